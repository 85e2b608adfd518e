"""Pairs of layers whose prompts are held together (see `Pairs`).

The slots of the prompt come first, oldest first, then those of the tokens that follow, which are exact. What two layers
share is in the arrays of the lower one; a step of the upper one is lent it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Group, Phase
from kvjax.cache.slots import constrain, forget, free_slots_for, write
from kvjax.cache.state import Layer, LayerKV, PerSlot, Store
from kvjax.storage import dense
from kvjax.storage.base import Storage
from kvjax.storage.layouts import LOWER, UPPER, Pairs
from kvjax.storage.minicache import Merged
from kvjax.storage.side import Sides

Array = jax.Array
Layers = tuple[Layer, ...]


def codecs_of(storage: Storage) -> dict[str, Merged]:
    """Returns the codecs of keys and values of a storage of pairs."""
    found = {name: codec for name, codec in storage.codecs.items() if isinstance(codec, Merged)}
    assert len(found) == len(storage.codecs)
    return found


def half_of(group: Group) -> str | None:
    """Returns whether a group is of the ``lower`` or the ``upper`` layer of a pair, or None if it is of neither."""
    return codecs_of(group.storage)["key"].half if isinstance(group.storage.layout, Pairs) else None


def of_layer(storage: Storage, layer: int, layers: int) -> Storage:
    """Returns how a layer is held, before the number of its slots is known; dense if it is in no pair.

    Args:
      storage: of all layers.
      layer: its number.
      layers: the number of layers.

    Raises:
      StorageError: the model has too few layers for the storage.
    """
    if not isinstance(storage.layout, Pairs):
        return storage
    half = storage.layout.half(layer, layers)
    if half is None:
        return dense()
    key, value = (dataclasses.replace(codec, half=half) for codec in codecs_of(storage).values())
    return dataclasses.replace(storage, key=key, value=value, name=f"{storage.name} {half}")


def with_slots(storage: Storage, tokens: int) -> Storage:
    """Returns how a layer of a pair is held, for prompts that leave up to `tokens` tokens."""
    key, value = (dataclasses.replace(codec, count=codec.kept(tokens)) for codec in codecs_of(storage).values())
    return dataclasses.replace(storage, key=key, value=value)


def merge_prompts(layers: Layers, phase: Phase) -> Layers:
    """Merges the prompts of each pair of layers when both have ended.

    Args:
      layers: after the prompt. Those of pairs are dense, in arrays of as many slots as while decoding.
      phase: the groups of the decoding phase.
    """
    made = list(layers)
    for index, groups in enumerate(phase):
        if half_of(groups[0]) == LOWER:
            pair = _merged(layers[index][0], layers[index + 1][0], groups[0])
            made[index], made[index + 1] = (Layer((constrain(each),)) for each in pair)
    return tuple(made)


def _merged(lower: LayerKV, upper: LayerKV, group: Group) -> tuple[LayerKV, LayerKV]:
    """Merges two dense layers that hold the same positions; `group` is that of the lower one."""
    size = group.slots[0]
    stores: tuple[dict[str, Any], ...] = ({}, {})
    sides: tuple[dict[str, Any], ...] = ({}, {})
    position = lower.position[:, :, :size]
    for name, codec in codecs_of(group.storage).items():
        one, other = (each.stores[0][name]["exact"][:, :, :size] for each in (lower, upper))
        halves = codec.encode_pair(one.astype(jnp.float32), other.astype(jnp.float32), position, one.dtype)
        for own, also, (parts, side) in zip(stores, sides, halves, strict=True):
            own[name] = parts
            if side:
                also[name] = side
    first, second = (
        layer.replace(stores=(store, _rest(layer.stores[0], size)), sides=side)
        for layer, store, side in zip((lower, upper), stores, sides, strict=True)
    )
    return first, second


def _rest(store: Store, size: int) -> Store:
    """Returns the slots of a dense store after the first `size`."""
    return {name: {"exact": parts["exact"][:, :, size:]} for name, parts in store.items()}


def lent(layers: Layers, index: int, groups: tuple[Group, ...]) -> Layer:
    """Returns a layer with what the lower layer of its pair holds for both, if it is an upper one.

    Args:
      layers: of the cache.
      index: of the layer.
      groups: its groups of heads.
    """
    own = layers[index]
    return Layer((together(layers[index - 1][0], own[0]),)) if half_of(groups[0]) == UPPER else own


def together(lower: LayerKV, upper: LayerKV) -> LayerKV:
    """Returns the upper layer of a pair with the parts that only the lower one holds."""
    store = {name: {**lower.stores[0][name], **parts} for name, parts in upper.stores[0].items()}
    sides = {name: {**lower.sides[name], **parts} for name, parts in upper.sides.items()}
    return upper.replace(stores=(store, *upper.stores[1:]), sides=sides)


def returned(after: Layer, before: Layer) -> Layer:
    """Returns a layer after a step without what it was lent; `before` is the layer before it was lent anything."""

    def own(new: LayerKV, old: LayerKV) -> LayerKV:
        def of(made: Store | Sides, had: Store | Sides) -> dict[str, Any]:
            return {name: {part: made[name][part] for part in parts} for name, parts in had.items()}

        store, *others = new.stores
        return new.replace(stores=(of(store, old.stores[0]), *others), sides=of(new.sides, old.sides))

    return Layer(own(*pair) for pair in zip(after, before, strict=True))


def settle(
    layer: LayerKV, key: Array, value: Array, position: Array, per_slot: PerSlot, group: Group
) -> tuple[LayerKV, PerSlot]:
    """Writes a step's own tokens, which stay exact; see `kvjax.cache.step.update.settle`."""
    key, value, position, per_slot = constrain((key, value, position, per_slot))
    merged, size = group.slots
    mine, own = position[:, :, merged : -key.shape[2]], position[:, :, -key.shape[2] :]
    # [B, K, n]; out of bounds, where writes are dropped, for padding
    free = jnp.where(own >= 0, free_slots_for(mine, own), size)
    store = layer.stores[1]
    exact = {
        name: {"exact": write(store[name]["exact"], free, x.astype(store[name]["exact"].dtype))}
        for name, x in (("key", key), ("value", value))
    }
    position = jnp.concatenate([position[:, :, :merged], write(mine, free, own)], axis=2)
    at, count = merged + free, merged + size
    moved: PerSlot = jax.tree.map(lambda leaf: write(leaf[:, :, :count], at, leaf[:, :, count:]), per_slot)
    layer = layer.replace(position=position, stores=(layer.stores[0], exact))
    return layer, moved.replace(stats=forget(moved.stats, position))
