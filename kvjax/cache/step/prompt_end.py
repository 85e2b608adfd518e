"""The conversion of slots from one phase to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.arrangements import block_encoding, segment_encoding, segments, tiers
from kvjax.cache.context_parallel import position_ranks
from kvjax.cache.groups import RANK, Group
from kvjax.cache.slots import empty_stats, forget, oldest_first, slots_of, take
from kvjax.cache.state import EMPTY, LIVE, LayerKV, PerSlot, Store, live_slots
from kvjax.numerics.rope import Rope
from kvjax.parallel import host_memory
from kvjax.selection.base import Held
from kvjax.storage import store as held
from kvjax.storage.base import UNROTATED
from kvjax.storage.layouts import Blocks, Segments, Tiers
from kvjax.storage.side import Sides

Array = jax.Array


class Prompt(NamedTuple):
    """What `convert` knows of a layer's prompts.

    Attributes:
      length: [B] int32 tokens of each row's prompt.
      rope: the model's rotary embedding.
      frequencies: of the rows, see `Rope.frequencies`; None without a rotary embedding.
      skew: [K, D, D] of these KV heads, see `kvjax.models.skew`; None = the identity.
      sides: of a calibration, of these KV heads; None = the storage has none.
    """

    length: Array
    rope: Rope | None = None
    frequencies: Array | None = None
    skew: Array | None = None
    sides: Sides | None = None

    def unrotate(self, key: Array, position: Array) -> Array:
        """Returns keys [B, K, S, D] as they were before rotation to `position` [B, K, S], float32."""
        if self.rope is None or self.frequencies is None:
            return key.astype(jnp.float32)
        return self.rope.unrotate(key, position, self.frequencies)

    def rotate(self, key: Array, position: Array) -> Array:
        """Returns keys [B, K, S, D], which are not rotated, at their positions [B, K, S]."""
        if self.rope is None or self.frequencies is None:
            return key
        return self.rope.rotate(key, position, self.frequencies)


def convert(layer: LayerKV, before: Group, after: Group, prompt: Prompt) -> LayerKV:
    """Moves the live slots of the prompt phase, oldest first, into the arrays of the decoding phase.

    The live slots must fit, which lowering ensures. Keys and values that are exact are encoded where `after` has a
    codec; codes are moved unchanged.

    Args:
      layer: the slots at the end of the prompt.
      before: the group of the prompt phase.
      after: the group of the decoding phase.
      prompt: the prompts.

    Returns:
      The stores, statistics and index of `after`.
    """
    made = _converted(layer, before, after, prompt)
    marks = {name: mark for name, mark in made.marks.items() if name != LIVE}
    if not after.holds_ranks:
        return made.replace(marks=marks)
    ranks = position_ranks.of_slots(made.position)
    return made.replace(stats=made.stats | {RANK: ranks}, marks=marks | {LIVE: live_slots(made)})


def _converted(layer: LayerKV, before: Group, after: Group, prompt: Prompt) -> LayerKV:
    """Returns the slots without their ranks; see `convert`."""
    live = layer.position >= 0
    # A one-shot prompt is exact and on the device, whatever the storage.
    in_place = bool(before.slots) and before.storage.apart
    newest = prompt.length - 1
    index = _index(layer, before, after, prompt)
    per_slot = PerSlot(layer.stats, {name: index.pop(name) for name in after.selection.per_slot})
    sides = {**(prompt.sides or {}), **layer.sides}
    if isinstance(after.storage.layout, Blocks):
        if in_place:
            # Both phases have arrays of the same sizes, since nothing was evicted.
            return layer.replace(index=dict(per_slot.index) | index)
        layer, own = block_encoding.convert(layer, after, per_slot, newest, sides)
        return layer.replace(stats=own.stats, index=own.index | index)
    if isinstance(after.storage.layout, Segments):
        made = segments.empty(after, slots_of(layer.position)[:2], layer.dim, layer.value.dtype)
        layer, own = segment_encoding.convert(layer, after, per_slot, made, sides)
        return layer.replace(stats=own.stats, index=own.index | index)
    if isinstance(after.storage.layout, Tiers):
        if in_place:
            layer, own = tiers.resize(layer, after, per_slot)
        else:
            layer, own = tiers.convert(layer, after, per_slot, prompt.length, sides)
        return layer.replace(stats=own.stats, index=own.index | index)
    pieces = []
    # The number of slots per store. The phase before has a single store unless both phases have the same stores.
    sizes = [jax.tree.leaves(store)[0].shape[2] for store in layer.stores] if in_place else [layer.position.shape[2]]
    of_stores = store_order.separated(layer.position, sizes, layer.parts)
    leaves, tree = jax.tree.flatten(per_slot)
    split = [store_order.separated(leaf, sizes, layer.parts) for leaf in leaves]
    owns = [jax.tree.unflatten(tree, own) for own in zip(*split, strict=True)] or [per_slot] * len(sizes)
    for number, (storage, slots) in enumerate(zip(after.stores, after.slots, strict=True)):
        if in_place:
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
    fresh = empty_stats(after.needs, after.remembers, slots_of(position))
    stats = {name: moved.stats.get(name, new) for name, new in fresh.items()}
    return layer.replace(
        position=position, stores=stores, stats=stats, index=moved.index | index, parts=after.parts
    )  # fmt: skip


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


def _index(layer: LayerKV, before: Group, after: Group, prompt: Prompt) -> dict[str, Array]:
    """Builds the index of the selection of the decoding phase from exact keys.

    Arrays with an entry for each slot are of the layer's slots, others of the slots of `after`.
    """
    selection = after.selection
    if before.selection.per_slot:
        # It is kept during the prompt.
        return dict(layer.index)
    if before.slots and not before.storage.exact:
        # Lowering refuses selections that summarise exact keys.
        return {}
    # [B, K, S] and [B, K, S, D]: one layer of a pool in host memory is on the device at a time.
    position, keys = layer.position, [host_memory.to_device(store["key"]["exact"]) for store in layer.stores]
    key = keys[0] if len(keys) == 1 else jnp.concatenate(keys, axis=2)
    if after.storage.frame == UNROTATED:
        key = prompt.rotate(key, position)
    if not selection.per_slot:
        # [B, K, S] and [B, K, S, D], as they will be after the slots have moved
        order = oldest_first(position, position >= 0, after.capacity)
        position, key = take(position, order, after.capacity, EMPTY), take(key, order, after.capacity)
    index = selection.init(slots_of(position), layer.dim, key.dtype)
    if not index:
        return {}
    kept = Held(position, key, prompt.length, prompt.skew, lambda key: prompt.unrotate(key, position))
    return selection.build(index, layer.index if before.watch else {}, kept)
