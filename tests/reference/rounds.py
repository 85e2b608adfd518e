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


def ladder(
    budget: Any, span: int, layers: int, overlap: int = 0, sinks: int = 4, every: int = 64, positions: str = "cache"
) -> Policy:
    """Unit by unit, slot by slot; the cursor is `view.rounds["cursor"]`."""
    unit = 1 + math.ceil((layers - span) / (span - overlap))
    kept = min(math.ceil(span / (span - overlap)), unit)

    def rank(view: View) -> Ranking:
        first, cursor = view.layer % (unit - kept + 1), view.rounds.get("cursor", sinks)
        slots, gone, excess = [*range(len(view.position))], [], len(view.position) - view.budget
        while len(gone) < excess:
            if len(slots) - cursor < unit + layers:
                cursor = sinks
            if len(slots) - cursor < unit + layers:
                gone.append(slots.pop(sinks))
                continue
            leaving = [s for i, s in enumerate(slots[cursor : cursor + unit]) if not first <= i < first + kept]
            cursor += kept if len(leaving) <= excess - len(gone) else 0
            for slot in leaving[: excess - len(gone)]:
                gone.append(slot)
                slots.remove(slot)
        view.rounds["cursor"] = cursor
        priority = np.full(len(view.position), np.inf)
        priority[gone] = np.arange(len(gone))
        return Ranking(priority)

    return Policy(budget, rank, every=every, positions=positions)
