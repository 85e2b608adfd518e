"""A step of a group of heads of which a device has all slots, and the prompt in one shot."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Group
from kvjax.cache.slots import after_reading, constrain, constrain_slots, longest, ranks
from kvjax.cache.state import Block, LayerKV, PerSlot
from kvjax.cache.step import attend, evict, query_blocks
from kvjax.cache.step.interface import AttentionOperands, LayerArgs, StepInputs, add_to_prompt_index
from kvjax.cache.step.operands import Operands, operands, rotate_to_ranks
from kvjax.cache.step.pool import Pool, joined, pool_of, prompt_pool, run_after_inputs
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.cache.step.step_end import QueryView, finish
from kvjax.kernels.coded import as_array
from kvjax.numerics.rope import Rope
from kvjax.policies.components import KeyFrame
from kvjax.policies.row_memory import Queries
from kvjax.policies.written import Token, placed
from kvjax.storage import store as held
from kvjax.storage.side import PROMPT, PromptView, Sides
from kvjax.typing import PyTree

Array = jax.Array


def step(
    layer: LayerKV | None, inputs: StepInputs, block: Block, group: Group, budget: Array | None, args: LayerArgs
) -> tuple[Array, LayerKV, AttentionOperands]:
    """Runs the step; for the arguments see `kvjax.cache.step.step.step`.

    Args:
      layer: the slots; None if the block is the whole prompt.
      inputs: the step's own tokens.
      block: the tokens of the step.
      group: the policy, storage, selection and kernels.
      budget: [B] int32 slots per KV head, or None.
      args: of the layer.
    """
    rope, one_shot = args.rope, layer is None
    if layer is None:
        pool = prompt_pool(inputs.key, inputs.value, block, group)
    else:
        pool = pool_of(layer, inputs, block, group, args)
    if group.prompt_index is not None:
        pool = pool._replace(index=add_to_prompt_index(pool.index, group.prompt_index, inputs, block, args.skew))
    options: dict[str, Any] = {
        "query_position": block.position, "scale": inputs.scale, "soft_cap": args.soft_cap, "window": args.window,
        "causal": one_shot, "prompt": block.prompt, "group_reduce": group.policy.group_reduce,
    }  # fmt: skip

    def attended(pool: Pool, query: Array, *, whole: bool = False) -> Operands:
        by_rank = None
        if rope is not None and group.policy.positions == "cache":
            by_rank = functools.partial(_by_rank, pool, block, rope, one_shot)
        return operands(pool, query, group, inputs.rotation, by_rank, whole=whole)

    # Coded slots are decoded after all else is computed, and again by who needs them; see `run_after_inputs`.
    made = None if pool.coded else attended(pool, inputs.query)

    def look(pool: Pool, query: Array) -> tuple[Array, dict[str, Array], PyTree, Array, Array | None]:
        """Returns the output, the columns, the selection's index, and what was read and chosen (see `Reading`)."""
        query, keys, values, _ = attended(pool, query) if made is None else made
        chosen = attend.read(pool, query, keys, values, block, group, inputs, budget, args)
        if one_shot and group.selection.whole_text:
            output, columns = attend.attend_text(query, chosen, pool, group, **options)
        elif group.sparse_prompt is not None and not attend.is_turn(group):
            output, columns = query_blocks.attend(query, chosen, pool, group, unrotate, **options)
        else:
            output, columns = attend.attend(query, chosen, pool, group, log_weight, block.prefix, **options)
            output = attend.mixed(output, chosen, group.selection)
        index = chosen.index if chosen.view is None else group.selection.settle(chosen.index, columns, chosen.view)
        return output, columns, index, chosen.position, chosen.chosen

    def unrotate(key: Array) -> Array:
        return Prompt(block.prompt, rope, inputs.frequencies).unrotate(key, pool.position)

    log_weight = None if one_shot or group.policy.merge is None else group.policy.merge.log_weight(pool.stats)
    output, columns, index, read, chosen = run_after_inputs(look, pool, inputs.query)
    columns |= attend.columns_of(chosen, pool, block, group)
    if pool.new_tokens is not None or (group.policy.folding is not None and not one_shot):
        pool = pool._replace(position=_after_reading(pool, output))
    # If KV heads are replicated but query heads are not, XLA would otherwise merge in parts and gather the cache.
    columns = constrain(columns, by_xla=group.by_xla)
    # [B]
    queries = jnp.sum(block.position >= 0, axis=1, dtype=jnp.int32)
    stats = pool.stats | _written(pool, inputs, output, block, group, args)
    observed = evict.observe(stats, group.needs, columns, queries, block.position.shape[1])
    stats = observed if block.row_newest is None else _of_seen(stats, observed, pool, block, group)
    per_slot = PerSlot(stats, {name: index[name] for name in group.selection.per_slot})
    memory = _remembered(layer, inputs, block, group, rope)
    # XLA removes the frequencies unless the policy rotates keys.
    frequencies = None if rope is None else rope.frequencies(block.total)
    frame = None
    if group.parallel is None:  # otherwise positions are not those that keys are rotated to
        frame = KeyFrame(group.policy.positions == "original", rope, frequencies)
    queries_seen = QueryView(frame, memory, inputs.scale, args.soft_cap, args.window, args.params or {})
    after, moved, memory = finish(pool, per_slot, block, group, budget, inputs.rotation, made, queries_seen)
    after = after.replace(stats=moved.stats, index=index | moved.index, memory=memory)
    # The slots of a prompt in one shot are in the arrays of the decoding phase.
    then = group.decode_group if one_shot else group if group.by_xla else None
    if one_shot and then is not None:
        after = after.replace(sides=_prompt_sides(after, inputs, block, then))
        prompt = Prompt(block.prompt, rope, inputs.frequencies, args.skew, args.sides)
        after = convert(after, group, then, prompt)
    after = constrain(after) if then is None or not then.slot_axes else constrain_slots(after, then.per_head)
    if group.storage.on_host:
        return output, after, AttentionOperands(inputs.query, None, read, log_weight, pool.position, chosen)
    # XLA removes this unless the caller uses it.
    seen = attended(pool, inputs.query, whole=True) if made is None or group.storage.shortened else made
    keys = joined(tuple(map(as_array, seen.keys)))
    return output, after, AttentionOperands(seen.query, keys, read, log_weight, pool.position, chosen)


