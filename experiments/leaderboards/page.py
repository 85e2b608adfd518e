"""The page of a leaderboard: a table for each budget with 95 % intervals and mean ranks, and plots against bytes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.leaderboards import pareto, scores
from experiments.leaderboards.config import LeaderboardConfig
from experiments.leaderboards.scores import LOSS
from experiments.reports import tables
from experiments.reports.bootstrap import MIN_VALUES, interval
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

PAGE = "leaderboard.md"
MAX_PERCENT = 1e5  # that is written out
SAME_NATS = 0.01  # a token, by which the full cache's perplexity may differ between machines
HELD, RANK, TASKS = "held", "mean rank", "tasks"
PEAK, FOOTPRINT, READ, TIME, PEER = "peak", "footprint", "read", "time of a step", "as kvpress"

ABOUT = """\
{model} in {dtype} on {machines}. Perplexity is that of {new} tokens after prompts of {prompt}, by teacher forcing, on
{rows} rows of each text ({texts}); it is given as the increase over the full cache's on the same rows. Scores of tasks
are means over their questions, of 100. In parentheses are 95 % intervals, by the bootstrap over rows or questions where
there are at least {least}: this page alone cannot tell caches whose intervals overlap from each other. *Held* is the
share of the bytes of a full cache in {dtype}. *Mean rank* is over perplexity and tasks, among the caches of the same
table, whatever they hold; 1 is the best. RULER's tasks of the same settings are one column, over all questions."""
ABOUT_SUMMARY = """\
Perplexity above the full cache's, and the mean score of all tasks, of caches with several budgets; intervals are in
the tables below. *Mean rank* is that among these caches, as a mean over the budgets that all of them have."""
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


def merged(parts: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Returns the contents of several files as those of one.

    If several files have a cell, the first one is used that has a result of it.

    Args:
      parts: contents of leaderboard.json, of the same model, texts and tasks.

    Raises:
      ConfigError: if they differ in that, or in the perplexity of the full cache.
    """
    first = parts[0]
    rows: dict[tuple[str, float | None], JsonObject] = {}
    for part in parts:
        for name, size in first["sizes"].items():
            if part["sizes"].get(name) != size:
                raise ConfigError(f"--page has files that differ in {name}: {size} and {part['sizes'].get(name)}.")
        for row in part["rows"]:
            key = row["cache"], row["budget"]
            if key not in rows or rows[key]["status"] != "ok":
                rows[key] = row
    measured = [row for row in rows.values() if row["status"] == "ok"]
    tasks = {tuple(sorted(row["tasks"])) for row in measured}
    if len(tasks) > 1:
        raise ConfigError(f"--page has files that differ in tasks: {' and '.join(map(str, sorted(tasks)))}.")
    for text in measured[0]["full_nats"] if measured else ():
        full = [float(np.mean(row["full_nats"][text])) for row in measured]
        if max(full) - min(full) > SAME_NATS:
            low, high = (f"{math.exp(nats):.2f}" for nats in (min(full), max(full)))
            raise ConfigError(
                f"--page has files with other perplexities of the full cache on {text}, {low} and {high}: the text "
                "or the weights differ."
            )
    commands = "\n".join(dict.fromkeys(part["command"] for part in parts))
    return {"command": commands, "sizes": first["sizes"], "rows": list(rows.values())}


def over_budgets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns a table of the caches that have several budgets: perplexity and the mean of all tasks at each budget.

    Args:
      rows: see `experiments.leaderboards.cells.row`.

    Returns:
      Column -> text of each cache, by their mean rank over the budgets that all of them have.
    """
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in rows:
        if row["budget"] is not None:
            found.setdefault(row["cache"], {})[row["budget"]] = row
    found = {cache: own for cache, own in found.items() if len(own) > 1}
    budgets = sorted({budget for own in found.values() for budget in own})
    common = [budget for budget in budgets if all(budget in own for own in found.values())]
    # [budgets, caches]
    ranks = [scores.ranked([own[budget] for own in found.values()]) for budget in common]
    mean = dict(zip(found, np.mean(ranks, axis=0), strict=True)) if ranks else {}
    columns = {LOSS: lambda row: f"{_shown(scores.increase(row))} %"}
    if any(row["tasks"] for row in rows):
        columns[TASKS] = lambda row: f"{scores.task_mean(row):.0f}"
    return [
        ({RANK: f"{mean[cache]:.1f}"} if mean else {})
        | {"cache": f"`{cache}`", HELD: _range([scores.held(row) for row in found[cache].values()])}
        | {
            f"{name}, {100 * budget:g} %": show(found[cache][budget]) if budget in found[cache] else ""
            for name, show in columns.items()
            for budget in budgets
        }
        for cache in sorted(found, key=lambda cache: mean.get(cache, 0.0))
    ]


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _shown(percent: float) -> str:
    return f"{percent:+.1f}" if abs(percent) < MAX_PERCENT else f"{percent:+.1e}"


def cells_of(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Returns a row of a table.

    Args:
      row: see `experiments.leaderboards.cells.row`.
      names: task -> the head of its column.
    """
    loss, seed = scores.loss_of(row), f"{row['cache']} {row['budget']}"
    low, high = (scores.percent(x) for x in interval(loss, seed))
    found = {
        "cache": f"`{row['cache']}`",
        HELD: f"{100 * scores.held(row):.0f} %",
        **_optional(row),
        LOSS: f"{_shown(scores.increase(row))} %",
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
    done = [scores.with_means(row) for row in measured if scores.is_finite(row)]
    failed = [row for row in found["rows"] if row["status"] != "ok"]
    failed += [row | {"error": "a score is not a number"} for row in measured if not scores.is_finite(row)]
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
    commands = "\n\n".join(f"`{each}`" for each in found["command"].splitlines())
    sections = ["# Leaderboard", "", "\n".join([about, *more]), "", commands, ""]
    full = {"cache": "`full`"} | {
        names[task]: f"{np.mean(each['full']):.0f}" for task, each in done[0]["tasks"].items()
    }
    perplexity = ", ".join(
        f"{math.exp(np.mean(nats)):.2f} ({text.rsplit('/', 1)[-1]})" for text, nats in done[0]["full_nats"].items()
    )
    sections += [f"The full cache: perplexity {perplexity}.", ""]
    sections += [tables.table([full], "github"), ""] if names else []
    if len(summary := over_budgets(done)) > 1:
        sections += [f"## All budgets\n\n{ABOUT_SUMMARY}", "", tables.table(summary, "github"), ""]
    for budget in [*sorted({row["budget"] for row in done if row["budget"] is not None}), None]:
        own = [row for row in done if row["budget"] == budget]
        if not own:
            continue
        lines = [
            (rank, {RANK: f"{rank:.1f}"} | cells_of(row, names))
            for rank, row in zip(scores.ranked(own), own, strict=True)
        ]
        title = "Without a budget" if budget is None else f"{100 * budget:g} % of the prompt"
        ordered = [line for _, line in sorted(lines, key=lambda each: each[0])]
        sections += [f"## {title}", "", tables.table(ordered, "github"), ""]
    if any("generated" in row for row in done):
        sections += ["[Long generations](generation.md).", ""]
    sections += ["![perplexity and tasks against the bytes held](leaderboard.png)", "", _failures(failed)]
    return {PAGE: "\n".join(sections).rstrip() + "\n", "leaderboard.png": pareto.plot(done)}


def _failures(failed: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"- Not measured: `{row['cache']}` at {row['budget']}: {row.get('error')}" for row in failed)
