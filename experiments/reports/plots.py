"""Plots of runs and sweeps, drawn without a screen."""

import io
import itertools
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.reports.tables import Row, short, show_bytes
from experiments.runs.measure import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FULL_COLOR = "#555555"
#: Okabe and Ito's colours, told apart by colour-blind readers too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WEIGHTS = "weights"  # the name under which a PNG holds the digest of a model's weights
LABEL_WIDTH = 28  # characters of a line of a label, where it can be broken
CHARACTER = 0.075  # inches of a character of a label, about
LINE = 0.19  # inches of a line of a label
PANEL = 3.3  # inches of a panel whose ratio is 1
MAX_LINES = 5  # caches whose lines and bars can be told apart in one plot
ROW = 0.5  # inches of a cache's row
ASIDE = 0.006  # of the width of the axes, between the bars of two lines at one place


def colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each policy; the full cache is grey."""
    others = [name for name in dict.fromkeys(names) if name != "full"]
    return {"full": FULL_COLOR} | {name: COLORS[i % len(COLORS)] for i, name in enumerate(others)}


def gradient(names: Sequence[str]) -> dict[str, Any]:
    """A colour for each of many names, which change from dark to light in their order."""
    from matplotlib import colormaps

    return {name: colormaps["viridis"](i / max(1, len(names) - 1)) for i, name in enumerate(names)}


def label_of(name: str) -> str:
    """Returns a policy's label in a plot: files without folders, a line each for policy, storage and selection."""
    parts = re.sub(r"[^\s()=,']*/", "", short(name)).split(" + ")
    lines = [textwrap.wrap(part, LABEL_WIDTH, break_long_words=False) or [part] for part in parts]
    return "\n+ ".join("\n".join(each) for each in lines)


def inches(labels: Sequence[str]) -> float:
    """The width of the widest label."""
    return CHARACTER * max((len(line) for label in labels for line in label.split("\n")), default=0)


def new_figure(columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes [1, columns], drawn without a screen; matplotlib loads only when something is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width_ratios, sharey = options.pop("width_ratios", None), options.pop("sharey", False)
    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False, sharey=sharey, width_ratios=width_ratios)


def style(axes: "Axes", title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, pad=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)


def png(figure: Any, weights: str = "") -> bytes:
    """Returns a figure as a file.

    Args:
      figure: of matplotlib.
      weights: the digest of the model's weights, which the file names; see `experiments.runs.identity.of_weights`.
    """
    buffer = io.BytesIO()
    # No date and no version in the file: equal results are equal bytes.
    figure.savefig(
        buffer, format="png", dpi=150, metadata={"Software": None, **({WEIGHTS: weights} if weights else {})}
    )
    return buffer.getvalue()


def spread(places: Sequence[float], gap: float, low: float = -np.inf, high: float = np.inf) -> list[float]:
    """Moves ascending places apart until each is `gap` from the next, as little as possible in the mean.

    Args:
      places: of labels, ascending.
      gap: the least distance between two of them.
      low: the least place; it is kept where there is not enough room between both bounds.
      high: the largest place.
    """
    groups: list[list[float]] = []  # each [mean of its places, how many]

    def top_and_bottom(below: list[float], above: list[float]) -> tuple[float, float]:
        return below[0] + (below[1] - 1) * gap / 2, above[0] - (above[1] - 1) * gap / 2

    for place in places:
        groups.append([place, 1])
        while len(groups) > 1:
            top, bottom = top_and_bottom(groups[-2], groups[-1])
            if bottom - top >= gap:
                break
            mean, count = groups.pop()
            total = groups[-1][1] + count
            groups[-1] = [(groups[-1][0] * groups[-1][1] + mean * count) / total, total]
    moved = np.array([mean + (i - (count - 1) / 2) * gap for mean, count in groups for i in range(int(count))])
    steps = gap * np.arange(len(moved))
    return list(np.maximum(np.minimum(moved - steps, high - steps[-1:]), low) + steps)


