"""Settle: what a step's own tokens become in a cache that holds slots in a code (STORAGE.md, "One step, with storage").

A step sees its own tokens exactly. Afterwards every surviving token that is older than the residual is encoded, once,
from its exact numbers, into a free coded slot; while decoding that is one slot per head.
"""

import jax
import jax.numpy as jnp

from kvjax.cache.layout import Group
from kvjax.cache.slots import forget, free_slots, write
from kvjax.cache.state import EMPTY, FAR, LayerKV, Store
from kvjax.storage import store as held
from kvjax.storage.base import Storage

Array = jax.Array


def settle(
    layer: LayerKV, key: Array, value: Array, position: Array, stats: dict[str, Array], newest: Array, group: Group
) -> LayerKV:
    """The layer after a step.

    Args:
      layer: the slots before the step.
      key: [B, K, n, D] of the step's own tokens, as they are stored.
      value: [B, K, n, D].
      position: [B, K, S + n] int32 of the layer's slots, then of the step's own tokens, after eviction.
      stats: statistic name -> [B, K, S + n, ...], observed.
      newest: [B] int32 newest position of each row; -1 = a row without a token.
      group: how slots are held.
    """
    coded_slots, n = group.slots[0], key.shape[2]
    coded, storage = layer.stores[0], group.stores[0]
    dtype = value.dtype
    at = {"coded": position[:, :, :coded_slots], "exact": position[:, :, coded_slots:]}
    sums = {name: (leaf[:, :, :coded_slots], leaf[:, :, coded_slots:]) for name, leaf in stats.items()}
    # [B, K, r + n, D]: tokens that are exact during this step
    if len(layer.stores) > 1:
        exact = layer.stores[1]
        keys = jnp.concatenate([exact["key"]["exact"], key.astype(dtype)], axis=2)
        values = jnp.concatenate([exact["value"]["exact"], value], axis=2)
    else:
        keys, values = key, value
    # A row without a token in this block changes nothing: its newest position is unknown here, and nothing is due.
    due = (at["exact"] >= 0) & (at["exact"] <= (newest - group.storage.residual)[:, None, None])
    due &= (newest >= 0)[:, None, None]
    index = _first(due, min(n, due.shape[2]))
    chosen = jnp.take_along_axis(due, index, axis=2)
    # [B, K, m]; out of bounds, where writes are dropped, for what is not due
    target = jnp.where(chosen, free_slots(at["coded"], index.shape[2]), coded_slots)

    def pick(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, index.reshape(*index.shape, *(1,) * (leaf.ndim - 3)), axis=2)

    coded = _encode(storage, coded, target, pick(keys), pick(values), dtype)
    coded_position = write(at["coded"], target, pick(at["exact"]))
    coded_stats = {name: write(old, target, pick(new)) for name, (old, new) in sums.items()}
    if len(layer.stores) == 1:
        return _layer(layer, coded_position, coded_stats, (coded,))
    # What stays exact: the residual's own slots keep their places, the step's tokens take the free ones.
    size = group.slots[1]
    left = jnp.where(due, EMPTY, at["exact"])
    mine, own = left[:, :, :size], left[:, :, size:]
    free = jnp.where(own >= 0, free_slots_for(mine, own), size)
    store = layer.stores[1]
    exact = {
        "key": {"exact": write(store["key"]["exact"], free, key.astype(dtype))},
        "value": {"exact": write(store["value"]["exact"], free, value)},
    }
    exact_position = write(mine, free, own)
    exact_stats = {name: write(new[:, :, :size], free, new[:, :, size:]) for name, (_, new) in sums.items()}
    joined = {name: jnp.concatenate([coded_stats[name], exact_stats[name]], axis=2) for name in stats}
    return _layer(layer, jnp.concatenate([coded_position, exact_position], axis=2), joined, (coded, exact))


def free_slots_for(position: Array, own: Array) -> Array:
    """A free slot [B, K, n] for each of the tokens `own` [B, K, n] that is live; the capacity for the others."""
    free = free_slots(position, own.shape[2])
    if own.shape[2] == 1:
        return free
    # The i-th live token takes the i-th free slot.
    number = jnp.cumsum(own >= 0, axis=2) - 1
    return jnp.take_along_axis(free, jnp.maximum(number, 0), axis=2)


def recode(storage: Storage, store: Store, changed: Array, key: Array, value: Array, dtype: jnp.dtype) -> Store:
    """The store with the slots `changed` [B, K, S] encoded anew from key and value [B, K, S, D], after a merge."""
    new = held.encode(storage, key, value, dtype)
    return jax.tree.map(
        lambda old, made: jnp.where(changed.reshape(*changed.shape, *(1,) * (old.ndim - 3)), made, old), store, new
    )


def _first(marks: Array, count: int) -> Array:
    """The first `count` slots [B, K, count] that are marked; others after them."""
    if count == 1:
        slot = jnp.arange(marks.shape[2], dtype=jnp.int32)
        return jnp.minimum(jnp.min(jnp.where(marks, slot, FAR), axis=2, keepdims=True), marks.shape[2] - 1)
    return jnp.argsort(~marks, axis=2, stable=True)[:, :, :count].astype(jnp.int32)


def _encode(storage: Storage, store: Store, target: Array, key: Array, value: Array, dtype: jnp.dtype) -> Store:
    return jax.tree.map(lambda old, new: write(old, target, new), store, held.encode(storage, key, value, dtype))


def _layer(layer: LayerKV, position: Array, stats: dict[str, Array], stores: tuple[Store, ...]) -> LayerKV:
    return layer.replace(position=position, stats=forget(stats, position), stores=stores)
