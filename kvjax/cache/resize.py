"""Changes the sizes of a cache's arrays, between steps."""

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.arrangements.base import PromptSlots
from kvjax.cache.groups import Group
from kvjax.cache.slots import constrain, constrain_slots, empty_stats, oldest_first, slots_of, take
from kvjax.cache.state import EMPTY, LayerKV, PerSlot
from kvjax.parallel.host_memory import pad

Array = jax.Array


def refuses(before: Group, after: Group) -> str | None:
    """Returns why what the arrays of a group hold cannot be moved to those of another, or None if it can be.

    The arrays of `after` are those of the same policy, storage and selection for more tokens. A storage that encodes
    nothing of a short text holds it as another storage.

    Args:
      before: a group of heads while decoding.
      after: the same heads in arrays of other sizes.
    """
    if before.memory != after.memory:
        return f"policy {after.policy.name} has a memory whose size is that of the prompt"
    if _same_format(before, after):
        return after.arrangement.refuses_resize(before, after)
    return after.arrangement.refuses_start(before, after)


def holds_single_slots(group: Group) -> bool:
    """Returns whether slots are held one by one, on the device and without an index of them."""
    return not (group.arrangement.sized_by_extent or group.storage.on_host) and group.selection.reads_all


def _same_format(before: Group, after: Group) -> bool:
    """Returns whether two groups hold slots in the same form."""
    return before.arrangement is after.arrangement and after.arrangement.same_format(before, after)


def resized(layer: LayerKV, before: Group, after: Group, length: Array, *, fresh: bool = False) -> LayerKV:
    """Moves the slots of a group into arrays of other sizes.

    Larger arrays have the slots where they were, followed by empty ones. In smaller arrays, which are of single slots,
    the live slots, which must fit, are ordered by age.

    Args:
      layer: in the arrays of `before`.
      before: a group of heads.
      after: a group that `refuses` accepts.
      length: [B] int32 tokens of each row.
      fresh: whether statistics and memories are those of `after`, and begin anew.
    """
    if fresh:
        layer = resized(layer.replace(stats={}, memory={}), before, after, length)
        batch, heads, _ = layer.position.shape
        memory = {each.name: each.empty((batch, heads, after.queries), layer.dim) for each in after.memory}
        stats = empty_stats(after.needs, after.remembers, slots_of(layer.position))
        return layer.replace(stats=stats, memory=memory)
    if before.slots == after.slots and before.storage == after.storage:
        return layer
    per_slot = PerSlot(layer.stats, {name: layer.index[name] for name in after.selection.per_slot})
    if _same_format(before, after):
        made = _moved(layer, per_slot, before, after)
    else:
        slots = PromptSlots(layer, per_slot, after, length, layer.sides, in_place=False)
        made, own = after.arrangement.start(slots)
        made = made.replace(stats=own.stats, index=layer.index | own.index)
    return constrain_slots(made, after.per_head) if after.slot_axes else constrain(made)


def _moved(layer: LayerKV, per_slot: PerSlot, before: Group, after: Group) -> LayerKV:
    """Moves slots between arrays of the same stores."""
    first = before.unranked_stores
    leaves, tree = jax.tree.flatten(per_slot)
    # Per leaf, the arrays of each store that has statistics.
    split = [store_order.separated(leaf, before.slots[first:], layer.parts) for leaf in leaves]
    own_at = store_order.separated(layer.position, before.slots, layer.parts)
    orders = [
        oldest_first(position, position >= 0, slots) if slots < old else None
        for position, old, slots in zip(own_at, before.slots, after.slots, strict=True)
    ]

    def move(leaf: Array, number: int, fill: int = 0) -> Array:
        order, slots = orders[number], after.slots[number]
        return pad(leaf, slots, fill) if order is None else take(leaf, order, slots, fill)

    positions = [move(position, number, EMPTY) for number, position in enumerate(own_at)]
    moved = [
        store_order.joined([move(leaf, first + number) for number, leaf in enumerate(own)], layer.parts)
        for own in split
    ]
    if all(order is None for order in orders):
        stores = after.arrangement.resized(layer, before, after)
    else:
        stores = tuple(
            jax.tree.map(lambda leaf, number=number: move(leaf, number), store)
            for number, store in enumerate(layer.stores)
        )
    own: PerSlot = jax.tree.unflatten(tree, moved)
    index = _index(layer, after) | own.index
    position = store_order.joined(positions, layer.parts)
    return layer.replace(position=position, stores=stores, stats=own.stats, index=index)


def _index(layer: LayerKV, after: Group) -> dict[str, Array]:
    """Returns the arrays of a selection's index that have no entry for each slot, in their sizes of `after`."""
    selection = after.selection
    batch, heads, _ = slots_of(layer.position)
    empty = selection.init((batch, heads, after.capacity), layer.dim, jnp.float32)

    def larger(old: Array, new: Array) -> Array:
        if old.shape == new.shape:
            return old
        return jax.lax.dynamic_update_slice(new.astype(old.dtype), old, (0,) * old.ndim)

    return {name: larger(old, empty[name]) for name, old in layer.index.items() if name not in selection.per_slot}