def _of_seen(
    before: dict[str, Array], after: dict[str, Array], pool: Pool, block: Block, group: Group
) -> dict[str, Array]:
    """Returns statistics as they were in the slots of tokens that follow a block which is fed within a text."""
    position = pool.position if pool.new_tokens is None else pool.position[:, :, group.unranked :]
    # [B, K, S']
    later = position > jnp.max(block.position, axis=1)[:, None, None]

    def kept(old: Array, new: Array) -> Array:
        return jnp.where(later.reshape(*later.shape, *(1,) * (old.ndim - 3)), old, new)

    return {name: kept(before[name], new) for name, new in after.items()}


def _remembered(
    layer: LayerKV | None, inputs: StepInputs, block: Block, group: Group, rope: Rope | None
) -> dict[str, dict[str, Array]]:
    """Returns what the policies remember of queries, with those of the step; for the arguments see `step`."""
    if not group.memory:
        return {}
    batch, kv_heads, n, dim = inputs.key.shape
    # [B, H, n, D], constants to the gradient
    query, unrotated = (jax.lax.stop_gradient(x.astype(jnp.float32)) for x in (inputs.query, inputs.unrotated[0]))
    rotated = query
    if rope is not None and group.policy.positions == "cache":
        rotated = rope.rotate(unrotated, block.position, rope.frequencies(block.total))
    # [B, K, G, n, D]
    rotated, unrotated = (x.reshape(batch, kv_heads, -1, n, dim) for x in (rotated, unrotated))
    queries = Queries(rotated, unrotated, block.position, block.position[:, 0], block.prompt)
    made = {}
    for each in group.memory:
        before = each.empty((batch, kv_heads, rotated.shape[2]), dim) if layer is None else layer.memory[each.name]
        after = before if each.of_replay else each.update(before, queries)
        made[each.name] = constrain(after, by_xla=group.by_xla)
    return made


