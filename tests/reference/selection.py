"""Selections in float64 NumPy: one row and one KV head, token by token, written from the definitions.

A text of T tokens has query [T, G, D], key and value [T, D]. Its first `prompt` tokens go in at once; every later token
is a step, in which the query of the token reads some of the tokens that are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Text(NamedTuple):
    """What became of a text; `gap` is the smallest difference between two slots of which one was chosen.

    A difference of logits where these are ranked, relative where probabilities are.
    """

    output: Array  # [T, G, D]
    read: Array  # [T, T] bool, which tokens each query read
    chosen: Array  # [T, T] bool
    gap: float


class Choice(NamedTuple):
    chosen: Array  # positions
    always: Array  # positions, the new token's among them
    gap: float = math.inf


Choose = Callable[[Array, Array, Array], Choice]  # query [G, D], key [n, D], position [n]; the last is the new token


def attend(query: Array, key: Array, scale: float) -> Array:
    """Softmax [G, n] of query [G, D] over keys [n, D]."""
    logits = scale * query @ key.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def top(worth: Array, age: Array, count: int, *, logits: bool = False) -> tuple[Array, float]:
    """Indices of the `count` largest, of equal ones the newer (larger `age`), and the gap to the next.

    An exact tie, settled by age, is not a close call.
    """
    order = np.lexsort((age, worth))[::-1]
    if not 0 < count < len(order):
        return order[: max(count, 0)], math.inf
    last, following = worth[order[count - 1]], worth[order[count]]
    if last == following:
        return order[:count], math.inf
    return order[:count], float((last - following) / (1 if logits else max(abs(last), abs(following))))


# --- selections of one step ---


def optimal(n: int, scale: float, window: int | None = None) -> Choose:
    """The n tokens of largest probability."""

    def choose(query: Array, key: Array, position: Array) -> Choice:
        new = position[-1]
        inside = np.ones(len(position), bool) if window is None else position > new - window
        probability = attend(query, key[inside], scale).mean(axis=0)
        candidates = position[inside][:-1]
        best, gap = top(probability[:-1], candidates, n)
        return Choice(candidates[best], position[-1:], gap)

    return choose


def quest(page: int, budget: int, scale: float, window: int | None = None) -> Choose:
    """The pages of largest bounds; page u holds the tokens u·page to (u + 1)·page of those that are kept."""

    def choose(query: Array, key: Array, position: Array) -> Choice:
        new = position[-1]
        seen = np.ones(len(position), bool) if window is None else position > new - window
        newest_page = (len(position) - 1) // page
        pages, bounds, ages = [], [], []
        for number in range(newest_page):
            tokens = np.arange(number * page, (number + 1) * page)
            if not seen[tokens].any():
                continue
            low, high = key[tokens].min(axis=0), key[tokens].max(axis=0)
            pages.append(tokens[seen[tokens]])
            bounds.append(scale * np.maximum(query * low, query * high).sum(axis=1))
            ages.append(position[tokens].max())
        always = position[newest_page * page :]
        always = always[seen[newest_page * page :]]
        if not pages:
            return Choice(np.zeros(0, int), always)
        score = np.array(bounds)  # [pages, G]
        rank = (score - score.max(axis=0)).max(axis=1)
        best, gap = top(rank, np.array(ages), max(3, budget // page) - 1, logits=True)
        return Choice(position[np.concatenate([pages[each] for each in best])], always, gap)

    return choose


def everything(query: Array, key: Array, position: Array) -> Choice:
    return Choice(np.zeros(0, int), position)


def run(
    query: Array, key: Array, value: Array, prompt: int, choose: Choose, scale: float, kept=None, window=None
) -> Text:
    """Teacher forcing with a dense prompt, of which the positions `kept` survive (None: all)."""
    length, group, dim = query.shape
    result = Text(np.zeros((length, group, dim)), np.zeros((length, length), bool), np.zeros((length, length), bool), 0)
    gaps = [math.inf]
    held = np.arange(prompt) if kept is None else np.sort(kept)
    for at in range(length):
        if at < prompt:
            chosen, read = np.zeros(0, int), np.arange(0 if window is None else max(0, at + 1 - window), at + 1)
        else:
            held = np.append(held, at)
            choice = choose(query[at], key[held], held)
            chosen, read = choice.chosen, np.sort(np.concatenate([choice.chosen, choice.always]))
            gaps.append(choice.gap)
        result.chosen[at, chosen] = True
        result.read[at, read] = True
        result.output[at] = attend(query[at], key[read], scale) @ value[read]
    return result._replace(gap=min(gaps))


# --- what H2O's authors released as H2O ---


def masked(
    query: Array, key: Array, value: Array, prompt: int, budget: int, recent: int, scale: float,
    block: int | None = None,
) -> Text:  # fmt: skip
    """A query sees its own block and what was allowed after the step before."""
    length, group, dim = query.shape
    output, read = np.zeros((length, group, dim)), np.zeros((length, length), bool)
    starts = [*range(0, prompt, block or prompt), *range(prompt, length), length]
    score, allowed, gaps = np.zeros(0), np.zeros(0, bool), [math.inf]
    for start, stop in itertools.pairwise(starts):
        score = np.append(score, np.zeros(stop - start))
        allowed = np.append(allowed, np.ones(stop - start, bool))
        for at in range(start, stop):
            seen = np.flatnonzero(allowed[: at + 1])
            read[at, seen] = True
            probability = attend(query[at], key[seen], scale)
            output[at] = probability @ value[seen]
            score[seen] += probability.mean(axis=0)
        present = np.arange(stop)
        window = present >= stop - recent  # the newest among those that are present
        older = present[~window]
        best, gap = top(score[older], older, budget - recent)
        gaps.append(gap)
        heavy = np.isin(present, older[best])
        score = np.where(heavy | window, score, 0.0)
        allowed = heavy | (present >= stop + 1 - recent)  # counting the token to come
    return Text(output, read, np.zeros_like(read), min(gaps))


def in_hindsight(query: Array, key: Array, value: Array, budget: int, recent: int, scale: float) -> Text:
    """One heavy set from the column sums of the whole text, and a band."""
    length, group, dim = query.shape
    score = np.zeros(length)
    for at in range(length):
        score[: at + 1] += attend(query[at], key[: at + 1], scale).mean(axis=0)
    heavy, gap = top(score, np.arange(length), budget - recent)
    output, read = np.zeros((length, group, dim)), np.zeros((length, length), bool)
    for at in range(length):
        seen = np.array([j for j in range(at + 1) if j in heavy or at - j < recent], int)
        read[at, seen] = True
        output[at] = attend(query[at], key[seen], scale) @ value[seen]
    return Text(output, read, np.zeros_like(read), gap)


def local(query: Array, key: Array, value: Array, budget: int, recent: int, scale: float) -> Text:
    """A heavy set for each query, from the probabilities that the queries before it paid; and a band."""
    length, group, dim = query.shape
    heavy = budget - recent
    score, gaps = np.zeros(length), [math.inf]
    output, read = np.zeros((length, group, dim)), np.zeros((length, length), bool)
    for at in range(length):
        paid = attend(query[at], key[: at + 1], scale).mean(axis=0)
        if at < heavy:
            score[: at + 1] += paid
            seen = np.arange(at + 1)
        else:
            best, gap = top(score[:at], np.arange(at), heavy - 1)
            gaps.append(gap)
            mine = np.append(best, at)
            score[: at + 1] += paid
            score[[j for j in range(length) if j not in mine]] = 0.0
            seen = np.array([j for j in range(at + 1) if j in mine or at - j <= recent - 1], int)
        read[at, seen] = True
        output[at] = attend(query[at], key[seen], scale) @ value[seen]
    return Text(output, read, np.zeros_like(read), min(gaps))
