"""Changes the number of slots of arrays that hold single slots, between steps."""

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.arrangements.single_slots import SlotArrangement
from kvjax.cache.groups import Group
from kvjax.cache.slots import constrain, constrain_slots, empty_stats, oldest_first, slots_of, take
from kvjax.cache.state import EMPTY, LayerKV, PerSlot
from kvjax.parallel import host_memory

Array = jax.Array


def refuses(group: Group) -> str | None:
    """Returns why the arrays of a group cannot change their size, or None if they can."""
    if not isinstance(group.arrangement, SlotArrangement):
        return f"storage {group.storage.label} encodes tokens in blocks, in arrays whose size is fixed at the prompt"
    if group.storage.on_host:
        return f"storage {group.storage.label} is in host memory, in arrays whose size is fixed at the prompt"
    if not group.selection.reads_all:
        return f"selection {group.selection.name} has an index whose size is fixed at the prompt"
    return None


def resized(layer: LayerKV, before: Group, after: Group, *, fresh: bool = False) -> LayerKV:
    """Moves the slots of a group into arrays of another size.

    Larger arrays have the slots where they were, followed by empty ones. In smaller arrays the live slots, which must
    fit, are ordered by age.

    Args:
      layer: in the arrays of `before`.
      before: a group that `refuses` accepts.
      after: the same group with another number of slots in some store.
      fresh: whether statistics and memories are those of `after`, and begin anew.
    """
    if fresh:
        layer = resized(layer.replace(stats={}, memory={}), before, after)
        batch, heads, _ = layer.position.shape
        memory = {each.name: each.empty((batch, heads, after.queries), layer.dim) for each in after.memory}
        stats = empty_stats(after.needs, after.remembers, slots_of(layer.position))
        return layer.replace(stats=stats, memory=memory)
    if before.slots == after.slots:
        return layer
    parts = layer.parts

    def per_store(leaf: Array) -> list[Array]:
        return store_order.separated(leaf, before.slots, parts)

    own = PerSlot(layer.stats, {name: layer.index[name] for name in before.selection.per_slot})
    leaves, tree = jax.tree.flatten(own)
    split = [per_store(leaf) for leaf in leaves]
    positions, stores, moved = [], [], []
    for number, (position, store) in enumerate(zip(per_store(layer.position), layer.stores, strict=True)):
        slots = after.slots[number]
        if slots >= before.slots[number]:
            positions.append(_padded(position, slots, EMPTY))
            stores.append(jax.tree.map(lambda leaf, slots=slots: _padded(leaf, slots), store))
            moved.append([_padded(each[number], slots) for each in split])
        else:
            # [B, K, slots]
            order = oldest_first(position, position >= 0, slots)
            positions.append(take(position, order, slots, EMPTY))
            stores.append(jax.tree.map(lambda leaf, order=order, slots=slots: take(leaf, order, slots), store))
            moved.append([take(each[number], order, slots) for each in split])
    joined = [store_order.joined(each, parts) for each in zip(*moved, strict=True)]
    made: PerSlot = jax.tree.unflatten(tree, joined)
    position = store_order.joined(positions, parts)
    layer = layer.replace(position=position, stores=tuple(stores), stats=made.stats, index=layer.index | made.index)
    return constrain_slots(layer, after.per_head) if after.slot_axes else constrain(layer)


def _padded(leaf: Array, slots: int, fill: int = 0) -> Array:
    """Adds slots to the end of an array [B, K, S, ...]."""
    if host_memory.on_host(leaf):
        raise AssertionError("arrays in host memory keep their size")
    pad = ((0, 0), (0, 0), (0, slots - leaf.shape[2]), *((0, 0),) * (leaf.ndim - 3))
    return jnp.pad(leaf, pad, constant_values=fill)