def _written(
    pool: Pool, inputs: StepInputs, output: Array, block: Block, group: Group, args: LayerArgs
) -> dict[str, Array]:
    """Returns the written scores of all slots, including the step's own tokens, [B, K, S'] each.

    Args:
      pool: the slots and the step's own tokens.
      inputs: the step's own tokens.
      output: [B, H, n, D], the output of attention.
      block: the tokens of the step.
      group: the group of heads, with its policies.
      args: the arguments of the layer.
    """
    if not group.writes:
        return {}
    assert args.hidden is not None
    batch, kv_heads, n, dim = inputs.key.shape
    grouped = (batch, kv_heads, -1, n, dim)
    query, key = inputs.unrotated
    kernel = args.out_kernel
    token = Token(
        args.hidden, query.reshape(grouped), key, inputs.value, output.reshape(grouped), block.position,
        None if kernel is None else kernel.reshape(kv_heads, -1, dim, kernel.shape[1]),
    )  # fmt: skip
    position = pool.position if pool.new_tokens is None else pool.position[:, :, group.unranked :]
    made = {}
    for each in group.writes:
        # Gradients treat the choice of slots as a constant.
        own = jax.lax.stop_gradient(each.write(token, args.params or {}))
        made[each.name] = placed(pool.stats[each.name], own, position, block.position)
    return constrain(made, by_xla=group.by_xla)


def _by_rank(
    pool: Pool, block: Block, rope: Rope, one_shot: bool, query: Array, keys: tuple[PyTree, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """Rotates query and keys to their ranks; see `rotate_to_ranks`.

    Args:
      pool: the slots.
      block: the tokens of the step.
      rope: the layer's rotary embedding.
      one_shot: whether the slots are the block's tokens in order.
      query: [B, H, n, D], not rotated.
      keys: [B, K, S_i, D] of each piece, not rotated.
    """
    size = pool.position.shape[2]
    query_rank, key_rank = ranks(block.position, pool.position, in_order=one_shot)
    return rotate_to_ranks(query, keys, query_rank, pool.cut(key_rank), longest(pool.position), rope, size)


def _after_reading(pool: Pool, output: Array) -> Array:
    """Returns the positions [B, K, S'] as they are, after the output [B, H, n, D] was computed.

    In a step that evicts nothing, no write would depend on what is read, and neither would the values that a merge
    writes. XLA would then copy every store that is read and written in the same step; see
    `kvjax.cache.slots.after_reading`. If the step's own tokens are in other
    arrays, only their positions must wait.
    """
    batch, kv_heads = pool.position.shape[:2]
    size, n = pool.layer.position.shape[2], output.shape[2]
    # [B, K, n]: one number of each KV head
    number = output.reshape(batch, kv_heads, -1, n, output.shape[3])[:, :, 0, :, 0]
    if pool.new_tokens is None:
        return after_reading(pool.position, number[:, :, :1])
    own = after_reading(pool.position[:, :, size:], number)
    return jnp.concatenate([pool.position[:, :, :size], own], axis=2)


def _prompt_sides(after: LayerKV, inputs: StepInputs, block: Block, group: Group) -> Sides:
    """Makes what the keys and values of each row share from its whole prompt.

    Args:
      after: the prompt's slots after eviction, token i in slot i.
      inputs: the prompt's queries, keys and values.
      block: the prompt's tokens.
      group: of the decoding phase.
    """
    if not group.storage.sides_of(PROMPT):
        return {}
    query, key, value = (x.astype(jnp.float32) for x in inputs[:3])
    grouped = query.reshape(*key.shape[:2], -1, *query.shape[2:])
    view = PromptView(key, grouped, key, value, block.position, after.position >= 0)
    return constrain(held.prompt_sides(group.storage, view, inputs.value.dtype))
