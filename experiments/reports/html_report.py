"""Reports of runs and sweeps as HTML files that need no network: tables, plots, the tokens that caches hold."""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from experiments.reports.tables import LEGEND, Section
from kvjax.analysis.viewer import Viewer

RUN, SWEEP = "report.html", "sweep.html"  # templates
LEFT = {"policy", "error", "model", "storage"}  # columns of text; numbers are on the right


class Link(NamedTuple):
    """A link to a file of the same folder."""

    target: str
    text: str


def page(
    title: str,
    paragraphs: Sequence[str],
    *,
    command: str,
    rows: Sequence[dict[str, str]],
    sections: Sequence[Section],
    plots: Mapping[str, bytes],
    texts: Sequence[tuple[str, str]],
    viewer: Viewer | None,
    back: str | None = None,
) -> str:
    """Returns the page of a run.

    Args:
      title: of the run.
      paragraphs: about the model, the text and the machine.
      command: that repeats the run; empty if it is not known.
      rows: the cells of the table of results, a line a cache.
      sections: further tables.
      plots: PNG files by what they show. The first one stands below the table, the others at the end.
      texts: each cache's name, and the text that was generated under it.
      viewer: of the first row; None for none.
      back: the address of the sweep's page; None where the run belongs to no sweep.
    """
    return _rendered(
        RUN, title=title, paragraphs=paragraphs, command=command, rows=rows, sections=sections, images=_images(plots),
        texts=texts, legend=_emphasised(LEGEND), back=back,
        viewer=None if viewer is None else Markup(viewer.fragment()),
    )  # fmt: skip


def sweep_page(
    title: str,
    paragraphs: Sequence[str],
    *,
    command: str,
    rows: Sequence[dict[str, str]],
    reports: Sequence[Sequence[Link]],
    warnings: Sequence[str],
    failures: Sequence[str],
    sections: Sequence[Section],
    plots: Mapping[str, bytes],
    caption: str,
    legend: str,
) -> str:
    """Returns the page of a sweep.

    Args:
      title: of the sweep.
      paragraphs: about the model and the text.
      command: that repeats the sweep.
      rows: the cells of the table of results, a line for each combination.
      reports: the links to the runs of each line.
      warnings: what a reader should know before believing a difference.
      failures: the combinations that failed, with their errors.
      sections: further tables.
      plots: PNG files by what they show.
      caption: what the error bars of the plots are; empty for none.
      legend: what the columns are.
    """
    return _rendered(
        SWEEP, title=title, paragraphs=paragraphs, command=command, rows=rows, reports=reports, warnings=warnings,
        failures=failures, sections=sections, images=_images(plots), caption=caption, legend=_emphasised(legend),
    )  # fmt: skip


def _images(plots: Mapping[str, bytes]) -> list[tuple[str, str]]:
    return [(name, base64.b64encode(content).decode()) for name, content in plots.items()]


def _rendered(template: str, **values: Any) -> str:
    # Everything that is not marked as HTML is escaped.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("experiments.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(template).render(left=LEFT, **values)


def _emphasised(text: str) -> Markup:
    """Returns Markdown whose only marks are asterisks as HTML."""
    return Markup(re.sub(r"\*(.+?)\*", r"<em>\1</em>", str(escape(text))))
