"""The report of a run as one HTML file without any network access: tables, plots and the text that caches hold."""

import base64
import re
from collections.abc import Mapping, Sequence

import jinja2
from markupsafe import Markup, escape

from experiments.reports.tables import LEGEND, Section
from kvjax.analysis.viewer import Viewer

TEMPLATE = "report.html"
LEFT = {"policy", "error", "model"}  # columns of text; numbers are on the right


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
) -> str:
    """Returns the page.

    Args:
      title: of the run.
      paragraphs: about the model, the text and the machine.
      command: that repeats the run; empty if it is not known.
      rows: the cells of the table of results, a line a cache.
      sections: further tables.
      plots: PNG files by what they show. The first one stands below the table, the others at the end.
      texts: each cache's name, and the text that was generated under it.
      viewer: of the first row; None for none.
    """
    images = [(name, base64.b64encode(content).decode()) for name, content in plots.items()]
    # Everything that is not marked as HTML is escaped.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("experiments.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(TEMPLATE).render(
        title=title, paragraphs=paragraphs, command=command, rows=rows, sections=sections, images=images, texts=texts,
        legend=_emphasised(LEGEND), left=LEFT, viewer=None if viewer is None else Markup(viewer.fragment()),
    )  # fmt: skip


def _emphasised(text: str) -> Markup:
    """Returns Markdown whose only marks are asterisks as HTML."""
    return Markup(re.sub(r"\*(.+?)\*", r"<em>\1</em>", str(escape(text))))
