"""Empty slots, and the conversion of slots from one phase to the next."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.layout import Group, Phase
from kvjax.cache.slots import constrain, empty_stats, forget, oldest_first, slots_of, take
from kvjax.cache.state import EMPTY, Layer, LayerKV, PerSlot, Store
from kvjax.storage import store as held

Array = jax.Array


def empty(group: Group, batch: int, kv_heads: int, dim: int, dtype: DTypeLike) -> LayerKV:
    """Allocates the empty slots of one group.

    Args:
      group: of heads.
      batch: the number of rows.
      kv_heads: KV heads of the model.
      dim: features of a head.
      dtype: of the model's keys and values.
    """
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
    """Allocates the empty slots of every group of a phase; see `empty`."""
    return tuple(Layer(empty(group, batch, kv_heads, dim, dtype) for group in layer) for layer in phase)


def convert(layer: LayerKV, before: Group, after: Group, newest: Array) -> LayerKV:
    """Moves the live slots of the prompt phase, oldest first, into the arrays of the decoding phase.

    The live slots must fit, which lowering ensures. Keys and values that are exact are encoded where `after` has a
    codec; codes are moved unchanged.

    Args:
      layer: the slots at the end of the prompt.
      before: the group of the prompt phase.
      after: the group of the decoding phase.
      newest: [B] int32 position of each row's last prompt token.

    Returns:
      The stores, statistics and index of `after`.
    """
    live = layer.position >= 0
    # A one-shot prompt is exact whatever the storage.
    coded = bool(before.slots) and not before.storage.exact
    # An index that is kept during the prompt has an entry for each slot.
    per_slot = PerSlot(layer.stats, layer.index)
    pieces = []
    start = 0
    for number, (storage, slots) in enumerate(zip(after.stores, after.slots, strict=True)):
        if coded:
            # From each store into the same store.
            source = layer.stores[number]
            size = jax.tree.leaves(source)[0].shape[2]
            mine = live[:, :, start : start + size]
            pieces.append(_moved(layer.position, per_slot, source, mine, slots, start))
            start += size
            continue
        due = live
        if len(after.slots) > 1:
            # [B, K, S]: what the residual does not keep exact
            old = layer.position <= (newest - after.storage.residual)[:, None, None]
            due = live & (old if number == 0 else ~old)
        position, own, store = _moved(layer.position, per_slot, layer.stores[0], due, slots, 0)
        if not storage.exact:
            store = held.encode(storage, store["key"]["exact"], store["value"]["exact"], layer.value.dtype)
        pieces.append((position, own, store))
    positions, owns, stores = zip(*pieces, strict=True)
    # [B, K, S], then [B, K, S, ...]
    position = jnp.concatenate(positions, axis=2)
    moved: PerSlot = forget(jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *owns), position)
    fresh = empty_stats(after.needs, after.policy.remembers, slots_of(position))
    stats = {name: moved.stats.get(name, new) for name, new in fresh.items()}
    # Lowering refuses a selection that summarises keys if they are encoded already.
    index = moved.index or ({} if coded else _summary(layer, after, position))
    return layer.replace(position=position, stores=stores, stats=stats, index=index)


def _moved(
    position: Array, per_slot: PerSlot, source: Store, mine: Array, slots: int, start: int
) -> tuple[Array, PerSlot, Store]:
    """Moves some slots of one store, oldest first, into `slots` slots.

    Args:
      position: [B, K, S] int32 of all stores.
      per_slot: of all stores.
      source: the store.
      mine: [B, K, size] bool, the slots of this store to move.
      slots: the number of slots of the result.
      start: the store's first slot in `position`.
    """
    end = start + mine.shape[2]
    # [B, K, size]
    position = position[:, :, start:end]
    order = oldest_first(position, mine, slots)
    own = jax.tree.map(lambda leaf: take(leaf[:, :, start:end], order, slots), per_slot)
    store = jax.tree.map(lambda leaf: take(leaf, order, slots), source)
    return take(jnp.where(mine, position, EMPTY), order, slots, EMPTY), own, store


def _summary(layer: LayerKV, after: Group, position: Array) -> Any:
    """Builds the index of the selection of the decoding phase from the keys of a dense layer."""
    if after.selection.reads_all:
        return {}
    capacity = position.shape[2]
    order = oldest_first(layer.position, layer.position >= 0, capacity)
    summary = after.selection.init(slots_of(position), layer.dim, layer.key.dtype)
    return after.selection.build(summary, position, take(layer.key, order, capacity)) if summary else {}
