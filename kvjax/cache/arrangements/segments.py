"""Segments: tokens that are encoded together when a segment ends, in two tiers by their salience (see `Segments`).

The slots of the high tier come first, then those of the low tier, then the window of exact tokens. A tier has a region
for the prompt and one of equal size for each segment after it. Only slots of the window have statistics.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache import store_order
from kvjax.cache.arrangements.blocks import OF_PROMPT
from kvjax.cache.groups import Extent, Group
from kvjax.cache.slots import SHARED
from kvjax.cache.state import LayerKV, Store
from kvjax.storage.base import Codec, Storage
from kvjax.storage.layouts import BlockCodec, Segments
from kvjax.storage.rounding import within
from kvjax.storage.side import Sides
from kvjax.storage.store import aligned

Array = jax.Array
ROUNDING = 1e-9  # of a share of tokens

HIGH, LOW, WINDOW = range(3)  # the stores
FILLED, ENDED = "filled", "ended"  # marks of slots on several devices


def salient(layout: Segments, tokens: int) -> int:
    """Returns how many of a segment's tokens go to the high tier."""
    return max(math.ceil(layout.ratio * tokens - ROUNDING), 0)


def regions(layout: Segments, tier: int) -> int:
    """Returns the slots of one segment after the prompt."""
    high = salient(layout, layout.window)
    return high if tier == HIGH else layout.window - high


def slots(layout: Segments, tokens: int, extent: Extent) -> tuple[int, int, int]:
    """Returns the slots of the high tier, of the low tier and of the window, for heads of `tokens` tokens."""
    prompt, segments = tokens - extent.following, extent.following // layout.window
    high = salient(layout, prompt)
    # A tier has a slot at the least, also if no token is ever in it.
    first, second = max(high, 1), max(prompt - high, 1)
    return first + segments * regions(layout, HIGH), second + segments * regions(layout, LOW), layout.window


def count_of(group: Group) -> int:
    """Returns the segments after the prompt that there is room for; where slots are divided, as many per device."""
    layout, parts = group.storage.layout, group.slot_parts
    assert isinstance(layout, Segments) and group.extent is not None
    return -(-(group.extent.following // layout.window) // parts) * parts


def over_devices(group: Group, parts: int) -> tuple[int, ...]:
    """Returns the slots of each store on `parts` devices, which have as much of the prompt and as many segments."""
    layout, few = group.storage.layout, count_of(group)
    assert isinstance(layout, Segments)
    many = count_of(dataclasses.replace(group, slot_parts=parts))
    tiers = [
        -(-(count - few * regions(layout, tier)) // parts) * parts + many * regions(layout, tier)
        for tier, count in enumerate(group.slots[:WINDOW])
    ]
    return *tiers, -(-layout.window // parts) * parts


def part_of_prompt(storage: Storage, name: str) -> str:
    """Returns the name of a part of a tier's keys of the prompt, which says whether all tokens share it."""
    own = storage.key.by_token if isinstance(storage.key, BlockCodec) else ()
    return (SHARED if own and name not in own else OF_PROMPT) + name


def storage_of(storage: Storage, tier: int) -> Storage:
    """Returns the storage whose codecs hold a tier."""
    assert isinstance(storage.layout, Segments)
    return storage.layout.high if tier == HIGH else storage


def empty(group: Group, shape: tuple[int, int], dim: int, dtype: DTypeLike) -> tuple[Store, ...]:
    """Makes the arrays of a group of heads: zeros.

    Args:
      group: of heads.
      shape: (B, K).
      dim: features of a head.
      dtype: the model's dtype.
    """
    layout, made = group.storage.layout, list[Store]()
    assert isinstance(layout, Segments)
    segments = count_of(group)
    for tier, count in enumerate(group.slots[:WINDOW]):
        own, size = storage_of(group.storage, tier), regions(layout, tier)
        key = {name: jnp.zeros((*shape, segments, *each), kind) for name, (each, kind) in _of(own, size, dim, dtype)}
        first = count - segments * size
        key |= {
            part_of_prompt(own, name): jnp.zeros((*shape, *each), kind)
            for name, (each, kind) in _of(own, first, dim, dtype)
        }
        parts = value_of(own).parts(dim, dtype).items()
        value = {name: jnp.zeros((*shape, count, *each), kind) for name, (each, kind) in parts}
        made.append({"key": key, "value": value})
    window = jnp.zeros((*shape, group.slots[WINDOW], dim), dtype)
    return *made, {"key": {"exact": window}, "value": {"exact": window}}


def empty_marks(group: Group, shape: tuple[int, int]) -> dict[str, Array]:
    """Returns the marks [B, K] of slots on several devices: tokens in the window, and segments that have ended."""
    return {name: jnp.zeros(shape, jnp.int32) for name in ((FILLED, ENDED) if group.slot_axes else ())}


def _of(storage: Storage, tokens: int, dim: int, dtype: DTypeLike) -> Any:
    assert isinstance(storage.key, BlockCodec)
    return storage.key.parts(tokens, dim, dtype).items()


def value_of(storage: Storage) -> Codec:
    """Returns the codec of the values of a tier."""
    assert isinstance(storage.value, Codec)
    return storage.value


def joined(storage: Storage, layer: LayerKV, pieces: list[Array], side: str) -> Array:
    """Joins the keys or values of all stores, from `decode`, in the order of positions: [B, K, S, D]."""
    assert isinstance(storage.layout, Segments)
    if side == "key":
        # Of the keys of a tier, those of the prompt come first, on whichever device they are.
        for tier in range(WINDOW):
            later = next(iter(later_parts(layer.stores[tier]).values())).shape[2] * regions(storage.layout, tier)
            first = pieces[tier].shape[2] - later
            pieces[tier] = store_order.joined([pieces[tier][:, :, :first], pieces[tier][:, :, first:]], layer.parts)
    return store_order.joined(pieces, layer.parts)


def later_parts(store: Store) -> dict[str, Array]:
    """Returns the parts of a tier's keys of the segments after the prompt."""
    return {name: part for name, part in store["key"].items() if not name.startswith((OF_PROMPT, SHARED))}


def decode(storage: Storage, layer: LayerKV, tier: int, side: str, dtype: DTypeLike, sides: Sides) -> Array:
    """Decodes the keys or the values of a store, [B, K, S_i, D].

    Args:
      storage: how they are held.
      layer: the slots.
      tier: number of the store.
      side: ``key`` or ``value``.
      dtype: of the result.
      sides: what vectors share.
    """
    store, layout = layer.stores[tier], storage.layout
    if tier == WINDOW:
        return store[side]["exact"].astype(dtype)
    assert isinstance(layout, Segments)
    own = storage_of(storage, tier)
    if side == "value":
        return within(value_of(own).decode(store[side], aligned(own, sides, side, 4), layer.dim), dtype)
    count, size = jax.tree.leaves(store["value"])[0].shape[2], regions(layout, tier)
    later = later_parts(store)
    prompt = {
        name.removeprefix(OF_PROMPT).removeprefix(SHARED): part
        for name, part in store[side].items() if name not in later
    }  # fmt: skip
    segments = next(iter(later.values())).shape[2]
    assert isinstance(own.key, BlockCodec)
    pieces = [own.key.decode(prompt, None, count - segments * size, layer.dim)]
    if segments and size:
        x = own.key.decode(later, None, size, layer.dim)
        pieces.append(x.reshape(*x.shape[:2], segments * size, layer.dim))
    return within(jnp.concatenate(pieces, axis=2), dtype)
