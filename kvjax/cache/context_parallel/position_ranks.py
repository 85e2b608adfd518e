"""The rank of each slot by position among the live slots of its head, where slots are divided over devices.

A rank changes only when a slot of a lower position is evicted. Each slot therefore holds its rank as a statistic, and
every device subtracts the number of older slots that a step evicts on all devices: as many as the step has tokens.
The rank of the step's own token is the number of live slots on all devices, which every device counts on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.groups import RANK
from kvjax.cache.state import FAR, LIVE, LayerKV
from kvjax.numerics.mask_indices import compact
from kvjax.parallel import slot_reductions

Array = jax.Array


class Ranks(NamedTuple):
    """Ranks among the live slots of a head, with a step's own tokens.

    Attributes:
      each: [B, K, S_i] int32 of each of this device's stores, and of the step's own tokens.
      longest: [B] int32, the number of live slots of the fullest head.
    """

    each: list[Array]
    longest: Array


def of_slots(position: Array) -> Array:
    """Returns the rank of each slot [B, K, S] of a whole layer, float32; 0 in empty slots."""
    live = position >= 0
    ordered = jnp.sort(jnp.where(live, position, FAR), axis=2)
    rank = jax.vmap(jax.vmap(lambda row, x: jnp.searchsorted(row, x)))(ordered, position)
    return jnp.where(live, rank, 0).astype(jnp.float32)


def of_step(layer: LayerKV, own: Array, sizes: Sequence[int], axes: slot_reductions.Across) -> Ranks:
    """Returns the ranks of this device's slots and of a step's own tokens.

    Args:
      layer: of this device, before the step.
      own: [B, K, n] int32 positions of the tokens, -1 = padding.
      sizes: the number of slots of each store.
      axes: that slots and heads are divided over.
    """
    before = layer.marks[LIVE][..., None]
    # [B]
    longest = jnp.max(before[..., 0] + jnp.sum(own >= 0, axis=2, dtype=jnp.int32), axis=1)
    # Few models rotate by it; in others XLA removes this.
    longest = jax.lax.pmax(longest, axes.heads) if axes.heads else longest
    new = before + jnp.maximum(jnp.cumsum(own >= 0, axis=2, dtype=jnp.int32) - 1, 0)
    return Ranks([*store_order.separated(layer.stats[RANK].astype(jnp.int32), sizes), new], longest)


def counted(layer: LayerKV, own: Array) -> LayerKV:
    """Counts a step's own tokens among the live slots; their positions [B, K, n] int32 are -1 for padding."""
    return layer.replace(marks=layer.marks | {LIVE: layer.marks[LIVE] + jnp.sum(own >= 0, axis=2, dtype=jnp.int32)})


def after_eviction(layer: LayerKV, evicted: Array) -> LayerKV:
    """Returns a layer with the ranks after the positions [B, K, V] int32 were evicted, on any device; FAR = none."""
    ordered = jnp.sort(evicted, axis=2)
    older = jax.vmap(jax.vmap(lambda row, x: jnp.searchsorted(row, x)))(ordered, layer.position)
    rank = layer.stats[RANK] - older.astype(jnp.float32)
    live = layer.marks[LIVE] - jnp.sum(evicted < FAR, axis=2, dtype=jnp.int32)
    stats = layer.stats | {RANK: jnp.where(layer.position >= 0, rank, 0.0)}
    return layer.replace(stats=stats, marks=layer.marks | {LIVE: live})


def evicted_positions(position: Array, victim: Array, max_victims: int) -> Array:
    """Gathers the positions that all devices evict, [B, K, C * most] int32; FAR = none.

    Args:
      position: [B, K, S'] int32 of this device.
      victim: [B, K, S'] bool.
      max_victims: the most victims of a head.
    """
    slots, valid = compact(victim, max_victims)
    every = slot_reductions.gather(jnp.where(valid, jnp.take_along_axis(position, slots, axis=2), FAR))
    return jnp.moveaxis(every, 0, 2).reshape(*position.shape[:2], -1)
