"""The state of a cache, which is the pytree that `lax.scan` carries, and the tokens of a step."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.storage.side import Sides
from kvjax.storage.store import Store
from kvjax.summary import items, one_line
from kvjax.units import size

Array = jax.Array
EMPTY = -1
FAR = jnp.iinfo(jnp.int32).max
LIVE = "live"  # the mark of the number of live slots of a head
#: Marks of contexts that share positions: the first running position of them, the position after the last one, and by
#: how much the running position of a later token exceeds the one that it is rotated to.
CONTEXTS_START, CONTEXTS_STOP, SHIFT = PARALLEL_MARKS = "contexts start", "contexts stop", "shift"


class LayerKV(flax.struct.PyTreeNode):
    """The slots of one group of KV heads of one layer.

    The slots of several stores (coded, then exact) follow each other in `position` and `stats`, on each device where
    slots are divided. An empty slot may hold any key and value; its statistics are 0.

    Attributes:
      position: [B, K, S] int32 absolute token position, -1 = empty. Live positions of a head are distinct.
      stores: keys and values, leaves [B, K, S, ...], in the order of `Group.stores`.
      stats: statistic name -> [B, K, S, ...].
      index: the selection's index, leaves [B, K, ...].
      dim: D, the number of features of a head.
      parts: the number of devices that the slots of several stores are divided over; see `kvjax.cache.store_order`.
      sides: what the keys, and the values, of a row and KV head share since its prompt ended, leaves [B, K, ...]; {}
        for a storage without such sides.
      marks: of a layout of blocks, ``key`` and ``value`` -> [B, K] int32, the number of tokens that are encoded; where
        the slots of each device hold their ranks, ``live`` -> [B, K] int32, the live slots on all devices; where
        contexts share positions, `PARALLEL_MARKS` -> [B, K] int32; otherwise {}.
      memory: name of a `kvjax.policies.row_memory.RowMemory` -> its arrays [B, K, ...].
    """

    position: Array
    stores: tuple[Store, ...]
    stats: dict[str, Array]
    index: dict[str, Array]
    dim: int = flax.struct.field(pytree_node=False)
    parts: int = flax.struct.field(pytree_node=False, default=1)
    sides: Sides = flax.struct.field(default_factory=dict)
    marks: dict[str, Array] = flax.struct.field(default_factory=dict)
    memory: dict[str, dict[str, Array]] = flax.struct.field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def key(self) -> Array:
        """[B, K, S, D] keys of a dense cache: rotated at their position, or unrotated under ``positions="cache"``."""
        return self._exact("key")

    @property
    def value(self) -> Array:
        """[B, K, S, D] values of a dense cache."""
        return self._exact("value")

    @property
    def in_blocks(self) -> bool:
        """Whether tokens are encoded in blocks or segments, and held exactly until theirs is full."""
        return bool(self.marks.keys() - {LIVE, *PARALLEL_MARKS})

    @property
    def is_exact(self) -> bool:
        """Whether keys and values are held as they are."""
        return len(self.stores) == 1 and all(set(parts) == {"exact"} for parts in self.stores[0].values())

    def _exact(self, name: str) -> Array:
        if len(self.stores) != 1 or set(self.stores[0][name]) != {"exact"}:
            raise AttributeError(
                f"the {name}s of this layer are encoded; kvjax.storage.read(storage, layer) decodes them"
            )
        return self.stores[0][name]["exact"]

    def with_exact(self, key: Array, value: Array) -> "LayerKV":
        """A dense layer with other keys and values [B, K, S, D]."""
        return self.replace(stores=(exact_store(key, value),))


class PerSlot(flax.struct.PyTreeNode):
    """Arrays with an entry for each slot, which move with the slots.

    Attributes:
      stats: statistic name -> [B, K, S, ...].
      index: of a selection that keeps numbers of slots: name -> [B, K, S, ...]; otherwise {}.
    """

    stats: dict[str, Array]
    index: dict[str, Array]

    def __repr__(self) -> str:
        return one_line(self)


def exact_store(key: Array, value: Array) -> Store:
    """A store of keys and values [B, K, S, D] as they are."""
    return {"key": {"exact": key}, "value": {"exact": value}}


@jax.tree_util.register_pytree_node_class
class Layer(tuple[LayerKV, ...]):
    """One layer: a tuple of `LayerKV`, one per group of heads.

    If all heads are in one group, the layer has that group's attributes: `position`, `stats`, `key` and so on.
    """

    def tree_flatten(self) -> tuple[tuple[LayerKV, ...], None]:
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Layer":
        return cls(children)

    def __repr__(self) -> str:
        return f"Layer({items(self)})"

    @property
    def index(self) -> Any:  # instead of a tuple's method of that name
        """The selection's index, if all heads are in one group."""
        return self.__getattr__("index")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or len(self) != 1:
            raise AttributeError(
                f"a layer of {len(self)} groups of heads has no {name!r}; take one group, such as layer[0]"
            )
        return getattr(self[0], name)


