"""Runs the combinations of a sweep that are missing, and reports all; see `experiments.sweep`."""

import collections
import dataclasses
import functools
import itertools
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import config as configs
from experiments import fields, results, specs
from experiments.config import ExperimentConfig
from experiments.progress import tracked
from experiments.reports import tables, trades
from experiments.runs import identity, machine
from experiments.runs.session import Session
from experiments.sweeps import doubts, report, sharing
from experiments.sweeps.intervals import FULL
from experiments.sweeps.report import write
from experiments.sweeps.sharing import MISSING, Shard
from experiments.sweeps.table import cells, other_code
from kvjax.errors import ConfigError, KvjaxError
from kvjax.parallel import distributed
from kvjax.specs import user_files
from kvjax.typing import JsonObject

Axis = tuple[str, list[Any]]  # a field and its values
SOME_FAILED = 1
MAX_PADDING = 8  # the largest budget over the smallest for which they share arrays
NARROW = 100  # columns, of a terminal whose width is not known


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


def with_full(config: ExperimentConfig, full: bool) -> ExperimentConfig:
    """Returns a config whose baselines begin with the full cache, or do without it.

    A session measures the full cache once for all configs of one text and one model.
    """
    baselines = tuple(name for name in config.baselines if name.strip() != FULL)
    return dataclasses.replace(config, baselines=(FULL, *baselines) if full else baselines)


def sweep(
    base: ExperimentConfig,
    axes: Sequence[Axis],
    *,
    full: bool = True,
    rerun: bool = False,
    shard: Shard | None = None,
    wait: bool = False,
    progress: bool | None = None,
    argv: Sequence[str] | None = None,
) -> tuple[Path, list[tables.Row]]:
    """Runs what is missing of a product and is not left to other workers; see `experiments.sweeps.sharing`.

    Args:
      base: the config whose fields the product sets.
      axes: fields and their values.
      full: whether the full cache is measured too, once for all combinations with the same text and model.
      rerun: run everything, whether there is a result or not; a result that another worker has written since this call
        began counts.
      shard: run these combinations; None = those that this worker can claim.
      wait: stay until there are results of those that others have claimed too.
      progress: see `experiments.progress.tracked`.
      argv: the command. With it, each run that is measured writes a page beside its result, as single runs do; None =
        no pages.

    Returns:
      The folder, and every combination's result: what it set, status ("ok", "failed", or "missing" where it is left to
      another worker), and rows or error. Where the folder takes no more results, those that it did not take are in
      another one, which is the one returned.

    Raises:
      ConfigError: the folder cannot be written, before anything is run.
    """
    combinations = [(swept, with_full(config, full)) for swept, config in product(base, axes)]
    return run_all(base, combinations, rerun=rerun, shard=shard, wait=wait, progress=progress, argv=argv)


def run_all(
    base: ExperimentConfig,
    combinations: Sequence[tuple[JsonObject, ExperimentConfig]],
    *,
    rerun: bool = False,
    shard: Shard | None = None,
    wait: bool = False,
    progress: bool | None = None,
    session: Session | None = None,
    argv: Sequence[str] | None = None,
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
      argv: see `sweep`.
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
                write_page = None if argv is None else functools.partial(report.write_run, folder, names[i], argv)
                run = functools.partial(_run_one, write_page, session, config, swept, contents[i], capacity)
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


def _run_one(
    write_page: Callable[..., None] | None, session: Session, config: ExperimentConfig, *given: Any
) -> tables.Row:
    """Returns one run's result, see `_attempt`, after its page is written."""
    result = _attempt(session, config, *given)
    outcome = result.pop("outcome", None)
    if write_page is not None and outcome is not None:
        write_page(config, result["swept"], outcome)
    return result


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
        result |= {"rows": outcome.rows(), "outcome": outcome}
    except Exception as error:  # whatever it is, the other combinations go on
        known = isinstance(error, KvjaxError)
        result |= {"status": "failed", "error": str(error) if known else f"{type(error).__name__}: {error}"}
        if not known:
            result["traceback"] = traceback.format_exc()
    return result | {"seconds": round(time.perf_counter() - start, 3), "swept": swept}


def shown(found: Sequence[tables.Row]) -> str:
    """Returns the table of a sweep for a terminal, without intervals where they would make it too wide for it."""
    table = tables.table(cells(found))
    width = shutil.get_terminal_size((NARROW, 24)).columns
    if not sys.stdout.isatty() or max(map(len, table.splitlines())) <= width:
        return table
    return f"{tables.table(cells(found, with_intervals=False))}\n\nsweep.md and sweep.html have 95 % intervals."


def start(base: ExperimentConfig, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Runs what a command line asks for.

    Returns:
      The exit status.
    """
    if distributed.count() > 1:
        raise ConfigError("a sweep's workers share runs, not a model: leave out --distributed and the like.")
    axes = [parse_axis(text) for text in values.sweep]
    shard = None if values.shard is None else sharing.parse_shard(values.shard)
    folder, every = sweep(
        base, axes, full=values.full, rerun=values.rerun, shard=shard, wait=values.wait, argv=argv
    )  # fmt: skip
    found = [result for result in every if result["status"] != MISSING]
    for about in dict.fromkeys(result["model"] for result in found if result["status"] == "ok"):
        print(about)
    if found:
        print(f"\n{shown(found)}\n")
    if costs := trades.costs([result for result in found if result["status"] == "ok"]):
        print(f"Against exact slots:\n\n{tables.table(list(map(trades.cost_cells, costs)))}\n")
    for line in doubts.warnings(found):
        print(f"Warning: {line}")
    for line in other_code(found):
        print(line)
    failed = [result for result in found if result["status"] != "ok"]
    for result in failed:
        print(f"failed, {report.what(result)}: {result['error']}", file=sys.stderr)
    done = f"{len(found) - len(failed)} of {len(every)} runs done"
    if len(found) < len(every):
        print(
            f"{done}, {len(every) - len(found)} left to other workers; results in {folder}/. The last worker writes "
            "sweep.md, sweep.html and sweep.png; so does the same command once all results are there."
        )
    else:
        # After the table is printed: a full disk must not take it away.
        write(folder, base, found, shlex.join(["python", "-m", "experiments.sweep", *argv[1:]]))
        print(f"{done}; results, sweep.md, sweep.html and sweep.png in {folder}/")
    return SOME_FAILED if failed else 0
