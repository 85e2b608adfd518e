"""Reference scores of keys and values that look at no query, and what ranks by another policy's importance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.reference.base import Array, Policy, Ranking, View, lowest

LARGEST = float(np.finfo(np.float32).max)


def _policy(budget: Any, rank: Any, every: int | None, **options: Any) -> Policy:
    """Returns a compressor if `every` is None, and otherwise a policy that evicts `every` slots at once."""
    if every is None:
        return Policy(budget, rank, at_prompt_end_only=True, **options)
    return Policy(budget, rank, every=every, **options)


def lag_relative(key: Array, value: Array, lag: int, sinks: int) -> Array:
    """[S] importance of slots in the order of positions."""
    size = len(key)
    if size < sinks + 2 * lag:
        return np.arange(size, dtype=float)
    found = np.ones(size)
    for start in range(sinks, size - 2 * lag + 1, lag):
        here, after = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        total = np.zeros(lag)
        for x in (key, value):
            low, high = x[after].min(axis=0), x[after].max(axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                relative = np.where(high > low, (x[here] - low) / (high - low), 0.0)
            spread = np.exp(relative.std(axis=1, ddof=1))
            total += spread / spread.sum()
        for rank, slot in enumerate(np.lexsort((np.arange(lag), total))):
            found[start + slot] = rank / lag
    return found


def lagkv(budget: Any, every: int | None = None, lag: int = 128, sinks: int = 4, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        score = lag_relative(view.key, view.value, lag, sinks)
        score[:sinks] = np.inf
        return Ranking(score)

    return _policy(budget, rank, every, **options)


def leverage_of(key: Array, ridge: float) -> Array:
    """[S] of unrotated keys [S, D]."""
    x = key - key.mean(axis=0)
    return np.einsum("sd,de,se->s", x, np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1])), x)


def leverage(budget: Any, every: int | None = None, ridge: float = 0.01, recent: int = 0, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        scaled = leverage_of(view.unrotated, ridge) * 2**16
        # How far each is from the place where it would be rounded otherwise, and how far the next value is.
        distance = np.abs(scaled - np.floor(scaled) - 0.5) / np.maximum(scaled, 1.0)
        score = np.rint(scaled) / 2**16
        score[len(score) - recent :] = np.inf
        return Ranking(score, distance=distance, unit=1.0 / max(scaled.min(), 1.0))

    return _policy(budget, rank, every, **options)


def key_value_share(key: Array, value: Array, block: int) -> Array:
    """[S] of slots in the order of positions."""
    found = np.ones(len(key))
    for x in (key, value):
        squares = (x**2).sum(axis=1)
        for start in range(0, len(squares), block):
            total = squares[start : start + block].sum()
            found[start : start + block] *= squares[start : start + block] / total if total else 0.0
    return found


def cur(budget: Any, block: int = 16, sinks: int = 4, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        score = key_value_share(view.key, view.value, block)
        score[:sinks] = np.inf
        return Ranking(score)

    return _policy(budget, rank, None, **options)


def output_change(score: Array, value: Array, fast: bool = False) -> Array:
    """[S]: the change of the output without a slot, for scores [S] and values [S, D]."""
    total = score.sum()
    share = score / total if total > 0 else np.zeros(len(score))
    output = value.mean(axis=0) if fast else share @ value
    change = share / np.maximum(1 - share, 1e-6) * np.linalg.norm(value - output, axis=1)
    return np.where(share > 1 - 1e-6, LARGEST, change)


def caote(policy: Policy, fast: bool = False) -> Policy:
    """The importance of `policy` is needed of protected slots too: `Policy.importance`."""

    def importance(view: View) -> Array:
        return output_change(policy.importance(view), view.value, fast)

    def rank(view: View) -> Ranking:
        inner = policy.rank(view)
        return inner._replace(priority=np.where(np.isinf(inner.priority), np.inf, importance(view)))

    return replace(policy, rank=rank, importance=importance)


MEASURES = {
    "range": lambda v: v.max(axis=1) - v.min(axis=1),
    "absmax": lambda v: np.abs(v).max(axis=1),
    "var": lambda v: v.var(axis=1),
    "l2": lambda v: np.linalg.norm(v, axis=1),
}


def value_aware(policy: Policy, large: int | None = None, measure: str = "range") -> Policy:
    """The largest values among those that the policy leaves open are protected too."""

    def protects(view: View) -> tuple[Array, float]:
        if policy.protects is None:
            inner = policy.rank(view)
            held, narrowest = np.isposinf(inner.priority), inner.gap
        else:
            held, narrowest = policy.protects(view)
        # In the first layer, equal tokens have equal values but for rounding: they tie.
        size = np.where(held, -np.inf, np.round(MEASURES[measure](view.value), 12))
        free = np.flatnonzero(~held)
        number = min(view.budget // 4 if large is None else large, len(free))
        small, gap = lowest(size[free], view.position[free], len(free) - number)
        protected = np.ones(len(size), bool)
        protected[free[small]] = False
        return protected, min(gap, narrowest)

    def rank(view: View) -> Ranking:
        protected, gap = protects(view)
        inner = policy.rank(view)
        return inner._replace(priority=np.where(protected, np.inf, inner.priority), gap=gap)

    return replace(policy, rank=rank, protects=protects)


def after_prompt(view: View) -> View:
    """The slots of the tokens after the prompt."""
    after = view.position >= view.prompt_length

    def cut(stats: dict[str, Array]) -> dict[str, Array]:
        # Heads that are ranked together hold the same positions; others do not look at each other.
        return {name: stat[after] if len(stat) == len(after) else stat for name, stat in stats.items()}

    arrays = {name: getattr(view, name) for name in ("position", "key", "value", "unrotated", "rotated", "hidden")}
    return view._replace(
        **{name: x if x is None else x[after] for name, x in arrays.items()}, stats=cut(view.stats),
        layer_stats=[cut(stats) for stats in view.layer_stats],
    )  # fmt: skip


def phases(prompt: Policy, decode: Policy) -> Policy:
    """Keeps the slots that `prompt` leaves; `decode` evicts others, under a budget for the tokens after the prompt.

    Importances are of all slots, those of the prompt too, unless they choose slots for a part of the budget; slots that
    are protected because of others are chosen among those after the prompt.
    """

    def rank(view: View) -> Ranking:
        after = view.position >= view.prompt_length
        priority = np.full(len(after), np.inf)
        if not after.any():
            return Ranking(priority)
        if decode.of_budget:
            inner = decode.rank(after_prompt(view))
            priority[after] = inner.priority
            return Ranking(priority, inner.gap)
        if decode.protects is None:
            inner = decode.rank(view)
            return inner._replace(priority=np.where(after, inner.priority, np.inf))
        held, gap = decode.protects(after_prompt(view))
        priority[after] = np.where(held, np.inf, decode.importance(view)[after])
        return Ranking(priority, gap)

    then = replace(decode, rank=rank, beyond_prompt=True)
    statistics = {**prompt.statistics, **decode.statistics}
    return replace(prompt, at_prompt_end_only=True, statistics=statistics, then=then)
