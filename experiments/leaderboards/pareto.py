"""Plots of a leaderboard: perplexity and the scores of tasks against the bytes held."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import JOINED
from experiments.leaderboards import scores
from experiments.reports import plots

LABELS = 16  # caches that a plot has room to name
SELECTED = f"full{JOINED}"  # how the name of a cache begins whose selection reads a full one
BUDGET = re.compile(r", (?:\w+=)?\{\w+\}|(?:\w+=)?\{\w+\}(?:, )?")  # arguments that `cells.filled` fills
SETTING = re.compile(r", \w+=[^,()]+|\w+=[^,()]+(?:, )?")  # arguments with a name
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000)  # of the axes


def _tick(axis: Any, values: Sequence[float]) -> None:
    """Marks round numbers on a logarithmic axis, from the one below the values to the one above them."""
    from matplotlib.ticker import NullLocator

    low, high = min(values), max(values)
    # An axis of shares begins above 0; one of differences may have 0 on it.
    ticks = TICKS if axis.get_scale() == "log" else (0, *(tick for tick in TICKS if tick >= 0.5))
    first = max((tick for tick in ticks if tick <= low), default=low)
    last = min((tick for tick in ticks if tick >= high and tick > first), default=max(min(high, TICKS[-1]), first + 1))
    shown = [tick for tick in ticks if first <= tick <= last]
    axis.set_minor_locator(NullLocator())
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.axes.set(**{f"{axis.axis_name}lim": (first, last)})


def on_front(points: Sequence[tuple[str, float, float]]) -> set[str]:
    """Returns the names that no other point beats in both numbers, of which less is better."""
    return {name for name, x, y in points if not any(a <= x and b <= y and (a, b) != (x, y) for _, a, b in points)}


def labels_of(caches: Sequence[str]) -> dict[str, str]:
    """Returns short names for a plot: without budgets and settings where the names still differ.

    The full cache that a selection reads or a storage holds is left out too.
    """
    without_budget = [_short(BUDGET.sub("", each)) for each in caches]
    without_settings = [_short(SETTING.sub("", BUDGET.sub("", each))) for each in caches]
    choices = zip(without_settings, without_budget, caches, strict=True)
    columns = (without_settings, without_budget, list(caches))
    return {
        each: next(name for name, column in zip(names, columns, strict=True) if column.count(name) == 1)
        for each, names in zip(caches, choices, strict=True)
    }


def _short(cache: str) -> str:
    return cache.replace("()", "").removeprefix(SELECTED)


def plot(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Draws perplexity, and the mean of all tasks, against the share of bytes held.

    With more than `LABELS` caches, only those on the Pareto front have a name and a color, and those with several
    budgets if these are few.

    Args:
      rows: see `experiments.leaderboards.cells.row`.

    Returns:
      A PNG.
    """
    panels = [("perplexity above full, %", scores.increase, True)]
    if any(row["tasks"] for row in rows):
        panels.append(("mean score of tasks", scores.task_mean, False))
    figure, axes = plots.new_figure(len(panels), figsize=(6.4 * len(panels), 5.2))
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    labels = labels_of(caches)
    lines = {cache for cache in caches if sum(row["cache"] == cache for row in rows) > 1}
    lines = lines if len(lines) <= LABELS else set()
    named_of = []
    for _, value, smaller in panels:
        points = [(row["cache"], scores.held(row), value(row) * (1 if smaller else -1)) for row in rows]
        named_of.append(set(caches) if len(caches) <= LABELS else on_front(points) | lines)
    # A cache has the same color in both panels.
    colors = dict(zip((cache for cache in caches if cache in set().union(*named_of)), itertools.cycle(plots.COLORS)))
    for ax, (name, value, smaller), named in zip(axes[0], panels, named_of, strict=True):
        plots.style(ax, name, "keys and values held, % of the full cache's", "")
        ends = []
        for cache in caches:
            own = [row for row in rows if row["cache"] == cache]
            x, y = zip(*sorted((100 * scores.held(row), value(row)) for row in own), strict=True)
            color = colors[cache] if cache in named else plots.FULL_COLOR
            ax.plot(x, y, linewidth=1, color=color, alpha=0.8)
            # Labels have a white border: above the points without a name, below the others.
            order = 4 if cache in named else 2
            ax.plot(x, y, "o", markersize=3, color=color, alpha=0.8, clip_on=False, zorder=order)
            if cache in named:
                ends.append((x[-1], y[-1], labels[cache], color))
        ax.set_xscale("log")
        _tick(ax.xaxis, [100 * scores.held(row) for row in rows])
        if smaller:
            # Differences below 1 % are within the intervals: less room for them than for a factor of ten above it.
            ax.set_yscale("symlog", linthresh=1, linscale=0.4)
            _tick(ax.yaxis, [value(row) for row in rows])
        plots.label_lines(ax, ends)
    return plots.png(figure)
