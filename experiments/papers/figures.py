"""Figures of entries: lines and bars in panels."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.reports import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^Dv<>pX*P"
MANY = 12  # lines of a panel, such as those of layers, from which on they have one scale of colours
SHOWN = 5  # of many lines, in a legend


@dataclasses.dataclass(frozen=True)
class Panel:
    """One axes of a figure.

    Attributes:
      title: above it.
      x: label of the horizontal axis.
      y: label of the vertical axis.
      lines: label -> xs and ys.
      log_x: whether the horizontal axis is logarithmic.
      log_y: whether the vertical one is.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False


def curves(panels: Sequence[Panel]) -> bytes:
    """Draws lines in panels side by side, a colour and a marker for each label, as a PNG.

    The lines of a panel that has `MANY` are taken to be in an order, as layers are.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    colors = plots.colors(labels)
    marker = dict(zip(labels, itertools.cycle(MARKERS), strict=False))
    figure, axes = plots.new_figure(len(panels), figsize=(4.6 * len(panels), 3.8))
    for ax, panel in zip(axes[0], panels, strict=True):
        plots.style(ax, panel.title, panel.x, panel.y)
        own = list(panel.lines)
        many = len(own) >= MANY
        color = plots.gradient(own) if many else colors
        shown = {own[i * (len(own) - 1) // (SHOWN - 1)] for i in range(SHOWN)} if many else set(own)
        for label, (xs, ys) in panel.lines.items():
            few = len(xs) <= 16 and not many
            ax.plot(
                xs, ys, color=color[label], marker=marker[label] if few else None, markersize=4.5, lw=1.6,
                label=label if label in shown else None,
                ls=(0, (4, 3)) if label == "full" else "-",
            )  # fmt: skip
        ax.grid(axis="y", color="#e5e5e5", lw=0.8)
        if panel.log_x:
            ax.set_xscale("log")
            low, high = ax.get_xlim()
            if high < 30 * low:
                # Under a decade and a half powers of ten are few, and labels of all minor ticks overlap.
                ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                ax.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        if panel.log_y:
            ax.set_yscale("log")
    same = all(set(panel.lines) == set(labels) for panel in panels)
    for ax, panel in zip(axes[0], panels, strict=True):
        if not same and len(panel.lines) > 1:
            ax.legend(frameon=False, fontsize=8)
    if same:
        _legend(axes[0][-1], labels)
    return plots.png(figure)


def bars(title: str, y: str, groups: Mapping[str, Mapping[str, float]], *, log: bool = False) -> bytes:
    """Draws bars as a PNG.

    Args:
      title: above.
      y: label of the vertical axis.
      groups: group along the horizontal axis -> label -> height.
      log: whether the vertical axis is logarithmic.
    """
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    color, width = plots.colors(labels), 0.8 / len(labels)
    figure, axes = plots.new_figure(1, figsize=(max(5.0, 1.2 * len(groups) + 2), 3.8))
    ax = axes[0][0]
    plots.style(ax, title, "", y)
    for place, label in enumerate(labels):
        xs = [number + (place - (len(labels) - 1) / 2) * width for number in range(len(groups))]
        heights = [group.get(label, 0.0) for group in groups.values()]
        ax.bar(xs, heights, width=0.92 * width, color=color[label], label=label)
    ax.set_xticks(range(len(groups)), list(groups))
    if log:
        ax.set_yscale("log")
    _legend(ax, labels)
    return plots.png(figure)


def png(figure: object) -> bytes:
    """The bytes of a figure of `kvjax.analysis.plots`."""
    return plots.png(figure)


def _legend(ax: "Axes", labels: Sequence[str]) -> None:
    if len(labels) > 1:
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
