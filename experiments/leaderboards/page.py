"""The page of a leaderboard: a table for each budget with 95 % intervals and mean ranks, and plots against bytes."""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from experiments.config import JOINED
from experiments.leaderboards.config import LeaderboardConfig
from experiments.reports import plots, tables
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

PAGE = "leaderboard.md"
RESAMPLES = 2_000
LOW, HIGH = 2.5, 97.5  # percentiles of a 95 % interval
MAX_PERCENT = 1e5  # that is written out
MAX_NATS = 700.0  # whose exponential is a float64
LABELS = 16  # caches that a plot has room to name
SELECTED = f"full{JOINED}"  # how the name of a cache begins whose selection reads a full one
BUDGET = re.compile(r", (?:\w+=)?\{\w+\}|(?:\w+=)?\{\w+\}(?:, )?")  # arguments that `cells.filled` fills
SETTING = re.compile(r", \w+=[^,()]+|\w+=[^,()]+(?:, )?")  # arguments with a name
RULER = re.compile(r"^ruler_\w+")  # the name of a task, before its settings
MIN_VALUES = 8  # rows or questions of which the bootstrap says something
LOSS, HELD, RANK = "perplexity", "held", "mean rank"
PEAK, FOOTPRINT, READ, TIME, PEER = "peak", "footprint", "read", "time of a step", "as kvpress"
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000)  # of the axes

ABOUT = """\
{model} in {dtype} on {machines}. Perplexity is that of {new} tokens after prompts of {prompt}, by teacher forcing, on
{rows} rows of each text ({texts}); it is given as what it is above the full cache's on the same rows. Scores of tasks
are means over their questions, of 100. In parentheses are 95 % intervals, by the bootstrap over rows or questions where
there are at least {least}: this page alone cannot tell caches whose intervals overlap from each other. *Held* is the
share of the bytes of a full cache in {dtype}. *Mean rank* is over perplexity and tasks, among the caches of the same
table, whatever they hold; 1 is the best. RULER's tasks of the same settings are one column, over all questions."""
#: Columns that older files lack, or that are measured if they are asked for.
ABOUT_MORE = {
    PEAK: "*Peak* is the memory that reading the prompts or a decoding step needs beyond the weights, whichever is\n"
    "larger, as a share of the full cache's; it is estimated from compiled programs of few layers, for texts alone.",
    FOOTPRINT: "*Footprint* is the slots that are held after the prompt, summed over steps, of the full cache's.",
    READ: "*Read* is the share of the slots held that the first step after the prompt reads at most.",
    TIME: "*Time of a step* is that over the full cache's, in the same process.",
    PEER: "*As kvpress*: how many answers to needles equal those of kvpress's press of this name, token by token,\n"
    "with the same weights ({peer}).",
}


def sizes(config: LeaderboardConfig) -> JsonObject:
    """Returns the sizes that the page states."""
    return {
        "model": config.model.path, "dtype": config.model.dtype or "the dtype of the platform",
        "texts": [text.rsplit("/", 1)[-1] for text in config.texts], "rows": config.data.num_sequences,
        "prompt": config.data.prompt_length, "new": config.data.new_tokens,
    }  # fmt: skip


def interval(values: ArrayLike, name: str) -> tuple[float, float]:
    """Returns the 95 % interval of a mean by the bootstrap.

    Args:
      values: of rows or questions.
      name: seeds the draws, so that these do not depend on what else is on the page.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    array = np.asarray(values, np.float64)
    # [resamples]
    means = array[rng.integers(0, array.size, (RESAMPLES, array.size))].mean(axis=1)
    low, high = np.percentile(means, [LOW, HIGH])
    return float(low), float(high)


def loss_of(row: Mapping[str, Any]) -> np.ndarray:
    """Returns what each row of the texts costs above the full cache, [rows] nats a token."""
    return np.concatenate([np.subtract(row["nats"][text], row["full_nats"][text]) for text in row["nats"]])


def _percent(nats: float) -> float:
    """Returns by how many percent a perplexity is larger, given the difference in nats."""
    return 100 * math.expm1(min(nats, MAX_NATS))


def _shown(percent: float) -> str:
    return f"{percent:+.1f}" if abs(percent) < MAX_PERCENT else f"{percent:+.1e}"


def is_finite(row: Mapping[str, Any]) -> bool:
    """Returns whether all scores of a row are numbers."""
    return bool(np.isfinite(loss_of(row)).all() and all(np.isfinite(t["scores"]).all() for t in row["tasks"].values()))


def with_means(row: JsonObject) -> JsonObject:
    """Returns a row that has RULER's tasks of the same settings as one, over all of their questions."""
    groups: dict[str, list[str]] = {}
    for task in row["tasks"]:
        groups.setdefault(RULER.sub("ruler", task), []).append(task)
    made = {}
    for name, own in groups.items():
        if len(own) == 1:
            made[own[0]] = row["tasks"][own[0]]
        else:
            each = [row["tasks"][task] for task in own]
            made[name] = {part: [x for one in each for x in one[part]] for part in ("scores", "full")}
    return row | {"tasks": made}


