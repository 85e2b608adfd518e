"""The files of a sweep: sweep.md, sweep.html, sweep.png and sweep.json, and a page for each run."""

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from experiments import results
from experiments.config import ExperimentConfig
from experiments.reports import html_report, plots, run_page, tables, trades
from experiments.reports.html_report import Link
from experiments.reports.tables import Row, Section
from experiments.runs import machine
from experiments.runs.session import Outcome
from experiments.sweeps import doubts, intervals, sharing, table
from experiments.sweeps.seeds import SEED
from kvjax.typing import JsonObject

NUMBERS = ("budget", "perplexity", "agreement", "same_until", "recall", "kv_bytes", "full_kv_bytes")  # in sweep.json
PAGE, PLOT = "sweep.html", "sweep.png"
#: Flags of a sweep that a single run does not have, and the folder of results, which is of this machine.
OF_A_SWEEP = {
    "--sweep", "--shard", "--config.output", "--rerun", "--norerun", "--wait", "--nowait", "--full", "--nofull",
}  # fmt: skip
WITH_VALUE = {"--sweep", "--shard", "--config.output"}
BARS = "Bars are 95 % intervals over rows{of}."


def what(result: Row) -> str:
    """Returns the fields that a run's combination set, in words."""
    return ", ".join(f"{path}={value}" for path, value in result["swept"].items())


def page_of(file: str) -> str:
    """Returns the name of a run's page by that of its result."""
    return f"{Path(file).stem}.html"


def write_run(
    folder: sharing.Folder,
    file: str,
    argv: Sequence[str],
    config: ExperimentConfig,
    swept: JsonObject,
    outcome: Outcome,
) -> None:
    """Writes the page of a run beside its result.

    Args:
      folder: of the sweep.
      file: the name of the result.
      argv: the command of the sweep.
      config: of the run.
      swept: the fields that the sweep set.
      outcome: of the run.
    """
    text = run_page.page(
        config, outcome, command=command_of(argv, swept), title=f"{config.name}: {what({'swept': swept})}",
        plots={f"Plot of {config.name}": plots.run_plot(outcome.measurements)}, back=PAGE,
    )  # fmt: skip
    with contextlib.suppress(OSError):  # a folder that takes nothing more is reported with the result itself
        results.write(folder.path / page_of(file), text)


def command_of(argv: Sequence[str], swept: JsonObject) -> str:
    """Returns the command that repeats one run of a sweep by itself.

    Args:
      argv: the command of the sweep.
      swept: the fields that the sweep set for this run.
    """
    given, skip = [], False
    for argument in argv[1:]:
        flag = re.sub(r"^-(?=\w)", "--", argument.partition("=")[0])
        if not skip and flag not in OF_A_SWEEP:
            given.append(argument)
        skip = not skip and flag in WITH_VALUE and "=" not in argument
    texts = {path: ",".join(map(str, value)) if isinstance(value, tuple) else value for path, value in swept.items()}
    fields = [f"--config.{path}={'none' if value in (None, ()) else value}" for path, value in texts.items()]
    return shlex.join(["python", "-m", "experiments.run", *given, *fields])


def write(folder: Path, base: ExperimentConfig, found: Sequence[Row], command: str) -> list[dict[str, str]]:
    """Writes a sweep's files over the combinations of this call; returns the table's lines."""
    done = [result for result in found if result["status"] == "ok"]
    paragraphs = list(dict.fromkeys(result[key] for key in ("model", "text") for result in done))
    quality = "perplexity" if any(tables.own_row(result)["perplexity"] is not None for result in done) else "agreement"
    storages = any("storage" in result["swept"] for result in found)
    points = trades.points(done, quality) if storages else table.points(found, quality)
    drawn = {}
    if points:
        picture = (trades.plot if storages else plots.sweep_plot)(points, quality)
        folder = sharing.write(folder, PLOT, picture)
        drawn = {f"Plot of {base.name}: quality of each cache, over what it holds": picture}
    bars = _bars(points, done, quality)
    failures = [f"Failed, {what(result)}: {result['error']}" for result in found if result["status"] != "ok"]
    paragraphs += table.other_code(found)
    warnings, costs = doubts.warnings(found), trades.costs(done)
    sections = [Section("Against exact slots", "", list(map(trades.cost_cells, costs)))] if costs else []
    title, legend = f"{base.name}, swept", f"{table.LEGEND} {tables.LEGEND}"

    lines = table.cells(found, report=lambda result: f"[{Path(result['file']).stem}]({_target(folder, result)})")
    warned = [f"> **Warning.** {line}" for line in warnings]
    text = tables.markdown(title, [*paragraphs, f"`{command}`", *warned], lines, PLOT if points else None)
    parts = [text, *([bars, ""] if bars else []), legend, "", *failures, ""]
    parts += [f"{each.markdown()}\n" for each in sections]
    sharing.write(folder, "sweep.md", "\n".join(parts))

    links = [
        [Link(_target(folder, each), str(each["swept"][SEED]) if len(group) > 1 else "report") for each in group]
        for group in table.sources(found)
    ]
    plain = table.cells(found)
    page = html_report.sweep_page(
        title, paragraphs, command=command, rows=plain, reports=links, warnings=warnings, failures=failures,
        sections=sections, plots=drawn, caption=bars, legend=legend,
    )  # fmt: skip
    sharing.write(folder, PAGE, page)

    rows = [result["swept"] | _numbers(tables.own_row(result)) for result in done]
    full = [each.swept | _numbers(row) for each in table.references(found) for row in each.rows]
    numbers = {
        "environment": machine.environment(), "command": command, "about": paragraphs, "failed": failures,
        "warnings": warnings, "full": full, "points": rows, "costs": costs,
    }  # fmt: skip
    sharing.write(folder, "sweep.json", results.to_json(numbers))
    return plain


def _target(folder: Path, result: Row) -> str:
    """Returns the file that a link to a run goes to: its page, or its result where older code has made no page."""
    page = page_of(result["file"])
    return page if (folder / page).is_file() else str(result["file"])


def _numbers(row: Row) -> JsonObject:
    """Returns the numbers of a row for sweep.json, and the intervals of their columns."""
    bounds = intervals.bounds([row], f"{row['policy']} {row['budget']}")
    return {name: row.get(name) for name in NUMBERS} | {"intervals": {key: list(each) for key, each in bounds.items()}}


def _bars(points: Sequence[Row], done: Sequence[Row], quality: str) -> str:
    """Returns what the error bars of a plot are; empty where it has none."""
    if not any(point.get("interval") for point in points):
        spread = any(point.get("error") for point in points)
        return "Bars are standard deviations over seeds." if spread else ""
    paired = quality == "perplexity" and bool(table.full_rows(done))
    return BARS.format(of=", of the difference to the full cache on the same rows" if paired else "")
