"""Reference policies with parameters, and with scores that a token gets once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tests.parameters import of_head
from tests.reference.base import Array, Policy, Ranking, View, lowest, newest


def _future(mean: Array, size: Array, key: Array, seen: int, longest: int, theta: float | None) -> Array:
    """[S]: of one query head's mean [D] and magnitudes [F], on rotated keys [S, D], as complex numbers."""
    half = mean.shape[-1] // 2
    z, k = mean[:half] + 1j * mean[half:], key[:, :half] + 1j * key[:, half:]
    omega = np.zeros(half) if theta is None else theta ** (-np.arange(half) / half)
    offsets = [2**i for i in range(longest.bit_length())]
    ahead = np.mean([np.exp(1j * omega * (seen + offset)) for offset in offsets], axis=0)
    return (np.conj(k) * z * ahead).real.sum(axis=1) + np.abs(k) @ (size - np.abs(z))


def triattention(budget: Any, every: int = 128, longest: int = 65_536, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        queries, dim = view.queries[0].rotated.shape
        mean = of_head("triattention", "mean", view.layer, view.head, (queries, dim)).astype(float)
        size = of_head("triattention", "size", view.layer, view.head, (queries, dim // 2)).astype(float)
        seen = view.queries[-1].position + 1
        raw = np.array([_future(mean[g], size[g], view.rotated, seen, longest, view.theta) for g in range(queries)])
        return Ranking(((raw - raw.mean(1, keepdims=True)) / np.maximum(raw.std(1, keepdims=True), 1e-6)).max(axis=0))

    return Policy(budget, rank, every=every, **options)


def qfilters(budget: Any, every: int | None = None, recent: int = 0, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        direction = of_head("qfilters", "direction", view.layer, view.head, view.key.shape[1:]).astype(float)
        return Ranking(np.where(newest(view, recent), np.inf, view.rotated @ direction))

    if every is None:
        return Policy(budget, rank, at_prompt_end_only=True, **options)
    return Policy(budget, rank, every=every, **options)


def critical(policy: Policy, first_stage: float = 0.5, epsilon: float = 1e-4) -> Policy:
    """The first stage by importance alone, the rest times the norm of the value's part of the output."""

    def rank(view: View) -> Ranking:
        inner = policy.rank(view)
        held = np.isposinf(inner.priority)
        number = math.floor(first_stage * max(view.budget - held.sum(), 0) + 1e-9)
        free = np.flatnonzero(~held)
        small, gap = lowest(inner.priority[free], view.position[free], max(len(free) - number, 0))
        norm = np.abs(np.einsum("sd,gde->gse", view.value, view.out)).sum(axis=2).mean(axis=0)
        priority = np.full(len(held), np.inf)
        last = free[small]
        priority[last] = (policy.importance(view)[last] + epsilon) * norm[last]
        return Ranking(priority, min(gap, inner.gap))

    return replace(policy, rank=rank, of_budget=True)


def learned(
    budget: Any, every: int | None = 1, recent: int = 0, threshold: float | None = None, age: bool = False,
    sinks: int = 0, **options: Any,
) -> Policy:  # fmt: skip
    """Ranks by the linear gate."""

    def rank(view: View) -> Ranking:
        kernel = of_head("linear_gate", "kernel", view.layer, view.head, view.hidden.shape[1:]).astype(float)
        score = view.hidden @ kernel + float(of_head("linear_gate", "bias", view.layer, view.head, ()))
        # Equal tokens tie in the first layer.
        score = np.round(score, 12)
        priority = score * (view.position[-1] + 1 - view.position) if age else score
        if threshold is not None:
            priority = np.where(score < threshold, -np.inf, priority)
        held = newest(view, recent) | (view.position < sinks)
        return Ranking(np.where(held, np.inf, priority))

    options |= {"bounded": threshold is not None}
    if every is None:
        return Policy(budget, rank, at_prompt_end_only=True, **options)
    return Policy(budget, rank, every=every, **options)
