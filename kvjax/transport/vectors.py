"""The keys and values of a context, head by head in the order of their positions, and back into its arrays."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.state import KVState, Layer, LayerKV, exact_store
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.numerics.rope import Rope
from kvjax.parallel import distributed


class Head(NamedTuple):
    """The live slots of a KV head of a row.

    Attributes:
      slots: [n] int, in the order of their positions.
      position: [n] int32, of their tokens.
      sides: keys and values, [n, D] float32 each.
    """

    slots: np.ndarray
    position: np.ndarray
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


class TokenVectors(NamedTuple):
    """The tokens of a row in a layer whose heads hold the same positions.

    Attributes:
      position: [n] int32, ascending.
      sides: the keys, not rotated, and the values of all heads, [n, K * D] float32 each.
    """

    position: np.ndarray
    sides: tuple[np.ndarray, np.ndarray]


def by_token(context: Context) -> list[list[TokenVectors]]:
    """Returns the vectors of all heads of each layer and row, with keys as they were before rotation.

    Raises:
      InputError: see `read`; or heads hold different positions.
    """
    assert context.made is not None
    found = read(context)
    config = context.made.model.config
    total = np.asarray(found.state.total)
    layers = []
    for index, groups in enumerate(found.layers):
        rope = config.kind(index).rope if unrotates(context.layout.decode[index][0]) else None
        layers.append([_tokens_of(groups, row, rope, int(total[row])) for row in range(len(total))])
    return layers


def unrotates(group: Group) -> bool:
    """Returns whether keys are held as they are at their positions."""
    return group.policy.positions == "original"


def _tokens_of(groups: list[GroupVectors], row: int, rope: Rope | None, total: int) -> TokenVectors:
    """Returns the tokens of a row in a layer."""
    heads = [own for group in groups for own in zip(group.heads, group.rows[row], strict=True)]
    heads.sort(key=lambda each: each[0])
    position = heads[0][1].position
    if any(not np.array_equal(position, own.position) for _, own in heads):
        raise InputError("heads hold different positions, which KVTC codes together; use CacheGen's codes.")
    # [K, n, D]
    key, value = (np.stack([own.sides[side] for _, own in heads]) for side in range(2))
    if rope is not None:
        key = turned(rope, key, position, total, back=True)
    joined = (each.swapaxes(0, 1).reshape(len(position), -1) for each in (key, value))
    one, two = joined
    return TokenVectors(position, (one, two))


def turned(rope: Rope, key: np.ndarray, position: np.ndarray, total: int, *, back: bool) -> np.ndarray:
    """Rotates keys [K, n, D] float32 to positions [n], or back."""
    at, length = jnp.asarray(position[None]), jnp.full((1,), total, jnp.int32)
    turn = rope.unrotate if back else rope.rotate
    return np.array(turn(jnp.asarray(key[None]), at, rope.frequencies(length))[0])


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
    return Head(slots, position[slots], (key[slots].astype(np.float32), value[slots].astype(np.float32)))
