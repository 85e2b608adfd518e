"""Runs the product of some fields' values: one result a combination, and only those that are missing.

    python -m experiments.sweep --config=h2o_tiny --sweep=policy.budget=0.1,0.2,0.5 --sweep=policy.name=h2o,window

Any field can be swept: --sweep='storage=dense,int8,int4(residual=32)', --sweep='selection=everything,optimal(64)'.
Where storages are swept the plot shows quality against the bytes held, otherwise against the budget.
Results are JSON files in OUTPUT/NAME-sweep/, named by a hash of the resolved config; a rerun does what is missing or
failed. Values are separated by commas, or by semicolons if there are any: --sweep='mesh=data:2;data:1,model:2'.
"""

import itertools
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm.auto import tqdm

from experiments import cli, fields, machine, plots, report, results, trades
from experiments import config as configs
from experiments.config import ExperimentConfig
from experiments.session import Session
from kvjax.errors import ConfigError, KvjaxError

Axis = tuple[str, list[Any]]  # a field and its values
SOME_FAILED = 1
_NAMING = ("policy.name", "storage", "selection")  # the fields that a policy's name in reports is made of
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


def product(base: ExperimentConfig, axes: Sequence[Axis]) -> list[tuple[dict[str, Any], ExperimentConfig]]:
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
    base: ExperimentConfig, axes: Sequence[Axis], *, progress: bool | None = None
) -> tuple[Path, list[report.Row]]:
    """Runs what is missing of a product.

    Args:
      progress: show a progress bar; None = if stderr is a terminal.

    Returns:
      The folder, and every combination's result: what it set, status ("ok" or "failed"), and rows or error.
    """
    combinations = product(base, axes)
    folder = Path(base.output) / f"{base.name}-sweep"
    session, found = Session(), []
    bar = tqdm(combinations, unit="run", disable=None if progress is None else not progress)
    for swept, config in bar:
        bar.set_description(" ".join(f"{path.split('.')[-1]}={value}" for path, value in swept.items()))
        path = folder / f"{configs.digest(config)}.json"
        result = results.read_json(path)
        if not isinstance(result, dict) or result.get("status") != "ok":
            result = _attempt(session, config)
            results.write(path, results.to_json(result | {"swept": swept}))
        # The file may be of another sweep with the same resolved config.
        found.append(result | {"swept": swept, "policy": configs.name_of(config), "file": path.name})
    return folder, found


def _attempt(session: Session, config: ExperimentConfig) -> report.Row:
    """One run's result; an error is a result too. An interruption is not: it ends the sweep."""
    start = time.perf_counter()
    result: report.Row = {"config": fields.to_dict(config), "environment": machine.environment()}
    try:
        outcome = session.run(config)
        result["environment"] |= {"explain": outcome.explain()}
        result |= {"status": "ok", "model": outcome.model, "text": outcome.text, "notes": outcome.notes}
        result["rows"] = outcome.rows()
    except Exception as error:  # whatever it is, the other combinations go on
        known = isinstance(error, KvjaxError)
        result |= {"status": "failed", "error": str(error) if known else f"{type(error).__name__}: {error}"}
        if not known:
            result["traceback"] = traceback.format_exc()
    return result | {"seconds": round(time.perf_counter() - start, 3)}


def own_row(result: report.Row) -> report.Row:
    """The measurement of the combination's own policy among its baselines."""
    return next(row for row in result["rows"] if row["policy"] == result["policy"])


def cells(found: Sequence[report.Row]) -> list[dict[str, str]]:
    """One line a combination: what it set, then what came of it."""
    lines = []
    for result in found:
        line = {_COLUMNS.get(path, path.split(".")[-1]): str(value) for path, value in result["swept"].items()}
        line |= {"policy": result["policy"]} if "policy" in line else {}
        if result["status"] == "ok":
            line |= report.cells(own_row(result))
        lines.append(line)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return [{key: line.get(key, "FAILED" if key == columns[-1] else report.NONE) for key in columns} for line in lines]


def points(found: Sequence[report.Row], quality: str) -> list[report.Row]:
    """What the plot shows: the budget as it was swept, or the share of the cache where that has no one unit."""
    done = [(result, own_row(result)) for result in found if result["status"] == "ok"]
    done = [(result, row) for result, row in done if row[quality] is not None and row["policy"] != "full"]
    kinds = {type(row["budget"]) for _, row in done}
    if kinds == {float}:
        name, scale = "budget, % of the prompt", lambda row: 100 * row["budget"]
    elif kinds == {int}:
        name, scale = "budget, slots per KV head", lambda row: row["budget"]
    else:
        name, scale = "KV cache held, % of the full cache", lambda row: 100 * row["kv_bytes"] / row["full_kv_bytes"]
    factor = 100 if quality == "agreement" else 1
    shown = []
    for result, row in done:
        others = {path: v for path, v in result["swept"].items() if path not in ("policy.budget", *_NAMING)}
        label = " ".join([row["policy"], *(f"{path.split('.')[-1]}={value}" for path, value in others.items())])
        full = next((r[quality] for r in result["rows"] if r["policy"] == "full"), None)
        known = quality == "perplexity" and full is not None
        shown.append({
            "label": label, "x": scale(row), "x_name": name, "y": factor * row[quality], "full": full if known else None
        })  # fmt: skip
    return shown


def write(folder: Path, base: ExperimentConfig, found: Sequence[report.Row], command: str) -> list[dict[str, str]]:
    """Writes sweep.md and sweep.png over the combinations of this call; returns the table's lines."""
    lines = cells(found)
    done = [result for result in found if result["status"] == "ok"]
    paragraphs = list(dict.fromkeys(result[key] for key in ("model", "text") for result in done))
    quality = "perplexity" if any(own_row(result)["perplexity"] is not None for result in done) else "agreement"
    storages = any("storage" in result["swept"] for result in found)
    shown = trades.points(done, quality) if storages else points(found, quality)
    if shown:
        draw = trades.plot if storages else plots.sweep_plot
        results.write(folder / "sweep.png", draw(shown, quality))
    failures = [f"Failed, {_what(result)}: {result['error']}" for result in found if result["status"] != "ok"]
    text = report.markdown(f"{base.name}, swept", [*paragraphs, f"`{command}`"], lines, "sweep.png" if shown else None)
    results.write(folder / "sweep.md", "\n".join([text, report.LEGEND, "", *failures, ""]))
    return lines


def _what(result: report.Row) -> str:
    return ", ".join(f"{path}={value}" for path, value in result["swept"].items())


def main(argv: Sequence[str]) -> int:
    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_multi_string("sweep", [], "FIELD=VALUE,VALUE,...; may be repeated", flag_values=values)

    base, values = cli.parse(argv, about=__doc__, define=define)
    axes = [parse_axis(text) for text in values.sweep]
    folder, found = sweep(base, axes)
    lines = write(folder, base, found, " ".join(["python", "-m", "experiments.sweep", *argv[1:]]))
    for about in dict.fromkeys(result["model"] for result in found if result["status"] == "ok"):
        print(about)
    print(f"\n{report.table(lines)}\n")
    failed = [result for result in found if result["status"] != "ok"]
    for result in failed:
        print(f"failed, {_what(result)}: {result['error']}", file=sys.stderr)
    print(f"{len(found) - len(failed)} of {len(found)} runs done; results, sweep.md and sweep.png in {folder}/")
    return SOME_FAILED if failed else 0


if __name__ == "__main__":
    cli.main(main)
