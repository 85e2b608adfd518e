"""Maps of queries and tokens as PNGs, one for each KV head, which are kept from one build to the next."""

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

INCHES, DPI = (
    3.5,
    200,
)  # the width of a map, which is shown at up to 100 pixels an inch: its text is as large as a page's
READ, HELD, EVICTED, PAPER = (0.13, 0.36, 0.62), (0.64, 0.79, 0.94), (0.87, 0.90, 0.94), (1.0, 1.0, 1.0)
Colour = tuple[float, float, float]


def draw(
    cells: np.ndarray, colours: Sequence[Colour], *, title: str, rows: str, columns: str, first: int = 0,
    height: float = INCHES, line: int | None = None,
) -> bytes:  # fmt: skip
    """Draws a map as a PNG.

    Args:
      cells: [rows, columns] int, the index of each cell's colour.
      colours: the colours.
      title: above the map.
      rows: the label of the vertical axis.
      columns: the label of the horizontal axis.
      first: the number of the first row.
      height: inches.
      line: the row above which a dashed line is drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    extent = (0, cells.shape[1], first + cells.shape[0], first)
    axes.imshow(np.array(colours)[cells], extent=extent, interpolation="nearest", aspect="auto")
    if line is not None:
        axes.axhline(line, color="0.25", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set(title=title, xlabel=columns, ylabel=rows)
    axes.spines[["top", "right"]].set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": ""})
    return out.getvalue()


def kept(name: str, about: str, folder: Path, heads: int, make: Callable[[], Sequence[bytes]]) -> list[str]:
    """Writes the pictures of an entry, unless the folder has them.

    Args:
      name: of the entry.
      about: everything that the pictures depend on.
      folder: of the pictures.
      heads: how many there are.
      make: draws them.

    Returns:
      The names of the files, which have a digest of `about`.
    """
    digest = hashlib.sha256(about.encode()).hexdigest()[:12]
    names = [f"{name}-{digest}-{head}.png" for head in range(heads)]
    if not all((folder / each).exists() for each in names):
        folder.mkdir(parents=True, exist_ok=True)
        for each, picture in zip(names, make(), strict=True):
            (folder / each).write_bytes(picture)
    return names


def lines(pictures: Sequence[str], about: str) -> list[str]:
    """Returns the lines of a page that show the pictures of an entry side by side.

    Args:
      pictures: one for each KV head, relative to the page.
      about: the alternative text, to which the number of the head is added.
    """
    shown = [f"![{about} {head}]({picture})" for head, picture in enumerate(pictures)]
    return [":::{container} maps", *shown, ":::", ""]
