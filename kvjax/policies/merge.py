"""Merges: fold evicted keys and values into pairs that stay, instead of dropping them.

Every eviction policy takes one as `merge=`. The policy decides which slots are evicted; a merge changes what the other
slots hold. Keys are merged as stored: rotated, unless ``positions="cache"``.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument, number_argument
from kvjax.policies.base import factory
from kvjax.policies.components import Folded, Merge, Stats, View
from kvjax.policies.convolution import lococo
from kvjax.policies.nearest import nearest, newest, victims_of

Array = jax.Array
THRESHOLD_OFFSET = 2  # added to D2O's threshold, a cosine, so that 0 means that there is none yet
TINY = jnp.finfo(jnp.float32).tiny  # the smallest divisor, instead of 0


def _unit(x: Array) -> Array:
    """Scales vectors [..., D] to norm 1."""
    return x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True)), TINY)


def _by_cosine(key: Array) -> Callable[[Array, Array], Array]:
    """Makes a score for `nearest`: the cosine of the two keys."""
    key = key.astype(jnp.float32)
    # [B, K, 1, S]: products are divided, so that no array has the directions of all keys
    norm = jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(key), axis=3)), TINY)[:, :, None]
    return lambda victim, _: jnp.einsum("bktd,bksd->bkts", _unit(victim), key) / norm


def _by_distance(position: Array) -> Callable[[Array, Array], Array]:
    """Makes a score for `nearest`: minus the distance of the two positions."""
    return lambda _, victim: -jnp.abs(victim[..., None] - position[:, :, None]).astype(jnp.float32)


# (total [B, K, S, ...], slot [B, K, n], x [B, K, n, ...]) -> total with x added at the slots
_add = jax.vmap(jax.vmap(lambda total, slot, x: total.at[slot].add(x)))
# (all [B, K, S, ...], slot [B, K, n], x [B, K, n, ...]) -> all with x at the slots
_put = jax.vmap(jax.vmap(lambda every, slot, x: every.at[slot].set(x)))


def _average(x: Array, own: float, slot: Array, weight: Array, others: Array) -> Array:
    """Averages vectors into slots: (own·x + Σ w·other) / (own + Σ w).

    Args:
      x: [B, K, S, D].
      own: the weight of what a slot holds.
      slot: [B, K, n] int32, the slot into which each of the others is averaged.
      weight: [B, K, n] float32, 0 for those that are left out.
      others: [B, K, n, D] float32.

    Returns:
      [B, K, S, D] in the dtype of x; a slot without others is unchanged to the bit.
    """
    if slot.shape[2] == 1:
        # One row of each head changes; the others are neither read nor written.
        before = jnp.take_along_axis(x, slot[..., None], axis=2)
        row = before.astype(jnp.float32)
        weight = weight[..., None]
        weights = own + weight
        made = jnp.where(weights > own, (own * row + weight * others) / weights, row).astype(x.dtype)
        return _put(x, slot, made)
    # [B, K, S, D]
    total = _add(own * x.astype(jnp.float32), slot, weight[..., None] * others)
    # [B, K, S]
    weights = _add(jnp.full(x.shape[:3], own, jnp.float32), slot, weight)
    return jnp.where((weights > own)[..., None], total / weights[..., None], x.astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class CaM(Merge):
    """Adds a victim's value in equal parts to the newest tokens (CaM, Zhang et al., ICML 2024).

    v_k += p·v_i / recent for each of them, with p = min(1, A_i / max A) and A the mean attention S / N. The authors
    draw from Bernoulli(p) whether to add; this adds the expected value. Keys are unchanged.

    Attributes:
      recent: the number of newest tokens, at least 1.
    """

    recent: int = 32
    needs = frozenset({"mass", "count"})
    over_devices = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent", count_argument("recent", self.recent, minimum=1))

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        victims = victims_of(key, value, victim, view, tokens)
        # [B, K, S]
        attention = stats["mass"] / jnp.maximum(stats["count"], 1)
        kept = view.live & ~victim
        # [B, K, 1]
        maximum = jnp.max(jnp.where(kept, attention, 0.0), axis=2, keepdims=True)
        among, maximum = newest(view.position, kept, self.recent, maximum)
        # [B, K, n]
        share = jnp.take_along_axis(attention, victims.slot, axis=2) / jnp.maximum(maximum, TINY)
        weight = jnp.where(victims.real, jnp.minimum(share, 1.0), 0.0) / self.recent
        # [B, K, D]
        added = jnp.einsum("bkn,bknd->bkd", weight, victims.value)
        # [B, K, S, D]
        more = jnp.where(among[..., None], added[:, :, None], 0.0)
        return Folded(key, (value.astype(jnp.float32) + more).astype(value.dtype), dict(stats))


@dataclasses.dataclass(frozen=True)
class D2O(Merge):
    """Averages a victim into the kept pair of the most similar key (D2O, arXiv:2406.13035, section 3.2).

    Victims whose cosine u to that key is at least τ are averaged in with weights e^u against the pair's own e. τ is the
    mean u of the first victims, then τ <- beta·(mean u) + (1 - beta)·τ.

    Attributes:
      beta: weight of the latest mean, from 0 (τ stays the first mean) to 1 (τ is the latest mean).
    """

    beta: float = 0.7
    remembers = ("threshold",)
    over_devices = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", number_argument("beta", self.beta, minimum=0.0, maximum=1.0))

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        victims = victims_of(key, value, victim, view, tokens)
        # [B, K, 1]: every live slot has the same
        before = jnp.max(stats["threshold"], axis=2, keepdims=True)
        found = nearest(victims, view.live & ~victim, view.position, _by_cosine(key), maximum=before)
        # [B, K, n]
        similarity = jnp.where(victims.real, found.score, 0.0)
        # [B, K, 1]
        count = jnp.sum(victims.real, axis=2, keepdims=True)
        mean = jnp.sum(similarity, axis=2, keepdims=True) / jnp.maximum(count, 1).astype(jnp.float32)
        before = found.maximum
        now = jnp.where(before == 0, mean, self.beta * mean + (1 - self.beta) * (before - THRESHOLD_OFFSET))
        # [B, K, n]
        weight = jnp.where(victims.real & found.here & (similarity >= now), jnp.exp(similarity), 0.0)
        threshold = jnp.where(count > 0, now + THRESHOLD_OFFSET, before)
        return Folded(
            _average(key, jnp.e, found.slot, weight, victims.key),
            _average(value, jnp.e, found.slot, weight, victims.value),
            {**stats, "threshold": jnp.broadcast_to(threshold, stats["threshold"].shape)},
        )


@dataclasses.dataclass(frozen=True)
class SimilarKey(Merge):
    """Averages a victim into the kept pair of the most similar key, with the weights of `D2O` (EMS, arXiv:2412.08521).

    A victim whose cosine to that key is below `threshold` is dropped; the paper calls this the zero class.

    Attributes:
      threshold: the smallest cosine of the two keys, -1 to 1.
    """

    threshold: float = 0.6
    over_devices = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", number_argument("threshold", self.threshold, minimum=-1.0, maximum=1.0))

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        victims = victims_of(key, value, victim, view, tokens)
        found = nearest(victims, view.live & ~victim, view.position, _by_cosine(key))
        merged = victims.real & found.here & (found.score >= self.threshold)
        # [B, K, n]
        weight = jnp.where(merged, jnp.exp(jnp.where(merged, found.score, 0.0)), 0.0)
        return Folded(
            _average(key, jnp.e, found.slot, weight, victims.key),
            _average(value, jnp.e, found.slot, weight, victims.value),
            dict(stats),
        )


@dataclasses.dataclass(frozen=True)
class KVMerger(Merge):
    """Averages a victim into the kept pair next to it in the text, if their keys are similar (arXiv:2407.08454).

    The weight is e^(-d² / 2σ²), with d the distance to that key and σ = (mean d) / √2, against 1 for the kept pair.

    Attributes:
      similarity: the smallest cosine of the two keys, -1 to 1.
    """

    similarity: float = 0.75
    over_devices = True

    def __post_init__(self) -> None:
        similarity = number_argument("similarity", self.similarity, minimum=-1.0, maximum=1.0)
        object.__setattr__(self, "similarity", similarity)

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        victims = victims_of(key, value, victim, view, tokens)
        found = nearest(victims, view.live & ~victim, view.position, _by_distance(view.position), key=key)
        assert found.key is not None
        slot = found.slot
        # [B, K, n]
        similar = jnp.sum(_unit(found.key) * _unit(victims.key), axis=-1) >= self.similarity
        similar &= victims.real & found.here
        squared = jnp.sum(jnp.square(found.key - victims.key), axis=-1)
        # The square root has no gradient at 0, the value of padding.
        distance = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)
        # [B, K, S]
        zeros = jnp.zeros(view.position.shape, jnp.float32)
        total = _add(zeros, slot, jnp.where(similar, distance, 0.0))
        count = _add(zeros, slot, similar.astype(jnp.float32))
        # [B, K, n]
        mean = jnp.take_along_axis(total / jnp.maximum(count, 1), slot, axis=2)
        # d² / 2σ²; the distance of equal keys is 0
        exponent = jnp.square(distance) / jnp.maximum(jnp.square(mean), TINY)
        weight = jnp.where(similar, jnp.exp(-exponent), 0.0)
        return Folded(
            _average(key, 1.0, slot, weight, victims.key),
            _average(value, 1.0, slot, weight, victims.value),
            dict(stats),
        )


@dataclasses.dataclass(frozen=True)
class Anchors(Merge):
    """Averages a victim into the kept pair next to it in the text, with equal weights.

    See Elastic Cache, arXiv:2407.18121, section 3.3.
    """

    over_devices = True

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        victims = victims_of(key, value, victim, view, tokens)
        found = nearest(victims, view.live & ~victim, view.position, _by_distance(view.position))
        # [B, K, n]
        weight = (victims.real & found.here).astype(jnp.float32)
        return Folded(
            _average(key, 1.0, found.slot, weight, victims.key),
            _average(value, 1.0, found.slot, weight, victims.value),
            dict(stats),
        )


cam = factory(CaM)
d2o = factory(D2O)
kvmerger = factory(KVMerger)
anchors = factory(Anchors)

#: Every merge, by name.
MERGES: dict[str, Callable[..., Merge]] = {
    "cam": cam, "d2o": d2o, "kvmerger": kvmerger, "anchors": anchors, "lococo": lococo,
}  # fmt: skip
