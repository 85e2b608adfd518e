"""Settle: moves a step's own tokens into a cache that has a codec or is in host memory.

A step attends to its own tokens exactly. Afterwards, every surviving token that is older than the residual is encoded
once, from its exact numbers, into an empty coded slot. While decoding, that is one slot per head.
"""

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements import block_encoding, layer_pairs, segment_encoding
from kvjax.cache.groups import Group
from kvjax.cache.slots import constrain, forget, free_slots, free_slots_for, write
from kvjax.cache.state import EMPTY, FAR, LayerKV, PerSlot, Store
from kvjax.kernels import registry
from kvjax.parallel import sharding
from kvjax.storage import store as held
from kvjax.storage.base import Storage
from kvjax.storage.layouts import Blocks, Pairs, Segments
from kvjax.storage.side import Sides

Array = jax.Array


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
    """Encodes what is due and writes a step's own tokens.

    Args:
      layer: the slots before the step.
      key: [B, K, n, D] of the step's own tokens, as they are stored.
      value: [B, K, n, D].
      position: [B, K, S + n] int32 of the layer's slots and of the step's own tokens, after eviction.
      per_slot: leaves [B, K, S + n, ...], after the step was observed.
      newest: [B] int32 newest position of each row, -1 for a row without a token.
      group: which has the storage.
      sides: what keys and values share.

    Returns:
      The layer with its positions and stores, and `per_slot` for the layer's slots.
    """
    if isinstance(group.storage.layout, Blocks):
        return block_encoding.settle(layer, key, value, position, per_slot, newest, group, sides)
    if isinstance(group.storage.layout, Segments):
        return segment_encoding.settle(layer, key, value, position, per_slot, group, sides)
    if isinstance(group.storage.layout, Pairs):
        return layer_pairs.settle(layer, key, value, position, per_slot, group)
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
    return layer.replace(position=position, stores=(coded, exact)), moved.replace(stats=forget(moved.stats, position))


def _write_codes(store: Store, slots: Array, new: Store, group: Group) -> Store:
    """Writes to slots [B, K, m] of a store; one slot per head by the kernel that reads the codes, if it has its own."""
    if group.attend != "pallas_tpu" or slots.shape[2] != 1 or not any(group.codecs):
        return jax.tree.map(lambda old, made: write(old, slots, made), store, new)
    olds, tree = jax.tree.flatten(store)
    run = registry.find("append", group.attend).load()
    heads = ("batch", "kv_heads")
    arguments = (olds, slots, jax.tree.leaves(new))
    return jax.tree.unflatten(tree, sharding.on_each_device(run, arguments, (heads,) * 3, heads))


def recode(
    storage: Storage, store: Store, changed: Array, key: Array, value: Array, dtype: jnp.dtype, sides: Sides
) -> Store:
    """Encodes the slots again that a merge has changed.

    Args:
      storage: how the slots are held.
      store: before the merge.
      changed: [B, K, S] bool.
      key: [B, K, S, D] after the merge.
      value: [B, K, S, D].
      dtype: the model's.
      sides: what keys and values share.
    """
    new = held.encode(storage, key, value, dtype, sides)
    return jax.tree.map(
        lambda old, made: jnp.where(changed.reshape(*changed.shape, *(1,) * (old.ndim - 3)), made, old), store, new
    )


def _first(marks: Array, count: int) -> Array:
    """Returns the first `count` marked slots, [B, K, count] int32, followed by others if there are fewer."""
    if count == 1:
        slot = jnp.arange(marks.shape[2], dtype=jnp.int32)
        return jnp.minimum(jnp.min(jnp.where(marks, slot, FAR), axis=2, keepdims=True), marks.shape[2] - 1)
    return jnp.argsort(~marks, axis=2, stable=True)[:, :, :count].astype(jnp.int32)
