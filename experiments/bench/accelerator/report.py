"""The report of an accelerator: a table of what was wanted and what was measured, and every part's rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

from experiments.bench.accelerator.parts import KERNELS, Part
from experiments.bench.kernels import STEP
from kvjax.typing import Json, JsonObject

Outcome = Mapping[str, Json]
Rows = Sequence[dict[str, Any]]
NOT_RUN = "not measured: no time was left"


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
      work: what was done.
      part: the part that says it.
      wanted: by platform, in per cent; empty where nothing is.
      text: from the part's rows and the kernels' name, what was measured, and the figure that is compared with what is
        wanted, if any; None where the rows do not have it.
    """

    work: str
    part: str
    wanted: dict[str, float]
    text: Any


def _kernel(rows: Rows, kernel: str) -> tuple[str, float] | None:
    found = {row["statistics"]: row for row in rows if row["implementation"] == kernel and row["% of a copy"]}
    if STEP not in found:
        return None
    step = found[STEP]
    return f"{step['% of a copy']:.0f} % ({step['kernel']}, {step['GB/s']:,.0f} GB/s)", step["% of a copy"]


def _attention(rows: Rows, kernel: str) -> tuple[str, float | None] | None:
    found = {row["statistics"]: row for row in rows if row["implementation"] == kernel and row["% of a copy"]}
    names = {"mass": "with statistics", "none": "without"}
    each = [f"{about} {found[name]['% of a copy']:.0f} %" for name, about in names.items() if name in found]
    return ("; ".join(each), None) if each else None


def _step(rows: Rows, kernel: str) -> tuple[str, float]:
    row = rows[0]
    return f"{row['% of the limit']:.0f} % ({row['ms/step']:.2f} ms, {row['tokens/s']:,.0f} tokens/s)", row[
        "% of the limit"
    ]


def _prefill(rows: Rows, kernel: str) -> tuple[str, float | None]:
    def one(row: JsonObject) -> str:
        share = f"{row['% of a large product']:.0f} % of a large product"
        return share if row["% of published"] is None else f"{row['% of published']:.0f} % of published, {share}"

    return "; ".join(f"{row['side']}: {one(row)}" for row in rows), None


def _device(rows: Rows, kernel: str) -> tuple[str, float | None]:
    return "; ".join(f"{row['work']}: {row['measured']:,.0f} {row['unit']}" for row in rows), None


def _storages(rows: Rows, kernel: str) -> tuple[str, float | None]:
    coded = [row for row in rows if row["cache"].startswith("h2o")]
    return "; ".join(f"{row['cache'][5:]} {row['times dense']:.2f} ({row['MB']:,.0f} MB)" for row in coded), None


def _selections(rows: Rows, kernel: str) -> tuple[str, float | None]:
    return "; ".join(f"{row['cache']} {row['faster than full']:.2f}" for row in rows), None


def _transfers(rows: Rows, kernel: str) -> tuple[str, float | None]:
    most = max(row["MB"] for row in rows)
    return "; ".join(f"{row['direction']} {row['GB/s']:.1f} GB/s" for row in rows if row["MB"] == most), None


def _tests(rows: Rows, kernel: str) -> tuple[str, float | None]:
    total = {name: sum(row[name] for row in rows) for name in ("passed", "failed", "skipped")}
    unfinished = sum(row["stopped"] or "ended with" in (row["notes"] or "") for row in rows)
    more = f", {unfinished} of {len(rows)} files did not come to an end" if unfinished else ""
    return ", ".join(f"{count} {name}" for name, count in total.items()) + more, None


