"""Segments: encodes their tokens in two tiers, in a step and when a prompt ends; see `segment_arrays`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.arrangements import segment_arrays
from kvjax.cache.arrangements.base import Arrangement, Counts, PromptSlots, StepTokens, reads_some
from kvjax.cache.arrangements.block_arrays import OF_PROMPT
from kvjax.cache.arrangements.blocks_with_residual import refuses_changes
from kvjax.cache.arrangements.segment_arrays import (
    HIGH,
    LOW,
    WINDOW,
    later_parts,
    regions,
    salient,
    storage_of,
    value_of,
)
from kvjax.cache.slots import constrain, empty_stats, forget, oldest_first, slots_of, take, write
from kvjax.cache.state import EMPTY, LayerKV, PerSlot, Store
from kvjax.errors import StorageError
from kvjax.numerics.top_k import largest
from kvjax.parallel.host_memory import gather
from kvjax.selection.base import Selection
from kvjax.storage import dense
from kvjax.storage.base import Storage
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.layouts import Segments
from kvjax.storage.side import Sides
from kvjax.storage.store import aligned
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.cache.groups import Group
    from kvjax.cache.planning.head_groups import Branch
    from kvjax.cache.planning.limits import Sizes
    from kvjax.cache.spec import CacheSpec

Array = jax.Array
Vectors = Mapping[str, Array]  # ``key`` and ``value`` -> [B, K, n, D]


def _encoded(storage: Storage, exact: Vectors, index: Array, known: Array, sides: Sides) -> tuple[PyTree, PyTree]:
    """Encodes some tokens of a segment as one block of keys, and their values.

    Args:
      storage: of the tier.
      exact: keys and values [B, K, n, D].
      index: [B, K, m] int32, the tokens.
      known: [B, K, m] bool, False beyond the last of them, where the first is repeated: ranges are those of the others.
      sides: what vectors share.
    """
    # [B, K, m]
    index = jnp.where(known, index, index[:, :, :1])
    any_token = known[:, :, :1, None]
    key, value = (jnp.where(any_token, gather(exact[side], index), 0.0) for side in ("key", "value"))
    dtype = exact["value"].dtype
    assert isinstance(storage.key, BlockCodec)
    keys = storage.key.encode(key.astype(jnp.float32), None, dtype)
    return keys, value_of(storage).encode(value.astype(jnp.float32), aligned(storage, sides, "value", 4), dtype)


def _chosen(layout: Segments, stats: Mapping[str, Array], position: Array) -> Array:
    """Marks the tokens [B, K, n] of a segment that go to the high tier: the largest mean attention."""
    count = jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    # Shares are counted on the host, in float64.
    maximum = jnp.asarray([salient(layout, tokens) for tokens in range(position.shape[2] + 1)], jnp.int32)
    score = stats["mass"] / jnp.maximum(stats["count"], 1)
    return (position >= 0) & largest(score, position, maximum[count])


def _first(layer: LayerKV, layout: Segments, tier: int) -> int:
    """Returns the slots of the prompt's region of a tier."""
    store = layer.stores[tier]
    segments = next(iter(later_parts(store).values())).shape[2]
    count: int = jax.tree.leaves(store["value"])[0].shape[2]
    return count - segments * regions(layout, tier)


