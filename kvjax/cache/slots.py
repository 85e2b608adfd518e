"""Slots: finds empty ones, writes and moves them, and orders them by position."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from kvjax.cache.state import EMPTY, FAR, LayerKV, exact_store
from kvjax.numerics.mask_indices import compact
from kvjax.numerics.statistics import Statistic, by_name
from kvjax.parallel import host_memory, sharding
from kvjax.parallel.host_memory import write

Array = jax.Array
T = TypeVar("T")

EXACT = "exact"  # the part of tokens that are not encoded
AXES = ("batch", "kv_heads", "slots")  # logical axes of the first dimensions of an array of slots


def slots_of(key: Array) -> tuple[int, int, int]:
    """Returns (B, K, S) of an array [B, K, S, ...]."""
    batch, kv_heads, slots = key.shape[:3]
    return batch, kv_heads, slots


def empty_stats(
    needs: frozenset[Statistic], remembers: tuple[str, ...], shape: tuple[int, int, int]
) -> dict[str, Array]:
    """Returns the statistics of empty slots.

    Args:
      needs: the statistics that attention reports.
      remembers: names of the statistics of a merge.
      shape: (B, K, S).
    """
    observed = {s.name: s.empty(shape) for s in by_name(needs)}
    return observed | {name: jnp.zeros(shape, jnp.float32) for name in remembers}


def free_slots(position: Array, count: int, page: int = 1) -> Array:
    """Finds the first `count` empty slots of each head.

    Args:
      position: [B, K, S] int32.
      count: the number of slots.
      page: the number of slots of a page. If pages are freed as a whole, those of a page that is not full come first.

    Returns:
      [B, K, count] int32; S, which is out of bounds, in place of a slot that does not exist.
    """
    capacity = position.shape[2]
    slot = jnp.arange(capacity, dtype=jnp.int32)
    if count == 1:
        # [B, K, 1]: min of an iota instead of argmin, which CPUs do not vectorise
        if page == 1:
            return jnp.min(jnp.where(position < 0, slot, capacity), axis=2, keepdims=True)
        first = jnp.min(_turn(position, page) * capacity + slot, axis=2, keepdims=True)
        return jnp.where(first < 2 * capacity, first % capacity, capacity)
    # On a CPU, to sort the slots would take longer than to attend to them.
    if page == 1:
        # [B, K, count] each
        free, exists = compact(position < 0, count)
        return jnp.where(exists, free, capacity)
    turn = _turn(position, page)
    (first, begun), (then, empty) = (compact(turn == each, count) for each in (0, 1))
    # [B, K, count]: those of pages that have begun, then the others
    number = jnp.arange(count, dtype=jnp.int32) - jnp.sum(begun, axis=2, keepdims=True, dtype=jnp.int32)
    index = jnp.maximum(number, 0)
    others = jnp.where(jnp.take_along_axis(empty, index, axis=2), jnp.take_along_axis(then, index, axis=2), capacity)
    return jnp.where(number < 0, first, others)


def free_slots_for(position: Array, own: Array) -> Array:
    """Finds an empty slot for each live token.

    Args:
      position: [B, K, S] int32 of the slots.
      own: [B, K, n] int32 of the tokens, -1 for one that is not live.

    Returns:
      [B, K, n] int32; undefined for tokens that are not live.
    """
    free = free_slots(position, own.shape[2])
    if own.shape[2] == 1:
        return free
    # The i-th live token takes the i-th free slot.
    number = jnp.cumsum(own >= 0, axis=2) - 1
    return jnp.take_along_axis(free, jnp.maximum(number, 0), axis=2)


def _turn(position: Array, page: int) -> Array:
    """Orders slots [B, K, S] by when they are written to: 0 = in a page that is not full, 1 = empty, 2 = live."""
    live = position >= 0
    if page == 1:
        return jnp.where(live, 2, 1)
    batch, kv_heads, size = position.shape
    # [B, K, U, page]
    pages = jnp.pad(live, ((0, 0), (0, 0), (0, -size % page))).reshape(batch, kv_heads, -1, page)
    # [B, K, S]
    begun = jnp.repeat(jnp.any(pages, axis=3), page, axis=2)[:, :, :size]
    return jnp.where(live, 2, jnp.where(begun, 0, 1))


def append(layer: LayerKV, key: Array, value: Array, position: Array, page: int = 1) -> LayerKV:
    """Writes n tokens into the first n empty slots of each head of a dense layer. Padding is not written.

    Args:
      layer: a dense layer.
      key: [B, K, n, D].
      value: [B, K, n, D].
      position: [B, n] int32, -1 = padding.
      page: see `free_slots`.
    """
    capacity = layer.position.shape[2]
    # [B, K, n]
    free = free_slots(layer.position, position.shape[1], page)
    # [B, K, n]; `capacity` is out of bounds, where writes are dropped
    target = jnp.where(position[:, None] >= 0, free, capacity)
    layer = layer.with_exact(
        write(layer.key, target, key.astype(layer.key.dtype)),
        write(layer.value, target, value.astype(layer.value.dtype)),
    )
    return layer.replace(
        position=write(layer.position, target, jnp.broadcast_to(position[:, None], target.shape)),
    )


def oldest_first(position: Array, chosen: Array, capacity: int) -> Array:
    """Returns the chosen slots in the order of their positions, followed by the others.

    Args:
      position: [B, K, S] int32.
      chosen: [B, K, S] bool.

    Returns:
      [B, K, min(S, capacity)] slots.
    """
    return jnp.argsort(jnp.where(chosen, position, FAR), axis=2, stable=True)[:, :, :capacity]


def take(leaf: Array, order: Array, capacity: int, fill: int = 0) -> Array:
    """Takes slots from an array and pads the result, which is in the same memory, to `capacity` slots.

    Args:
      leaf: [B, K, S, ...].
      order: [B, K, n] int32, the slots to take.
      capacity: the number of slots of the result.
      fill: value of the padding; in host memory, where only keys and values are, it may be any number.
    """
    if host_memory.on_host(leaf):
        empty = ((0, 0), (0, 0), (0, max(0, capacity - order.shape[2])))
        return host_memory.take(leaf, jnp.pad(order.astype(jnp.int32), empty))
    index = order.reshape(*order.shape, *(1,) * (leaf.ndim - 3))
    moved = jnp.take_along_axis(leaf, index, axis=2)
    pad = ((0, 0), (0, 0), (0, max(0, capacity - order.shape[2])), *((0, 0),) * (leaf.ndim - 3))
    return jnp.pad(moved, pad, constant_values=fill)


def ranks(query_position: Array, key_position: Array, *, in_order: bool) -> tuple[Array, Array]:
    """Ranks each query's own slot, and each slot, by position among the live slots of its head.

    Args:
      query_position: [B, n] int32.
      key_position: [B, K, S] int32, -1 = empty (whose rank is undefined).
      in_order: whether the slots are the tokens of the block in order, as in a one-shot prompt. Ranks are then
        positions.

    Returns:
      Ranks from 0 of queries, [B, K, n] int32, and of slots, [B, K, S] int32.
    """
    batch, kv_heads, _ = key_position.shape
    query_position = jnp.broadcast_to(query_position[:, None], (batch, kv_heads, query_position.shape[1]))
    if in_order:
        return query_position, key_position
    ordered = jnp.sort(jnp.where(key_position >= 0, key_position, FAR), axis=2)
    rank = jax.vmap(jax.vmap(lambda row, x: jnp.searchsorted(row, x).astype(jnp.int32)))
    return rank(ordered, query_position), rank(ordered, key_position)


def transient(key: Array, value: Array, position: Array, stats: dict[str, Array], index: dict[str, Array]) -> LayerKV:
    """Returns a dense layer that holds one block of tokens, token i in slot i.

    Args:
      key: [B, K, n, D].
      value: [B, K, n, D].
      position: [B, n] int32.
      stats: the statistics of n slots.
      index: the selection's index of n slots.
    """
    position = jnp.broadcast_to(position[:, None], key.shape[:3])
    return LayerKV(position=position, stores=(exact_store(key, value),), stats=stats, index=index, dim=key.shape[3])


def forget(tree: T, position: Array) -> T:
    """Sets arrays [B, K, S, ...] to 0 in empty slots.

    Keys and values need not be cleared, since no query sees an empty slot.

    Args:
      tree: statistics, for example.
      position: [B, K, S] int32, -1 = empty.
    """

    def clear(leaf: Array) -> Array:
        live = (position >= 0).reshape(position.shape + (1,) * (leaf.ndim - position.ndim))
        return jnp.where(live, leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(clear, tree)


def constrain(tree: T, *, by_xla: bool = False) -> T:
    """Constrains the sharding of arrays [B, K, ...] on the current mesh to that of the cache.

    Args:
      tree: the arrays.
      by_xla: whether XLA divides the other dimensions as it likes; see `Group.by_xla`.
    """
    return jax.tree.map(lambda leaf: sharding.constrain(leaf, axes_of(leaf, 2), free=by_xla), tree)


def constrain_slots(layer: LayerKV, per_head: frozenset[str]) -> LayerKV:
    """Constrains the sharding of a layer whose slots are divided over devices; see `Group.slot_axes` and `divided`."""
    made: LayerKV = jax.tree.map(
        lambda leaf, count: sharding.constrain(leaf, axes_of(leaf, count)), layer, divided(layer, per_head)
    )
    return made


def divided(layer: LayerKV, per_head: frozenset[str]) -> LayerKV:
    """Returns the number of `AXES` that divide each array of a layer whose slots are divided over devices.

    Args:
      layer: the layer.
      per_head: the names of arrays of the index that are not divided; see `Group.per_head`.
    """

    def count(path: KeyPath, leaf: Array) -> int:
        names = sharding.path_names(path)
        # Every device has the exact tokens that wait until their block is full, and what a head has once.
        once = names[0] in ("sides", "marks", "memory") or (layer.in_blocks and names[-1] == EXACT)
        once |= names[0] == "index" and names[-1] in per_head
        return 2 if once else 3

    found: LayerKV = jax.tree_util.tree_map_with_path(count, layer)
    return found


def axes_of(leaf: Array, count: int) -> tuple[str | None, ...]:
    """Returns the logical axes of an array of which the first `count` of `AXES` divide it."""
    return (*AXES[:count], *(None,) * (leaf.ndim - count))


def after_reading(slots: Array, number: Array) -> Array:
    """Returns integers as they are, so that XLA computes them after a number that was read.

    XLA ignores optimization barriers on CPUs. It does not see that these minima change nothing.

    Args:
      slots: int32, at most FAR - 1.
      number: float, of a shape that broadcasts against `slots`.
    """
    return jnp.minimum(slots, jnp.where(jnp.isnan(number), slots, FAR - 1))


def longest(position: Array) -> Array:
    """Returns the number of live slots of the fullest head of each row, [B] int32, for positions [B, K, S]."""
    return jnp.max(jnp.sum(position >= 0, axis=2, dtype=jnp.int32), axis=1)


__all__ = [
    "EMPTY", "after_reading", "append", "axes_of", "constrain", "constrain_slots", "divided", "empty_stats",
    "forget", "free_slots", "free_slots_for", "longest", "oldest_first", "ranks", "slots_of", "take", "transient",
    "write",
]  # fmt: skip