def scored(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers that a row is ranked by, of which lower ones are better."""
    found = {LOSS: float(loss_of(row).mean())}
    return found | {task: -float(np.mean(each["scores"])) for task, each in row["tasks"].items()}


def with_peer(rows: Sequence[JsonObject], found: Mapping[str, Any], model: str) -> list[JsonObject]:
    """Returns rows with what `experiments.bench answers` says of the cells that it has.

    Args:
      rows: see `experiments.leaderboards.cells.row`.
      found: the JSON file of that benchmark.
      model: that of the leaderboard.

    Raises:
      ConfigError: the answers are of another model, or of no cell.
    """
    if found["model"] != model:
        raise ConfigError(f"--kvpress has answers of {found['model']}, and the leaderboard is of {model}.")
    equal = {
        (each["cache"], each["budget"]): {"equal": each["answers equal"], "questions": each["questions"]}
        for each in found["answers"]
        if "answers equal" in each
    }
    if not any((row["cache"], row["budget"]) in equal for row in rows):
        raise ConfigError("--kvpress has answers under none of the leaderboard's caches and budgets.")
    command = f"python -m experiments.bench {found['command']}"
    return [
        row | {"peer": equal[key] | {"command": command}} if (key := (row["cache"], row["budget"])) in equal else row
        for row in rows
    ]


def ranked(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the mean rank of each row over perplexity and all tasks; equal scores share their ranks."""
    numbers = [scored(row) for row in rows]
    # [columns, rows]
    ranks = [_ranks([each[column] for each in numbers]) for column in numbers[0]]
    return [float(x) for x in np.mean(ranks, axis=0)]


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values)
    return (array[:, None] > array).sum(axis=1) + ((array[:, None] == array).sum(axis=1) + 1) / 2


