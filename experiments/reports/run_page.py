"""The page of a run: ``report.html`` of a single run, and the page of each run of a sweep."""

from collections.abc import Mapping, Sequence

from experiments.config import ExperimentConfig
from experiments.reports import html_report, tables
from experiments.runs import machine
from experiments.runs.session import Outcome


def about(outcome: Outcome, environment: Mapping[str, object]) -> list[str]:
    """Returns paragraphs about the model, the text, notes and the machine."""
    where = f"{environment['device']} ({environment['cpu']}, {environment['cores']} cores)"
    versions = f"jax {environment['jax']}, Python {environment['python']}, commit {environment['commit'] or 'unknown'}"
    notes = [f"Note: {note}" for note in outcome.notes]
    return [outcome.model, outcome.text, *notes, f"On {where}; {versions}."]


def page(
    config: ExperimentConfig,
    outcome: Outcome,
    *,
    command: str,
    plots: Mapping[str, bytes],
    title: str | None = None,
    paragraphs: Sequence[str] | None = None,
    back: str | None = None,
) -> str:
    """Returns the page.

    Args:
      config: the run's config.
      outcome: its results.
      command: the command that repeats the run; empty if it is not known.
      plots: PNG files by what they show.
      title: of the page; None = the config's name.
      paragraphs: about the run; None = `about` on this machine.
      back: the address of the page of a sweep that the run belongs to.
    """
    summaries = outcome.rows()
    labels = [row["policy"] for row in summaries]
    return html_report.page(
        title or config.name, about(outcome, machine.environment()) if paragraphs is None else paragraphs,
        command=command, rows=[tables.cells(row) for row in summaries], sections=tables.sections(summaries),
        viewer=outcome.viewer, plots=plots, texts=list(zip(labels, outcome.continuations, strict=True)), back=back,
    )  # fmt: skip
