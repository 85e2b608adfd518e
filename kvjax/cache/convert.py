"""The bridge between phases: from the slots of one group to those of another, and empty slots to begin with."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.layout import Group, Phase
from kvjax.cache.slots import (
    constrain,
    empty_stats,
    forget,
    oldest_first,
    slots_of,
    take,
    with_index,
    without_index,
)
from kvjax.cache.state import EMPTY, Layer, LayerKV, Store
from kvjax.storage import store as held

Array = jax.Array


def empty(group: Group, batch: int, kv_heads: int, dim: int, dtype: DTypeLike) -> LayerKV:
    """A group's empty slots for `batch` rows of a model with `kv_heads` KV heads."""
    heads = kv_heads if group.heads is None else len(group.heads)
    shape, dtype = (batch, heads, group.capacity), jnp.dtype(dtype)
    stores = tuple(
        held.empty(storage, (batch, heads, slots), dim, dtype)
        for storage, slots in zip(group.stores, group.slots, strict=True)
    )
    return constrain(
        LayerKV(
            position=jnp.full(shape, EMPTY, jnp.int32),
            stores=stores,
            stats=empty_stats(group.needs, group.policy.remembers, shape),
            index=group.selection.init(shape, dim, dtype),
            dim=dim,
        )
    )


def empty_layers(phase: Phase, batch: int, kv_heads: int, dim: int, dtype: DTypeLike) -> tuple[Layer, ...]:
    """Empty slots for every group of a phase."""
    return tuple(Layer(empty(group, batch, kv_heads, dim, dtype) for group in layer) for layer in phase)


def convert(layer: LayerKV, before: Group, after: Group, newest: Array) -> LayerKV:
    """Moves the live slots of one group, oldest first, into the arrays of another; the caller vouches that they fit.

    What `after` holds in a code is encoded here if `before` holds it exactly. Codes are moved as they are.

    Args:
      layer: the slots under `before`, a one-shot prompt's or those of its blocks.
      before: the group whose prompt ends with this step.
      after: the group that goes on.
      newest: [B] int32 the last position that each row has stepped.

    Returns:
      The slots under `after`: its stores, the statistics that it needs, the index of its selection.
    """
    live = layer.position >= 0
    # A one-shot prompt is exact whatever the storage.
    coded = bool(before.slots) and not before.storage.exact
    # Selections that keep an index while the prompt goes in have a number for each slot.
    layer = layer.replace(stats=with_index(layer.stats, layer.index))
    pieces = []
    start = 0
    for number, (storage, slots) in enumerate(zip(after.stores, after.slots, strict=True)):
        if coded:
            # From each store into the same store.
            source = layer.stores[number]
            size = jax.tree.leaves(source)[0].shape[2]
            mine = live[:, :, start : start + size]
            pieces.append(_moved(layer, source, mine, slots, start))
            start += size
            continue
        due = live
        if len(after.slots) > 1:
            # [B, K, S]: what the residual does not keep exact
            old = layer.position <= (newest - after.storage.residual)[:, None, None]
            due = live & (old if number == 0 else ~old)
        position, stats, store = _moved(layer, layer.stores[0], due, slots, 0)
        if not storage.exact:
            store = held.encode(storage, store["key"]["exact"], store["value"]["exact"], layer.value.dtype)
        pieces.append((position, stats, store))
    positions, columns, stores = zip(*pieces, strict=True)
    position = jnp.concatenate(positions, axis=2) if len(positions) > 1 else positions[0]
    joined = {name: jnp.concatenate([each[name] for each in columns], axis=2) for name in layer.stats}
    found, index = without_index(forget(joined, position))
    fresh = empty_stats(after.needs, after.policy.remembers, slots_of(position))
    stats = {name: found.get(name, new) for name, new in fresh.items()}
    # Lowering refuses a selection that summarises keys where these are held in a code by now.
    index = index or ({} if coded else _summary(layer, after, position))
    return layer.replace(position=position, stores=stores, stats=stats, index=index)


def _moved(layer: LayerKV, source: Store, mine: Array, slots: int, start: int) -> tuple[Array, dict[str, Array], Store]:
    """Positions, statistics and store of the slots `mine` [B, K, size], which begin at `start`, in `slots` slots."""
    size = mine.shape[2]
    position = layer.position[:, :, start : start + size]
    order = oldest_first(position, mine, slots)
    stats = {name: take(leaf[:, :, start : start + size], order, slots) for name, leaf in layer.stats.items()}
    store = jax.tree.map(lambda leaf: take(leaf, order, slots), source)
    return take(jnp.where(mine, position, EMPTY), order, slots, EMPTY), stats, store


def _summary(layer: LayerKV, after: Group, position: Array) -> Any:
    """The index of the selection of the decoding phase, built from the keys of a dense layer."""
    if after.selection.reads_all:
        return {}
    capacity = position.shape[2]
    order = oldest_first(layer.position, layer.position >= 0, capacity)
    summary = after.selection.init(slots_of(position), layer.dim, layer.key.dtype)
    return after.selection.build(summary, position, take(layer.key, order, capacity)) if summary else {}
