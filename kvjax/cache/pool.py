"""The slots that a step works on, decoded, and rotated as attention sees them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.layout import Group
from kvjax.cache.slots import append, constrain, empty_stats, longest, ranks, slots_of, transient
from kvjax.cache.state import Block, LayerKV
from kvjax.rope import Rope
from kvjax.storage import store as held

Array = jax.Array


class Pool(NamedTuple):
    """All slots of a step: those that are held and, where these are held in a code, the step's own tokens after them.

    Attributes:
      layer: the layer; in a dense one the step's tokens have been appended.
      own: key and value [B, K, n, D] of the step's tokens where these are not in the layer yet, else None.
      position: [B, K, S'] int32 over all slots.
      stats: statistic name -> [B, K, S', ...].
      index: the selection's; where it has a number for each slot, over all slots.
    """

    layer: LayerKV
    own: tuple[Array, Array] | None
    position: Array
    stats: dict[str, Array]
    index: Any

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of slots of each piece: of every store, and of the step's own tokens."""
        sizes = [jax.tree.leaves(store)[0].shape[2] for store in self.layer.stores]
        return (*sizes, *(() if self.own is None else (self.own[0].shape[2],)))

    def cut(self, x: Array) -> list[Array]:
        """An array over all slots, [B, K, S', ...], piece by piece."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [x[:, :, start : start + size] for start, size in zip(starts, self.sizes, strict=True)]


def joined(pieces: tuple[Array, ...]) -> Array:
    """Pieces [B, K, S_i, ...] as one array [B, K, S', ...]."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)


def prompt_pool(key: Array, value: Array, block: Block, group: Group) -> Pool:
    """A prompt in one shot: its own transient keys and values."""
    shape = slots_of(key)
    stats = empty_stats(group.needs, group.policy.remembers, shape)
    index: Any = group.selection.init(shape, key.shape[3], key.dtype) if group.selection.in_prompt else {}
    layer = constrain(transient(key, value, block.position, stats, index))
    return Pool(layer, None, layer.position, layer.stats, layer.index)


def pool_of(layer: LayerKV, key: Array, value: Array, block: Block, group: Group) -> Pool:
    """The slots of a layer and the tokens [B, K, n, D] of a block."""
    if group.storage.exact:
        # Pinned before attention too: where KV heads are replicated but query heads are not, XLA would otherwise write
        # the cache in parts and gather it whole at every step.
        layer = constrain(append(layer, key, value, block.position))
        return Pool(layer, None, layer.position, layer.stats, layer.index)
    layer = constrain(layer)
    own = jnp.broadcast_to(block.position[:, None], key.shape[:3])
    new = empty_stats(group.needs, group.policy.remembers, slots_of(key))
    index = layer.index
    if group.selection.in_prompt:
        more = group.selection.init(slots_of(key), key.shape[3], key.dtype)
        index = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=2), index, more)
    stats = {name: jnp.concatenate([leaf, new[name]], axis=2) for name, leaf in layer.stats.items()}
    return Pool(layer, (key, value), jnp.concatenate([layer.position, own], axis=2), stats, index)


def decoded(pool: Pool, group: Group) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Keys and values [B, K, S_i, D] of each piece, as stored (rotated, unless ``positions="cache"``)."""
    if pool.own is None:
        return (pool.layer.key,), (pool.layer.value,)
    pieces = [
        held.decode(storage, store, pool.layer.dim, pool.own[1].dtype)
        for storage, store in zip(group.stores, pool.layer.stores, strict=True)
    ]
    # A query sees its own block exactly: its tokens are a piece of their own until they are encoded.
    keys, values = zip(*pieces, pool.own, strict=True)
    return keys, values


def once_ready(function: Callable[..., Any], pool: Pool, *arguments: Any) -> Any:
    """``function(pool, *arguments)``, which decodes what is coded; not before the arguments are there.

    Decoding depends on nothing of a step. XLA's scheduler for CPUs would decode every layer before the first one
    attends, and hold a decoded copy of the whole cache (it ignores optimization barriers). A branch is not entered
    before its arguments are there.
    """
    if pool.own is None:
        return function(pool, *arguments)

    def zeros(*operands: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *operands))

    def in_branch(*operands: Any) -> Any:
        # Where no row has a token nothing changes, whatever attention returns.
        return jax.lax.cond(jnp.any(operands[0].position >= 0), function, zeros, *operands)

    return jax.lax.platform_dependent(pool, *arguments, cpu=in_branch, default=function)


def rotated_by_rank(
    pool: Pool, keys: tuple[Array, ...], query: Array, block: Block, rope: Rope, fresh: bool
) -> tuple[Array, tuple[Array, ...]]:
    """Query [B, H, n, D] and keys rotated to their rank among the live slots of their head (StreamingLLM).

    Args:
      keys: [B, K, S_i, D] of each piece, not rotated.
      fresh: whether the slots are the block's tokens in order.
    """
    query_rank, key_rank = ranks(block.position, pool.position, in_order=fresh)
    # The query heads of a group share their KV head's slots, and so its ranks.
    query_rank = jnp.repeat(query_rank, query.shape[1] // pool.position.shape[1], axis=1)
    # Frequencies that follow the length follow the ranks', not the text's.
    frequencies = rope.frequencies(longest(pool.position))
    keys = tuple(rope.rotate(key, rank, frequencies) for key, rank in zip(keys, pool.cut(key_rank), strict=True))
    return rope.rotate(query, query_rank, frequencies), keys
