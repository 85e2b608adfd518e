"""Segments whose slots are divided over devices.

Every device has the window, whose tokens are exact, with their statistics, and encodes it when it is full. The one that
has room for the segment writes it. Each device has an equal part of the prompt and as many segments; see
`kvjax.cache.arrangements.segments`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.arrangements import segment_encoding
from kvjax.cache.arrangements.segments import ENDED, FILLED, HIGH, WINDOW, later_parts
from kvjax.cache.context_parallel.placement import Own
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, LayerKV, PerSlot
from kvjax.storage.layouts import Segments
from kvjax.storage.side import Sides

Array = jax.Array


def with_window(layer: LayerKV, own: Array) -> LayerKV:
    """Returns the layer of one device with the positions of the whole window instead of this device's part of it.

    The tokens of the window are those before the step's own.

    Args:
      layer: of this device.
      own: [B, K, 1] int32 of the step's own token; -1 for a row without one, which sees nothing.
    """
    window = layer.stores[WINDOW]["value"]["exact"].shape[2]
    # [B, K, 1] and [B, K, W]
    filled = layer.marks[FILLED][..., None]
    number = jnp.arange(window, dtype=jnp.int32)
    at = jnp.where((own >= 0) & (number < filled), own - filled + number, EMPTY)
    return layer.replace(position=jnp.concatenate([layer.position[:, :, : sum(_tiers(layer))], at], axis=2))


def settle(before: LayerKV, layer: LayerKV, own: Own, group: Group, sides: Sides, axes: tuple[str, ...]) -> LayerKV:
    """Writes a step's token into the window, and encodes the window of each row in which it is full.

    Args:
      before: of this device.
      layer: from `with_window`, with the statistics after the step.
      own: the step's own token.
      group: has the storage.
      sides: what vectors share.
      axes: that slots are divided over.
    """
    layout, me = group.storage.layout, jax.lax.axis_index(axes)
    assert isinstance(layout, Segments)
    sizes, window = _tiers(layer), layer.stores[WINDOW]["value"]["exact"].shape[2]
    held = dataclasses.replace(group, slots=(*sizes, window))
    few = next(iter(later_parts(layer.stores[HIGH]).values())).shape[2]
    ended = before.marks[ENDED][..., None] - me * few
    position = jnp.concatenate([layer.position, own.position], axis=2)
    stats = {name: jnp.concatenate([leaf, own.stats[name]], axis=2) for name, leaf in layer.stats.items()}
    after, moved = segment_encoding.settle(layer, own.key, own.value, position, PerSlot(stats, {}), held, sides, ended)
    *tiers, at = store_order.separated(after.position, (*sizes, window))
    part = window // group.slot_parts
    at = jax.lax.dynamic_slice_in_dim(at, me * part, part, axis=2)
    # [B, K, 1]: a row without a token has not been asked for its window, and stays as it is.
    real = own.position >= 0
    at = jnp.where(real, at, before.position[:, :, sum(sizes) :])
    filled = before.marks[FILLED] + real[..., 0].astype(jnp.int32)
    full = filled == layout.window
    return after.replace(
        position=jnp.concatenate([*tiers, at], axis=2),
        stats={
            name: jnp.where(real.reshape(*real.shape, *(1,) * (leaf.ndim - 3)), leaf, layer.stats[name])
            for name, leaf in moved.stats.items()
        },
        marks={FILLED: jnp.where(full, 0, filled), ENDED: before.marks[ENDED] + full.astype(jnp.int32)},
    )


def _tiers(layer: LayerKV) -> tuple[int, ...]:
    """Returns the slots of the two tiers of a device."""
    return tuple(jax.tree.leaves(store["value"])[0].shape[2] for store in layer.stores[:WINDOW])
