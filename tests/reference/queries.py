"""Reference policies that look at a row's queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.reference.base import Array, Policy, Ranking, View, lowest, newest
from tests.reference.scores import leverage_of


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


def noncausal_mass(queries: Array, key: Array, chunk: int) -> Array:
    """[S] of queries [S, G, D] and keys [S, D] in the order of their positions."""
    found = np.zeros(len(key))
    for start in range(0, len(key), chunk):
        part = slice(start, start + chunk)
        logits = np.einsum("igd,jd->gij", queries[part], key[part]) / math.sqrt(key.shape[1])
        found[part] = softmax(logits).sum(axis=1).mean(axis=0)
    return found


def compactor(
    budget: Any, sinks: int = 8, recent: int = 4, chunk: int = 256, blend: float | None = None, ridge: float = 0.01,
    **options: Any,
) -> Policy:  # fmt: skip
    """Scores are standardised over all heads, so that the heads of a layer are ranked together."""

    def shares(heads: list[View]) -> list[tuple[Array, float]]:
        size, slots = len(heads[0].position), heads[0].budget
        inner = slice(sinks, size - recent)
        weight = 1 - slots / size if blend is None else blend
        columns = []
        for view in heads:
            queries = np.array([each.rotated for each in view.queries])[inner]
            mass = noncausal_mass(queries, view.rotated[inner], chunk) * np.linalg.norm(view.value[inner], axis=1)
            mass = np.convolve(mass, np.ones(3) / 3, mode="same")
            columns.append((leverage_of(view.unrotated[inner], ridge), mass))
        leverage, mass = ((x - x.mean()) / max(x.std(ddof=1), 1e-6) for x in np.moveaxis(np.array(columns), 1, 0))
        choices = []
        for score in weight * leverage + mass:
            priority = np.full(size, np.inf)
            priority[inner] = score
            gone, gap = lowest(priority, heads[0].position, size - slots)
            choices.append((~np.isin(np.arange(size), gone), gap))
        return choices

    # A prompt within the budget is ranked by anything.
    return Policy(budget, lambda view: Ranking(view.position * 1.0), shares=shares, at_prompt_end_only=True, **options)