class SegmentArrangement(Arrangement):
    """The arrangement of `kvjax.storage.layouts.Segments`."""

    def refuses(self, spec: "CacheSpec", branch: "Branch", sizes: "Sizes", layers: int) -> str | None:
        if reason := refuses_changes(branch):
            return reason
        if reads_some(branch.selection):
            return (
                f"selection={branch.selection!r} reads slots of one store, but tokens of a segment are in two; leave "
                "it out, or use a storage of slots or blocks such as int4 or kivi."
            )
        if sizes.block is not None:
            return "a prompt is one segment, which is encoded when it ends; leave out prefill_block."
        return None

    def stores(self, storage: Storage) -> tuple[Storage, ...]:
        return storage_of(storage, HIGH), storage, dense()

    def slots(self, storage: Storage, counts: Counts) -> tuple[int, ...]:
        layout = storage.layout
        assert isinstance(layout, Segments) and counts.array_sizes is not None
        return segment_arrays.slots(layout, counts.slots, counts.array_sizes)

    def unranked_stores(self, selection: Selection) -> int:
        # A selection that hides slots looks at the statistics of all.
        return WINDOW if selection.reads_all else 0

    def refuses_devices(self, group: "Group") -> str | None:
        return f"storage {group.storage.label} moves the tokens of a segment to two tiers when it ends"

    def empty(
        self, group: "Group", shape: tuple[int, int], dim: int, dtype: DTypeLike
    ) -> tuple[tuple[Store, ...], dict[str, Array]]:
        return segment_arrays.empty(group, shape, dim, dtype), {}

    def decoded(
        self, storage: Storage, layer: LayerKV, number: int, side: str, dtype: DTypeLike, sides: Sides
    ) -> Array | None:
        return segment_arrays.decode(storage, layer, number, side, dtype, sides)

    def read(self, storage: Storage, layer: LayerKV, sides: Sides, lower: LayerKV | None) -> tuple[Array, Array, Array]:
        if len(layer.stores) != WINDOW + 1:
            raise StorageError(f"the layer is not held as {storage!r}; give the storage that it was made with.")
        sides = {**sides, **layer.sides}
        key, value = (
            jnp.concatenate(
                [segment_arrays.decode(storage, layer, tier, side, jnp.float32, sides) for tier in range(WINDOW + 1)],
                axis=2,
            )
            for side in ("key", "value")
        )
        return key, value, layer.position

    def refuses_resize(self, before: "Group", after: "Group") -> str | None:
        if all(segment_arrays.prompt_slots(before, tier) == segment_arrays.prompt_slots(after, tier)
               for tier in (HIGH, LOW)):  # fmt: skip
            return None
        return f"storage {after.storage.label} holds a prompt as one block"

    def resized(self, layer: LayerKV, before: "Group", after: "Group") -> tuple[Store, ...]:
        return segment_arrays.resized(layer, after)

    def write(self, step: StepTokens) -> tuple[LayerKV, PerSlot]:
        return _write(step)

    def convert(self, prompt: PromptSlots) -> tuple[LayerKV, PerSlot]:
        layer, group = prompt.layer, prompt.group
        made = segment_arrays.empty(group, slots_of(layer.position)[:2], layer.dim, layer.value.dtype)
        return _convert(layer, group, prompt.per_slot, made, prompt.sides)


def _write(step: StepTokens) -> tuple[LayerKV, PerSlot]:
    """Writes a step's token into the window, and encodes the window of each row in which it is full."""
    layer, key, value, position, _, per_slot, _, group, sides = step
    key, value, position, per_slot = constrain((key, value, position, per_slot))
    layout = group.storage.layout
    assert isinstance(layout, Segments)
    high, low, size = group.slots
    own = position[:, :, -1:]
    window_at = position[:, :, high + low : -1]
    # [B, K, 1]: slots of the window are filled in order
    count = jnp.sum(window_at >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    target = jnp.where(own >= 0, count, size)
    store = layer.stores[WINDOW]
    exact = {
        side: write(store[side]["exact"], target, x.astype(store[side]["exact"].dtype))
        for side, x in (("key", key), ("value", value))
    }
    window_at = write(window_at, target, own)
    # Tiers that are not ranked have no statistics.
    ranked = not group.unranked
    narrow, whole = (per_slot.stats, per_slot.index) if not ranked else ({}, per_slot.stats | per_slot.index)
    narrow = {name: write(leaf[:, :, :-1], target, leaf[:, :, -1:]) for name, leaf in narrow.items()}
    to = jnp.where(own >= 0, high + low + target, high + low + size)
    whole = {name: write(leaf[:, :, :-1], to, leaf[:, :, -1:]) for name, leaf in whole.items()}
    stats = {name: whole[name][:, :, high + low :] if ranked else narrow[name] for name in per_slot.stats}
    due = (own >= 0) & (count + 1 == layout.window)
    tiers_at = [position[:, :, :high], position[:, :, high : high + low]]
    segments = (group.slots[HIGH] - _first(layer, layout, HIGH)) // max(regions(layout, HIGH), 1)
    stores = list(layer.stores[:WINDOW])
    if segments:
        # [B, K, 1]: the number of segments that have ended
        lives = [jnp.sum(at[:, :, _first(layer, layout, tier) :] >= 0, axis=2, keepdims=True, dtype=jnp.int32)
                 for tier, at in enumerate(tiers_at)]  # fmt: skip
        ended = (lives[HIGH] + lives[LOW]) // layout.window
        here = due & (ended < segments)

        def end(exact: Vectors, stats: PyTree, window_at: Array) -> list[PyTree]:
            """Encodes the windows of all rows: per tier the tokens, their block of keys, and their values."""
            up = _chosen(layout, stats, window_at)
            made = list[PyTree]()
            for tier, marks in ((HIGH, up), (LOW, (window_at >= 0) & ~up)):
                order = oldest_first(window_at, marks, regions(layout, tier)).astype(jnp.int32)
                own, known = storage_of(group.storage, tier), jnp.ones(order.shape, bool)
                made.append((order, _encoded(own, exact, order, known, sides)) if order.shape[2] else None)
            return made

        def nothing(*operands: Any) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(end, *operands))

        ends = jax.lax.cond(jnp.any(due), end, nothing, exact, stats, window_at)
        for tier, made in enumerate(ends):
            if made is None:
                continue
            order, (keys, values) = made
            first, each = _first(layer, layout, tier), regions(layout, tier)
            number = jnp.where(here, ended, segments)
            to = jnp.where(here, first + ended * each + jnp.arange(each, dtype=jnp.int32), group.slots[tier])
            old = stores[tier]
            stores[tier] = {
                "key": {
                    **old["key"],
                    **{name: write(old["key"][name], number, new[:, :, None]) for name, new in keys.items()},
                },
                "value": {name: write(part, to, values[name]) for name, part in old["value"].items()},
            }
            tiers_at[tier] = write(tiers_at[tier], to, jnp.take_along_axis(window_at, order, axis=2))
            start = 0 if tier == HIGH else high
            to = jnp.where(here, start + to, high + low + size)
            whole = {name: write(leaf, to, gather(leaf[:, :, high + low :], order)) for name, leaf in whole.items()}
    window_at = jnp.where(due, EMPTY, window_at)
    position = jnp.concatenate([*tiers_at, window_at], axis=2)
    exact_store: Store = {side: {"exact": x} for side, x in exact.items()}
    layer = layer.replace(position=position, stores=(*stores, exact_store))
    narrow = forget(narrow, window_at)
    moved = {name: forget(whole[name], position) if ranked else narrow[name] for name in per_slot.stats}
    return layer, PerSlot(moved, {name: whole[name] for name in per_slot.index})


