"""Runs the combinations of a sweep that are missing, and reports all; see `experiments.sweep`."""

import collections
import functools
import itertools
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import config as configs
from experiments import fields, results, specs
from experiments.config import ExperimentConfig
from experiments.progress import tracked
from experiments.reports import plots, tables, trades
from experiments.runs import identity, machine
from experiments.runs.session import Session
from experiments.sweeps import seeds, sharing
from experiments.sweeps.sharing import MISSING, Shard
from kvjax.errors import ConfigError, KvjaxError
from kvjax.parallel import distributed
from kvjax.specs import user_files
from kvjax.typing import JsonObject

Axis = tuple[str, list[Any]]  # a field and its values
SOME_FAILED = 1
MAX_PADDING = 8  # the largest budget over the smallest for which they share arrays
COMMIT = 10  # digits of a commit that are shown
OTHER_CODE = " *"  # marks results that were computed by other code
_NAMING = ("policy.name", "storage", "selection")  # the fields that a policy's name in reports is made of
_NUMBERS = ("budget", "perplexity", "agreement", "same_until", "recall", "kv_bytes", "full_kv_bytes")  # in sweep.json
_COLUMNS = dict.fromkeys(_NAMING, "policy") | {"policy.budget": "budget (slots)"}  # of `report.cells`


def parse_axis(text: str) -> Axis:
    """``policy.budget=0.1,0.2`` as a field and its values.

    Raises:
      ConfigError: not of that form, an unknown field, or a value of the wrong kind.
    """
    path, equals, listed = text.partition("=")
    values = [value.strip() for value in (listed.split(";") if ";" in listed else fields.split(listed))]
    if not equals or not all(values):
        raise ConfigError(f"--sweep={text} is not of the form FIELD=VALUE,VALUE,..., as in policy.budget=0.1,0.2.")
    kind = fields.kind_of(path, ExperimentConfig)
    if path in ("output", "name"):
        raise ConfigError(f"--sweep={text}: {path} says where results go, and cannot be swept.")
    return path, list(dict.fromkeys(fields.read(kind, value) for value in values))


def product(base: ExperimentConfig, axes: Sequence[Axis]) -> list[tuple[JsonObject, ExperimentConfig]]:
    """Every combination of values, as the fields that it sets and the resolved config.

    Raises:
      ConfigError: no field, or one twice.
    """
    paths = [path for path, _ in axes]
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError("give at least one --sweep=FIELD=VALUE,VALUE,..., each field once.")
    combinations = []
    for values in itertools.product(*(values for _, values in axes)):
        config = base
        for path, value in zip(paths, values, strict=True):
            config = fields.override(config, path, value)
        combinations.append((dict(zip(paths, values, strict=True)), config))
    return combinations


def sweep(
    base: ExperimentConfig,
    axes: Sequence[Axis],
    *,
    rerun: bool = False,
    shard: Shard | None = None,
    wait: bool = False,
    progress: bool | None = None,
) -> tuple[Path, list[tables.Row]]:
    """Runs what is missing of a product and is not left to other workers; see `experiments.sweeps.sharing`.

    Args:
      base: the config whose fields the product sets.
      axes: fields and their values.
      rerun: run everything, whether there is a result or not; a result that another worker has written since this call
        began counts.
      shard: run these combinations; None = those that this worker can claim.
      wait: stay until there are results of those that others have claimed too.
      progress: see `experiments.progress.tracked`.

    Returns:
      The folder, and every combination's result: what it set, status ("ok", "failed", or "missing" where it is left to
      another worker), and rows or error. Where the folder takes no more results, those that it did not take are in
      another one, which is the one returned.

    Raises:
      ConfigError: the folder cannot be written, before anything is run.
    """
    return run_all(base, product(base, axes), rerun=rerun, shard=shard, wait=wait, progress=progress)


