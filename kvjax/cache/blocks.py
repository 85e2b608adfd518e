"""Blocks: keys or values of consecutive tokens that are encoded together, and the exact ones that wait to be encoded.

Slot i of a head holds its i-th token in order of position, since nothing is evicted while decoding. A head has encoded
its first tokens, as many as `LayerKV.marks` says; those after them are exact, token i in entry i mod E of an array of
E entries. How many are encoded may differ between keys and values and between rows.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.layout import Extent, Group
from kvjax.cache.slots import after_reading, constrain, empty_stats, forget, oldest_first, slots_of, take, write
from kvjax.cache.state import EMPTY, LayerKV, PerSlot, Store
from kvjax.storage.base import Parts, Shapes, Storage
from kvjax.storage.layouts import BlockCodec, Blocks, SegmentCodec
from kvjax.storage.side import Sides
from kvjax.storage.store import aligned, warn_if_larger

Array = jax.Array
T = TypeVar("T")
Marks = dict[str, Array]  # ``key`` and ``value`` -> [B, K] int32 tokens that are encoded

EXACT = "exact"  # the part of the tokens that are not encoded
PROMPT = "prompt"  # the mark of the tokens in blocks of the prompt, where these are held in another form
#: Prefixes of the parts of a prompt's blocks, and of what these share.
OF_PROMPT, SHARED = "prompt_", "shared_"


def unit_of(storage: Storage, side: str) -> int:
    """Returns the number of tokens that are encoded together."""
    assert isinstance(storage.layout, Blocks)
    return storage.layout.size if isinstance(storage.codecs[side], BlockCodec) else 1


def room(storage: Storage, side: str, slots: int, extent: Extent) -> tuple[int, int]:
    """Returns the number of units of tokens that can be encoded, and the number of exact tokens.

    Args:
      storage: how keys and values are held.
      side: ``key`` or ``value``.
      slots: the most tokens of a head.
      extent: what arrays are sized for.
    """
    unit = unit_of(storage, side)
    codec = storage.codecs[side]
    if isinstance(codec, BlockCodec) and codec.prompt is not None:
        # How many blocks are filled after a prompt depends on where it ends in a block.
        longest = slots - extent.following
        ends = range(max(extent.shortest, longest - unit + 1), longest + 1)
        return max((end + extent.following) // unit - end // unit for end in ends), min(unit, slots)
    if isinstance(codec, BlockCodec):
        return slots // unit, min(unit, slots)
    # A compressor may drop the newest tokens of the prompt, so that all that it leaves is encoded.
    least = slots - extent.following if extent.compressed else 0
    return max(slots - storage.residual, least, 0), min(storage.residual, slots)


def empty(group: Group, shape: tuple[int, int], dim: int, dtype: DTypeLike) -> tuple[Store, Marks]:
    """Makes the arrays of a group of heads whose storage has the layout `Blocks`: zeros.

    Args:
      group: of heads.
      shape: (B, K).
      dim: features of a head.
      dtype: the model's dtype.
    """
    storage, made = group.storage, dict[str, Parts]()
    warn_if_larger(storage, dim, dtype)
    assert group.extent is not None
    for side, codec in storage.codecs.items():
        units, exact = room(storage, side, group.capacity, group.extent)
        parts = parts_of(storage, side, dim, dtype)
        coded = {name: jnp.zeros((*shape, units, *own), each) for name, (own, each) in parts.items()}
        if isinstance(codec, BlockCodec) and codec.prompt is not None:
            size = unit_of(storage, side)
            blocks = (group.capacity - group.extent.following) // size
            coded |= {
                OF_PROMPT + name: jnp.zeros((*shape, blocks, *own), each)
                for name, (own, each) in codec.prompt.parts(size, dim, dtype).items()
            } | {
                SHARED + name: jnp.zeros((*shape, *own), each)
                for name, (own, each) in codec.prompt.shared(dim, dtype).items()
            }
        made[side] = {**coded, EXACT: jnp.zeros((*shape, exact, dim), dtype)}
    return made, {name: jnp.zeros(shape, jnp.int32) for name in (*made, *_prompt_mark(storage))}


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
        whole = _from_prompt(codec.prompt, all_parts, unit, whole)
    if units:
        sizes = (unit, layer.dim) if isinstance(codec, BlockCodec) else (layer.dim,)
        shared = aligned(storage, sides, side, 3 + len(sizes))
        # [B, K, N, D]
        coded = codec.decode(parts, shared, *sizes).reshape(*exact.shape[:2], units * unit, layer.dim).astype(dtype)
        if PROMPT in layer.marks:
            # Blocks after the prompt; what is not encoded yet lies in slots beyond.
            at = layer.marks[PROMPT][..., None] + jnp.arange(units * unit, dtype=jnp.int32)
            whole = write(whole, at, coded)
        else:
            # [B, K, S, D]
            whole = jnp.pad(coded, ((0, 0), (0, 0), (0, slots - units * unit), (0, 0)))
    if exact.shape[2] == 0:
        return whole
    # Slots beyond the last are dropped.
    return write(whole, _slots_of_exact(layer.marks[side], exact.shape[2]), exact.astype(dtype))


def _from_prompt(codec: SegmentCodec, parts: Parts, unit: int, whole: Array) -> Array:
    """Writes what the blocks of the prompt decode to into the first slots of [B, K, S, D]."""
    own, shared = (
        {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
        for prefix in (OF_PROMPT, SHARED)
    )
    blocks = next(iter(own.values())).shape[2]
    if not blocks:
        return whole
    *shape, slots, dim = whole.shape
    coded = codec.decode(own, shared, unit, dim).reshape(*shape, blocks * unit, dim).astype(whole.dtype)
    return jnp.pad(coded, ((0, 0), (0, 0), (0, slots - blocks * unit), (0, 0)))


def _slots_of_exact(mark: Array, size: int) -> Array:
    """Returns the slot whose token each of `size` exact entries holds, [B, K, size], for marks [B, K]."""
    mark = mark[..., None]
    return mark + (jnp.arange(size, dtype=jnp.int32) - mark) % size


def settle(
    layer: LayerKV,
    key: Array,
    value: Array,
    position: Array,
    per_slot: PerSlot,
    newest: Array,
    group: Group,
    sides: Sides,
) -> tuple[LayerKV, PerSlot]:
    """Writes a step's own tokens and encodes what is due; see `kvjax.cache.settle.settle`."""
    key, value, position, per_slot = constrain((key, value, position, per_slot))
    size, n = layer.position.shape[2], key.shape[2]
    own = position[:, :, size:]
    # [B, K, 1]
    held = jnp.sum(position[:, :, :size] >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    count = jnp.sum(own >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    # [B, K, n]: the slot of each token; out of bounds, where writes are dropped, for padding
    at = jnp.where(own >= 0, held + jnp.arange(n, dtype=jnp.int32), size)
    position = write(position[:, :, :size], at, own)
    per_slot = jax.tree.map(lambda leaf: write(leaf[:, :, :size], at, leaf[:, :, size:]), per_slot)
    store, marks = {}, {}
    for side, x in (("key", key), ("value", value)):
        mark = layer.marks[side][..., None]
        coded = _coded(group.storage, side, position, held + count, newest, mark)
        first = layer.marks[PROMPT][..., None] if PROMPT in layer.marks else 0
        store[side] = _flushed(group.storage, side, layer.stores[0][side], x, held, at, mark, coded, size, first, sides)
        marks[side] = coded[..., 0]
    return layer.replace(position=position, stores=(store,), marks=layer.marks | marks), per_slot


def _coded(storage: Storage, side: str, position: Array, held: Array, newest: Array, mark: Array) -> Array:
    """Returns the number of tokens that are to be encoded, [B, K, 1] int32.

    Args:
      storage: how keys and values are held.
      side: ``key`` or ``value``.
      position: [B, K, S] int32, the step's own tokens included.
      held: [B, K, 1] int32, the number of live slots.
      newest: [B] int32, -1 for a row without a token, of which nothing is due.
      mark: [B, K, 1] int32, the number of tokens that are encoded.
    """
    if isinstance(storage.codecs[side], BlockCodec):
        unit = unit_of(storage, side)
        return held // unit * unit
    newest = newest[:, None, None]
    old = (position >= 0) & (position <= newest - storage.residual)
    return jnp.where(newest >= 0, jnp.sum(old, axis=2, keepdims=True, dtype=jnp.int32), mark)


def _flushed(
    storage: Storage,
    side: str,
    parts: Parts,
    x: Array,
    held: Array,
    at: Array,
    mark: Array,
    coded: Array,
    size: int,
    first: Array | int,
    sides: Sides,
) -> Parts:
    """Encodes the tokens from `mark` to before `coded`, and writes the step's own that stay exact.

    Args:
      storage: how keys and values are held.
      side: ``key`` or ``value``.
      parts: of the layer.
      x: [B, K, n, D] of the step's own tokens.
      held: [B, K, 1] int32, the number of live slots before the step.
      at: [B, K, n] int32, the slots of the step's own tokens; `size` for padding.
      mark: [B, K, 1] int32.
      coded: [B, K, 1] int32.
      size: the number of slots.
      first: [B, K, 1] int32 tokens in blocks of the prompt that are held apart, or 0.
      sides: what vectors share.
    """
    unit, codec = unit_of(storage, side), storage.codecs[side]
    old = parts[EXACT]
    others = {name: parts[name] for name in parts_of(storage, side, old.shape[3], old.dtype)}
    entries, n = old.shape[2], x.shape[2]
    x = x.astype(old.dtype)
    units = next(iter(others.values())).shape[2]
    if units:
        # The most units that a step completes; before it, less than one is exact, or `residual` tokens.
        most = (unit - 1 + n) // unit
        # [B, K, most]
        number = mark // unit + jnp.arange(most, dtype=jnp.int32)
        due = (number + 1) * unit <= coded

        def encode(old: Array, x: Array) -> tuple[Parts, Array]:
            """Returns the parts, and one number of each KV head that was read [B, K, 1]."""
            # [B, K, most * unit]: their slots
            slots = number[..., None] * unit + jnp.arange(unit, dtype=jnp.int32)
            slots = slots.reshape(*slots.shape[:2], -1)
            # [B, K, most * unit, D]
            tokens = _gather(x, jnp.clip(slots - held, 0, n - 1))
            if entries:
                tokens = jnp.where((slots < held)[..., None], _gather(old, slots % entries), tokens)
            read = tokens[:, :, :1, 0].astype(jnp.float32)
            if isinstance(codec, BlockCodec):
                tokens = tokens.reshape(*tokens.shape[:2], most, unit, -1)
            shared = aligned(storage, sides, side, tokens.ndim)
            return codec.encode(tokens.astype(jnp.float32), shared, old.dtype), read

        # Most steps complete no block.
        new, read = encode(old, x) if unit == 1 else _if_any(due, encode, old, x)
        # XLA would copy the exact tokens if it could write the new ones before it has read those that are due.
        at = after_reading(at, read)
        target = jnp.where(due, number - first // unit, units)
        others = {name: write(part, target, new[name]) for name, part in others.items()}
    if entries:
        stays = (at >= coded) & (at < size)
        old = write(old, jnp.where(stays, at % entries, entries), x)
    return {**parts, **others, EXACT: old}


def _gather(x: Array, index: Array) -> Array:
    """Gathers vectors of x [B, K, S, D] at [B, K, n]."""
    return jnp.take_along_axis(x, index[..., None], axis=2)


def _if_any(due: Array, function: Callable[..., T], *operands: Array) -> T:
    """Calls a function if any row has something due; otherwise returns zeros."""
    shapes = jax.eval_shape(function, *operands)

    def nothing(*_: Array) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    made: T = jax.lax.cond(jnp.any(due), function, nothing, *operands)
    return made


def convert(layer: LayerKV, after: Group, per_slot: PerSlot, newest: Array, sides: Sides) -> tuple[LayerKV, PerSlot]:
    """Moves a dense layer into blocks when its prompt ends.

    Args:
      layer: the slots at the end of the prompt, exact.
      after: the group of the decoding phase.
      per_slot: of the layer's slots.
      newest: [B] int32 the prompt's last position.
      sides: what vectors share.

    Returns:
      The layer with its positions, stores and marks; and `per_slot` for its slots.
    """
    storage, size = after.storage, after.capacity
    assert after.extent is not None
    live = layer.position >= 0
    # [B, K, W]
    order = oldest_first(layer.position, live, size)
    position = take(jnp.where(live, layer.position, EMPTY), order, size, EMPTY)
    moved = jax.tree.map(lambda leaf: take(leaf, order, size), per_slot)
    # [B, K, 1]
    held = jnp.sum(live, axis=2, keepdims=True, dtype=jnp.int32)
    store, marks = {}, {}
    parts: Parts
    for side in storage.codecs:
        # [B, K, W, D]
        x = take(layer.stores[0][side][EXACT], order, order.shape[2])
        units, entries = room(storage, side, size, after.extent)
        coded = _coded(storage, side, position, held, newest, jnp.zeros_like(held))
        codec, unit = storage.codecs[side], unit_of(storage, side)
        if isinstance(codec, BlockCodec) and codec.prompt is not None:
            marks[PROMPT] = coded[..., 0]
            blocks = (size - after.extent.following) // unit
            empty_units = _encoded(storage, side, x[:, :, :0], units, sides)
            parts = {**empty_units, **_encoded_prompt(codec.prompt, x, coded // unit, blocks, unit)}
        else:
            parts = _encoded(storage, side, x, units, sides)
        exact = x[:, :, :0]
        if entries:
            exact = _gather(x, jnp.minimum(_slots_of_exact(coded[..., 0], entries), x.shape[2] - 1))
        store[side] = {**parts, EXACT: exact}
        marks[side] = coded[..., 0]
    per_slot = forget(moved, position)
    fresh = empty_stats(after.needs, after.policy.remembers, slots_of(position))
    stats = {name: per_slot.stats.get(name, new) for name, new in fresh.items()}
    return layer.replace(position=position, stores=(store,), marks=marks), per_slot.replace(stats=stats)


def _encoded_prompt(codec: SegmentCodec, x: Array, filled: Array, blocks: int, unit: int) -> Parts:
    """Encodes the first tokens of x [B, K, W, D] as the blocks of a prompt, `filled` [B, K, 1] of which are full."""
    batch, kv_heads, width, dim = x.shape
    if not blocks:
        parts = {OF_PROMPT + name: spec for name, spec in codec.parts(unit, dim, x.dtype).items()}
        own = {name: jnp.zeros((batch, kv_heads, 0, *shape), each) for name, (shape, each) in parts.items()}
        shared = {SHARED + name: spec for name, spec in codec.shared(dim, x.dtype).items()}
        return own | {name: jnp.zeros((batch, kv_heads, *shape), each) for name, (shape, each) in shared.items()}
    whole = jnp.pad(x, ((0, 0), (0, 0), (0, max(blocks * unit - width, 0)), (0, 0)))[:, :, : blocks * unit]
    live = jnp.arange(blocks, dtype=jnp.int32) < filled
    given = whole.reshape(batch, kv_heads, blocks, unit, dim).astype(jnp.float32)
    # What is not full is not encoded yet.
    made, also = codec.encode(jnp.where(live[..., None, None], given, 0.0), live, x.dtype)
    own = {OF_PROMPT + name: part for name, part in made.items()}
    return own | {SHARED + name: part for name, part in also.items()}


def _encoded(storage: Storage, side: str, x: Array, units: int, sides: Sides) -> Parts:
    """Encodes all units that x [B, K, W, D] fills, and pads the result to `units`.

    Those that are not due are encoded too; they are written again when they are.
    """
    unit, codec = unit_of(storage, side), storage.codecs[side]
    batch, kv_heads, width, dim = x.shape
    filled = min(units, width // unit)
    # A unit of zeros where there is none: codecs need not take arrays of size 0.
    given = x[:, :, : filled * unit] if filled else jnp.zeros((batch, kv_heads, unit, dim), x.dtype)
    if isinstance(codec, BlockCodec):
        given = given.reshape(batch, kv_heads, -1, unit, dim)
    made = codec.encode(given.astype(jnp.float32), aligned(storage, sides, side, given.ndim), x.dtype)
    pad = ((0, 0), (0, 0), (0, max(units - filled, 0)))
    return {name: jnp.pad(part[:, :, :filled], (*pad, *((0, 0),) * (part.ndim - 3))) for name, part in made.items()}
