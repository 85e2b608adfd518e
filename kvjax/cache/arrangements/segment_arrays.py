"""Segments: tokens that are encoded together when a segment ends, in two tiers by their salience (see `Segments`).

The slots of the high tier come first, then those of the low tier, then the window of exact tokens. A tier has a region
for the prompt and one of equal size for each segment after it. Only slots of the window have statistics.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.arrangements.block_arrays import OF_PROMPT
from kvjax.cache.state import LayerKV, Store
from kvjax.parallel.host_memory import pad
from kvjax.storage.base import Codec, Storage
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.layouts import Segments
from kvjax.storage.rounding import within
from kvjax.storage.side import Sides
from kvjax.storage.store import aligned
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.cache.groups import ArraySizes, Group

Array = jax.Array
ROUNDING = 1e-9  # of a share of tokens

HIGH, LOW, WINDOW = range(3)  # the stores


def salient(layout: Segments, tokens: int) -> int:
    """Returns how many of a segment's tokens go to the high tier."""
    return max(math.ceil(layout.ratio * tokens - ROUNDING), 0)


def regions(layout: Segments, tier: int) -> int:
    """Returns the slots of one segment after the prompt."""
    high = salient(layout, layout.window)
    return high if tier == HIGH else layout.window - high


def slots(layout: Segments, tokens: int, array_sizes: "ArraySizes") -> tuple[int, int, int]:
    """Returns the slots of the high tier, of the low tier and of the window, for heads of `tokens` tokens."""
    prompt, segments = tokens - array_sizes.following, array_sizes.following // layout.window
    high = salient(layout, prompt)
    # A tier has a slot at the least, also if no token is ever in it.
    first, second = max(high, 1), max(prompt - high, 1)
    return first + segments * regions(layout, HIGH), second + segments * regions(layout, LOW), layout.window


def count_of(group: "Group") -> int:
    """Returns the segments after the prompt that there is room for."""
    layout = group.storage.layout
    assert isinstance(layout, Segments) and group.array_sizes is not None
    return group.array_sizes.following // layout.window


def prompt_slots(group: "Group", tier: int) -> int:
    """Returns the slots of a tier that are those of the prompt."""
    assert isinstance(group.storage.layout, Segments)
    return group.slots[tier] - count_of(group) * regions(group.storage.layout, tier)


def resized(layer: LayerKV, after: "Group") -> tuple[Store, ...]:
    """Returns the stores with room for more segments after the prompt."""
    segments, stores = count_of(after), list[Store]()
    for tier, store in enumerate(layer.stores[:WINDOW]):
        later = {name: pad(part, segments) for name, part in later_parts(store).items()}
        value = {name: pad(part, after.slots[tier]) for name, part in store["value"].items()}
        stores.append({"key": {**store["key"], **later}, "value": value})
    return *stores, layer.stores[WINDOW]


def storage_of(storage: Storage, tier: int) -> Storage:
    """Returns the storage whose codecs hold a tier."""
    assert isinstance(storage.layout, Segments)
    return storage.layout.high if tier == HIGH else storage


def empty(group: "Group", shape: tuple[int, int], dim: int, dtype: DTypeLike) -> tuple[Store, ...]:
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
        key = {name: jnp.zeros((*shape, segments, *each), kind) for name, (each, kind) in _parts(own, size, dim, dtype)}
        first = count - segments * size
        key |= {
            OF_PROMPT + name: jnp.zeros((*shape, *each), kind) for name, (each, kind) in _parts(own, first, dim, dtype)
        }
        parts = value_of(own).parts(dim, dtype).items()
        value = {name: jnp.zeros((*shape, count, *each), kind) for name, (each, kind) in parts}
        made.append({"key": key, "value": value})
    window = jnp.zeros((*shape, group.slots[WINDOW], dim), dtype)
    return *made, {"key": {"exact": window}, "value": {"exact": window}}


def _parts(storage: Storage, tokens: int, dim: int, dtype: DTypeLike) -> PyTree:
    assert isinstance(storage.key, BlockCodec)
    return storage.key.parts(tokens, dim, dtype).items()


def value_of(storage: Storage) -> Codec:
    """Returns the codec of the values of a tier."""
    assert isinstance(storage.value, Codec)
    return storage.value


def later_parts(store: Store) -> dict[str, Array]:
    """Returns the parts of a tier's keys of the segments after the prompt."""
    return {name: part for name, part in store["key"].items() if not name.startswith(OF_PROMPT)}


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
        name.removeprefix(OF_PROMPT): part
        for name, part in store[side].items() if name not in later
    }  # fmt: skip
    segments = next(iter(later.values())).shape[2]
    assert isinstance(own.key, BlockCodec)
    pieces = [own.key.decode(prompt, None, count - segments * size, layer.dim)]
    if segments and size:
        x = own.key.decode(later, None, size, layer.dim)
        pieces.append(x.reshape(*x.shape[:2], segments * size, layer.dim))
    return within(jnp.concatenate(pieces, axis=2), dtype)
