"""Runs entries: measures what is missing, judges, prints and writes."""

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import kvjax
from experiments import results
from experiments.papers import page, verdict
from experiments.papers.entry import Entry, registry
from experiments.papers.names import NAMES
from experiments.papers.page import Report
from experiments.papers.parts import Lab, by_inputs, check_unique, code
from experiments.papers.settings import Settings
from experiments.progress import tracked
from experiments.runs import machine
from kvjax.errors import ConfigError, KvjaxError
from kvjax.typing import Json, JsonObject

PARTS = "parts"  # the folder of measurements, below the output
PAGE = "README.md"


def entries_of(names: Sequence[str]) -> list[Entry]:
    """The entries of some names; ``all`` is every one, and the name of a paper, such as ``h2o``, those of it.

    Raises:
      ConfigError: no name, or an unknown one.
    """
    known = registry()
    found: dict[str, Entry] = {}
    for name in names:
        own = [each for each in known if name in ("all", each, each.split("_")[0])]
        if not own:
            close = [each for each in known if name.replace("-", "_") in each]
            hint = f"did you mean {', '.join(close)}? " if close else ""
            raise ConfigError(f"unknown entry {name!r}; {hint}--list prints all {len(known)}, and 'all' runs them.")
        found |= {each: known[each] for each in own}
    if not found:
        raise ConfigError("give the names of entries, such as h2o_table6, or all; --list prints the names.")
    return [found[name] for name in NAMES if name in found]


def run(
    names: Sequence[str],
    settings: Settings,
    output: Path,
    *,
    rerun: bool = False,
    progress: bool | None = None,
    compared: Sequence[Path] = (),
) -> list[str]:
    """Runs entries, prints each as soon as it is done, and writes the page.

    Reports that the folder does not take, for example because the disk is full, are written elsewhere.

    Args:
      names: see `entries_of`.
      settings: of the run.
      output: the folder that is written.
      rerun: whether to measure what there is a result of, too.
      progress: see `experiments.progress.tracked`.
      compared: see `write_page`.

    Returns:
      The names of entries that failed.

    Raises:
      ConfigError: an unknown name, or a folder that cannot be written.
    """
    entries = entries_of(names)
    for folder in compared:
        verdicts_in(folder)
    lab = Lab(settings, output / PARTS, rerun=rerun)
    failed: list[str] = []
    # Most parts are of the same prompts under other caches.
    with kvjax.reuse_prompts(machine.prompt_room()):
        for entry in entries:
            try:
                done = report(entry, lab, progress=progress)
                print(f"\n{done.text()}", flush=True)
                try:
                    write(output, done, settings)
                except OSError as error:
                    # A disk may be full, for example.
                    if (other := results.elsewhere("papers", error)) is None:
                        raise
                    output = other
                    write(output, done, settings)
            except Exception as error:  # whatever it is, the other entries go on
                failed.append(entry.name)
                known = isinstance(error, KvjaxError)
                message = error if known else traceback.format_exc()
                print(f"\n{entry.name} FAILED: {message}", file=sys.stderr, flush=True)
                continue
            # After every entry: a run that is killed leaves a page of those that are done.
            write_page(output, settings.described(), compared)
    if len(failed) < len(entries):
        print(f"Wrote {output}/{PAGE}, and a report, a figure and the results of each entry in the same folder.")
    return failed


def report(entry: Entry, lab: Lab, *, progress: bool | None = None) -> Report:
    """Measures an entry's parts, or finds them, and judges."""
    parts = check_unique(tuple(entry.parts(lab.settings)))
    # The store of `kvjax.reuse_prompts` may not have room for the prompts of all texts: parts of one text are measured
    # one after the other, so that its prompts are still there.
    missing = by_inputs(part for part in parts if not lab.has(part))
    for part in tracked(missing, unit="part", name=lambda each: each.name, show=progress, leave=False):
        lab.get(part)
    judgement = entry.judge(lab.settings, {part: lab.get(part) for part in parts})
    trial = lab.settings.scale.trial and not entry.exact
    found, reason = verdict.conclude(judgement, trial=trial)
    old = sum(lab.code_of(part) != code() for part in parts)
    remarks = [f"Note: {old} of {len(parts)} parts were measured by other code; --rerun measures them anew."]
    made = ["Note: of generated stories and questions, which stand in for the texts that are not here."]
    return Report(
        entry, judgement, found, reason, [*(remarks if old else []), *(made if lab.settings.generated else [])]
    )


