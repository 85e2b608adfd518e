"""Attention matching (METHODS.md, section 9) for one KV head, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import nnls

from tests.reference.base import Array, Policy, Ranking, Statistic, View
from tests.reference.prompt_replay import Replay

MOST_QUERIES = 4096
HELD = Statistic(lambda old, block: old)  # set when the prompt ends


def queries_of(view: View, queries: str) -> Array:
    """[N, D]: the queries of all heads of the group at evenly spaced positions of the prompt, or of its replay."""
    n = view.prompt_length
    given = view.queries[n:] if queries == "replay" else view.queries[:n]
    count = min(len(given), max(1, MOST_QUERIES // len(given[0].rotated)))
    chosen = [given[number * len(given) // count - 1] for number in range(1, count + 1)]
    if queries != "following":
        return np.concatenate([each.rotated for each in chosen])
    return np.concatenate([rotated(each.unrotated, n + i % 64, view.theta) for i, each in enumerate(chosen)])


def rotated(x: Array, position: int, theta: float | None) -> Array:
    """Vectors [G, D], rotated to a position."""
    if theta is None:
        return x
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], axis=1)


def softmax(logits: Array) -> Array:
    terms = np.exp(logits - logits.max(axis=1, keepdims=True))
    return terms / terms.sum(axis=1, keepdims=True)


def fitted(query: Array, key: Array, value: Array, keep: Array, ridge: float) -> tuple[Array, Array]:
    """The values [S, D] and log-weights [S] of the slots that stay.

    Args:
      query: [N, D].
      key: [S, D], rotated.
      value: [S, D].
      keep: [S] bool.
      ridge: relative to the mean square of a column of P.
    """
    logits = query @ key.T / math.sqrt(key.shape[1])
    output = softmax(logits) @ value
    terms = np.exp(logits - logits.max(axis=1, keepdims=True))
    weight, _ = nnls(terms[:, keep], terms.sum(axis=1), maxiter=100 * len(key))
    log_weight = np.log(np.maximum(weight, 1e-6))
    shares, old = softmax(logits[:, keep] + log_weight), value[keep]
    penalty = ridge * np.trace(shares.T @ shares) / keep.sum()
    gram = shares.T @ shares + penalty * np.eye(keep.sum())
    new = old + np.linalg.solve(gram, shares.T @ (output - shares @ old))
    values, log_weights = value.copy(), np.zeros(len(value))
    if np.sum((shares @ new - output) ** 2) <= np.sum((softmax(logits[:, keep]) @ old - output) ** 2):
        values[keep], log_weights[keep] = new, log_weight
    return values, log_weights


def matched(budget: Any, queries: str = "prompt", ridge: float = 1e-3, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        logits = queries_of(view, queries) @ view.rotated.T / math.sqrt(view.rotated.shape[1])
        return Ranking(softmax(logits).max(axis=0))

    def fits(view: View, keep: Array) -> tuple[Array, Array]:
        return fitted(queries_of(view, queries), view.rotated, view.value, keep, ridge)

    statistics = {"log_weight": HELD} | ({"replayed": HELD} if queries == "replay" else {})
    replay = Replay((), (), 2048, 4, False) if queries == "replay" else None
    return Policy(budget, rank, statistics, at_prompt_end_only=True, fits=fits, replay=replay, **options)
