"""Blocks: keys or values of consecutive tokens that are encoded together, and the exact ones that wait to be encoded.

Slot i of a head holds its i-th token in order of position, since nothing is evicted while decoding. A head has encoded
its first tokens, as many as `LayerKV.marks` says; those after them are exact, token i in entry i mod E of an array of
E entries. How many are encoded may differ between keys and values and between rows.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.slots import write
from kvjax.cache.state import LayerKV, Store
from kvjax.parallel.host_memory import gather, pad
from kvjax.storage.base import Parts, Shapes, Storage
from kvjax.storage.block_codec import BlockCodec, SegmentCodec
from kvjax.storage.layouts import Blocks
from kvjax.storage.rounding import within
from kvjax.storage.side import Sides
from kvjax.storage.store import aligned, warn_if_larger

if TYPE_CHECKING:
    from kvjax.cache.groups import ArraySizes, Group

Array = jax.Array
Marks = dict[str, Array]  # ``key`` and ``value`` -> [B, K] int32 tokens that are encoded

EXACT = "exact"  # the part of the tokens that are not encoded
PROMPT = "prompt"  # the mark of the tokens in blocks of the prompt, where these are held in another form
OF_PROMPT, SHARED = "prompt_", "shared_"  # prefixes of the parts of a prompt's blocks, and of what these share


def unit_of(storage: Storage, side: str) -> int:
    """Returns the number of tokens that are encoded together."""
    assert isinstance(storage.layout, Blocks)
    return storage.layout.size if isinstance(storage.codecs[side], BlockCodec) else 1


def room(storage: Storage, side: str, slots: int, array_sizes: "ArraySizes", parts: int = 1) -> tuple[int, int]:
    """Returns the number of units of tokens that can be encoded, and the number of exact tokens.

    Args:
      storage: how keys and values are held.
      side: ``key`` or ``value``.
      slots: the most tokens of a head.
      array_sizes: what arrays are sized for.
      parts: the number of devices that slots are divided over. A coded unit is where its slots are, and every slot may
        be coded.
    """
    unit = unit_of(storage, side)
    codec = storage.codecs[side]
    if isinstance(codec, BlockCodec) and codec.prompt is not None:
        # How many blocks are filled after a prompt depends on where it ends in a block.
        longest = slots - array_sizes.following
        ends = range(max(array_sizes.shortest, longest - unit + 1), longest + 1)
        return max((end + array_sizes.following) // unit - end // unit for end in ends), min(unit, slots)
    if isinstance(codec, BlockCodec):
        return slots // unit, min(unit, slots)
    if parts > 1:
        return slots, min(storage.residual, slots)
    # A compressor may drop the newest tokens of the prompt, so that all that it leaves is encoded.
    minimum = slots - array_sizes.following if array_sizes.compressed else 0
    return max(slots - storage.residual, minimum, 0), min(storage.residual, slots)


def prompt_blocks(group: "Group") -> int:
    """Returns the number of blocks of a prompt, where these are held in another form."""
    assert group.array_sizes is not None
    return (group.capacity - group.array_sizes.following) // unit_of(group.storage, "key")


def over_devices(group: "Group", parts: int) -> int:
    """Returns the slots of a group on `parts` devices, each of which has as many blocks."""
    each = parts * multiple(group.storage)
    return -(-group.capacity // each) * each


def multiple(storage: Storage) -> int:
    """Returns what divides the slots of a device, so that no block and no round of exact entries is on two devices."""
    exact = [
        unit_of(storage, side) if isinstance(codec, BlockCodec) else storage.residual
        for side, codec in storage.codecs.items()
    ]
    return math.lcm(*(max(each, 1) for each in exact))


def empty(group: "Group", shape: tuple[int, int], dim: int, dtype: DTypeLike) -> tuple[Store, Marks]:
    """Makes the arrays of a group of heads whose storage has the layout `Blocks`: zeros.

    Args:
      group: of heads.
      shape: (B, K).
      dim: features of a head.
      dtype: the model's dtype.
    """
    storage, made = group.storage, dict[str, Parts]()
    warn_if_larger(storage, dim, dtype)
    assert group.array_sizes is not None
    for side, codec in storage.codecs.items():
        units, exact = room(storage, side, group.capacity, group.array_sizes, group.slot_parts)
        parts = parts_of(storage, side, dim, dtype)
        coded = {name: jnp.zeros((*shape, units, *own), each) for name, (own, each) in parts.items()}
        if isinstance(codec, BlockCodec) and codec.prompt is not None:
            size = unit_of(storage, side)
            blocks = prompt_blocks(group)
            coded |= {
                OF_PROMPT + name: jnp.zeros((*shape, blocks, *own), each)
                for name, (own, each) in codec.prompt.parts(size, dim, dtype).items()
            } | {
                SHARED + name: jnp.zeros((*shape, *own), each)
                for name, (own, each) in codec.prompt.shared(dim, dtype).items()
            }
        made[side] = {**coded, EXACT: jnp.zeros((*shape, exact, dim), dtype)}
    return made, {name: jnp.zeros(shape, jnp.int32) for name in (*made, *_prompt_mark(storage))}


def resized(layer: LayerKV, after: "Group") -> Store:
    """Returns the store of a layer with room for as many tokens as `after` has."""
    storage, made = after.storage, dict[str, Parts]()
    assert after.array_sizes is not None
    for side, parts in layer.stores[0].items():
        units, entries = room(storage, side, after.capacity, after.array_sizes, after.slot_parts)
        blocks = prompt_blocks(after) if any(name.startswith(OF_PROMPT) for name in parts) else 0
        coded = {
            name: part if name.startswith(SHARED) else pad(part, blocks if name.startswith(OF_PROMPT) else units)
            for name, part in parts.items()
            if name != EXACT
        }
        exact, before = parts[EXACT], parts[EXACT].shape[2]
        if before and before != entries:
            # Each token goes to its entry of more.
            exact = gather(exact, slots_of_exact(layer.marks[side], entries) % before)
        made[side] = {**coded, EXACT: pad(exact, entries)}
    return made


def _prompt_mark(storage: Storage) -> tuple[str, ...]:
    """Returns the name of the mark of tokens in blocks of the prompt, if these are held in another form."""
    of_prompt = (codec.prompt for codec in storage.codecs.values() if isinstance(codec, BlockCodec))
    return (PROMPT,) if any(each is not None for each in of_prompt) else ()


def parts_of(storage: Storage, side: str, dim: int, dtype: DTypeLike) -> Shapes:
    """Returns the parts of the tokens that are encoded together after the prompt: name -> (shape, dtype)."""
    codec = storage.codecs[side]
    if isinstance(codec, BlockCodec):
        return codec.parts(unit_of(storage, side), dim, dtype)
    return codec.parts(dim, dtype)


def decode(storage: Storage, layer: LayerKV, side: str, dtype: DTypeLike, sides: Sides) -> Array:
    """Decodes the keys or the values of all slots, [B, K, S, D].

    Args:
      storage: how they are held.
      layer: the slots.
      side: ``key`` or ``value``.
      dtype: of the result.
      sides: what vectors share.
    """
    all_parts = layer.stores[0][side]
    parts = {name: all_parts[name] for name in parts_of(storage, side, layer.dim, dtype)}
    exact, codec, unit = all_parts[EXACT], storage.codecs[side], unit_of(storage, side)
    slots, units = layer.position.shape[2], next(iter(parts.values())).shape[2]
    # [B, K, S, D]
    whole = jnp.zeros((*layer.position.shape, layer.dim), dtype)
    if isinstance(codec, BlockCodec) and codec.prompt is not None:
        whole = from_prompt(codec.prompt, all_parts, unit, whole)
    if units:
        sizes = (unit, layer.dim) if isinstance(codec, BlockCodec) else (layer.dim,)
        shared = aligned(storage, sides, side, 3 + len(sizes))
        # [B, K, N, D]
        coded = codec.decode(parts, shared, *sizes).reshape(*exact.shape[:2], units * unit, layer.dim)
        coded = within(coded, dtype)
        if PROMPT in layer.marks:
            # Blocks after the prompt; what is not encoded yet lies in slots beyond.
            at = layer.marks[PROMPT][..., None] + jnp.arange(units * unit, dtype=jnp.int32)
            whole = write(whole, at, coded)
        else:
            # [B, K, S, D]
            whole = jnp.pad(coded, ((0, 0), (0, 0), (0, slots - units * unit), (0, 0)))
    if exact.shape[2] == 0:
        return whole
    # Slots beyond the last are dropped, and so are those of devices before this one.
    at = slots_of_exact(layer.marks[side], exact.shape[2])
    return write(whole, jnp.where(at < 0, slots, at), exact.astype(dtype))


def from_prompt(codec: SegmentCodec, parts: Parts, unit: int, whole: Array) -> Array:
    """Writes what the blocks of the prompt decode to into the first slots of [B, K, S, D]."""
    own, shared = (
        {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
        for prefix in (OF_PROMPT, SHARED)
    )
    blocks = next(iter(own.values())).shape[2] if own else 0
    if not blocks:
        return whole
    *shape, slots, dim = whole.shape
    coded = within(codec.decode(own, shared, unit, dim).reshape(*shape, blocks * unit, dim), whole.dtype)
    return jnp.pad(coded, ((0, 0), (0, 0), (0, slots - blocks * unit), (0, 0)))


def slots_of_exact(mark: Array, size: int) -> Array:
    """Returns the slot whose token each of `size` exact entries holds, [B, K, size], for marks [B, K]."""
    mark = mark[..., None]
    return mark + (jnp.arange(size, dtype=jnp.int32) - mark) % size
