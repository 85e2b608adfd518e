"""Blocks of consecutive tokens, encoded when they are full, and the residual: the newest tokens, which stay exact.

A step or the end of a prompt writes its tokens exactly, and encodes the blocks that are full (`_tokens_to_encode`). The
arrays are those of `block_arrays`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.arrangements import block_arrays
from kvjax.cache.arrangements.base import Arrangement, PromptSlots, StepTokens, merges
from kvjax.cache.arrangements.block_arrays import (
    EXACT,
    OF_PROMPT,
    PROMPT,
    SHARED,
    parts_of,
    prompt_blocks,
    room,
    slots_of_exact,
    unit_of,
)
from kvjax.cache.arrangements.single_slots import SlotArrangement
from kvjax.cache.slots import after_reading, constrain, empty_stats, forget, oldest_first, slots_of, take, write
from kvjax.cache.state import EMPTY, FAR, LayerKV, PerSlot, Store
from kvjax.errors import StorageError
from kvjax.storage import dense
from kvjax.storage.base import Parts, Storage
from kvjax.storage.block_codec import BlockCodec, SegmentCodec
from kvjax.storage.side import Sides
from kvjax.storage.store import aligned
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.cache.groups import Group
    from kvjax.cache.planning.head_groups import Branch
    from kvjax.cache.planning.limits import Sizes
    from kvjax.cache.spec import CacheSpec

Array = jax.Array
T = TypeVar("T")


BEYOND = FAR - 1  # above every slot; see `after_reading`


class Others(NamedTuple):
    """Counts of the slots of all devices, where slots are divided; numbers count from the first slot of one.

    Attributes:
      held: [B, K, 1] int32, the number of tokens before the step.
      old: [B, K, 1] int32, the number of tokens that are no longer in the residual after it.
    """

    held: Array
    old: Array


class BlockArrangement(Arrangement):
    """The arrangement of `kvjax.storage.layouts.Blocks`."""

    in_order = True

    def refuses(self, spec: "CacheSpec", branch: "Branch", sizes: "Sizes", layers: int) -> str | None:
        if reason := refuses_changes(branch):
            return reason
        if sizes.block is not None and spec.storage.of_prompt:
            return "the blocks of a prompt are encoded together when it ends; leave out prefill_block."
        return None

    def prompt_storage(self, storage: Storage, *, compressed: bool, in_blocks: bool) -> Storage:
        # Blocks are of the tokens that survive the prompt, which are known at its end; until then all are exact.
        return dense() if compressed and in_blocks else storage

    def refuses_devices(self, group: "Group") -> str | None:
        storage = group.storage
        # While a policy evicts, tokens of blocks are held one by one, or all of them.
        if group.policy.budget is not None or not group.selection.reads_all:
            return f"storage {storage.label} holds a token in a block, and slots are evicted or chosen"
        if storage.of_prompt:
            return f"storage {storage.label} holds the blocks of a prompt in another form than later ones"
        return None

    def slots_over_devices(self, group: "Group", parts: int) -> tuple[int, ...]:
        return (block_arrays.over_devices(group, parts),)

    def empty(
        self, group: "Group", shape: tuple[int, int], dim: int, dtype: DTypeLike
    ) -> tuple[tuple[Store, ...], dict[str, Array]]:
        store, marks = block_arrays.empty(group, shape, dim, dtype)
        return (store,), marks

    def decoded(
        self, storage: Storage, layer: LayerKV, number: int, side: str, dtype: DTypeLike, sides: Sides
    ) -> Array | None:
        return block_arrays.decode(storage, layer, side, dtype, sides)

    def read(self, storage: Storage, layer: LayerKV, sides: Sides, lower: LayerKV | None) -> tuple[Array, Array, Array]:
        single = SlotArrangement()
        if layer.is_exact:
            # No block is ever full.
            return single.read(dense(), layer, sides, lower)
        if not layer.in_blocks:
            return single.read(storage.by_age() or storage, layer, sides, lower)
        for side in storage.codecs:
            names = {name for name in layer.stores[0][side] if not name.startswith((OF_PROMPT, SHARED))}
            if names != {*parts_of(storage, side, layer.dim, "float32"), EXACT}:
                raise StorageError(f"the layer is not held as {storage!r}; give the storage that it was made with.")
        sides = {**sides, **layer.sides}
        key, value = (block_arrays.decode(storage, layer, side, jnp.float32, sides) for side in storage.codecs)
        return key, value, layer.position

    def resized(self, layer: LayerKV, before: "Group", after: "Group") -> tuple[Store, ...]:
        return (block_arrays.resized(layer, after),)

    def write(self, step: StepTokens) -> tuple[LayerKV, PerSlot]:
        return write_tokens(step)

    def convert(self, prompt: PromptSlots) -> tuple[LayerKV, PerSlot]:
        if prompt.in_place:
            # Both phases have arrays of the same sizes, since nothing was evicted.
            return prompt.layer, prompt.per_slot
        return _convert(prompt.layer, prompt.group, prompt.per_slot, prompt.length - 1, prompt.sides)


def refuses_changes(branch: "Branch") -> str | None:
    """Returns why tokens that are encoded together do not go with a policy that changes or evicts them, or None."""
    if merges(branch):
        return "a merge changes tokens that are encoded in blocks; use a policy without a merge, or a storage of slots."
    if branch.decode.budget is not None:
        return (
            "it evicts tokens of blocks that were encoded together while decoding; use full, a prompt compressor such "
            "as snapkv, or a storage of slots such as int4."
        )
    return None


def write_tokens(step: StepTokens, others: Others | None = None) -> tuple[LayerKV, PerSlot]:
    """Writes a step's own tokens and encodes what is due.

    Args:
      step: of slots that are divided over devices those of one device, which is also where the numbers of `others` and
        of `LayerKV.marks` count from; they are below 0 where they are on another device.
      others: what is known of all slots, if they are divided; None = these are all slots.
    """
    layer, key, value, position, _, per_slot, newest, group, sides = step
    if others is None:
        key, value, position, per_slot = constrain((key, value, position, per_slot))
    size, n = layer.position.shape[2], key.shape[2]
    own = position[:, :, size:]
    # [B, K, 1]
    held = jnp.sum(position[:, :, :size] >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    held = held if others is None else others.held
    count = jnp.sum(own >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    # [B, K, n]: the slot of each token; out of bounds, where writes are dropped, for padding
    end = size if others is None else BEYOND
    at = jnp.where(own >= 0, held + jnp.arange(n, dtype=jnp.int32), end)
    # An index below 0 is out of bounds too.
    here = at if others is None else jnp.where(at < 0, size, at)
    position = write(position[:, :, :size], here, own)
    per_slot = jax.tree.map(lambda leaf: write(leaf[:, :, :size], here, leaf[:, :, size:]), per_slot)
    store, marks = {}, {}
    for side, x in (("key", key), ("value", value)):
        mark = layer.marks[side][..., None]
        if others is None or isinstance(group.storage.codecs[side], BlockCodec):
            coded = _tokens_to_encode(group.storage, side, position, held + count, newest, mark)
        else:
            coded = jnp.where((newest >= 0)[:, None, None], others.old, mark)
        first = layer.marks[PROMPT][..., None] if PROMPT in layer.marks else 0
        store[side] = _flushed(group.storage, side, layer.stores[0][side], x, held, at, mark, coded, end, first, sides)
        marks[side] = coded[..., 0]
    return layer.replace(position=position, stores=(store,), marks=layer.marks | marks), per_slot


def _tokens_to_encode(storage: Storage, side: str, position: Array, held: Array, newest: Array, mark: Array) -> Array:
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
    end: int,
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
      at: [B, K, n] int32, the slots of the step's own tokens; `end` for padding.
      mark: [B, K, 1] int32.
      coded: [B, K, 1] int32.
      end: a number that is above that of every token's slot.
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
        maximum = (unit - 1 + n) // unit
        # [B, K, most]
        number = mark // unit + jnp.arange(maximum, dtype=jnp.int32)
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
                tokens = tokens.reshape(*tokens.shape[:2], maximum, unit, -1)
            shared = aligned(storage, sides, side, tokens.ndim)
            return codec.encode(tokens.astype(jnp.float32), shared, old.dtype), read

        # Most steps complete no block.
        new, read = encode(old, x) if unit == 1 else _if_any(due, encode, old, x)
        # XLA would copy the exact tokens if it could write the new ones before it has read those that are due.
        at = after_reading(at, read)
        target = jnp.where(due & (number >= 0), number - first // unit, units)
        others = {name: write(part, target, new[name]) for name, part in others.items()}
    if entries:
        stays = (at >= coded) & (at < end)
        old = write(old, jnp.where(stays, at % entries, entries), x)
    return {**parts, **others, EXACT: old}


def _gather(x: Array, index: Array) -> Array:
    """Gathers vectors of x [B, K, S, D] at [B, K, n]."""
    return jnp.take_along_axis(x, index[..., None], axis=2)


def _if_any(due: Array, function: Callable[..., T], *operands: Array) -> T:
    """Calls a function if any row has something due; otherwise returns zeros."""
    shapes = jax.eval_shape(function, *operands)

    def nothing(*_: Array) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    made: T = jax.lax.cond(jnp.any(due), function, nothing, *operands)
    return made


def _convert(layer: LayerKV, after: "Group", per_slot: PerSlot, newest: Array, sides: Sides) -> tuple[LayerKV, PerSlot]:
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
    assert after.array_sizes is not None
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
        units, entries = room(storage, side, size, after.array_sizes, after.slot_parts)
        coded = _tokens_to_encode(storage, side, position, held, newest, jnp.zeros_like(held))
        codec, unit = storage.codecs[side], unit_of(storage, side)
        if isinstance(codec, BlockCodec) and codec.prompt is not None:
            marks[PROMPT] = coded[..., 0]
            blocks = prompt_blocks(after)
            empty_units = _encoded(storage, side, x[:, :, :0], units, sides)
            parts = {**empty_units, **_encoded_prompt(codec.prompt, x, coded // unit, blocks, unit)}
        else:
            parts = _encoded(storage, side, x, units, sides)
        exact = x[:, :, :0]
        if entries:
            exact = _gather(x, jnp.minimum(slots_of_exact(coded[..., 0], entries), x.shape[2] - 1))
        store[side] = {**parts, EXACT: exact}
        marks[side] = coded[..., 0]
    per_slot = forget(moved, position)
    empty = empty_stats(after.needs, after.remembers, slots_of(position))
    stats = {name: per_slot.stats.get(name, new) for name, new in empty.items()}
    layer = layer.replace(position=position, stores=(store,), marks=marks)
    return layer, per_slot.replace(stats=stats)


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