def write(output: Path, done: Report, settings: Settings) -> None:
    """Writes an entry's report, its figure and its results as JSON."""
    name = done.entry.name
    about: JsonObject = {
        "name": name,
        "question": done.entry.question,
        "verdict": done.verdict.value,
        "reason": done.reason,
    }
    about |= {"settings": dict(settings.described()), "measured": measured_on()} | verdict.as_json(done.judgement)
    if done.judgement.draw is not None:
        results.write(output / f"{name}.png", done.judgement.draw())
    results.write(output / f"{name}.md", done.markdown(3))
    results.write(output / f"{name}.json", results.to_json(about))


def write_page(output: Path, described: Mapping[str, Json], compared: Sequence[Path] = ()) -> list[str]:
    """Writes the page of the entries in a folder that were run with some settings.

    Args:
      output: the folder of results, in which the page is written.
      described: see `Settings.described`.
      compared: folders of results of other models, whose verdicts stand beside these.

    Returns:
      The names of the entries on the page.

    Raises:
      ConfigError: one of these folders has no results.
    """
    sections = entries_in(output, described)
    others = dict(map(verdicts_in, compared))
    model = name_of(described) if others else "verdict"
    results.write(output / PAGE, page.page(sections, about(described, sections), model=model, compared=others))
    return list(sections)


def name_of(described: Mapping[str, Json]) -> str:
    """Returns the name of the model of a run's settings."""
    return Path(described["model"]["path"] or described["model"]["shape"] or "model").name


def verdicts_in(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the name of the model of a folder of results, and its verdicts by entry.

    Raises:
      ConfigError: a folder without results.
    """
    found = {name: results.read_json(folder / f"{name}.json") for name in NAMES}
    known = {name: result for name, result in found.items() if isinstance(result, dict) and "verdict" in result}
    if not known:
        raise ConfigError(f"--compare={folder} has no results of `python -m experiments.paper`.")
    return name_of(next(iter(known.values()))["settings"]), {name: own["verdict"] for name, own in known.items()}


def entries_in(output: Path, described: Mapping[str, Json]) -> dict[str, tuple[JsonObject, str]]:
    """Entry -> its results and its report, of those in a folder that were run with some settings."""
    sections: dict[str, tuple[JsonObject, str]] = {}
    wanted = json.loads(json.dumps(described))
    for name in NAMES:
        result = results.read_json(output / f"{name}.json")
        text = output / f"{name}.md"
        if isinstance(result, dict) and result.get("settings") == wanted and text.is_file():
            sections[name] = (result, text.read_text(encoding="utf-8"))
    return sections


def measured_on() -> dict[str, str]:
    """The machine and the code of this process."""
    made = machine.environment()
    return {
        "machine": f"{made['device']} ({made['cpu']}, {made['cores']} cores)",
        "versions": f"jax {made['jax']}, Python {made['python']}",
        "commit": made["commit"] or "unknown",
    }


def about(described: Mapping[str, Json], sections: Mapping[str, tuple[Mapping[str, Json], str]]) -> list[str]:
    """Paragraphs about a run: its model, its sizes and its machines."""
    scale = described["scale"]
    shown = ", ".join(f"{key} {value}" for key, value in described["model"].items() if value)
    sizes = (
        f"Texts: {scale['rows']} rows of {scale['prompt']} + {scale['new']} tokens; attention: {scale['look_rows']} "
        f"rows of {scale['length']}; recall: {scale['prompts']} prompts of {scale['recall']}; "
        f"{scale['questions']} questions of a task."
    )
    trial = ["**This is a trial of few rows (`--fast`): its verdicts decide nothing.**"] if scale["trial"] else []
    places: dict[str, list[str]] = {}
    for name, (result, _) in sections.items():
        made = result.get("measured", {"machine": "an unknown machine"})
        places.setdefault(", ".join(made.values()), []).append(name)
    # Which entries each is of matters only where there are several.
    several = len(places) > 1
    ran = [f"On {place}" + (f": {', '.join(names)}." if several else ".") for place, names in places.items()]
    trial += ["**Of generated stories and questions, not of the papers' texts.**"] if "texts" in described else []
    return [*trial, f"Model: {shown}; seed {described['seed']}. {sizes}", *ran]
