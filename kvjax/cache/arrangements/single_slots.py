"""Slots that are each held by themselves, and the newest and first ones exactly (see `Storage.residual`).

A step attends to its own tokens exactly. Afterwards, every surviving token that is older than the residual is encoded
once, from its exact numbers, into an empty coded slot. While decoding, that is one slot per head.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.arrangements.base import Arrangement, Counts, PromptSlots, StepTokens
from kvjax.cache.slots import (
    constrain,
    empty_stats,
    forget,
    free_slots,
    free_slots_for,
    oldest_first,
    slots_of,
    take,
    write,
)
from kvjax.cache.state import EMPTY, FAR, LayerKV, PerSlot, Store
from kvjax.errors import StorageError
from kvjax.kernels import registry
from kvjax.parallel import sharding
from kvjax.storage import dense
from kvjax.storage import store as held
from kvjax.storage.base import Storage
from kvjax.storage.side import Sides

if TYPE_CHECKING:
    from kvjax.cache.groups import Group

Array = jax.Array


class SlotArrangement(Arrangement):
    """The arrangement of `kvjax.storage.layouts.SingleSlots`."""

    sized_by_extent = False
    codes_readable = True

    def same_format(self, before: "Group", after: "Group") -> bool:
        # In fewer slots than are exact or wait to be encoded, slots of a storage are those of another one.
        return before.storage == after.storage

    def stores(self, storage: Storage) -> tuple[Storage, ...]:
        return (storage, dense()) if storage.divided else (storage,)

    def slots(self, storage: Storage, counts: Counts) -> tuple[int, ...]:
        slots = counts.slots
        if not storage.divided:
            return (slots,)
        exact, newest = min(storage.kept_exact, slots), min(storage.residual, slots)
        if counts.evicts:
            # Where the newest tokens may be evicted, all that stays may be encoded; so may the first ones.
            return (slots - newest if counts.newest_stay else slots), exact
        # A compressor may drop the newest tokens of the prompt. Those that follow stay, and the newest of them are
        # exact.
        return slots - (min(newest, counts.following) if counts.compressed else exact), exact

    def refuses_devices(self, group: "Group") -> str | None:
        return None

    def read(self, storage: Storage, layer: LayerKV, sides: Sides, lower: LayerKV | None) -> tuple[Array, Array, Array]:
        return read_stores(self.stores(storage), storage, layer, sides)

    def write(self, step: StepTokens) -> tuple[LayerKV, PerSlot]:
        layer, key, value, position, _, per_slot, newest, group, sides = step
        # If KV heads are replicated but query heads are not, XLA would otherwise gather the coded cache at every step.
        key, value, position, per_slot = constrain((key, value, position, per_slot))
        coded_slots, n = group.slots[0], key.shape[2]
        coded, storage = layer.stores[0], group.stores[0]
        dtype = value.dtype
        # [B, K, S_coded] and [B, K, r + n]
        coded_at, exact_at = position[:, :, :coded_slots], position[:, :, coded_slots:]
        coded_own, exact_own = (
            jax.tree.map(lambda leaf, part=part: leaf[:, :, part], per_slot)
            for part in (slice(coded_slots), slice(coded_slots, None))
        )
        # [B, K, r + n, D]: tokens that are exact during this step
        if len(layer.stores) > 1:
            exact = layer.stores[1]
            keys = jnp.concatenate([exact["key"]["exact"], key.astype(dtype)], axis=2)
            values = jnp.concatenate([exact["value"]["exact"], value], axis=2)
        else:
            keys, values = key, value
        # A row without a token in this block changes nothing: its newest position is unknown here, and nothing is due.
        due = (exact_at >= 0) & (exact_at <= (newest - group.storage.residual)[:, None, None])
        due &= (newest >= 0)[:, None, None]
        if group.storage.sinks:
            due &= exact_at >= group.storage.sinks
        index = _first(due, min(n, due.shape[2]))
        chosen = jnp.take_along_axis(due, index, axis=2)
        # Where pages are freed as a whole, a token goes where it would have gone before any was.
        page = group.policy.page
        before = coded_at if page == 1 else layer.position[:, :, :coded_slots]
        # [B, K, m]; out of bounds, where writes are dropped, for what is not due
        target = jnp.where(chosen, free_slots(before, index.shape[2], page), coded_slots)

        def pick(leaf: Array) -> Array:
            return jnp.take_along_axis(leaf, index.reshape(*index.shape, *(1,) * (leaf.ndim - 3)), axis=2)

        # Written to the slots [B, K, m].
        made = held.encode(storage, pick(keys), pick(values), dtype, sides)
        coded = _write_codes(coded, target, made, group)
        coded_at = write(coded_at, target, pick(exact_at))
        coded_own = jax.tree.map(lambda old, new: write(old, target, pick(new)), coded_own, exact_own)
        if len(layer.stores) == 1:
            return layer.replace(position=coded_at, stores=(coded,)), coded_own.replace(
                stats=forget(coded_own.stats, coded_at)
            )
        # Tokens that stay exact keep their slots; the step's own tokens are written to empty ones.
        size = group.slots[1]
        left = jnp.where(due, EMPTY, exact_at)
        mine, own = left[:, :, :size], left[:, :, size:]
        free = jnp.where(own >= 0, free_slots_for(mine, own), size)
        store = layer.stores[1]
        exact = {
            "key": {"exact": write(store["key"]["exact"], free, key.astype(dtype))},
            "value": {"exact": write(store["value"]["exact"], free, value)},
        }
        exact_at = write(mine, free, own)
        exact_own = jax.tree.map(lambda leaf: write(leaf[:, :, :size], free, leaf[:, :, size:]), exact_own)
        # [B, K, S], then [B, K, S, ...]
        position = jnp.concatenate([coded_at, exact_at], axis=2)
        moved = jax.tree.map(lambda one, two: jnp.concatenate([one, two], axis=2), coded_own, exact_own)
        return layer.replace(position=position, stores=(coded, exact)), moved.replace(
            stats=forget(moved.stats, position)
        )

    def convert(self, prompt: PromptSlots) -> tuple[LayerKV, PerSlot]:
        layer, per_slot, after, sides = prompt.layer, prompt.per_slot, prompt.group, prompt.sides
        live, newest = layer.position >= 0, prompt.length - 1
        pieces = []
        # The number of slots per store. The phase before has a single store unless both phases have the same stores.
        sizes = [layer.position.shape[2]]
        if prompt.in_place:
            sizes = [jax.tree.leaves(store)[0].shape[2] for store in layer.stores]
        of_stores = store_order.separated(layer.position, sizes, layer.parts)
        leaves, tree = jax.tree.flatten(per_slot)
        split = [store_order.separated(leaf, sizes, layer.parts) for leaf in leaves]
        owns = [jax.tree.unflatten(tree, own) for own in zip(*split, strict=True)] or [per_slot] * len(sizes)
        for number, (storage, slots) in enumerate(zip(after.stores, after.slots, strict=True)):
            if prompt.in_place:
                # From each store into the same store.
                own_at = of_stores[number]
                pieces.append(_moved(own_at, owns[number], layer.stores[number], own_at >= 0, slots))
                continue
            due = live
            if len(after.slots) > 1:
                # [B, K, S]: what does not stay exact
                old = layer.position <= (newest - after.storage.residual)[:, None, None]
                old &= layer.position >= after.storage.sinks
                due = live & (old if number == 0 else ~old)
            position, own, store = _moved(layer.position, per_slot, layer.stores[0], due, slots)
            if not storage.exact:
                exact = store["key"]["exact"], store["value"]["exact"]
                store = held.encode(storage, *exact, layer.value.dtype, sides)
            pieces.append((position, own, held.place(storage, store)))
        positions, moves, stores = zip(*pieces, strict=True)
        # [B, K, S], then [B, K, S, ...]
        position = store_order.joined(positions, after.parts)
        moved: PerSlot = forget(jax.tree.map(lambda *leaves: store_order.joined(leaves, after.parts), *moves), position)
        empty = empty_stats(after.needs, after.remembers, slots_of(position))
        stats = {name: moved.stats.get(name, new) for name, new in empty.items()}
        return layer.replace(position=position, stores=stores, parts=after.parts), moved.replace(stats=stats)


def read_stores(
    ways: tuple[Storage, ...], storage: Storage, layer: LayerKV, sides: Sides
) -> tuple[Array, Array, Array]:
    """Returns what a layer of single slots holds; see `Arrangement.read`. `ways`: how each store is held."""
    if len(ways) > len(layer.stores):
        # A residual that covers every token.
        ways = (dense(),)
    if len(ways) != len(layer.stores) or any(map(_differs, ways, layer.stores, [layer.dim] * len(ways))):
        raise StorageError(f"the layer is not held as {storage!r}; give the storage that it was made with.")
    pieces = [
        held.decode(each, store, layer.dim, jnp.dtype(jnp.float32), {**sides, **layer.sides})
        for each, store in zip(ways, layer.stores, strict=True)
    ]
    key, value = (
        store_order.joined([x.astype(jnp.float32) for x in each], layer.parts) for each in zip(*pieces, strict=True)
    )
    return key, value, layer.position


def _moved(position: Array, per_slot: PerSlot, source: Store, mine: Array, slots: int) -> tuple[Array, PerSlot, Store]:
    """Moves some slots of one store, oldest first, into `slots` slots.

    Args:
      position: [B, K, S] int32 of the store.
      per_slot: of the store.
      source: the store.
      mine: [B, K, S] bool, the slots to move.
      slots: the number of slots of the result.
    """
    order = oldest_first(position, mine, slots)
    own, store = jax.tree.map(lambda leaf: take(leaf, order, slots), (per_slot, source))
    return take(jnp.where(mine, position, EMPTY), order, slots, EMPTY), own, store


def _write_codes(store: Store, slots: Array, new: Store, group: "Group") -> Store:
    """Writes to slots [B, K, m] of a store; one slot per head by the kernel that reads the codes, if it has its own."""
    if group.attn_implementation != "pallas_tpu" or slots.shape[2] != 1 or not any(group.codecs):
        return jax.tree.map(lambda old, made: write(old, slots, made), store, new)
    olds, tree = jax.tree.flatten(store)
    run = registry.find("append", group.attn_implementation).load()
    heads = ("batch", "kv_heads")
    arguments = (olds, slots, jax.tree.leaves(new))
    return jax.tree.unflatten(tree, sharding.on_each_device(run, arguments, (heads,) * 3, heads))


def _first(marks: Array, count: int) -> Array:
    """Returns the first `count` marked slots, [B, K, count] int32, followed by others if there are fewer."""
    if count == 1:
        slot = jnp.arange(marks.shape[2], dtype=jnp.int32)
        return jnp.minimum(jnp.min(jnp.where(marks, slot, FAR), axis=2, keepdims=True), marks.shape[2] - 1)
    return jnp.argsort(~marks, axis=2, stable=True)[:, :, :count].astype(jnp.int32)


def _differs(storage: Storage, store: Store, dim: int) -> bool:
    """Returns whether a store's parts are not those of a storage, apart from their dtypes."""
    expected = jax.eval_shape(lambda: held.empty(storage, (1, 1, 1), dim, jnp.float32))
    return jax.tree.map(lambda x: x.shape[3:], expected) != jax.tree.map(lambda x: x.shape[3:], store)
