"""The report of a tuned model: results.json, and a table with a plot of the loss in report.md and report.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import results
from experiments.reports import html_report, plots, tables
from experiments.reports.tables import NONE, Row
from experiments.sweeps import intervals
from experiments.sweeps.table import ABOVE
from experiments.tuning.config import TuneConfig
from experiments.tuning.evaluate import Gap

RESULTS, PLOT = "results.json", "report.png"
LEGEND = (
    "*Above full* is the perplexity above that of the full cache with the same weights, window by window, with the "
    "95 % interval of its mean. Both caches read the prompt in the same blocks, and later tokens one at a time."
)


def cells(before: Sequence[Row], after: Sequence[Row]) -> list[dict[str, str]]:
    """Returns the lines of the table: each cache with the weights before training, then after it."""
    lines = []
    for model, (reference, own) in (("before", before), ("after", after)):
        for row in (reference, own):
            compared = None if row is reference else intervals.against_full(model, [row], [reference])
            line = {"model": model}
            for column, text in tables.cells(row).items():
                line[column] = text
                if column == intervals.PERPLEXITY:
                    line[ABOVE] = NONE if compared is None else intervals.show_percent(compared)
            lines.append(line)
    return lines


def write(
    folder: Path,
    config: TuneConfig,
    before: Sequence[Row],
    after: Sequence[Row],
    gap: Gap | None,
    losses: Mapping[int, float],
    *,
    about: Sequence[str],
    command: str,
) -> str:
    """Writes results.json, report.md, report.html and report.png.

    Args:
      folder: of the run.
      config: of the run.
      before: the rows of the full cache and of the spec before training.
      after: the same after training.
      gap: the gap before and after.
      losses: step -> loss in training, nats per token.
      about: paragraphs about the model, what was trained and the machine.
      command: that repeats the run.

    Returns:
      The table as text.
    """
    rows = [{"model": model, **row} for model, pair in (("before", before), ("after", after)) for row in pair]
    found = {"name": config.name, "steps": config.steps, "gap": gap.to_json() if gap else None, "rows": rows}
    results.write(folder / RESULTS, results.to_json(found))
    lines, sections, drawn = cells(before, after), tables.sections(after), plot(losses)
    paragraphs = [*about, *([gap.sentence()] if gap else [])]
    results.write(folder / PLOT, drawn)
    shown = tables.markdown(config.name, [*paragraphs, *([f"`{command}`"] if command else [])], lines, PLOT)
    parts = [shown, LEGEND, tables.LEGEND, *(each.markdown() for each in sections)]
    results.write(folder / "report.md", "\n\n".join(parts) + "\n")
    texts = [(f"{row['model']}, {tables.short(row['policy'])}", row["continuation"]) for row in rows]
    page = html_report.page(
        config.name, [*paragraphs, LEGEND.replace("*", "")], command=command, rows=lines, sections=sections,
        plots={"Loss in training": drawn}, texts=texts, viewer=None,
    )  # fmt: skip
    results.write(folder / "report.html", page)
    return tables.table(lines)


def plot(losses: Mapping[int, float]) -> bytes:
    """Returns a PNG of the loss by step."""
    figure, ((axes,),) = plots.new_figure(1, figsize=(6, 3.6))
    plots.style(axes, "Loss in training", "step", "nats per token")
    axes.plot(list(losses), list(losses.values()), color=plots.COLORS[0], linewidth=1.2)
    return plots.png(figure)