def run_all(
    base: ExperimentConfig,
    combinations: Sequence[tuple[JsonObject, ExperimentConfig]],
    *,
    rerun: bool = False,
    shard: Shard | None = None,
    wait: bool = False,
    progress: bool | None = None,
    session: Session | None = None,
) -> tuple[Path, list[tables.Row]]:
    """Runs what is missing of combinations; see `sweep`.

    Args:
      base: a config whose name and output say where results go.
      combinations: what each sets, and the resolved config.
      rerun: see `sweep`.
      shard: see `sweep`.
      wait: see `sweep`.
      progress: see `sweep`.
      session: runs the configs, and keeps what several calls share; None = a new one.
    """
    capacity = capacity_of([config.policy.budget for _, config in combinations])
    before = Path(base.output) / f"{base.name}-sweep"
    results.make_folder(before)
    done: dict[int, tables.Row] = {}
    with user_files.pinned():
        # A result is named by the contents of files as they are now.
        contents = [identity.contents(config) for _, config in combinations]
        names = [
            f"{identity.digest(config, found)}.json" for (_, config), found in zip(combinations, contents, strict=True)
        ]
        folder = sharing.Folder(before, names, rerun=rerun)
        shared, session = sharing.Sharing(folder, shard=shard, wait=wait), session or Session(resume=not rerun)
        left = list(range(len(names)))
        while left:
            for i in tracked(left, unit="run", name=lambda i: _named(combinations[i][0]), show=progress):
                swept, config = combinations[i]
                run = functools.partial(_attempt, session, config, swept, contents[i], capacity)
                if (result := shared.attempt(i, names[i], run)) is not None:
                    done[i] = result
            left = [i for i in left if i not in done]
            if not left or shared.leaves([names[i] for i in left]):
                break
        done |= {i: result for i in left if (result := shared.by_others(names[i])) is not None}
        found = []
        for i, (name, (swept, config)) in enumerate(zip(names, combinations, strict=True)):
            # The file may be of another sweep with the same resolved config.
            found.append(done.get(i, {"status": MISSING}) | {"swept": swept, "file": name})
            found[-1]["policy"] = specs.name_of(config) if i in done else None
        if all(result["status"] == "ok" for result in found):
            session.finish([config for _, config in combinations])
    _with_labels([result for result in found if result["status"] != MISSING])
    return folder.path, found


def _with_labels(found: list[tables.Row]) -> list[tables.Row]:
    """Adds a ``label``: the name of the policy, or its text where policies of two files have one name."""
    texts = collections.defaultdict(set)
    for result in found:
        texts[result["policy"]].add(result["config"]["policy"]["name"])
    for result in found:
        name, text = result["policy"], result["config"]["policy"]["name"]
        _, *others = name.split(configs.JOINED)
        result["label"] = name if len(texts[name]) == 1 else configs.JOINED.join((text, *others))
    return found


def _named(swept: JsonObject) -> str:
    return " ".join(f"{path.split('.')[-1]}={value}" for path, value in swept.items())


def capacity_of(budgets: Sequence[int | float]) -> int | float | None:
    """Returns the slots that arrays have room for, so that all budgets of a sweep run the same programs.

    Args:
      budgets: of the configs, some of which may be invalid.

    Returns:
      The largest budget. None if there is one budget alone, if there are numbers and fractions, of which either may be
      larger, or if the largest is more than `MAX_PADDING` times the smallest: steps on empty slots would take longer
      than compilation.
    """
    numbers = (each for each in budgets if isinstance(each, int | float))
    valid = {each for each in numbers if (each >= 1 if isinstance(each, int) else 0 < each <= 1)}
    if len(valid) < 2 or len(set(map(type, valid))) > 1 or max(valid) > MAX_PADDING * min(valid):
        return None
    return max(valid)


