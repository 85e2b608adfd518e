"""Reference policies that remember their evictions: `View.rounds` is the head's own, and `rank` runs once a round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.reference.base import Array, Policy, Ranking, View, newest
from tests.reference.queries import redundancy_of, softmax


def attention_of_newest(queries: Array, key: Array) -> Array:
    """[S - w] of queries [w, G, D] and all keys [S, D], whose last w are the queries' own: each sees up to its own."""
    window, size = len(queries), len(key)
    logits = np.einsum("wgd,sd->wgs", queries, key) / math.sqrt(key.shape[1])
    later = np.arange(size) > size - window + np.arange(window)[:, None]
    shares = softmax(np.where(later[:, None], -np.inf, logits))
    mean = shares.max(axis=1).mean(axis=0)[: size - window]
    return mean / mean.max()


def gkv(
    budget: Any, every: int = 128, window: int = 8, lam: float = 0.1, alpha: float = 0.8, similar: float = 0.5,
    **options: Any,
) -> Policy:  # fmt: skip
    def rank(view: View) -> Ranking:
        older = ~newest(view, window)
        paid = attention_of_newest(np.array([each.rotated for each in view.queries[-window:]]), view.rotated)
        position = view.position[older].tolist()
        # By position: those of evicted tokens are never asked for again.
        lasting = {p: max(alpha * view.rounds.get(p, 0.0), a) for p, a in zip(position, paid, strict=True)}
        view.rounds.update(lasting)
        alike = redundancy_of(view.rotated, similar)[older]
        priority = np.full(len(older), np.inf)
        priority[older] = lam * np.array([*lasting.values()]) - (1 - lam) * alike / alike.max()
        return Ranking(priority)

    return Policy(budget, rank, every=every, **options)