FIGURES = (
    Figure(
        "a layer's decode step with statistics and victim, 2,048 slots, batch × heads 1,024, heads of 128, of a copy's "
        "bandwidth", "step", {"gpu": 90, "tpu": 86}, _kernel,
    ),
    Figure("decode attention alone, the same shape", "attention", {}, _attention),
    Figure(
        "OPT-6.7B's shape in bf16, batch 64, 2,048 + 2,048 tokens, h2o at 20 %, of the limit", "opt-6.7b",
        {"gpu": 70, "tpu": 70}, _step,
    ),
    Figure("the same by XLA alone", "opt-6.7b-xla", {}, _step),
    Figure("prompts of OPT-1.3B's shape, batch 8, 2,048 tokens, of the device's FLOPs", "prefill", {}, _prefill),
    Figure("a step on storages, over dense slots", "storages", {}, _storages),
    Figure("a step on 16,384 tokens, times as fast as the full cache", "selections", {}, _selections),
    Figure("the same from host memory, over the full cache on the device", "host", {}, _selections),
    Figure("the host link", "transfers", {}, _transfers),
    Figure("the device: reads, copies, multiplies", "device", {}, _device),
    Figure("the kernels' tests", "tests", {}, _tests),
)  # fmt: skip


def summary(environment: Mapping[str, Json], outcomes: Mapping[str, Outcome]) -> str:
    """The table: bold is what is short of what is wanted; without a figure, the last column says why."""
    platform = environment["platform"]
    rows = []
    for figure in FIGURES:
        wanted = figure.wanted.get(platform)
        text, value, why = _measured(figure, outcomes.get(figure.part), KERNELS.get(platform, "pallas_tpu"))
        if value is not None and wanted is not None and value < wanted:
            text = f"**{text}**"
        rows.append([figure.work, f"{wanted} %" if wanted else "", text, why or f"parts/{figure.part}.json"])
    columns = ["work", "wanted", "measured", "file, or why there is no figure"]
    return tabulate(rows, headers=columns, tablefmt="github", disable_numparse=True)


def _measured(figure: Figure, outcome: Outcome | None, kernel: str) -> tuple[str, float | None, str]:
    """Returns the measurement, the figure to compare, and the reason if there is none."""
    if outcome is None:
        return "", None, NOT_RUN
    if not outcome["rows"]:
        return "", None, f"{outcome['state']}: {brief(outcome)}"
    if (found := figure.text(outcome["rows"], kernel)) is not None:
        return *found, ""
    refused = [row["not run because"] for row in outcome["rows"] if row.get("not run because")]
    return "", None, _one_line("; ".join(refused))


def brief(outcome: Outcome) -> str:
    """The line of a reason that says most: the last one of an error, the first one of a part that was stopped."""
    lines = outcome["reason"].strip().splitlines()
    return _one_line(lines[0 if outcome.get("stopped") else -1])


def _one_line(text: str, size: int = 200) -> str:
    """The end of a text, where errors are, fit for a cell."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= size else f"... {line[-size:]}"


def write(environment: Mapping[str, Json], plan: Sequence[Part], outcomes: Mapping[str, Outcome]) -> str:
    """The whole report, in Markdown."""
    where = f"{environment['devices']} {environment['device']}"
    versions = ", ".join(f"{name} {environment[name]}" for name in ("kvjax", "jax", "jaxlib", "python"))
    changed = " with uncommitted changes" if environment["uncommitted_changes"] else ""
    host = f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gb']} GB"
    pieces = [
        f"# {where}",
        f"Measured by `python -m experiments.bench accelerator` on {where} ({environment['device_memory_gb']} GB for a "
        f"program); host: {host}; {versions}; commit {environment['commit']}{changed}.",
    ]
    if any("--tiny" in part.command for part in plan):
        pieces.append("**With --tiny: every size is that of a test, and no figure says anything about this device.**")
    pieces.append(summary(environment, outcomes))
    for part in plan:
        pieces.append(f"## {part.name}\n\n{part.about}.")
        outcome = outcomes.get(part.name)
        if outcome is None:
            pieces.append(f"{NOT_RUN.capitalize()}.")
            continue
        pieces.append(f"`{outcome['command']}`: {outcome['state']} in {outcome['seconds']:.0f} s.")
        if outcome["reason"]:
            pieces.append(f"```\n{outcome['reason'].strip()}\n```")
        if outcome["rows"]:
            pieces.append(_table(outcome["rows"]))
    return "\n\n".join(pieces) + "\n"


def _table(rows: Rows) -> str:
    """Rows without the columns that none of them has."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [{name: _cell(row[name]) for name in names} for row in rows]
    return tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