def _attempt(
    session: Session,
    config: ExperimentConfig,
    swept: JsonObject,
    contents: dict[str, str],
    capacity: int | float | None,
) -> tables.Row:
    """One run's result; an error is a result too. An interruption is not: it ends the sweep."""
    start = time.perf_counter()
    result: tables.Row = {
        "config": fields.to_dict(config), "contents": contents, "environment": machine.environment()
    }  # fmt: skip
    try:
        # A user's own Python files are pinned; other files are read now.
        identity.check_unchanged(config, contents)
        outcome = session.run(config, capacity=capacity)
        identity.check_unchanged(config, contents)
        result["environment"] |= {"explain": outcome.explain()}
        result |= {"status": "ok", "model": outcome.model, "text": outcome.text, "notes": outcome.notes}
        result["rows"] = outcome.rows()
    except Exception as error:  # whatever it is, the other combinations go on
        known = isinstance(error, KvjaxError)
        result |= {"status": "failed", "error": str(error) if known else f"{type(error).__name__}: {error}"}
        if not known:
            result["traceback"] = traceback.format_exc()
    return result | {"seconds": round(time.perf_counter() - start, 3), "swept": swept}


def label_of(result: tables.Row) -> str:
    """Returns the label of a result's policy in tables and plots."""
    return str(result.get("label", result["policy"]))


def cells(found: Sequence[tables.Row]) -> list[dict[str, str]]:
    """One line a combination, all seeds in one: what it set, then what came of it."""
    lines = []
    for group in seeds.groups(found):
        done = [result for result in group if result["status"] == "ok"]
        shown = done[0] if done else group[0]
        swept = shown["swept"] | ({seeds.SEED: f"{len(done)} seeds"} if len(group) > 1 else {})
        line = {_COLUMNS.get(path, path.split(".")[-1]): str(value) for path, value in swept.items()}
        if done:
            line |= seeds.cells([tables.own_row(result) for result in done])
        line |= {"policy": label_of(shown)} if "policy" in line else {}
        if any(_of_other_code(result) for result in done):
            first = next(iter(line))
            line[first] += OTHER_CODE
        lines.append(line)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return [{key: line.get(key, "FAILED" if key == columns[-1] else tables.NONE) for key in columns} for line in lines]


def _of_other_code(result: tables.Row) -> bool:
    """Whether a result was computed by other sources than these."""
    return bool(result["environment"].get("code") != identity.code())


def points(found: Sequence[tables.Row], quality: str) -> list[tables.Row]:
    """Returns the points of the plot: the swept budget, or the share of the cache where that has no one unit."""
    done, spread = [], []
    for group in seeds.groups([result for result in found if result["status"] == "ok"]):
        own = [tables.own_row(result) for result in group]
        if own[0][quality] is None or own[0]["policy"] == "full":
            continue
        done.append((group[0], seeds.mean(own)))
        spread.append(seeds.deviation([row[quality] for row in own]))
    kinds = {type(row["budget"]) for _, row in done}
    if kinds == {float}:
        name, scale = "budget, % of the prompt", lambda row: 100 * row["budget"]
    elif kinds == {int}:
        name, scale = "budget, slots per KV head", lambda row: row["budget"]
    else:
        name, scale = "KV cache held, % of the full cache", lambda row: 100 * row["kv_bytes"] / row["full_kv_bytes"]
    factor = 100 if quality == "agreement" else 1
    shown = []
    for (result, row), error in zip(done, spread, strict=True):
        named = ("policy.budget", seeds.SEED, *_NAMING)
        others = {path: v for path, v in result["swept"].items() if path not in named}
        label = " ".join([label_of(result), *(f"{path.split('.')[-1]}={value}" for path, value in others.items())])
        full = next((r[quality] for r in result["rows"] if r["policy"] == "full"), None)
        known = quality == "perplexity" and full is not None
        shown.append({
            "label": label, "x": scale(row), "x_name": name, "y": factor * row[quality],
            "error": None if error is None else factor * error, "full": full if known else None,
        })  # fmt: skip
    return shown


