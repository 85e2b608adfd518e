"""Slots in order whose tokens are encoded in blocks, where they are divided over devices.

A step's tokens are written where the slots of their numbers are. Every device has the exact tokens that wait until
their block is full; the one that has the block encodes it.
"""

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements.base import StepTokens
from kvjax.cache.arrangements.blocks_with_residual import Others, write_tokens
from kvjax.cache.context_parallel.gathered_state import GatheredState
from kvjax.cache.context_parallel.placement import NewTokens
from kvjax.cache.groups import Group
from kvjax.cache.state import LIVE, LayerKV, PerSlot
from kvjax.parallel import slot_reductions
from kvjax.storage.base import Storage
from kvjax.storage.side import Sides

Array = jax.Array


def first_slot(layer: LayerKV, axes: slot_reductions.Across) -> Array:
    """Returns the number of this device's first slot among those of all devices, [] int32."""
    return jax.lax.axis_index(axes.slots) * layer.position.shape[2]


def shifted(marks: dict[str, Array], by: Array) -> dict[str, Array]:
    """Returns marks that count from another slot."""
    return {name: mark if name == LIVE else mark + by for name, mark in marks.items()}


def older(position: Array, newest: Array, storage: Storage) -> Array:
    """Counts the slots [B, K, S] that are no longer in the residual, [B, K, 1] int32."""
    old = (position >= 0) & (position <= (newest - storage.residual)[:, None, None])
    return jnp.sum(old, axis=2, keepdims=True, dtype=jnp.int32)


def write(
    layer: LayerKV, own: NewTokens, gathered: GatheredState, newest: Array, group: Group, offset: Array, sides: Sides
) -> LayerKV:
    """Writes the step's own tokens.

    Args:
      layer: of this device, with the statistics after the step; its marks count from its first slot.
      own: the step's own tokens.
      gathered: `GatheredState.more` is the sum of `older` over all devices.
      newest: [B] int32 newest position of each row.
      group: has the storage.
      offset: int32, this device's first slot.
      sides: what keys and values share.

    Returns:
      The layer, whose marks count from the first slot of all devices.
    """
    assert gathered.more is not None
    old = gathered.more.astype(jnp.int32) + older(own.position, newest, group.storage) - offset
    position = jnp.concatenate([layer.position, own.position], axis=2)
    stats = {name: jnp.concatenate([leaf, own.stats[name]], axis=2) for name, leaf in layer.stats.items()}
    step = StepTokens(layer, own.key, own.value, position, None, PerSlot(stats, {}), newest, group, sides)
    after, moved = write_tokens(step, Others(gathered.live - offset, old))
    return after.replace(stats=moved.stats, marks=shifted(after.marks, offset))