def _convert(
    layer: LayerKV, after: "Group", per_slot: PerSlot, made: tuple[Store, ...], sides: Sides
) -> tuple[LayerKV, PerSlot]:
    """Splits the tokens that a prompt leaves into the two tiers.

    Args:
      layer: dense.
      after: the group of the decoding phase.
      per_slot: of the layer's slots.
      made: empty stores of `after`.
      sides: what vectors share.
    """
    layout = after.storage.layout
    assert isinstance(layout, Segments)
    exact = {side: layer.stores[0][side]["exact"] for side in ("key", "value")}
    live = layer.position >= 0
    up = _chosen(layout, per_slot.stats, layer.position)
    stores, positions, moved = list[Store](), [], []
    whole = per_slot.index if after.unranked else per_slot.stats | per_slot.index
    for tier, marks in ((HIGH, up), (LOW, live & ~up)):
        count = after.slots[tier]
        size = jax.tree.leaves(made[tier]["value"])[0].shape[2]
        first = size - next(iter(later_parts(made[tier]).values())).shape[2] * regions(layout, tier)
        order = oldest_first(layer.position, marks, first).astype(jnp.int32)
        order = jnp.pad(order, ((0, 0), (0, 0), (0, first - order.shape[2])))
        known = jnp.arange(first, dtype=jnp.int32) < jnp.sum(marks, axis=2, keepdims=True, dtype=jnp.int32)
        own = storage_of(after.storage, tier)
        keys, values = _encoded(own, exact, order, known, sides)

        def with_later(part: Array, fill: int, more: int = count - first) -> Array:
            """Appends the slots of the segments after the prompt."""
            later = jnp.full((*part.shape[:2], more, *part.shape[3:]), fill, part.dtype)
            return jnp.concatenate([part, later], axis=2)

        stores.append({
            "key": {**made[tier]["key"], **{OF_PROMPT + name: part for name, part in keys.items()}},
            "value": {name: with_later(part, 0) for name, part in values.items()},
        })  # fmt: skip
        positions.append(with_later(jnp.where(known, gather(layer.position, order), EMPTY), EMPTY))
        moved.append({name: take(leaf, order, count) for name, leaf in whole.items()})
    shape = slots_of(layer.position)[:2]
    window = jnp.full((*shape, after.slots[WINDOW]), EMPTY, jnp.int32)
    position = jnp.concatenate([*positions, window], axis=2)
    joined = {
        name: jnp.concatenate(
            [*(each[name] for each in moved), jnp.zeros((*window.shape, *leaf.shape[3:]), leaf.dtype)], 2
        )
        for name, leaf in whole.items()
    }
    joined = forget(joined, position)
    empty = empty_stats(after.needs, after.remembers, slots_of(position[:, :, after.unranked :]))
    stats = {name: new if after.unranked else joined.get(name, new) for name, new in empty.items()}
    layer = layer.replace(position=position, stores=(*stores, made[WINDOW]))
    return layer, PerSlot(stats, {name: joined[name] for name in per_slot.index})
