"""Scores of the cells of a leaderboard: losses, means over tasks, and mean ranks."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.typing import JsonObject

MAX_NATS = 700.0  # whose exponential is a float64
RULER = re.compile(r"^ruler_\w+")  # the name of a task, before its settings
LOSS = "perplexity"


def loss_of(row: Mapping[str, Any]) -> np.ndarray:
    """Returns what each row of the texts costs above the full cache, [rows] nats a token."""
    return np.concatenate([np.subtract(row["nats"][text], row["full_nats"][text]) for text in row["nats"]])


def percent(nats: float) -> float:
    """Returns by how many percent a perplexity is larger, given the difference in nats."""
    return 100 * math.expm1(min(nats, MAX_NATS))


def increase(row: Mapping[str, Any]) -> float:
    """Returns by how many percent the perplexity is above the full cache's."""
    return percent(float(loss_of(row).mean()))


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


def task_mean(row: Mapping[str, Any]) -> float:
    """Returns the mean of the scores of all tasks, each of which counts once, of 100."""
    return float(np.mean([np.mean(each["scores"]) for each in row["tasks"].values()]))


def ranked(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the mean rank of each row over perplexity and all tasks; equal scores share their ranks."""
    numbers = [scored(row) for row in rows]
    # [columns, rows]
    ranks = [_ranks([each[column] for each in numbers]) for column in numbers[0]]
    return [float(x) for x in np.mean(ranks, axis=0)]


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values)
    return (array[:, None] > array).sum(axis=1) + ((array[:, None] == array).sum(axis=1) + 1) / 2


def held(row: Mapping[str, Any]) -> float:
    """Returns the share of the full cache's bytes."""
    return float(row["kv_bytes"] / row["full_kv_bytes"])
