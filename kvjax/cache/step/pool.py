"""The slots of a layer, joined with the tokens of a step; see `kvjax.cache.step.operands`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Group
from kvjax.cache.slots import append, constrain, empty_stats, slots_of, transient
from kvjax.cache.state import Block, LayerKV
from kvjax.numerics.rope import Rope
from kvjax.storage.side import Sides
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.cache.step.interface import LayerArgs, StepInputs

Array = jax.Array
T = TypeVar("T")


class KeyRotation(NamedTuple):
    """The rotation of keys that are held as they are before it to their positions.

    Attributes:
      rope: the model's rotary embedding.
      frequencies: of the rows, see `Rope.frequencies`.
    """

    rope: Rope
    frequencies: Array

    def apply(self, key: Array, position: Array) -> Array:
        """Rotates keys [B, K, S, D] to positions [B, K, S]."""
        return self.rope.rotate(key, position, self.frequencies)

    def invert(self, key: Array, position: Array) -> Array:
        """Inverts `apply`."""
        return self.rope.unrotate(key, position, self.frequencies).astype(key.dtype)


class Pool(NamedTuple):
    """The slots of a layer and the tokens of a step.

    The step's own tokens are appended to the layer, or follow its slots; see `Storage.new_tokens_separate`.

    Attributes:
      layer: the layer, with the step's tokens if it is dense.
      new_tokens: key and value [B, K, n, D] of the step's tokens that follow the layer's slots, or None.
      position: [B, K, S'] int32 of all slots.
      stats: statistic name -> [B, K, S', ...].
      index: the selection's index; arrays with an entry for each slot have one for all slots.
      sides: what keys and values share, of prompts [B, K, ...] and of a calibration [K, ...].
    """

    layer: LayerKV
    new_tokens: tuple[Array, Array] | None
    position: Array
    stats: dict[str, Array]
    index: PyTree
    sides: Sides

    @property
    def coded(self) -> bool:
        """Whether slots must be decoded."""
        return any(set(parts) != {"exact"} for store in self.layer.stores for parts in store.values())

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that keys and values are decoded to."""
        return jnp.dtype((self.layer.value if self.new_tokens is None else self.new_tokens[1]).dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of slots of each store, and of the step's own tokens."""
        stores = self.layer.stores
        # The arrays of one store may have other sizes than its slots: `kvjax.cache.arrangements.blocks_with_residual`.
        sizes = [self.layer.position.shape[2]]
        if len(stores) > 1:
            sizes = [jax.tree.leaves(store["value"])[0].shape[2] for store in stores]
        return (*sizes, *(() if self.new_tokens is None else (self.new_tokens[0].shape[2],)))

    def cut(self, x: Array) -> list[Array]:
        """Splits an array of all slots, [B, K, S', ...], into stores and the step's own tokens."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [x[:, :, start : start + size] for start, size in zip(starts, self.sizes, strict=True)]


def joined(pieces: tuple[Array, ...]) -> Array:
    """Joins pieces [B, K, S_i, ...] to one array [B, K, S', ...]."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)


def prompt_pool(key: Array, value: Array, block: Block, group: Group) -> Pool:
    """Returns the pool of a prompt in one shot: its own keys and values."""
    shape = slots_of(key)
    stats = empty_stats(group.needs, group.remembers, shape)
    index: PyTree = group.selection.init(shape, key.shape[3], key.dtype) if group.selection.in_prompt else {}
    layer = constrain(transient(key, value, block.position, stats, index))
    return Pool(layer, None, layer.position, layer.stats, layer.index, {})


def pool_of(layer: LayerKV, inputs: "StepInputs", block: Block, group: Group, args: "LayerArgs") -> Pool:
    """Returns the pool of a layer and the tokens of a block.

    Args:
      layer: the slots.
      inputs: the tokens' keys and values.
      block: the tokens.
      group: the storage and the selection.
      args: of the layer.
    """
    key, value = inputs.key, inputs.value
    if not group.storage.new_tokens_separate:
        # Constrained before attention too: if KV heads are replicated but query heads are not, XLA would otherwise
        # write the cache in parts and gather it at every step.
        layer = constrain(append(layer, key, value, block.position, group.policy.page), by_xla=group.by_xla)
        return Pool(layer, None, layer.position, layer.stats, layer.index, {})
    layer = constrain(layer, by_xla=group.by_xla)
    own = jnp.broadcast_to(block.position[:, None], key.shape[:3])
    new = empty_stats(group.needs, group.remembers, slots_of(key))
    index = layer.index
    if group.selection.per_slot:
        entries = group.selection.entries(index, inputs.rotated_key, args.skew)
        joined_up = {name: jnp.concatenate([index[name], own], axis=2) for name, own in entries.items()}
        index = index | joined_up
    stats = {name: jnp.concatenate([leaf, new[name]], axis=2) for name, leaf in layer.stats.items()}
    position = jnp.concatenate([layer.position, own], axis=2)
    return Pool(layer, (key, value), position, stats, index, {**(args.sides or {}), **layer.sides})


def run_after_inputs(function: Callable[..., T], pool: Pool, *arguments: Any) -> T:
    """Calls ``function(pool, *arguments)``, which decodes slots, after its arguments have been computed.

    Decoding depends on nothing that is computed in a step. XLA's scheduler for CPUs would decode every layer before the
    first one attends, and hold a decoded copy of the whole cache; it ignores optimization barriers. A branch of a
    condition is not entered before its arguments have been computed.

    Args:
      function: uses every argument; its result does not matter if no row has a token.
      pool: the slots.
      arguments: further arguments.
    """
    if not pool.coded:
        return function(pool, *arguments)

    def zeros(*operands: Any) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *operands))

    def in_branch(*operands: Any) -> PyTree:
        # If no row has a token, nothing changes, whatever attention returns.
        return jax.lax.cond(jnp.any(operands[0].position >= 0), function, zeros, *operands)

    return jax.lax.platform_dependent(pool, *arguments, cpu=in_branch, default=function)
