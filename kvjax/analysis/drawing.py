"""Parts of the figures of `kvjax.analysis`; matplotlib is imported only when something is drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.errors import InputError
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Any  # a result, or a dict of results by policy name
POINTS = 100  # of a line, at most; longer ones are averaged over equal intervals


def draw_lines(axes: "Axes", results: Results, label: str) -> str:
    """Draws lines over the position of the query, one per policy or per layer of a single result; returns which."""
    if isinstance(results, Mapping):
        title, lines = "policy", {name: line_means(values[None])[0] for name, values in results.items()}
        colors: list[Any] = [f"C{i % 10}" for i in range(len(lines))]
    else:
        title, lines = "layer", {str(layer): line for layer, line in enumerate(line_means(results))}
        colors = ordered_colors(len(lines))
    for (name, line), color in zip(lines.items(), colors, strict=True):
        if not np.isnan(line).all():
            axes.plot(*thinned(line), color=color, label=name)
    axes.set(xlabel="position of the query (tokens)", ylabel=label)
    return title


def line_means(values: np.ndarray) -> np.ndarray:
    """[N, ..., T] -> [N, T]: the mean of what is not NaN; NaN where all is."""
    values = values.reshape(len(values), -1, values.shape[-1]).astype(np.float64)
    count = np.sum(~np.isnan(values), axis=1)
    return np.where(count > 0, np.nansum(values, axis=1), np.nan) / np.maximum(count, 1)


def thinned(line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y of at most `POINTS` points, each the mean of an interval of positions; NaN is left out."""
    at = np.flatnonzero(~np.isnan(line))
    step = max(1, -(-len(at) // POINTS))
    parts = [at[i : i + step] for i in range(0, len(at), step)]
    return np.array([part.mean() for part in parts]), np.array([line[part].mean() for part in parts])


def side_legend(axes: "Axes", title: str) -> None:
    lines = len(axes.get_lines())
    axes.legend(
        title=title, frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), ncols=-(-lines // 16)
    )


def ordered_colors(count: int) -> list[PyTree]:
    """`count` colors in order."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]


def make_figure(panels: int = 1, rows: int = 1) -> tuple[PyTree, PyTree]:
    """A figure that needs no display, and its axes: one, `panels` side by side, or some `rows` of them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plots need matplotlib, which is not installed: pip install 'kvjax[experiments]'.") from None
    figure = Figure(
        figsize=(6.4 if panels == 1 else 4.2 * panels, 3.8 if rows == 1 else 3.2 * rows), layout="constrained"
    )
    axes = figure.subplots(rows, panels)
    for each in np.ravel(axes):
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes
