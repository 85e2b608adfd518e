"""What becomes of an evicted key and value: folded into pairs that stay, instead of dropped.

Every eviction policy takes one as `merge=`. The slots that are live, and which of them go, are the policy's own; a
merge changes what the others hold. Keys are merged as they are stored: rotated, unless ``positions="cache"``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.policies.base import Folded, Merge, Stats, View, count_argument, memoized, number_argument
from kvjax.selection import largest

Array = jax.Array
TILE = 128  # evicted pairs that are compared with all slots at a time


class Gone(NamedTuple):
    """The pairs that go, in the order of their slots; padded to the tokens that came in, of which no more can go.

    Attributes:
      key, value: [B, K, n, D] float32; position: [B, K, n] int32; real: [B, K, n] bool, False = padding.
      slot: [B, K, n] int32.
    """

    key: Array
    value: Array
    position: Array
    real: Array
    slot: Array


def _gone(key: Array, value: Array, victim: Array, view: View, tokens: int) -> Gone:
    """`tokens`: at most so many go from a head."""
    if tokens == 1:
        index = jnp.argmax(victim, axis=2, keepdims=True).astype(jnp.int32)
    else:
        index = jnp.argsort(~victim, axis=2, stable=True)[:, :, :tokens].astype(jnp.int32)

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 3)), axis=2)

    return Gone(
        take(key).astype(jnp.float32), take(value).astype(jnp.float32), take(view.position), take(victim), index
    )


def _nearest(gone: Gone, kept: Array, position: Array, score: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """The kept slot that suits each pair best, of equals the newer: slot [B, K, n] int32, and its score."""
    count = gone.position.shape[2]
    tile = min(TILE, count)
    pad = -count % tile

    def tiles(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pad), *((0, 0),) * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, tile, *x.shape[3:]), 2, 0)

    def best(part: tuple[Array, Array]) -> tuple[Array, Array]:
        # [B, K, tile, S]
        scores = jnp.where(kept[:, :, None], score(*part), -jnp.inf)
        highest = jnp.max(scores, axis=3, keepdims=True)
        tied = kept[:, :, None] & (scores == highest)
        return jnp.argmax(jnp.where(tied, position[:, :, None], -1), axis=3).astype(jnp.int32), highest[..., 0]

    slot, highest = jax.lax.map(best, (tiles(gone.key), tiles(gone.position)))

    def whole(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)[:, :, :count]

    return whole(slot), whole(highest)


def _unit(x: Array) -> Array:
    return x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True)), jnp.finfo(jnp.float32).tiny)


def _by_cosine(key: Array) -> Callable[[Array, Array], Array]:
    directions = _unit(key.astype(jnp.float32))
    return lambda gone, _: jnp.einsum("bktd,bksd->bkts", _unit(gone), directions)


def _by_distance(position: Array) -> Callable[[Array, Array], Array]:
    return lambda _, gone: -jnp.abs(gone[..., None] - position[:, :, None]).astype(jnp.float32)


# [B, K, S, ...] zeros, and what is added at slots [B, K, n]
_add = jax.vmap(jax.vmap(lambda total, slot, x: total.at[slot].add(x)))


def _average(x: Array, own: float, slot: Array, weight: Array, others: Array) -> Array:
    """(own·x + Σ w·other) / (own + Σ w) in every slot: [B, K, S, D], [B, K, n], [B, K, n], [B, K, n, D]."""
    total = _add(own * x.astype(jnp.float32), slot, weight[..., None] * others)
    weights = _add(jnp.full(x.shape[:3], own, jnp.float32), slot, weight)
    # A slot that takes nothing stays as it is, to the bit.
    return jnp.where((weights > own)[..., None], total / weights[..., None], x.astype(jnp.float32)).astype(x.dtype)


@memoized
def cam(recent: int = 32) -> Merge:
    """Adds the value, in equal parts, to the `recent` newest tokens (CaM, Zhang et al., ICML 2024).

    v_k += p·v_i / recent for each of them, with p = min(1, A_i / max A) and A the mean attention S / N. The authors
    draw whether to add from Bernoulli(p); this is the mean of that. Keys stay.
    """
    recent = count_argument("recent", recent, minimum=1)

    def fold(key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        gone = _gone(key, value, victim, view, tokens)
        attention = stats["mass"] / jnp.maximum(stats["count"], 1)
        kept = view.live & ~victim
        most = jnp.max(jnp.where(kept, attention, 0.0), axis=2, keepdims=True)
        share = jnp.take_along_axis(attention, gone.slot, axis=2) / jnp.maximum(most, jnp.finfo(jnp.float32).tiny)
        weight = jnp.where(gone.real, jnp.minimum(share, 1.0), 0.0) / recent
        added = jnp.einsum("bkn,bknd->bkd", weight, gone.value)
        newest = kept & largest(view.position.astype(jnp.float32), jnp.where(kept, view.position, -1), recent)
        more = jnp.where(newest[..., None], added[:, :, None], 0.0)
        return Folded(key, (value.astype(jnp.float32) + more).astype(value.dtype), stats)

    return Merge(frozenset({"mass", "count"}), fold)


@memoized
def d2o(beta: float = 0.7) -> Merge:
    """Into the kept pair of the most similar key, if that is similar enough (D2O, arXiv:2406.13035, section 3.2).

    With u the cosine to it, pairs whose u is at least τ are averaged in with weights e^u against the pair's own e.
    τ is the mean u of the first pairs that go, then τ <- beta·(mean u) + (1 - beta)·τ.
    """
    beta = number_argument("beta", beta, minimum=0.0, maximum=1.0)

    def fold(key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        gone = _gone(key, value, victim, view, tokens)
        slot, similarity = _nearest(gone, view.live & ~victim, view.position, _by_cosine(key))
        similarity = jnp.where(gone.real, similarity, 0.0)
        count = jnp.sum(gone.real, axis=2, keepdims=True)
        mean = jnp.sum(similarity, axis=2, keepdims=True) / jnp.maximum(count, 1).astype(jnp.float32)
        # The same in every live slot; 2 is added, so that 0 says that there was none yet.
        before = jnp.max(stats["threshold"], axis=2, keepdims=True)
        now = jnp.where(before == 0, mean, beta * mean + (1 - beta) * (before - 2))
        weight = jnp.where(gone.real & (similarity >= now), jnp.exp(similarity), 0.0)
        threshold = jnp.where(count > 0, now + 2, before)
        return Folded(
            _average(key, jnp.e, slot, weight, gone.key),
            _average(value, jnp.e, slot, weight, gone.value),
            stats | {"threshold": jnp.broadcast_to(threshold, stats["threshold"].shape)},
        )

    return Merge(frozenset(), fold, remembers=("threshold",))


@memoized
def kvmerger(similarity: float = 0.75) -> Merge:
    """Into the kept pair next to it in the text, if their keys are alike, by a Gaussian (KVMerger, arXiv:2407.08454).

    Weights e^(-d² / 2σ²) of the distance d to its key against the pair's own 1, with σ = (mean d) / √2.

    Args:
      similarity: least cosine of the two keys.
    """
    similarity = number_argument("similarity", similarity, minimum=-1.0, maximum=1.0)

    def fold(key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        gone = _gone(key, value, victim, view, tokens)
        slot, _ = _nearest(gone, view.live & ~victim, view.position, _by_distance(view.position))
        pivot = jnp.take_along_axis(key.astype(jnp.float32), slot[..., None], axis=2)
        alike = gone.real & (jnp.sum(_unit(pivot) * _unit(gone.key), axis=-1) >= similarity)
        squared = jnp.sum(jnp.square(pivot - gone.key), axis=-1)
        # A root has no gradient at 0, where padding is.
        distance = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)
        zeros = jnp.zeros(view.position.shape, jnp.float32)
        total = _add(zeros, slot, jnp.where(alike, distance, 0.0))
        count = _add(zeros, slot, alike.astype(jnp.float32))
        mean = jnp.take_along_axis(total / jnp.maximum(count, 1), slot, axis=2)
        # d² / 2σ²; keys that are all the same are at no distance
        exponent = jnp.square(distance) / jnp.maximum(jnp.square(mean), jnp.finfo(jnp.float32).tiny)
        weight = jnp.where(alike, jnp.exp(-exponent), 0.0)
        return Folded(_average(key, 1.0, slot, weight, gone.key), _average(value, 1.0, slot, weight, gone.value), stats)

    return Merge(frozenset(), fold)


@memoized
def anchors() -> Merge:
    """Into the kept pair next to it in the text, all with one weight (Elastic Cache, arXiv:2407.18121, section 3.3)."""

    def fold(key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        gone = _gone(key, value, victim, view, tokens)
        slot, _ = _nearest(gone, view.live & ~victim, view.position, _by_distance(view.position))
        weight = gone.real.astype(jnp.float32)
        return Folded(_average(key, 1.0, slot, weight, gone.key), _average(value, 1.0, slot, weight, gone.value), stats)

    return Merge(frozenset(), fold)


#: Every merge, by name.
MERGES: dict[str, Callable[..., Merge]] = {"cam": cam, "d2o": d2o, "kvmerger": kvmerger, "anchors": anchors}
