"""Reference policies that evict at every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reference.base import (
    MASS,
    Array,
    Importance,
    Policy,
    Ranking,
    View,
    all_but_newest_half,
    all_but_recent,
    all_but_sinks,
    all_but_steady,
    all_slots,
    by_above,
    by_decayed,
    by_fetches,
    by_last,
    by_last_fetched,
    by_mass,
    by_mean,
    by_position,
    evict,
    latest,
    newest,
    recurrence,
)


def full(**options: Any) -> Policy:
    return Policy(None, None, **options)


def window(budget: Any, sinks: int = 4, **options: Any) -> Policy:
    return evict(by_position(), all_but_sinks(sinks), budget, **options)


def local_only(budget: Any, **options: Any) -> Policy:
    return window(budget, sinks=0, **options)


def streaming_llm(budget: Any, sinks: int = 4, **options: Any) -> Policy:
    return window(budget, sinks, positions="cache", **options)


def h2o(budget: Any, recent: int | None = None, **options: Any) -> Policy:
    return evict(by_mass(), all_but_recent(recent), budget, **options)


def heavy_only(budget: Any, **options: Any) -> Policy:
    return h2o(budget, recent=0, **options)


def h2o_decay(budget: Any, gamma: float = 0.96, recent: int | None = None, **options: Any) -> Policy:
    return evict(by_decayed(gamma), all_but_recent(recent), budget, **options)


def scissorhands(budget: Any, recent: int | None = None, history: int | None = None, **options: Any) -> Policy:
    return evict(by_above(history), all_but_recent(recent), budget, **options)


def tova(budget: Any, share_heads: bool = True, **options: Any) -> Policy:
    return evict(by_last(share_heads), all_slots(), budget, **options)


def mean_attention(budget: Any, recent: int | None = None, **options: Any) -> Policy:
    return evict(by_mean(), all_but_recent(recent), budget, **options)


def roco(budget: Any, protect: int | None = None, guard: int = 10, **options: Any) -> Policy:
    return evict(by_mean(), all_but_steady(protect, guard), budget, **options)


def fifo(budget: Any, **options: Any) -> Policy:
    return window(budget, sinks=0, **options)


def lru(budget: Any, recent: int | None = None, sinks: int = 0, **options: Any) -> Policy:
    """Who was not fetched for longest goes: equal (never fetched): the older."""
    return evict(by_last_fetched(), all_but_newest_half(recent, sinks), budget, **options)


def counter(
    budget: Any, saturate: int | None = 255, recent: int | None = None, sinks: int = 0, **options: Any
) -> Policy:
    """Evicts the slot that was fetched least often; a head's counts are halved when one reaches `saturate`."""
    return evict(by_fetches(saturate), all_but_newest_half(recent, sinks), budget, **options)


def ring(budget: Any, **options: Any) -> Policy:
    """FlexGen's H2O, b = 2k - 1: heavy slots and a ring of the k - 1 newest."""

    def rank(view: View) -> Ranking:
        k = (view.budget + 1) // 2
        decoding = view.position[-1] >= view.prompt_length
        # The ring and, while decoding, the token that comes: the ring's oldest moves up only after the victim went.
        safe = newest(view, k - 1 + decoding)
        return Ranking(np.where(safe, np.inf, view.stats["mass"]))

    return Policy(budget, rank, {"mass": MASS}, **options)


def _classes(protects: Callable[[View], Array], goes_first: Callable[[Array], Array], budget: Any, **options) -> Policy:
    """Unprotected slots go in two classes, `goes_first` before the others, each oldest first."""

    def rank(view: View) -> Ranking:
        later = np.where(goes_first(view.position), 0, 1) * (view.position[-1] + 1)
        return Ranking(np.where(protects(view), np.inf, later + view.position))

    return Policy(budget, rank, **options)


def strided(budget: Any, stride: int, local: int | None = None, **options: Any) -> Policy:
    def protects(view: View) -> Array:
        return newest(view, view.budget // 2 if local is None else local)

    return _classes(protects, lambda position: position % stride != 0, budget, **options)


def fixed(budget: Any, block: int, columns: int, **options: Any) -> Policy:
    def protects(view: View) -> Array:
        return view.position // block == view.position[-1] // block

    return _classes(protects, lambda p: p % block < block - columns, budget, **options)


def recurring(last: Array, gap: Array, now: float) -> Array:
    """[S] before it is rounded, of the positions `last` of the last hits and the widest gaps."""

    def sigmoid(x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    with np.errstate(divide="ignore", over="ignore"):
        found = 2 * sigmoid(-1 - (now - last) / gap) + 2 * sigmoid(1 - gap)
    return np.where(gap > 0, found, 0.0)


def lazy(budget: Any, every: int, alpha: float = 1e-4, **options: Any) -> Policy:
    def score(view: View) -> tuple[Array, Array]:
        since_birth, gap = view.stats["recurrence"].T
        scaled = recurring(view.position - 1 + since_birth, gap, view.position[-1]) * 2**16
        return np.rint(scaled) / 2**16, scaled

    def rank(view: View) -> Ranking:
        own, scaled = score(view)
        # As for leverage: how far each is from the place where it would be rounded otherwise. Slots of equal histories
        # are rounded alike, so that this matters where one of another history is a level away.
        distance = np.abs(scaled - np.floor(scaled) - 0.5) / np.maximum(scaled, 1.0)
        level = np.rint(scaled)
        other = (scaled[:, None] != scaled) & (np.abs(level[:, None] - level) <= 1)
        distance = np.where(other.any(axis=1), distance, np.inf)
        return Ranking(np.where(newest(view, every), np.inf, own), distance=distance, unit=1 / max(scaled.min(), 1.0))

    statistics = {"recurrence": recurrence(alpha)}
    return Policy(budget, rank, statistics, every=every, importance=lambda view: score(view)[0], **options)


def merged_by_cosine(view: View, keep: Array, threshold: float) -> tuple[Array, Array, float]:
    """Averages evicted pairs into the most similar of those that stay, with weights e to the cosine against e."""
    unit = view.key / np.linalg.norm(view.key, axis=1, keepdims=True)
    stays, into, gap = np.flatnonzero(keep), {}, np.inf
    for gone in np.flatnonzero(~keep):
        cosine = unit[stays] @ unit[gone]
        order = np.lexsort((view.position[stays], cosine))
        target, best = stays[order[-1]], cosine[order[-1]]
        second = cosine[order[-2]] if len(order) > 1 else -np.inf
        gap = min(gap, abs(best - threshold), best - second if best - second > 1e-12 and best > threshold else np.inf)
        if best >= threshold:
            into.setdefault(target, []).append((np.exp(best), gone))
    key, value = view.key.copy(), view.value.copy()
    for target, some in into.items():
        total = np.e + sum(weight for weight, _ in some)
        for made, x in ((key, view.key), (value, view.value)):
            made[target] = (np.e * x[target] + sum(weight * x[gone] for weight, gone in some)) / total
    return key, value, gap


def ems(budget: Any, recent: int | None = None, window: int = 32, threshold: float = 0.6, **options: Any) -> Policy:
    def of(view: View) -> Array:
        both = view.stats["mass"], view.stats["latest"].sum(axis=1)
        return np.max([x / x.max() for x in both], axis=0)

    importance = Importance({"mass": MASS, "latest": latest(window)}, of)
    folds = functools.partial(merged_by_cosine, threshold=threshold)
    return evict(importance, all_but_recent(recent), budget, folds=folds, **options)
