"""A second page of a leaderboard whose tasks have several questions about one context: scores by turn, and costs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from experiments.leaderboards.config import FULL
from experiments.reports import plots, tables
from experiments.reports.bootstrap import interval
from experiments.tasks.conversations import BYTES, HELD, MODES, MULTI_TURN, RECOMPUTED, SINGLE
from kvjax.typing import JsonObject

PAGE, PLOT = "turns.md", "turns.png"
LATER = "later turns"
_MODE = re.compile(r"\bmode=(\w+)(?:, )?")  # in the text of a task
ABOUT = """\
Scores by turn of questions about one context, of 100, with 95 % intervals by the bootstrap over contexts. *Later turns*
is the mean of all turns but the first, less the first, context by context. *Slots held* is what a KV head holds when it
answers, of what the full cache holds. *Kilobytes* are those of the arrays of a context, which have room for the whole
conversation. *Recomputed* is the number of tokens of a context that go through the model more than once, because each
question is asked in a separate prompt."""
ABOUT_MODES = """\
The mean of all turns but the first in each mode, and its difference from that of the same questions in separate
prompts (`single`), context by context."""


def turns_of(scores: Mapping[str, Any]) -> JsonObject:
    """Returns what the page shows of a task: its scores by turn, and what they cost.

    Args:
      scores: of a task that has turns; see `experiments.runs.measure.Measurement.scores`.
    """
    return {"by_turn": scores["by_turn"]} | {name: scores["scores"][name] for name in (HELD, BYTES, RECOMPUTED)}


def by_number(rows: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Returns the scores of each turn, those of all contexts that have it.

    Args:
      rows: of each context, the scores of its turns.
    """
    return [np.array([row[n] for row in rows if len(row) > n]) for n in range(max(map(len, rows)))]


def files(found: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Returns the files of the page: name -> content; none if no task has turns.

    Args:
      found: see `experiments.leaderboards.page.files`.
    """
    rows = [row for row in found["rows"] if row["status"] == "ok"]
    tasks = {task: _caches(rows, task) for task, each in (rows[0]["tasks"] if rows else {}).items() if "turns" in each}
    if not tasks:
        return {}
    lines = ["# By turn", "", ABOUT, "", f"`{found['command']}`", ""]
    lines += _modes(tasks)
    for task, caches in tasks.items():
        lines += [f"## {task}", "", tables.table([_line(task, *each) for each in caches.items()], "github"), ""]
    return {PAGE: "\n".join([*lines, f"![scores by turn]({PLOT})"]) + "\n", PLOT: plot(tasks)}


def _caches(rows: Sequence[Mapping[str, Any]], task: str) -> dict[str, JsonObject]:
    """Returns what there is of a task by cache, the full cache first."""
    found = {FULL: rows[0]["tasks"][task]["turns"][FULL]}
    for row in rows:
        budget = "" if row["budget"] is None else f", {100 * row['budget']:g} %"
        found[f"{row['cache']}{budget}"] = row["tasks"][task]["turns"]["cache"]
    return found


def _modes(tasks: Mapping[str, Mapping[str, JsonObject]]) -> list[str]:
    """Returns a table for each task that was asked in several modes, one of them `single`."""
    groups: dict[str, dict[str, Mapping[str, JsonObject]]] = {}
    for task, caches in tasks.items():
        found = _MODE.search(task)
        groups.setdefault(_MODE.sub("", task), {})[MULTI_TURN if found is None else found[1]] = caches
    lines = []
    for task, own in groups.items():
        modes = [mode for mode in reversed(MODES) if mode in own]
        if SINGLE not in modes or len(modes) == 1:
            continue
        shown = []
        for cache in own[SINGLE]:
            # A context with one question has no later ones.
            later = {mode: np.array(_later(own[mode][cache]["by_turn"])) for mode in modes}
            if not len(later[SINGLE]):
                continue
            line = {"cache": cache} | {mode: _shown(later[mode], f"{cache} {task} {mode}") for mode in modes}
            for mode in modes[1:]:
                less = _shown(later[mode] - later[SINGLE], f"{cache} {task} {mode} {SINGLE}", sign="+")
                line[f"{mode} less {SINGLE}"] = less
            shown.append(line)
        if not shown:
            continue
        lines += [f"## Modes of {task}", "", ABOUT_MODES, "", tables.table(shown, "github"), ""]
    return lines


def _later(by_turn: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean of the turns after the first, of each context that has some."""
    return [float(np.mean(row[1:])) for row in by_turn if len(row) > 1]


def _shown(values: ArrayLike, seed: str, sign: str = "") -> str:
    low, high = interval(values, seed)
    return f"{np.mean(np.asarray(values)):{sign}.0f} ({low:{sign}.0f} to {high:{sign}.0f})"


def _line(task: str, cache: str, found: Mapping[str, Any]) -> dict[str, str]:
    line = {"cache": cache}
    for number, values in enumerate(by_number(found["by_turn"]), 1):
        line[f"turn {number}"] = _shown(values, f"{cache} {task} {number}")
    if later := [np.mean(each[1:]) - each[0] for each in found["by_turn"] if len(each) > 1]:
        line[LATER] = _shown(later, f"{cache} {task} {LATER}", sign="+")
    return line | {
        HELD: f"{found[HELD]:.0f} %",
        "kilobytes": f"{found[BYTES] / 1000:,.0f}",
        "recomputed": f"{found[RECOMPUTED]:,.0f}",
    }


def plot(tasks: Mapping[str, Mapping[str, JsonObject]]) -> bytes:
    """Draws the scores of each turn, a panel for each task.

    Args:
      tasks: task -> cache -> see `turns_of`.
    """
    names = list(dict.fromkeys(cache for caches in tasks.values() for cache in caches))
    color, outside = plots.colors(names), plots.inches(names)
    height = max(3.6, plots.LINE * (len(names) + 4))
    figure, axes = plots.new_figure(len(tasks), figsize=((plots.PANEL + outside) * len(tasks), height))
    for ax, (task, caches) in zip(axes[0], tasks.items(), strict=True):
        plots.style(ax, task, "turn", "score")
        ends, most = [], 1
        for cache, found in caches.items():
            means = [float(values.mean()) for values in by_number(found["by_turn"])]
            most = max(most, len(means))
            ax.plot(range(1, len(means) + 1), means, marker="o", markersize=3, linewidth=1, color=color[cache])
            ends.append((len(means), means[-1], cache, color[cache]))
        ax.set_xticks(range(1, most + 1))
        ax.set_ylim(-8, 104)
        plots.label_lines(ax, ends)
    return plots.png(figure)
