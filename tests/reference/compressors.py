"""Reference policies that evict once, when the prompt ends."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from tests.reference.base import Array, Policy, Ranking, Statistic, View, _prompt_tail_mass


def snapkv(budget: Any, window: int = 32, kernel: int = 5, pooling: str = "avg", **options: Any) -> Policy:
    """Evicts once, when the prompt is complete; decoding appends."""
    statistics = {"tail": Statistic(_prompt_tail_mass(window))}
    rank = functools.partial(_snapkv_rank, window=window, kernel=kernel, pooling=pooling)
    return Policy(budget, rank, statistics, at_prompt_end_only=True, **options)


def _snapkv_rank(view: View, *, window: int, kernel: int, pooling: str) -> Ranking:
    outside = view.position < view.prompt_length - window
    scores, reach = view.stats["tail"][outside], kernel // 2
    near = [scores[max(j - reach, 0) : j + reach + 1] for j in range(len(scores))]
    pooled = [part.sum() / kernel if pooling == "avg" else part.max() for part in near]
    priority = np.full(len(outside), np.inf)
    priority[outside] = pooled
    return Ranking(priority)


def pyramidkv(budget: Any, window: int = 32, beta: int = 20, **options: Any) -> Policy:
    """SnapKV, with budgets that fall from layer to layer."""

    def by_layer(b: int, n: int, layers: int) -> list[int]:
        low = (b - window) // beta
        high = 2 * (b - window) - low
        if high > n - window:
            high = n - window
            low = 2 * (b - window) - high
        step = 0 if layers == 1 else (high - low) // (layers - 1)
        return [high - layer * step + window for layer in range(layers)]

    return replace(snapkv(budget, window, **options), by_layer=by_layer)


def adakv(
    base: Policy, safeguard: float = 0.2, max_share: float | None = None, layers: bool = False
) -> Policy:  # fmt: skip
    """Heads share their layer's slots: a safeguard each, the rest to the largest of all, up to a limit for each.

    `layers`: the heads of all layers do, in the order of layers.
    """

    def shares(heads: list[View]) -> list[tuple[Array, float]]:
        priority = [base.rank(view).priority for view in heads]
        keep = [np.isinf(p) for p in priority]  # the window
        room = heads[0].budget - int(keep[0].sum())
        own = math.floor(safeguard * room + 1e-9)
        limit = math.inf if max_share is None else math.floor(max_share * room + 1e-9)
        gaps, beyond = [], []
        for p, kept in zip(priority, keep, strict=True):
            best = sorted(np.flatnonzero(~kept), key=lambda j: (p[j], j), reverse=True)
            if 0 < own < len(best):
                gaps.append(_relative(p[best[own - 1]], p[best[own]]))
            kept[best[:own]] = True
            if limit < len(best):
                gaps.append(_relative(p[best[limit - 1]], p[best[limit]]))
            beyond.append(set() if limit >= len(best) else set(best[limit:]))
        left = [
            (p[j], -head, j)
            for head, p in enumerate(priority)
            for j in np.flatnonzero(~keep[head])
            if j not in beyond[head]
        ]
        left.sort(reverse=True)
        count = len(heads) * (room - own)
        if 0 < count < len(left):
            gaps.append(_relative(left[count - 1][0], left[count][0]))
        for _, head, j in left[:count]:
            keep[-head][j] = True
        return [(kept, min([math.inf, *gaps])) for kept in keep]

    return replace(base, shares=shares, over_layers=layers)


def chunkkv(base: Policy, chunk: int = 10) -> Policy:
    """The same chunks of positions stay in all heads, by the mean of importances that are summed over heads."""

    def shares(heads: list[View]) -> list[tuple[Array, float]]:
        value = np.sum([base.rank(view).priority for view in heads], axis=0)
        keep = np.isinf(value)
        room, gaps = heads[0].budget - int(keep.sum()), []
        parts = [np.flatnonzero(~keep & (heads[0].position // chunk == c)) for c in range(len(value) // chunk + 1)]
        mean = {c: value[part].mean() for c, part in enumerate(parts) if len(part)}
        best = sorted(mean, key=lambda c: (mean[c], c), reverse=True)
        for place, c in enumerate(best):
            if room <= len(parts[c]):
                # It is the last that keeps anything; the one above it and the one below could be so in its place.
                near = best[max(place - 1, 0) : place + 2]
                gaps += [_relative(mean[a], mean[b]) for a, b in itertools.pairwise(near)]
            own = sorted(parts[c], key=lambda j: (value[j], j), reverse=True)
            if 0 < room < len(own):
                gaps.append(_relative(value[own[room - 1]], value[own[room]]))
            keep[own[:room]] = True
            room -= min(room, len(own))
            if not room:
                break
        return [(keep.copy(), min([math.inf, *gaps]))] * len(heads)

    return replace(base, shares=shares)


def _relative(above: float, below: float) -> float:
    return math.inf if above == below else float((above - below) / max(abs(above), abs(below)))


NORM_BITS = 12  # significant bits of a key's norm


def rounded(norm: Array) -> Array:
    """Rounds to `NORM_BITS` significant bits, from halfway to the even neighbour."""
    significand, exponent = np.frexp(norm)
    return np.ldexp(np.rint(significand * 2**NORM_BITS), exponent - NORM_BITS)


def knorm(budget: Any, **options: Any) -> Policy:
    """Rotation keeps norms: keys of equal tokens tie in the first layer, and age decides."""

    def rank(view: View) -> Ranking:
        norm = np.linalg.norm(view.key, axis=1)
        scaled = np.frexp(norm)[0] * 2**NORM_BITS
        distance = np.abs(scaled - np.floor(scaled) - 0.5) / scaled
        return Ranking(-rounded(norm), distance=distance, unit=2.0 ** (1 - NORM_BITS))

    return Policy(budget, rank, at_prompt_end_only=True, **options)


def keydiff(budget: Any, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        unit = view.key / np.linalg.norm(view.key, axis=1, keepdims=True)
        mean = unit.mean(axis=0)
        return Ranking(-(unit @ mean) / np.linalg.norm(mean))

    return Policy(budget, rank, at_prompt_end_only=True, **options)
