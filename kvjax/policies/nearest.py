"""Searches of merges over all slots: the evicted pairs, the nearest slots that stay, and the newest ones.

Where slots are divided over devices, each device looks at its own, and one collective joins what they found. Its size
depends on the number of victims, and not on the number of slots. The step's own tokens are on every device, which all
change them in the same way.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.numerics.mask_indices import compact
from kvjax.numerics.top_k import largest
from kvjax.parallel import slot_reductions
from kvjax.policies.components import View

Array = jax.Array
TILE = 128  # evicted pairs that are compared with all slots at a time
FAR = np.iinfo(np.int32).max


class Victims(NamedTuple):
    """Evicted pairs in the order of their slots, padded to n, the largest number of victims of a head.

    Attributes:
      key: [B, K, n, D] float32.
      value: [B, K, n, D] float32.
      position: [B, K, n] int32.
      real: [B, K, n] bool, False = padding.
      slot: [B, K, n] int32.
    """

    key: Array
    value: Array
    position: Array
    real: Array
    slot: Array


class Nearest(NamedTuple):
    """The slot that stays and has the highest score, for each victim.

    Attributes:
      slot: [B, K, n] int32, in bounds everywhere.
      here: [B, K, n] bool, whether it is a slot of this device.
      score: [B, K, n] float32.
      key: [B, K, n, D] float32 of that slot, on whichever device it is; None if it was not asked for.
      maximum: [B, K, 1] float32, the largest of what all devices gave.
    """

    slot: Array
    here: Array
    score: Array
    key: Array | None
    maximum: Array


def victims_of(key: Array, value: Array, victim: Array, view: View, tokens: int) -> Victims:
    """Gathers the pairs that `victim` marks; for the arguments see `Merge.fold`."""
    # [B, K, n]
    if tokens == 1:
        slot = jnp.argmax(victim, axis=2, keepdims=True).astype(jnp.int32)
    else:
        slot = jnp.argsort(~victim, axis=2, stable=True)[:, :, :tokens].astype(jnp.int32)

    def take(x: Array) -> Array:
        return _at(x, slot)

    return Victims(
        take(key).astype(jnp.float32), take(value).astype(jnp.float32), take(view.position), take(victim), slot
    )


def nearest(
    victims: Victims,
    kept: Array,
    position: Array,
    score: Callable[[Array, Array], Array],
    *,
    key: Array | None = None,
    maximum: Array | None = None,
) -> Nearest:
    """Finds the kept slot of the highest score for each victim; of equal scores, the newer slot.

    Args:
      victims: the evicted pairs.
      kept: [B, K, S] bool, the slots to choose from.
      position: [B, K, S] int32.
      score: (keys [B, K, t, D], positions [B, K, t] of victims) -> [B, K, t, S] float32.
      key: [B, K, S, D] as stored, if the keys of the slots that are found are wanted.
      maximum: [B, K, 1] float32, of which the largest of all devices is found as well; None = 0.
    """
    slot, highest = _nearest_here(victims, kept, position, score)
    # [B, K, n, D]
    found = None if key is None else _at(key, slot).astype(jnp.float32)
    maximum = jnp.zeros((*position.shape[:2], 1), jnp.float32) if maximum is None else maximum
    if not slot_reductions.current().slots:
        return Nearest(slot, jnp.ones(slot.shape, bool), highest, found, maximum)
    batch, kv_heads, n = slot.shape
    # [B, K, n]: -1 where a device keeps no slot
    at = _at(jnp.where(kept, position, -1), slot)
    # [C, B, K, n * (2 + D) + 1] int32, of which all but the positions are the bits of floats
    parts = [_bits(highest), at, _bits(maximum)]
    if found is not None:
        parts.append(_bits(found).reshape(batch, kv_heads, -1))
    every = slot_reductions.gather(jnp.concatenate(parts, axis=2))
    positions = every[..., n : 2 * n]
    scores = jnp.where(positions >= 0, _float(every[..., :n]), -jnp.inf)
    # [B, K, n]
    score_of_all = jnp.max(scores, axis=0)
    tied = jnp.where(scores == score_of_all, positions, -1)
    at_of_all = jnp.max(tied, axis=0)
    here = (at == at_of_all) & (at >= 0)
    if found is not None:
        # [1, B, K, n, 1]: of devices that have the same token, the first
        device = jnp.argmax(tied, axis=0)[None, ..., None]
        keys = _float(every[..., 2 * n + 1 :]).reshape(-1, *found.shape)
        found = jnp.take_along_axis(keys, device, axis=0)[0]
    return Nearest(slot, here, score_of_all, found, jnp.max(_float(every[..., 2 * n : 2 * n + 1]), axis=0))


def newest(position: Array, kept: Array, count: int, maximum: Array) -> tuple[Array, Array]:
    """Marks the `count` newest slots that stay.

    Args:
      position: [B, K, S] int32.
      kept: [B, K, S] bool.
      count: the number of slots to mark, on all devices.
      maximum: [B, K, 1] float32.

    Returns:
      [B, K, S] bool, and the largest `maximum` of all devices.
    """
    held, order = jnp.where(kept, position, -1), position.astype(jnp.float32)
    if not slot_reductions.current().slots:
        return kept & largest(order, held, count), maximum
    width = min(count, position.shape[2])
    with slot_reductions.alone():
        mine = largest(order, held, width, in_kernels=False)
    slots, valid = compact(mine, width)
    # [C, B, K, W + 1]
    every = slot_reductions.gather(jnp.concatenate([jnp.where(valid, _at(held, slots), -1), _bits(maximum)], axis=2))
    # [B, K, C * W], in falling order; a step's own token is there once for each device.
    named = -jnp.sort(-jnp.moveaxis(every[..., :-1], 0, 2).reshape(*position.shape[:2], -1), axis=2)
    first = jnp.pad(named[..., 1:] != named[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True)
    among = (named >= 0) & (jnp.cumsum(first, axis=2) <= count)
    oldest = jnp.min(jnp.where(among, named, FAR), axis=2, keepdims=True)
    return kept & (position >= oldest), jnp.max(_float(every[..., -1:]), axis=0)


def _nearest_here(
    victims: Victims, kept: Array, position: Array, score: Callable[[Array, Array], Array]
) -> tuple[Array, Array]:
    """Returns the slots of this device, [B, K, n] int32, and their scores, [B, K, n] float32; see `nearest`."""
    count = victims.position.shape[2]
    tile = min(TILE, count)
    pad = -count % tile

    def tiles(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pad), *((0, 0),) * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, tile, *x.shape[3:]), 2, 0)

    def best(part: tuple[Array, Array]) -> tuple[Array, Array]:
        # [B, K, tile, S]
        scores = jnp.where(kept[:, :, None], score(*part), -jnp.inf)
        # [B, K, tile, 1]
        highest = jnp.max(scores, axis=3, keepdims=True)
        tied = kept[:, :, None] & (scores == highest)
        return jnp.argmax(jnp.where(tied, position[:, :, None], -1), axis=3).astype(jnp.int32), highest[..., 0]

    # [n / tile, B, K, tile]
    slot, highest = jax.lax.map(best, (tiles(victims.key), tiles(victims.position)))

    def whole(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)[:, :, :count]

    return whole(slot), whole(highest)


def _at(x: Array, slot: Array) -> Array:
    """Takes slots [B, K, n] of an array [B, K, S, ...]."""
    return jnp.take_along_axis(x, slot.reshape(*slot.shape, *(1,) * (x.ndim - 3)), axis=2)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
