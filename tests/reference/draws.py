"""Reference policies that draw: the numbers are those of jax, one key at a time, and all else is float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from tests.reference.base import Array, Policy, Ranking, View, lowest, newest
from tests.reference.queries import softmax
from tests.reference.scores import MEASURES

LONGEST = 512  # positions


def folded(*parts: int) -> Array:
    key = jax.random.key(parts[0])
    for part in parts[1:]:
        key = jax.random.fold_in(key, part)
    return key


@functools.cache
def gumbel_noise(seed: int, layer: int, head: int) -> Any:
    """A function from the number of tokens so far to Gumbel variables, one for each position."""
    key = folded(seed, layer, head)

    def one(position: Any, seen: Any) -> Any:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, position), seen))

    return jax.jit(lambda seen: jax.vmap(one, (0, None))(np.arange(LONGEST), seen))


@functools.cache
def uniform(seed: int, layer: int, head: int) -> Any:
    """A function without arguments to uniform variables, one for each position."""
    key = folded(seed, layer, head)
    return jax.jit(lambda: jax.vmap(lambda at: jax.random.uniform(jax.random.fold_in(key, at)))(np.arange(LONGEST)))


def averaged_attention(queries: Array, key: Array, kernel: int) -> Array:
    """[S] of queries [w, G, D] and keys [S, D] that are older: the mean, of `kernel` neighbours too."""
    shares = softmax(np.einsum("wgd,sd->wgs", queries, key) / math.sqrt(key.shape[1]))
    return np.convolve(shares.mean(axis=(0, 1)), np.full(kernel, 1 / kernel), mode="full")[kernel // 2 :][: len(key)]


def vase(
    budget: Any, every: int = 64, large: int | None = None, sinks: int = 4, kernel: int = 5, seed: int = 0, **options
) -> Policy:
    def importance(view: View) -> Array:
        older = np.flatnonzero(~newest(view, every))
        queries = np.array([each.rotated for each in view.queries[-every:]])
        noise = np.asarray(gumbel_noise(seed, view.layer, view.head)(view.position[-1] + 1), np.float64)
        found = np.full(len(view.position), np.inf)
        found[older] = np.log(averaged_attention(queries, view.rotated[older], kernel)) + noise[view.position[older]]
        return found

    def protects(view: View) -> tuple[Array, float]:
        older = np.flatnonzero(~newest(view, every))
        # In the first layer, equal tokens have equal values but for rounding: they tie.
        size = np.round(MEASURES["range"](view.value[older]), 12)
        size[:sinks] = np.inf
        number = min(view.budget // 4 if large is None else large, len(older))
        rest, gap = lowest(size, view.position[older], len(older) - number)
        protected = np.ones(len(view.position), bool)
        protected[older[rest]] = False
        return protected, gap

    def rank(view: View) -> Ranking:
        protected, gap = protects(view)
        return Ranking(np.where(protected, np.inf, importance(view)), gap)

    return Policy(budget, rank, every=every, importance=importance, protects=protects, **options)


def random(budget: Any, every: int = 1, seed: int = 0, recent: int = 0, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        drawn = np.asarray(uniform(seed, view.layer, view.head)(), np.float64)[view.position]
        return Ranking(np.where(newest(view, recent), np.inf, drawn))

    return Policy(budget, rank, every=every, **options)


def vase_dkv(budget: Any, every: int = 64, rank: int = 20, sinks: int = 4, seed: int = 0, **options: Any) -> Policy:
    def ranking(view: View) -> Ranking:
        key = folded(seed, view.layer, int(view.position[-1]) + 1)
        directions = np.asarray(jax.random.normal(key, (view.key.shape[1], rank)), np.float64)
        product = np.prod([((x @ directions) ** 2).sum(axis=1) for x in (view.rotated, view.value)], axis=0)
        return Ranking(np.where(newest(view, every) | (view.position < sinks), np.inf, product))

    return Policy(budget, ranking, every=every, **options)
