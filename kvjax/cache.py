"""The KV cache and its step: append, attend, observe, evict (POLICIES.md, "Words and one step").

The only code that moves slots. A layer's cache is an array of slots whose shape never changes; which are live, how old
they are and where RoPE puts them is read from `position` alone, never from slot order. While decoding, eviction frees
one slot per head and the next token is written there: nothing is compacted or copied.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kvjax import attention, sharding
from kvjax.attention import Implementation
from kvjax.policies.base import Policy, View
from kvjax.rope import Rope
from kvjax.selection import largest
from kvjax.statistics import Observation

Array = jax.Array
EMPTY = -1
FAR = jnp.iinfo(jnp.int32).max


class LayerKV(flax.struct.PyTreeNode):
    """One layer's slots.

    Attributes:
      key: [B, K, S, D], rotated at its true position, or not at all under ``positions="cache"``.
      value: [B, K, S, D].
      position: [B, K, S] int32 absolute token position, -1 = empty. Live positions of a head are distinct.
      stats: the policy's own pytree, leaves [B, K, S, ...]; 0 in empty slots.
    """

    key: Array
    value: Array
    position: Array
    stats: Any


class KVState(flax.struct.PyTreeNode):
    """The whole cache: what `lax.scan` carries.

    Attributes:
      layers: one `LayerKV` a layer, or a tuple of them where heads are split (`kvjax.layers`); capacities may differ.
      length: [B] int32 tokens seen so far.
    """

    layers: tuple[Any, ...]
    length: Array


class Block(flax.struct.PyTreeNode):
    """The tokens of one step, and how the cache treats them.

    Attributes:
      position: [B, n] int32 absolute positions, -1 = padding (at a row's end).
      budget: one [B] int32 a layer, slots per KV head that each row keeps; unused when the policy keeps everything.
      policy: ranks the slots.
      capacity: slots of each layer's arrays when this step makes them (one-shot prefill); None = keep the arrays.
      prompt: [B] int32 tokens of each row's prompt; None = it ends with this block.
      decoding: the prompt is over.
      implementation: of attention, and of a whole decoding step where there is one; see `attention.attend`.
    """

    position: Array
    budget: tuple[Array, ...]
    policy: Policy = flax.struct.field(pytree_node=False)
    capacity: tuple[int, ...] | None = flax.struct.field(pytree_node=False, default=None)
    prompt: Array | None = None
    decoding: bool = flax.struct.field(pytree_node=False, default=False)
    implementation: Implementation = flax.struct.field(pytree_node=False, default="xla")


def step(
    layer: LayerKV | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    block: Block,
    index: int,
    rope: Rope | None = None,
    scale: float | None = None,
    window: int | None = None,
    heads: tuple[int, ...] | None = None,
) -> tuple[Array, LayerKV]:
    """One step of one layer: append the block, attend, observe, evict.

    Args:
      layer: the cache so far, or None: the block is the prompt; it attends over its own transient keys and values
        and only the survivors are kept, in ``block.capacity[index]`` slots.
      query: [B, H, n, D]; key, value: [B, K, n, D]; neither rotated.
      block: what the step is about; index: which layer this is.
      rope: the model's rotary embedding; scale, window: see `attention.attend`.
      heads: which KV heads of the model these are, None = all.

    Returns:
      output [B, H, n, D], and the layer's cache afterwards.
    """
    policy = block.policy
    by_rank = policy.positions == "cache"
    fresh = layer is None
    if rope is not None and not by_rank:
        query, key = (rope.rotate(x, block.position, rope.frequencies(_length(block))) for x in (query, key))
    # Pinned before attention too: where KV heads are replicated but query heads are not, XLA would otherwise write the
    # cache in parts and gather it whole at every step.
    layer = transient(key, value, block, policy) if layer is None else append(layer, key, value, block.position)
    layer = constrain(layer)
    attended = layer.key
    if rope is not None and by_rank:
        query_rank, key_rank = ranks(block.position, layer.position, in_order=fresh)
        # The query heads of a group share their KV head's slots, and so its ranks.
        query_rank = jnp.repeat(query_rank, query.shape[1] // key.shape[1], axis=1)
        # Frequencies that follow the length follow the ranks', not the text's.
        frequencies = rope.frequencies(longest(layer.position))
        query = rope.rotate(query, query_rank, frequencies)
        attended = rope.rotate(layer.key, key_rank, frequencies)
    look = functools.partial(
        attention.attend, query, attended, layer.value, query_position=block.position, scale=scale,
        group_reduce=policy.group_reduce, causal=fresh, prompt=block.prompt, implementation=block.implementation,
        log_weight=None if fresh or policy.merge is None or policy.merge.log_weight is None
        else policy.merge.log_weight(layer.stats),
    )  # fmt: skip
    if policy.budget is None:
        output, observation = look(key_position=layer.position, window=window, needs=policy.needs)
        layer = observe(layer, policy, observation)
    else:
        view = View(
            position=layer.position,
            key=jax.lax.stop_gradient(layer.key),
            value=jax.lax.stop_gradient(layer.value),
            newest=jnp.max(block.position, axis=1),
            budget=block.budget[index],
            prompt=_length(block) if block.prompt is None else block.prompt,
            layer=index,
            decoding=block.decoding,
            heads=heads,
        )
        if policy.mask is not None:
            output, layer = _masked(look, layer, policy, view, block, window)
        else:
            output, observation = look(key_position=layer.position, window=window, needs=policy.needs)
            layer = evict(observe(layer, policy, observation), policy, view, tokens=block.position.shape[1])
    layer = layer.replace(stats=forget(layer.stats, layer.position))
    if fresh and block.capacity is not None:
        layer = resize(layer, block.capacity[index])
    return output, constrain(layer)


def observe(layer: LayerKV, policy: Policy, observation: Observation) -> LayerKV:
    """The layer with its statistics updated: they decide who goes and nothing else, and are constants to a gradient."""
    return layer.replace(stats=policy.observe(layer.stats, jax.lax.stop_gradient(observation)))


def evict(layer: LayerKV, policy: Policy, view: View, *, tokens: int) -> LayerKV:
    """The layer without the lowest priorities, down to its limits; a block of so many tokens came in."""
    # [B, K, S]; a policy that divides by zero must not escape its limit
    priority = policy.priority(layer.stats, view)
    priority = jnp.where(jnp.isnan(priority), -jnp.inf, priority)
    # [B, 1, 1] or [B, K, 1]
    limit = view.budget[:, None, None] if policy.limits is None else policy.limits(layer.stats, view)
    # A row without tokens in this block is as it was, even where the policy that decodes has a smaller budget.
    counts = view.newest >= 0 if policy.then is None else view.at_prompt_end
    limit = jnp.where(counts[:, None, None], limit, FAR)
    victims = _one_victim if tokens == 1 and policy.then is None and not policy.shrinks else _all_victims
    victim = victims(priority, layer.position, limit)
    if policy.merge is not None:
        most = layer.position.shape[2] if policy.shrinks else tokens
        folded = policy.merge.fold(layer.key, layer.value, victim, layer.stats, view, most)
        layer = layer.replace(key=folded.key, value=folded.value, stats=folded.stats)
    return layer.replace(position=jnp.where(victim, EMPTY, layer.position))


def _masked(
    look: Callable[..., tuple[Array, Observation]],
    layer: LayerKV,
    policy: Policy,
    view: View,
    block: Block,
    window: int | None,
) -> tuple[Array, LayerKV]:
    """Attention of a policy that hides slots instead of freeing them: its output, and the layer observed."""
    mask, active = policy.mask, (view.newest >= 0)[:, None, None]
    assert mask is not None
    if mask.band is None:
        own = layer.position >= block.position[:, :1, None]
        seen = jnp.where(own | mask.visible(layer.stats, view), layer.position, EMPTY)
        output, observation = look(key_position=seen, window=window, needs=policy.needs)
        layer = observe(layer, policy, observation)
    else:
        _, observation = look(key_position=layer.position, window=window, needs=policy.needs)
        layer = observe(layer, policy, observation)
        band = mask.band(view) if window is None else jnp.minimum(mask.band(view), window)
        output, _ = look(key_position=layer.position, window=band, exempt=mask.visible(layer.stats, view))
    settled = mask.settle(layer.stats, view)
    # A row that had no token in this block is as it was.
    return output, layer.replace(stats=jax.tree.map(lambda new, old: jnp.where(active, new, old), settled, layer.stats))


def _length(block: Block) -> Array:
    """[B] int32 tokens of each row, this block's included."""
    return jnp.max(block.position, axis=1) + 1


def empty(policy: Policy, batch: int, kv_heads: int, capacity: int, dim: int, dtype: Any) -> LayerKV:
    """A layer of `capacity` empty slots per row and head."""
    shape = (batch, kv_heads, capacity)
    return constrain(
        LayerKV(
            key=jnp.zeros((*shape, dim), dtype),
            value=jnp.zeros((*shape, dim), dtype),
            position=jnp.full(shape, EMPTY, jnp.int32),
            stats=policy.init(shape),
        )
    )


def transient(key: Array, value: Array, block: Block, policy: Policy) -> LayerKV:
    """The block alone as a layer: slot i is token i."""
    shape = (key.shape[0], key.shape[1], key.shape[2])
    position = jnp.broadcast_to(block.position[:, None], shape)
    return LayerKV(key=key, value=value, position=position, stats=policy.init(shape))


def append(layer: LayerKV, key: Array, value: Array, position: Array) -> LayerKV:
    """Writes n tokens into the first n empty slots of each head; padding is written nowhere.

    Args:
      key, value: [B, K, n, D]; position: [B, n] int32, -1 = padding.
    """
    capacity = layer.position.shape[2]
    slot = jnp.arange(capacity, dtype=jnp.int32)
    if position.shape[1] == 1:
        # [B, K, 1]: min of an iota instead of argmin, which CPUs do not vectorise
        free = jnp.min(jnp.where(layer.position < 0, slot, capacity), axis=2, keepdims=True)
    else:
        order = jnp.argsort(layer.position >= 0, axis=2, stable=True)
        free = order[:, :, : position.shape[1]].astype(jnp.int32)
    # [B, K, n]; `capacity` is out of bounds, where writes are dropped
    target = jnp.where(position[:, None] >= 0, free, capacity)
    return layer.replace(
        key=_write(layer.key, target, key.astype(layer.key.dtype)),
        value=_write(layer.value, target, value.astype(layer.value.dtype)),
        position=_write(layer.position, target, jnp.broadcast_to(position[:, None], target.shape)),
    )


# vmap makes batch and heads batching dimensions of the scatter, so that a sharded cache is written where it lies.
_write = jax.vmap(jax.vmap(lambda cache, slot, new: cache.at[slot].set(new, mode="drop", unique_indices=True)))


def ranks(query_position: Array, key_position: Array, *, in_order: bool) -> tuple[Array, Array]:
    """Rank, by position from 0, of each query's own slot and of each slot among the live slots of its head.

    Args:
      query_position: [B, n] int32; key_position: [B, K, S] int32, -1 = empty (its rank is meaningless).
      in_order: slots are the block's tokens in order, as in a one-shot prompt: ranks are positions.

    Returns:
      [B, K, n] int32 and [B, K, S] int32.
    """
    batch, kv_heads, _ = key_position.shape
    query_position = jnp.broadcast_to(query_position[:, None], (batch, kv_heads, query_position.shape[1]))
    if in_order:
        return query_position, key_position
    ordered = jnp.sort(jnp.where(key_position >= 0, key_position, FAR), axis=2)
    rank = jax.vmap(jax.vmap(lambda row, x: jnp.searchsorted(row, x).astype(jnp.int32)))
    return rank(ordered, query_position), rank(ordered, key_position)


def _one_victim(priority: Array, position: Array, budget: Array) -> Array:
    """The slot to evict when at most one must go: lowest priority, of equals the oldest; [B, K, S] bool.

    Minima and comparisons only: argmin and sort are not vectorised on CPUs.
    """
    live = position >= 0
    over = jnp.sum(live, axis=2, keepdims=True, dtype=jnp.int32) > budget
    lowest = jnp.min(jnp.where(live, priority, jnp.inf), axis=2, keepdims=True)
    tied = live & (priority == lowest)
    oldest = jnp.min(jnp.where(tied, position, FAR), axis=2, keepdims=True)
    return over & tied & (position == oldest)


def _all_victims(priority: Array, position: Array, budget: Array) -> Array:
    """The slots to evict until `budget` are live: lowest priority first, of equals the older; [B, K, S] bool."""
    return (position >= 0) & ~largest(priority, position, budget)


def forget(stats: Any, position: Array) -> Any:
    """Statistics with 0 in empty slots; keys and values may stay as they are, since nothing sees an empty slot."""

    def clear(leaf: Array) -> Array:
        live = (position >= 0).reshape(position.shape + (1,) * (leaf.ndim - position.ndim))
        return jnp.where(live, leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(clear, stats)


def resize(layer: LayerKV, capacity: int) -> LayerKV:
    """Moves the live slots, oldest first, into `capacity` slots; the caller vouches that they fit."""
    size = layer.position.shape[2]
    order = jnp.argsort(jnp.where(layer.position >= 0, layer.position, FAR), axis=2, stable=True)

    def gather(leaf: Array, fill: int = 0) -> Array:
        index = order[:, :, :capacity].reshape(*order.shape[:2], -1, *(1,) * (leaf.ndim - 3))
        moved = jnp.take_along_axis(leaf, index, axis=2)
        pad = ((0, 0), (0, 0), (0, max(0, capacity - size)), *((0, 0),) * (leaf.ndim - 3))
        return jnp.pad(moved, pad, constant_values=fill)

    return LayerKV(
        key=gather(layer.key),
        value=gather(layer.value),
        position=gather(layer.position, EMPTY),
        stats=jax.tree.map(gather, layer.stats),
    )


def constrain(layer: LayerKV) -> LayerKV:
    """Keeps a layer's slots where the mesh in force wants them: rows over batch, KV heads over heads."""
    axes: Sequence[str | None] = ("batch", "kv_heads")
    return jax.tree.map(lambda leaf: sharding.constrain(leaf, (*axes, *(None,) * (leaf.ndim - 2))), layer)


def longest(position: Array) -> Array:
    """[B] int32: live slots of each row's fullest head, of position [B, K, S]."""
    return jnp.max(jnp.sum(position >= 0, axis=2, dtype=jnp.int32), axis=1)


def live_slots(layer: LayerKV) -> Array:
    """[B, K] int32: how many slots of each head are live."""
    return jnp.sum(layer.position >= 0, axis=2, dtype=jnp.int32)


def nbytes(state: KVState, *, statistics: bool = False) -> int:
    """Bytes that the keys and values occupy (with positions and statistics too, if asked)."""
    layers = jax.tree.leaves(state.layers, is_leaf=lambda node: isinstance(node, LayerKV))
    trees = layers if statistics else [(layer.key, layer.value) for layer in layers]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))
