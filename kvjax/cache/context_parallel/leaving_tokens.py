"""Tokens that leave a residual of single slots in a step of a layer whose slots are divided over devices.

Storages whose tokens are encoded in blocks, such as KIVI, have `kvjax.cache.context_parallel.write_blocks` instead.

An exact token that becomes older than the residual is encoded into an empty coded slot, which may be on another device.
Which positions become so old is known before the step, so that their keys and values travel with the partial results of
attention, and their statistics with what is told of evictions. The sums over all devices are those tokens: where a
device does not hold one, it adds 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.context_parallel import packing
from kvjax.cache.state import EMPTY
from kvjax.storage.base import Storage
from kvjax.storage.store import Store

Array = jax.Array
Stats = dict[str, Array]


class LeavingTokens(NamedTuple):
    """The tokens of this device that leave the residual, in the order of their ages; the youngest first.

    Attributes:
      position: [B, K, n] int32, -1 = none, or on another device.
      slot: [B, K, n] int32, the exact slot of each; undefined where there is none.
      target: [B, 1, n] int32, the positions that leave, on whichever device they are; -1 = none.
    """

    position: Array
    slot: Array
    target: Array

    def vectors(self, store: Store) -> Array:
        """Returns keys, values and a 1, [B, K, n, 2 * D + 1] float32; 0 where there is none."""
        found = (self.position >= 0)[..., None]
        both = [jnp.where(found, packing.at(store[side]["exact"], self.slot), 0) for side in ("key", "value")]
        return jnp.concatenate([each.astype(jnp.float32) for each in (*both, found)], axis=3)


def find_leaving(position: Array, newest: Array, count: int, storage: Storage) -> LeavingTokens:
    """Finds the tokens of this device that leave the residual.

    Args:
      position: [B, K, R] int32 of this device's exact slots, before the step.
      newest: [B] int32 newest position of each row, -1 for a row without a token, which none leaves.
      count: n, the tokens of the step.
      storage: has the residual.
    """
    # [B, 1, n]
    target = (newest[:, None] - storage.residual - jnp.arange(count, dtype=jnp.int32))[:, None]
    target = jnp.where((target >= storage.sinks) & (newest >= 0)[:, None, None], target, EMPTY)
    slot, found = places_of(position, target)
    return LeavingTokens(jnp.where(found, target, EMPTY), slot, target)


def places_of(position: Array, target: Array) -> tuple[Array, Array]:
    """Returns where positions [B, K, R] hold the targets [B, K or 1, n], [B, K, n] int32 in bounds, and whether."""
    size = position.shape[2]
    # [B, K, n, R]
    same = (position[:, :, None] == target[..., None]) & (target >= 0)[..., None]
    slot = jnp.min(jnp.where(same, jnp.arange(size, dtype=jnp.int32), size), axis=3)
    return jnp.minimum(slot, size - 1), slot < size


def packed(stats: Stats, slot: Array, own: Array) -> Array:
    """Packs the statistics [B, K, R, ...] of some slots [B, K, n] to int32 [B, K, m]; 0 where not `own` [B, K, n]."""
    bits = jnp.where(own[..., None], packing.packed(stats, slot), 0)
    return bits.reshape(*bits.shape[:2], bits.shape[2] * bits.shape[3])


def unpacked(bits: Array, stats: Stats, count: int) -> Stats:
    """Unpacks what `packed` has packed, after the sum over all devices: the statistics [B, K, n, ...].

    Args:
      bits: [B, K, m] int32.
      stats: of the shapes and dtypes that were packed.
      count: n.
    """
    return packing.unpacked(bits.reshape(*bits.shape[:2], count, packing.width(stats)), stats)