def write(folder: Path, base: ExperimentConfig, found: Sequence[tables.Row], command: str) -> list[dict[str, str]]:
    """Writes sweep.md, sweep.json and sweep.png over the combinations of this call; returns the table's lines."""
    lines = cells(found)
    done = [result for result in found if result["status"] == "ok"]
    paragraphs = list(dict.fromkeys(result[key] for key in ("model", "text") for result in done))
    quality = "perplexity" if any(tables.own_row(result)["perplexity"] is not None for result in done) else "agreement"
    storages = any("storage" in result["swept"] for result in found)
    shown = trades.points(done, quality) if storages else points(found, quality)
    if shown:
        draw = trades.plot if storages else plots.sweep_plot
        folder = sharing.write(folder, "sweep.png", draw(shown, quality))
    failures = [f"Failed, {_what(result)}: {result['error']}" for result in found if result["status"] != "ok"]
    paragraphs += other_code(found)
    text = tables.markdown(f"{base.name}, swept", [*paragraphs, f"`{command}`"], lines, "sweep.png" if shown else None)
    parts = [text, tables.LEGEND, "", *failures, ""]
    if costs := trades.costs(done):
        parts += ["## Against exact slots", "", tables.table(list(map(trades.cost_cells, costs)), "github"), ""]
    sharing.write(folder, "sweep.md", "\n".join(parts))
    rows = [{**result["swept"], **{name: tables.own_row(result).get(name) for name in _NUMBERS}} for result in done]
    numbers = {
        "environment": machine.environment(), "command": command, "about": paragraphs, "failed": failures,
        "points": rows, "costs": costs,
    }  # fmt: skip
    sharing.write(folder, "sweep.json", results.to_json(numbers))
    return lines


def other_code(found: Sequence[tables.Row]) -> list[str]:
    """A line about results that were computed by other code, if there are any."""
    old = [result for result in found if result["status"] == "ok" and _of_other_code(result)]
    if not old:
        return []
    commits = sorted({(result["environment"].get("commit") or "unknown")[:COMMIT] for result in old})
    of = ", ".join(commits)
    count = f"{len(old)} of {len(found)} results are of other code (commit {of})"
    return [f"{OTHER_CODE.strip()} {count}; --rerun computes them anew."]


def _what(result: tables.Row) -> str:
    return ", ".join(f"{path}={value}" for path, value in result["swept"].items())


def start(base: ExperimentConfig, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Runs what a command line asks for.

    Returns:
      The exit status.
    """
    if distributed.count() > 1:
        raise ConfigError("a sweep's workers share runs, not a model: leave out --distributed and the like.")
    axes = [parse_axis(text) for text in values.sweep]
    shard = None if values.shard is None else sharing.parse_shard(values.shard)
    folder, every = sweep(base, axes, rerun=values.rerun, shard=shard, wait=values.wait)
    found = [result for result in every if result["status"] != MISSING]
    lines = cells(found)
    for about in dict.fromkeys(result["model"] for result in found if result["status"] == "ok"):
        print(about)
    if lines:
        print(f"\n{tables.table(lines)}\n")
    if costs := trades.costs([result for result in found if result["status"] == "ok"]):
        print(f"Against exact slots:\n\n{tables.table(list(map(trades.cost_cells, costs)))}\n")
    for line in other_code(found):
        print(line)
    failed = [result for result in found if result["status"] != "ok"]
    for result in failed:
        print(f"failed, {_what(result)}: {result['error']}", file=sys.stderr)
    done = f"{len(found) - len(failed)} of {len(every)} runs done"
    if len(found) < len(every):
        print(
            f"{done}, {len(every) - len(found)} left to other workers; results in {folder}/. The last worker writes "
            "sweep.md and sweep.png; so does the same command once all results are there."
        )
    else:
        # After the table is printed: a full disk must not take it away.
        write(folder, base, found, shlex.join(["python", "-m", "experiments.sweep", *argv[1:]]))
        print(f"{done}; results, sweep.md and sweep.png in {folder}/")
    return SOME_FAILED if failed else 0
