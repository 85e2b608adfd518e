"""Reference policies that look at a row's queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.reference.base import Array, Policy, Ranking, View, newest


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention_of_last(queries: Array, key: Array, kernel: int) -> Array:
    """[S] of R-KV: queries [w, G, D] and keys [S, D] of the slots that are older than these."""
    logits = np.einsum("wgd,sd->wgs", queries, key) / math.sqrt(key.shape[1])
    mean = softmax(logits.max(axis=1)).mean(axis=0)
    reach = kernel // 2
    return np.array([mean[max(j - reach, 0) : j + reach + 1].max() for j in range(len(mean))])


def redundancy_of(key: Array, similar: float) -> Array:
    """[S] of keys [S, D] in the order of their positions."""
    unit = key / (np.linalg.norm(key, axis=1, keepdims=True) + 1e-8)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    for row in cosine:
        alike = np.flatnonzero(row > similar)
        if len(alike):
            row[alike[-1]] = 0.0
    return softmax(cosine.mean(axis=0))


def rkv(
    budget: Any, every: int = 128, window: int = 8, kernel: int = 7, lam: float = 0.07, similar: float = 0.5, **options
) -> Policy:
    def rank(view: View) -> Ranking:
        recent = newest(view, window)
        queries = np.array([each.rotated for each in view.queries[-window:]])
        priority = np.full(len(recent), np.inf)
        paid = attention_of_last(queries, view.rotated[~recent], kernel)
        priority[~recent] = lam * paid - (1 - lam) * redundancy_of(view.rotated, similar)[~recent]
        return Ranking(priority)

    return Policy(budget, rank, every=every, **options)


def morphkv(budget: Any, window: int = 32, fuse: str = "sum", every: int = 1, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        recent = newest(view, window)
        queries = np.array([each.rotated for each in view.queries[-window:]])
        key = view.rotated[~recent]
        paid = softmax(np.einsum("wgd,sd->wgs", queries, key) / math.sqrt(key.shape[1])).mean(axis=1)
        priority = np.full(len(recent), np.inf)
        priority[~recent] = paid.sum(axis=0) if fuse == "sum" else paid.max(axis=0)
        return Ranking(priority)

    return Policy(budget, rank, every=every, **options)


def mean_rotation(dim: int, start: int, number: int, theta: float | None) -> Array:
    """[D, D]: the mean of the rotations by the positions from `start` on."""
    if theta is None:
        return np.eye(dim)
    half = dim // 2
    angle = np.arange(start, start + number)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle).mean(axis=0)), np.diag(np.sin(angle).mean(axis=0))
    return np.block([[cos, -sin], [sin, cos]])


def log_expected_attention(queries: Array, key: Array, turn: Array, covariance: bool) -> Array:
    """[S], the logarithm: of queries [N, G, D] before rotation, on keys [S, D]."""
    scale, shares = 1 / math.sqrt(key.shape[1]), []
    for head in range(queries.shape[1]):
        own = queries[:, head]
        mean = own.mean(axis=0) if len(own) else np.zeros(key.shape[1])
        logit = scale * key @ (turn @ mean)
        if covariance and len(own):
            spread = turn @ np.cov(own.T, bias=True) @ turn.T
            logit = logit + 0.5 * scale**2 * np.einsum("sd,de,se->s", key, spread, key)
        top = logit.max()
        shares.append(logit - top - np.log(np.exp(logit - top).sum()))
    return np.logaddexp.reduce(shares, axis=0) - math.log(len(shares))


def expected_attention(
    budget: Any, every: int | None = None, future: int = 512, sinks: int = 4, covariance: bool = True,
    value_norm: bool = True, epsilon: float = 0.0, **options: Any,
) -> Policy:  # fmt: skip
    def rank(view: View) -> Ranking:
        seen = view.queries[-1].position + 1
        queries = np.array([each.unrotated for each in view.queries if each.position >= sinks])
        queries = queries.reshape(-1, *view.queries[0].unrotated.shape)
        later = view.position >= sinks
        turn = mean_rotation(view.key.shape[1], seen, future, view.theta)
        priority = np.full(len(later), np.inf)
        if later.any():
            log = log_expected_attention(queries, view.rotated[later], turn, covariance)
            norm = np.linalg.norm(view.value[later], axis=1) if value_norm else 1.0
            # The logarithm has the same order, and keeps differences between small amounts of attention.
            priority[later] = np.log(np.exp(log) + epsilon) + np.log(norm) if epsilon else log + np.log(norm)
        return Ranking(priority)

    if every is None:
        return Policy(budget, rank, at_prompt_end_only=True, **options)
    return Policy(budget, rank, every=every, **options)
