"""One step of one layer: select, append, attend, observe, evict, write.

The slots of a layer are arrays whose shape never changes. `position` alone says which slots are live, how old they are
and where RoPE rotates them; the order of slots has no meaning. While decoding, eviction frees one slot per head and the
next token is written there, so that nothing is compacted or copied.

A step runs in one of three ways: as one kernel (`fused_kernel`), on slots that are divided over devices
(`kvjax.cache.context_parallel`), or on all slots of a head on one device (`on_device`), as a prompt in one shot does.
The steps of a replay (`prompt_replay`) keep none of their tokens.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.context_parallel import step as context_parallel
from kvjax.cache.groups import Group
from kvjax.cache.parallel_contexts import shift_of
from kvjax.cache.state import Block, Layer, LayerKV
from kvjax.cache.step import fused_kernel, on_device, prompt_replay
from kvjax.cache.step.interface import AttentionOperands, LayerArgs, query_heads, rotated
from kvjax.errors import ConfigError

Array = jax.Array


def step_layer(
    layer: Layer | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    block: Block,
    groups: tuple[Group, ...],
    args: LayerArgs,
) -> tuple[Array, Layer, tuple[AttentionOperands | None, ...]]:
    """Runs `step` for each group of heads of a layer.

    Args:
      layer: the cache so far; None if the block is the whole prompt.
      query: [B, H, n, D], not rotated.
      key: [B, K, n, D], not rotated.
      value: [B, K, n, D].
      block: the tokens of the step, of this layer.
      groups: the layer's groups of heads.
      args: what else the layer gives.

    Returns:
      The output [B, H, n, D], the layer's cache afterwards, and the operands of attention of each group.
    """
    batch, _, n, dim = query.shape
    kv_heads = key.shape[1]
    outputs, afters, saw = [], [], []
    order: list[int] = []
    for number, (group, budget) in enumerate(zip(groups, block.budget, strict=True)):
        before = None if layer is None else layer[number]
        own, own_args = (query, key, value), args
        if group.heads is not None:
            heads = np.asarray(group.heads)
            own = (query_heads(query, group.heads, kv_heads), key[:, heads], value[:, heads])
            own_args = args.of_heads(group.heads, kv_heads)
            order += group.heads
        output, after, seen = step(before, *own, block=block, group=group, budget=budget, args=own_args)
        outputs.append(output.reshape(batch, own[1].shape[1], -1, n, dim))
        afters.append(after)
        saw.append(seen)
    # [B, K, G, n, D], in the model's order of heads
    joined_heads = jnp.concatenate(outputs, axis=1)[:, np.argsort(order)] if order else outputs[0]
    return joined_heads.reshape(query.shape), Layer(afters), tuple(saw)


def step(
    layer: LayerKV | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    block: Block,
    group: Group,
    budget: Array | None = None,
    args: LayerArgs | None = None,
) -> tuple[Array, LayerKV, AttentionOperands | None]:
    """Runs one step of one group of heads.

    Args:
      layer: the cache so far; None if the block is the whole prompt. The prompt then attends to its own keys and
        values, and only the slots that survive are kept, in the arrays of ``group.decode_group``.
      query: [B, H, n, D] of these heads, not rotated.
      key: [B, K, n, D], not rotated.
      value: [B, K, n, D].
      block: the tokens of the step.
      group: the policy, storage, selection and kernels.
      budget: [B] int32 slots per KV head; None if the group keeps everything.
      args: what else the layer gives; None for the defaults.

    Returns:
      The output [B, H, n, D], the cache afterwards, and the operands of attention (None if a kernel ran the step).
    """
    _check(layer, query, key, value, block, budget)
    args = LayerArgs() if args is None else args
    shift = None if layer is None or group.parallel is None else shift_of(layer)
    if block.prefix is not None:
        shift = _behind(block, group)
    inputs = rotated(query, key, value, block, group, args, shift)
    if layer is not None and group.replaying:
        return prompt_replay.step(layer, inputs, block, group, args)
    if layer is not None and group.step_implementation is not None:
        return fused_kernel.step(layer, inputs, block, group, budget, args)
    if layer is not None and group.slot_axes and not group.by_xla:
        return context_parallel.step(layer, inputs, block, group, budget, args)
    return on_device.step(layer, inputs, block, group, budget, args)


def _behind(block: Block, group: Group) -> Array:
    """Returns the difference of positions and those that tokens are rotated to, [B] int32, after a shared prefix."""
    if group.step_implementation is not None:
        raise ConfigError("kernels for whole steps do not read a shared prefix; give implementation='xla'.")
    return -jnp.broadcast_to(block.prefix.length, block.prompt.shape)


def _check(layer: LayerKV | None, query: Array, key: Array, value: Array, block: Block, budget: Array | None) -> None:
    """Asserts shapes and dtypes, which costs nothing in a compiled program."""
    batch, kv_heads, n, dim = key.shape
    chex.assert_rank([query, key, value], 4)
    chex.assert_equal_shape([key, value])
    chex.assert_shape(query, (batch, None, n, dim))
    chex.assert_is_divisible(query.shape[1], kv_heads)
    chex.assert_shape(block.position, (batch, n))
    rows = [block.prompt, block.total, *([] if budget is None else [budget])]
    chex.assert_shape(rows, (batch,))
    chex.assert_type([block.position, *rows], jnp.int32)
    if layer is not None:
        chex.assert_shape(layer.position, (batch, kv_heads, None))
        chex.assert_type(layer.position, jnp.int32)
        chex.assert_tree_shape_prefix((layer.stats, layer.stores), (batch, kv_heads))
        chex.assert_tree_shape_prefix(layer.index, (batch,))
