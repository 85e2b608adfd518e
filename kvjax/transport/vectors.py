"""The keys and values of a context, head by head in the order of their positions, and back into its arrays."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.state import KVState, Layer, LayerKV, exact_store
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.parallel import distributed


class Head(NamedTuple):
    """The live slots of a KV head of a row.

    Attributes:
      slots: [n] int, in the order of their positions.
      sides: keys and values, [n, D] float32 each.
    """

    slots: np.ndarray
    sides: tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class GroupVectors:
    """A group of heads of a layer.

    Attributes:
      heads: the KV heads of the layer that are in the group.
      rows: the heads of each row.
    """

    heads: tuple[int, ...]
    rows: list[list[Head]]


@dataclasses.dataclass(frozen=True)
class Vectors:
    """All keys and values of a context.

    Attributes:
      layers: the groups of each layer.
      num_heads: the number of KV heads of a layer.
      dim: the size of a head.
      state: the cache on the host, its layers one by one.
    """

    layers: list[list[GroupVectors]]
    num_heads: int
    dim: int
    state: KVState

    def most(self, row: int) -> int:
        """Returns the most live slots of a head of a row."""
        return max(len(head.slots) for layer in self.layers for group in layer for head in group.rows[row])


def read(context: Context) -> Vectors:
    """Reads keys and values.

    Raises:
      InputError: they are not held as they are.
    """
    state: KVState = arranged_state(distributed.to_host(context.state), ())
    layers = []
    for groups, layer in zip(context.layout.decode, state.layers, strict=True):
        found = []
        for group, own in zip(groups, layer, strict=True):
            if not own.is_exact or own.in_blocks or own.parts != 1 or own.sides:
                raise InputError(
                    f"keys and values are coded by storage {group.storage.label}, which is smaller already; transport "
                    "codes those of kvjax.storage.dense."
                )
            position, key, value = (np.asarray(each) for each in (own.position, own.key, own.value))
            rows = [[_head(position[b, k], key[b, k], value[b, k]) for k in range(position.shape[1])]
                    for b in range(position.shape[0])]  # fmt: skip
            found.append(GroupVectors(heads_of(group, position.shape[1]), rows))
        layers.append(found)
    num_heads = sum(len(group.heads) for group in layers[0])
    return Vectors(layers, num_heads, state.layers[0][0].dim, state)


def without_slots(state: KVState) -> KVState:
    """Returns a cache whose layers have neither positions nor slots."""
    return state.replace(
        layers=tuple(Layer(own.replace(position=(), stores=()) for own in layer) for layer in state.layers)
    )


def heads_of(group: Group, count: int) -> tuple[int, ...]:
    """Returns the KV heads of a layer that are in a group of `count` heads."""
    return tuple(range(count)) if group.heads is None else tuple(group.heads)


def live_slots(position: np.ndarray) -> np.ndarray:
    """Returns the live slots of a head, position [S], in the order of their positions."""
    order = np.argsort(position, kind="stable")
    return order[position[order] >= 0]


def filled(own: LayerKV, position: Any, key: Any, value: Any) -> LayerKV:
    """Returns a group of a layer with positions [B, K, S], and keys and values [B, K, S, D], arrays on the host."""
    return own.replace(position=position, stores=(exact_store(key, value),))


def _head(position: np.ndarray, key: np.ndarray, value: np.ndarray) -> Head:
    slots = live_slots(position)
    return Head(slots, (key[slots].astype(np.float32), value[slots].astype(np.float32)))