def label_lines(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Labels each line at its right end instead of in a legend, moved apart where the labels would touch.

    Labels stay between the top and the bottom of the axes where they have room.

    Args:
      ends: x, y, text and colour of each.
    """
    from matplotlib import patheffects

    axes.figure.canvas.draw()
    dpi, to_pixels = axes.figure.dpi, axes.transData.transform
    # Labels that are side by side need no distance from each other.
    columns: list[list[tuple[float, float, str, str]]] = []
    right = -np.inf
    for end in sorted(ends):
        left = to_pixels(end[:2])[0]
        if left > right:
            columns.append([])
        columns[-1].append(end)
        right = max(right, left + dpi * inches([end[2]]))
    for group in columns:
        # Points between lines of text. All labels are as far apart as the one of most lines needs.
        gap = 11 * max(text.count("\n") + 1 for _, _, text, _ in group) * dpi / 72
        ordered = sorted(group, key=lambda end: end[1])
        bottom, top = axes.bbox.y0 + gap / 2, axes.bbox.y1 - gap / 2
        heights = spread([to_pixels((x, y))[1] for x, y, *_ in ordered], gap, bottom, top)
        for (x, y, text, color), height in zip(ordered, heights, strict=True):
            offset = (height - to_pixels((x, y))[1]) * 72 / dpi
            axes.annotate(
                text, (x, y), (6, offset), textcoords="offset points", va="center", color=color, fontsize=9,
                clip_on=False, annotation_clip=False,
                path_effects=[patheffects.withStroke(linewidth=2, foreground="white")],
            )  # fmt: skip


def run_plot(measurements: Sequence[Measurement], weights: str = "") -> bytes:
    """A PNG: what a policy costs in perplexity as the continuation grows, and the cache that each one holds.

    Perplexities of one text under two policies differ far less than those of two lengths of it, so they are shown
    relative to the full cache's where that was measured. Of many caches with recall tasks, see `recall_plot`.

    Args:
      measurements: one per policy.
      weights: see `png`.
    """
    if len(measurements) > MAX_LINES and any(m.recall for m in measurements):
        return recall_plot(measurements, weights)
    scored = {m.policy: np.asarray(m.logprobs, np.float64) for m in measurements if m.logprobs is not None}
    color = colors([m.policy for m in measurements])
    recalled = [m for m in measurements if m.recall]
    labels = {m.policy: label_of(m.policy) for m in measurements}
    outside = inches(list(labels.values()))
    # Inches of each panel, labels outside of its axes included.
    widths = [1.5 * PANEL + outside] * bool(scored)
    widths += [1.3 * PANEL + inches([_one_line(m.policy) for m in recalled])] * bool(recalled)
    widths += [PANEL + outside]
    height = max(3.6, 1.4 + LINE * sum(label.count("\n") + 2 for label in labels.values()))
    figure, panels = new_figure(len(widths), figsize=(sum(widths), height), width_ratios=widths)
    figure.get_layout_engine().set(wspace=0.08)
    if scored:
        _loss_panel(panels[0, 0], scored, color)
    if recalled:
        _recall_panel(panels[0, -2], recalled, color)
    axes = panels[0, -1]
    share = [100 * m.kv_bytes / m.full_kv_bytes for m in measurements]
    style(axes, "Keys and values held while decoding", "% of the full cache")
    axes.barh(range(len(share)), share, color=[color[m.policy] for m in measurements], height=0.6)
    for i, (value, measurement) in enumerate(zip(share, measurements, strict=True)):
        axes.text(value + 2, i, f"{value:.0f} %  ({show_bytes(measurement.kv_bytes)})", va="center", fontsize=9)
    axes.set_yticks(range(len(share)), [labels[m.policy] for m in measurements])
    axes.set_xlim(0, 100)
    axes.set_ylim(len(share) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return png(figure, weights)


def recall_plot(measurements: Sequence[Measurement], weights: str = "") -> bytes:
    """A PNG with a row for each cache: what it recalls, a bar a task, and the bytes that it holds."""
    tasks = list(dict.fromkeys(task for m in measurements for task in m.recall))
    labels = [label_of(m.policy) for m in measurements]
    height, places = 0.74 / len(tasks), np.arange(len(measurements))
    figure, panels = new_figure(
        2, figsize=(2 * PANEL + inches(labels) + 0.6, 1.3 + ROW * len(labels)), sharey=True, width_ratios=(1, 1)
    )
    left, right = panels[0]
    style(left, "Facts found again", "% of questions answered exactly")
    for number, (task, color) in enumerate(zip(tasks, itertools.cycle(COLORS))):
        shares = np.array([100 * m.recall.get(task, np.nan) for m in measurements])
        y = places + (number - (len(tasks) - 1) / 2) * height
        left.barh(y, shares, height=0.9 * height, color=color, label=task.replace("_", " "))
        for place, share in zip(y, shares, strict=True):
            if not np.isnan(share):
                left.text(share + 2, place, f"{share:.0f}", va="center", fontsize=8)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=len(tasks))
    left.set_yticks(places, labels)
    style(right, "Keys and values held", "% of the full cache")
    held = [100 * m.kv_bytes / m.full_kv_bytes for m in measurements]
    right.barh(places, held, height=0.5, color=FULL_COLOR)
    for place, share, m in zip(places, held, measurements, strict=True):
        right.text(share + 2, place, f"{share:.0f} %  ({show_bytes(m.kv_bytes)})", va="center", fontsize=9)
    for axes in (left, right):
        axes.set_xlim(0, 108)
        axes.set_xticks(range(0, 101, 25))
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    right.set_xlim(0, 150)
    left.set_ylim(len(labels) - 0.5, -0.5)
    return png(figure, weights)


def _loss_panel(axes: "Axes", scored: dict[str, np.ndarray], color: dict[str, str]) -> None:
    """Perplexity of the first 1, 2, ... tokens of the continuation."""
    count = next(iter(scored.values())).shape[1]
    x = np.arange(1, count + 1)
    mean = {name: np.cumsum(-logprobs.mean(axis=0, dtype=np.float64)) / x for name, logprobs in scored.items()}
    relative = "full" in mean and len(mean) > 1
    if relative:
        style(axes, "Perplexity so far, against the full cache", "tokens after the prompt", "% above the full cache's")
        lines = {name: 100 * np.expm1(loss - mean["full"]) for name, loss in mean.items()}
    else:
        style(axes, "Perplexity so far", "tokens after the prompt", "perplexity")
        lines = {name: np.exp(loss) for name, loss in mean.items()}
    for name, y in lines.items():
        dashes = (0, (4, 3)) if relative and name == "full" else "-"
        axes.plot(x, y, color=color[name], lw=1.2 if name == "full" else 1.8, ls=dashes, zorder=2 + (name != "full"))
    axes.set_xlim(1, max(count, 2))
    axes.margins(y=0.1)
    axes.grid(axis="y", color="#e5e5e5", lw=0.8)
    label_lines(axes, [(x[-1], y[-1], label_of(name), color[name]) for name, y in lines.items()])


def _one_line(name: str) -> str:
    return " ".join(label_of(name).split("\n"))


def _recall_panel(axes: "Axes", measurements: Sequence[Measurement], color: dict[str, str]) -> None:
    """Exact matches by task, a bar a policy."""
    tasks = list(measurements[0].recall)
    height = 0.8 / len(measurements)
    style(axes, "Recalled from far back", "% answered exactly")
    for i, measurement in enumerate(measurements):
        for place, share in enumerate(measurement.recall.values()):
            y = place + (i - (len(measurements) - 1) / 2) * height
            axes.barh(y, 100 * share, height=0.92 * height, color=color[measurement.policy])
            axes.text(
                100 * share + 1.5, y, f"{_one_line(measurement.policy)} {100 * share:.0f}", va="center", fontsize=8
            )
    axes.set_yticks(range(len(tasks)), [task.replace("_", " ") for task in tasks])
    # Room for the longest label beside a bar of 100 %.
    room = inches([_one_line(m.policy) for m in measurements])
    axes.set_xlim(0, 106 * (1 + room / (1.3 * PANEL)))
    axes.set_xticks(range(0, 101, 25))
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def error_bar(point: Row) -> list[list[float]] | None:
    """Returns the lengths of an error bar below and above a point, as matplotlib takes them; None for no bar.

    Args:
      point: with ``y``; ``interval``, [low, high] or None; and where that is None ``error``, the standard deviation of
        y over seeds, or None.
    """
    if point.get("interval") is not None:
        low, high = point["interval"]
        if np.isfinite([low, high]).all():
            return [[max(point["y"] - low, 0.0)], [max(high - point["y"], 0.0)]]
    return [[point["error"]], [point["error"]]] if point["error"] else None


def sweep_plot(points: Sequence[Row], quality: str) -> bytes:
    """A PNG of quality against budget, a line a policy, the full cache dashed.

    Args:
      points: each with ``label`` (its line), ``x``, ``y``, ``interval`` and ``error`` (see `error_bar`), ``full`` (the
        full cache's quality or None), and in the first one ``x_name`` (the axis).
      quality: ``perplexity`` or ``agreement``.
    """
    shown = {point["label"]: label_of(point["label"]) for point in points}
    height = 1.4 + LINE * sum(label.count("\n") + 1 for label in shown.values())
    figure, panels = new_figure(1, figsize=(6 + inches(list(shown.values())), max(4.2, height)))
    axes = panels[0, 0]
    title, unit = {
        "perplexity": ("Perplexity against budget", "perplexity (lower is better)"),
        "agreement": ("Agreement with the full cache against budget", "greedy tokens equal, %"),
    }[quality]
    style(axes, title, points[0]["x_name"], unit)
    labels = list(dict.fromkeys(point["label"] for point in points))
    color, ends = colors(labels), []
    right = max(point["x"] for point in points)
    barred = any(error_bar(point) is not None for point in points)
    edge = right * (1 + ASIDE * len(labels) if barred else 1)
    for label in labels:
        line = sorted((point for point in points if point["label"] == label), key=lambda point: point["x"])
        # Bars at one budget stand beside each other.
        aside = ASIDE * right * (labels.index(label) - (len(labels) - 1) / 2) if barred else 0.0
        xs, ys = [point["x"] + aside for point in line], [point["y"] for point in line]
        for x, point in zip(xs, line, strict=True):
            if (bar := error_bar(point)) is not None:
                axes.errorbar(
                    x, point["y"], bar, fmt="none", color=color[label], lw=1.2, capsize=3, zorder=2
                )  # fmt: skip
        axes.plot(xs, ys, "o-", color=color[label], lw=1.8, ms=5.5, mec="white", mew=0.8, clip_on=False, zorder=3)
        ends.append((edge if xs[-1] > right - (edge - right) else xs[-1], ys[-1], shown[label], color[label]))
    full = {point["full"] for point in points if point["full"] is not None}
    for value in full:
        axes.axhline(value, color=FULL_COLOR, lw=1.2, ls=(0, (4, 3)), zorder=1)
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#e5e5e5", lw=0.8)
    axes.set_xlim(0, edge)
    if quality == "perplexity" and max(point["y"] for point in points) > 3 * min(point["y"] for point in points):
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(lambda value, place: f"{value:g}")
    ends += [(edge, value, "full cache", FULL_COLOR) for value in full]
    label_lines(axes, ends)
    return png(figure)