def cells_of(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Returns a row of a table.

    Args:
      row: see `experiments.leaderboards.cells.row`.
      names: task -> the head of its column.
    """
    loss, seed = loss_of(row), f"{row['cache']} {row['budget']}"
    low, high = (_percent(x) for x in interval(loss, seed))
    found = {
        "cache": f"`{row['cache']}`",
        HELD: f"{100 * _held(row):.0f} %",
        **_optional(row),
        LOSS: f"{_shown(_percent(loss.mean()))} %",
    }
    if loss.size >= MIN_VALUES:
        found[LOSS] += f" ({_shown(low)} to {_shown(high)})"
    for task, each in row["tasks"].items():
        low, high = interval(each["scores"], seed + task)
        found[names[task]] = f"{np.mean(each['scores']):.0f}"
        if len(each["scores"]) >= MIN_VALUES:
            found[names[task]] += f" ({low:.0f} to {high:.0f})"
    return found


def _optional(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the columns of `ABOUT_MORE` that a row has."""
    found = {
        name: f"{100 * row[key]:.0f} %" for name, key in ((FOOTPRINT, "footprint"), (READ, "read")) if row.get(key)
    }
    if peak := row.get("peak_bytes"):
        found = {PEAK: f"{100 * peak / row['full_peak_bytes']:.0f} %"} | found
    if rate := row.get("decode_tokens_per_second"):
        found[TIME] = f"{row['full_decode_tokens_per_second'] / rate:.2f}"
    if peer := row.get("peer"):
        found[PEER] = f"{peer['equal']} of {peer['questions']}"
    return found


def files(found: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Returns the files of a page: name -> content."""
    measured = [row for row in found["rows"] if row["status"] == "ok"]
    done = [with_means(row) for row in measured if is_finite(row)]
    failed = [row for row in found["rows"] if row["status"] != "ok"]
    failed += [row | {"error": "a score is not a number"} for row in measured if not is_finite(row)]
    if not done:
        return {PAGE: f"# Leaderboard\n\nNo cell has a result.\n\n{_failures(failed)}"}
    names = tables.short_names(list(dict.fromkeys(task for row in done for task in row["tasks"])))
    size = found["sizes"]
    machines = dict.fromkeys(
        f"{row['machine']['device']} ({row['machine']['cpu']}), jax {row['machine']['jax']}" for row in done
    )
    texts = ", ".join(size["texts"]) or "a generated text"
    about = ABOUT.format(**(size | {"texts": texts}), machines=" and ".join(machines), least=MIN_VALUES)
    optional = {name for row in done for name in _optional(row)}
    peer = next((row["peer"]["command"] for row in done if row.get("peer")), None)
    more = [line.format(peer=f"`{peer}`") for name, line in ABOUT_MORE.items() if name in optional]
    sections = ["# Leaderboard", "", "\n".join([about, *more]), "", f"`{found['command']}`", ""]
    full = {"cache": "`full`"} | {
        names[task]: f"{np.mean(each['full']):.0f}" for task, each in done[0]["tasks"].items()
    }
    perplexity = ", ".join(
        f"{math.exp(np.mean(nats)):.2f} ({text.rsplit('/', 1)[-1]})" for text, nats in done[0]["full_nats"].items()
    )
    sections += [f"The full cache: perplexity {perplexity}.", ""]
    sections += [tables.table([full], "github"), ""] if names else []
    for budget in [*sorted({row["budget"] for row in done if row["budget"] is not None}), None]:
        own = [row for row in done if row["budget"] == budget]
        if not own:
            continue
        lines = [
            (rank, {RANK: f"{rank:.1f}"} | cells_of(row, names)) for rank, row in zip(ranked(own), own, strict=True)
        ]
        title = "Without a budget" if budget is None else f"{100 * budget:g} % of the prompt"
        ordered = [line for _, line in sorted(lines, key=lambda each: each[0])]
        sections += [f"## {title}", "", tables.table(ordered, "github"), ""]
    if any("generated" in row for row in done):
        sections += ["[Long generations](generation.md).", ""]
    sections += ["![perplexity and tasks against the bytes held](leaderboard.png)", "", _failures(failed)]
    return {PAGE: "\n".join(sections).rstrip() + "\n", "leaderboard.png": plot(done, names)}


def _failures(failed: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"- Not measured: `{row['cache']}` at {row['budget']}: {row.get('error')}" for row in failed)


def _held(row: Mapping[str, Any]) -> float:
    """Returns the share of the full cache's bytes."""
    return float(row["kv_bytes"] / row["full_kv_bytes"])


def _tick(axis: Any, values: Sequence[float]) -> None:
    """Marks round numbers on a logarithmic axis, from the one below the values to the one above them."""
    from matplotlib.ticker import NullLocator

    low, high = min(values), max(values)
    # An axis of shares begins above 0; one of differences may have 0 on it.
    ticks = TICKS if axis.get_scale() == "log" else (0, *(tick for tick in TICKS if tick >= 0.5))
    first = max((tick for tick in ticks if tick <= low), default=low)
    last = min((tick for tick in ticks if tick >= high and tick > first), default=max(high, first + 1))
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


def plot(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> bytes:
    """Draws perplexity, and the mean of all tasks, against the share of bytes held.

    Of more than `LABELS` caches, only those on the Pareto front have a name and a color.
    """
    panels = [("perplexity above full, %", lambda row: _percent(loss_of(row).mean()), True)]
    if any(row["tasks"] for row in rows):
        mean = lambda row: np.mean([np.mean(each["scores"]) for each in row["tasks"].values()])  # noqa: E731
        panels.append(("mean score of tasks", mean, False))
    figure, axes = plots.new_figure(len(panels), figsize=(6.4 * len(panels), 5.2))
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    labels = labels_of(caches)
    for ax, (name, value, smaller) in zip(axes[0], panels, strict=True):
        plots.style(ax, name, "keys and values held, % of the full cache's", "")
        ends = []
        points_of = [(row["cache"], _held(row), float(value(row)) * (1 if smaller else -1)) for row in rows]
        named = set(caches) if len(caches) <= LABELS else on_front(points_of)
        for number, cache in enumerate(caches):
            own = [row for row in rows if row["cache"] == cache]
            points = sorted((100 * _held(row), float(value(row))) for row in own)
            color = plots.COLORS[number % len(plots.COLORS)] if cache in named else plots.FULL_COLOR
            x, y = zip(*points, strict=True)
            ax.plot(x, y, linewidth=1, color=color, alpha=0.8)
            # Labels have a white border: above the points without a name, below the others.
            order = 4 if cache in named else 2
            ax.plot(x, y, "o", markersize=3, color=color, alpha=0.8, clip_on=False, zorder=order)
            if cache in named:
                ends.append((x[-1], y[-1], labels[cache], color))
        ax.set_xscale("log")
        _tick(ax.xaxis, [100 * _held(row) for row in rows])
        if smaller:
            # Differences below 1 % are within the intervals: less room for them than for a factor of ten above it.
            ax.set_yscale("symlog", linthresh=1, linscale=0.4)
            _tick(ax.yaxis, [float(value(row)) for row in rows])
        plots.label_lines(ax, ends)
    return plots.png(figure)
