"""Heat maps of tasks over lengths and depths."""

from collections.abc import Mapping

from experiments.reports import plots
from experiments.tasks.base import Grid

CELL, MARGIN = 0.55, 1.5  # inches of a cell, and around the cells of a panel


def plot(task: str, grids: Mapping[str, Grid]) -> bytes:
    """A PNG: a panel a policy, a column a length, a row a depth, and in each cell the share of right answers.

    Args:
      task: the task, for the title.
      grids: policy -> its grid; all have the same lengths and depths.
    """
    first = next(iter(grids.values()))
    labels = {policy: plots.label_of(policy) for policy in grids}
    width = max(CELL * len(first.lengths) + MARGIN, *(plots.inches([label]) + 0.4 for label in labels.values()))
    height = CELL * 0.7 * len(first.depths) + MARGIN + 0.2 * max(label.count("\n") for label in labels.values())
    figure, panels = plots.new_figure(len(grids), figsize=(width * len(grids), height))
    for place, (policy, grid) in enumerate(grids.items()):
        axes = panels[0, place]
        plots.style(axes, labels[policy], "tokens", "depth of the fact, %" if place == 0 else "")
        axes.imshow(grid.shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        axes.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths])
        axes.set_yticks(range(len(grid.depths)), [f"{depth:g}" for depth in grid.depths])
        for row, values in enumerate(grid.shares):
            for column, value in enumerate(values):
                color = "black" if value > 50 else "white"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    figure.suptitle(f"{task.split('(')[0]}: % found", x=0.01, ha="left", fontsize=11)
    return plots.png(figure)