class KVState(flax.struct.PyTreeNode):
    """The whole cache. Every leaf has the batch first, so that `kvjax.parallel.host_memory.put_row` replaces one row in
    place.

    Attributes:
      layers: one `Layer` per layer of the model; some may be in stacks, see `kvjax.cache.layer_stack`.
      length: [B] int32 tokens seen so far.
      prompt: [B] int32 tokens of each row's prompt.
      total: [B] int32 tokens that each row will have in the end, as far as it is known; RoPE frequencies may depend
        on it.
      budget: per layer and group, [B] int32 slots per KV head that each row keeps while decoding, or None.
    """

    layers: Sequence[Layer]
    length: Array
    prompt: Array
    total: Array
    budget: Any

    def __repr__(self) -> str:
        """One line, since results of `generate` are printed. Leaves need not be arrays."""
        shapes: list[tuple[int, ...]] = [getattr(group.position, "shape", ()) for group in stored_groups(self)]
        if not shapes or any(len(shape) < 3 for shape in shapes):
            return f"KVState({len(self.layers)} layers)"
        slots = sorted({shape[-1] for shape in shapes})
        held = " to ".join(f"{each:,}" for each in dict.fromkeys((slots[0], slots[-1])))
        return (
            f"KVState({len(self.layers)} layers, rows: {shapes[0][0]}, slots per KV head: {held}, "
            f"keys and values: {size(nbytes(self))})"
        )


class Block(flax.struct.PyTreeNode):
    """The tokens of one step.

    Attributes:
      position: [B, n] int32 absolute positions, -1 = padding (at a row's end).
      prompt: [B] int32, see `KVState`.
      total: [B] int32, see `KVState`.
      budget: see `KVState`; during prefill, the budgets of the policy for prompts. In a layer, those of its groups.
      layer: int32, the index of the layer; None outside of a layer.
      replayed: [B] int32, during a replay, the first position of the chunk that is replayed; otherwise None.
      turn: see `kvjax.policies.base.View`.
      row_newest: [B] int32, the newest position of each row where tokens are fed within a text; None = that of the
        block.
      prefix: in a layer, its `kvjax.cache.shared_prefix.LayerPrefix`; None = rows begin with their own tokens.
    """

    position: Array
    prompt: Array
    total: Array
    budget: Any
    layer: Any = None
    replayed: Any = None
    turn: Any = None
    row_newest: Any = None
    prefix: Any = None

    def __repr__(self) -> str:
        return one_line(self)

    def of_layer(self, index: int, prefix: Any = None) -> "Block":
        """Returns the block with the budgets of one layer, and the prefix there."""
        return self.replace(budget=self.budget[index], layer=jnp.int32(index), prefix=prefix)

    @property
    def newest(self) -> Array:
        """[B] int32 position of each row's newest token, -1 for a row without a token in the block."""
        newest = jnp.max(self.position, axis=1)
        return newest if self.row_newest is None else jnp.where(newest >= 0, self.row_newest, newest)


def stored_groups(state: KVState) -> list[LayerKV]:
    """Returns the slots of every group of heads: of single layers, and of stacks of layers [B, L, K, S, ...]."""
    return jax.tree.leaves(state.layers, is_leaf=lambda x: isinstance(x, LayerKV))


def layers_of(state: KVState) -> list[tuple[int, LayerKV]]:
    """(index of the layer, its slots), for every group of heads of every layer."""
    return [(index, group) for index, layer in enumerate(state.layers) for group in layer]


def live_slots(layer: LayerKV) -> Array:
    """[B, K] int32: the number of live slots of each head; [B, L, K] of a stack of layers."""
    return jnp.sum(layer.position >= 0, axis=-1, dtype=jnp.int32)


def nbytes(state: KVState, *, statistics: bool = False) -> int:
    """Returns the bytes of keys and values.

    Args:
      state: the cache.
      statistics: whether to count positions, statistics and indices as well.
    """
    groups = stored_groups(state)
    trees = groups if statistics else [(group.stores, group.sides) for group in groups]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))
