"""Blocks of a prompt that are held in another form than later ones, on slots that are divided over devices.

Each device has an equal part of the prompt's blocks and, in the slots after them, of the room for later ones, which are
written as those of any storage of blocks are: see `kvjax.cache.arrangements.blocks`, whose slots count from the end of
the prompt's full blocks here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache import store_order
from kvjax.cache.arrangements import blocks
from kvjax.cache.arrangements.blocks import OF_PROMPT, PROMPT, unit_of
from kvjax.cache.context_parallel import placement
from kvjax.cache.context_parallel.gathered_state import Told
from kvjax.cache.context_parallel.placement import Own
from kvjax.cache.groups import Group
from kvjax.cache.slots import SHARED
from kvjax.cache.state import LayerKV, Store
from kvjax.storage.base import Storage
from kvjax.storage.layouts import BlockCodec
from kvjax.storage.side import Sides

Array = jax.Array
PREFIXES = (OF_PROMPT, SHARED)


class Halves(NamedTuple):
    """A layer in two parts.

    Attributes:
      position: [B, K, P] int32 of the tokens in the prompt's blocks.
      stats: of these, leaves [B, K, P, ...].
      store: their parts.
      later: the tokens after them.
    """

    position: Array
    stats: dict[str, Array]
    store: Store
    later: LayerKV


def apart(layer: LayerKV) -> bool:
    """Returns whether the prompt's blocks are in slots of their own."""
    return layer.parts > 1 and PROMPT in layer.marks


def halves(layer: LayerKV, storage: Storage, parts: int = 1) -> Halves:
    """Splits a layer.

    Args:
      layer: of one device, or of `parts` devices.
      storage: how it is held.
      parts: see `kvjax.cache.store_order`.
    """
    (store,) = layer.stores
    early: Store = {
        side: {name: x for name, x in own.items() if name.startswith(PREFIXES)} for side, own in store.items()
    }
    late: Store = {side: {name: x for name, x in own.items() if name not in early[side]} for side, own in store.items()}
    count = next(x.shape[2] for name, x in early["key"].items() if name.startswith(OF_PROMPT)) * unit_of(storage, "key")
    sizes = (count, layer.position.shape[2] - count)

    def split(x: Array) -> list[Array]:
        return store_order.separated(x, sizes, parts)

    position, after = split(layer.position)
    stats = {name: split(leaf) for name, leaf in layer.stats.items()}
    later = layer.replace(
        position=after,
        stores=(late,),
        stats={name: two for name, (_, two) in stats.items()},
        marks={side: layer.marks[side] - layer.marks[PROMPT] for side in store},
    )
    return Halves(position, {name: one for name, (one, _) in stats.items()}, early, later)


def decode(storage: Storage, layer: LayerKV, side: str, dtype: DTypeLike, sides: Sides, parts: int = 1) -> Array:
    """Decodes the keys or the values of all slots, [B, K, S, D].

    Args:
      storage: how they are held.
      layer: the slots.
      side: ``key`` or ``value``.
      dtype: of the result.
      sides: what vectors share.
      parts: see `halves`.
    """
    own, codec = halves(layer, storage, parts), storage.codecs[side]
    assert isinstance(codec, BlockCodec) and codec.prompt is not None
    empty = jnp.zeros((*own.position.shape, layer.dim), dtype)
    early = blocks.from_prompt(codec.prompt, own.store[side], unit_of(storage, side), empty)
    return store_order.joined([early, blocks.decode(storage, own.later, side, dtype, sides)], parts)


def settle(layer: LayerKV, own: Own, told: Told, newest: Array, group: Group, offset: Array, sides: Sides) -> LayerKV:
    """Writes the step's own tokens; see `placing.in_blocks`.

    Args:
      layer: of this device; its marks count from its first slot after the prompt's blocks.
      own: the step's own tokens.
      told: of the slots after the prompt's blocks.
      newest: [B] int32 newest position of each row.
      group: has the storage.
      offset: int32, this device's first slot of those.
      sides: what vectors share.
    """
    half = halves(layer, group.storage)
    after = placement.in_blocks(half.later, own, told, newest, group, offset, sides)
    first = layer.marks[PROMPT]
    return layer.replace(
        position=jnp.concatenate([half.position, after.position], axis=2),
        stores=({side: {**half.store[side], **parts} for side, parts in after.stores[0].items()},),
        stats={name: jnp.concatenate([one, after.stats[name]], axis=2) for name, one in half.stats.items()},
        marks={PROMPT: first} | {side: mark + first for side, mark in after.marks.items()},
    )
