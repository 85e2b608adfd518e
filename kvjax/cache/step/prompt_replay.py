"""A step of the replay of a prompt, and the eviction after the replay; see `kvjax.policies.prompt_replay`.

Tokens of a replay attend to the slots of the whole prompt and to their own block. They are not kept: a step changes
only the statistic of the replay, and the memories of its queries.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, Block, LayerKV, PerSlot
from kvjax.cache.step.interface import AttentionOperands, LayerArgs, StepInputs
from kvjax.cache.step.operands import Operands
from kvjax.cache.step.pool import KeyRotation, Pool
from kvjax.cache.step.prompt_end import Prompt
from kvjax.cache.step.step_end import QueryView, finish
from kvjax.numerics.statistics import Statistic
from kvjax.policies.components import KeyFrame
from kvjax.policies.prompt_replay import REPLAYED, Replay
from kvjax.policies.row_memory import Queries
from kvjax.storage.base import UNROTATED

Array = jax.Array

LARGEST = Statistic("largest", accumulate="max")  # the maximum over the queries of a block


def step(
    layer: LayerKV, inputs: StepInputs, block: Block, group: Group, args: LayerArgs
) -> tuple[Array, LayerKV, AttentionOperands]:
    """Attends to a whole prompt and to the block itself, and records the attention that slots of the chunk receive.

    Args:
      layer: the prompt's slots, exact and none of them evicted.
      inputs: the block's tokens.
      block: their positions, beyond the prompt.
      group: has the replay.
      args: of the layer.

    Returns:
      The output [B, H, n, D], the layer with its new statistic, and the operands of attention.
    """
    assert group.replay is not None
    query, own, held = _rotated(layer, inputs, block, group, args)
    held_value = layer.value
    if group.replay.by == "gradient" and REPLAYED in layer.stats:
        # The array of scores holds the gates less 1, with respect to which the gradient is taken.
        gates = 1 + layer.stats[REPLAYED][..., None]
        held_value = (held_value.astype(jnp.float32) * gates).astype(held_value.dtype)
    # [B, K, S + n, D] each, and [B, K, S + n]
    key, value = (jnp.concatenate(each, axis=2) for each in ((held, own), (held_value, inputs.value)))
    own_at = jnp.broadcast_to(block.position[:, None], own.shape[:3])
    position = jnp.concatenate([layer.position, own_at], axis=2)

    # The backward pass computes probabilities again, so that those of one layer exist at a time.
    @jax.checkpoint
    def attend(query: Array, key: Array, value: Array) -> Array:
        problem = attention.problem(
            query, key, value, query_position=block.position, key_position=position, scale=inputs.scale,
            soft_cap=args.soft_cap, window=args.window,
        )  # fmt: skip
        attended, _ = attention.attend_and_reduce(problem, "xla")
        return attention.ungroup(attended.output).astype(value.dtype)

    output = attend(query, key, value)
    if group.replay.by == "attention" and REPLAYED in layer.stats:
        scores = _scores(layer, query, (held, own), inputs, block, group.replay, args)
        layer = layer.replace(stats=layer.stats | {REPLAYED: scores})
    layer = layer.replace(memory=layer.memory | _remembered(layer, query, block, group))
    return output, layer, AttentionOperands(query, key, position, None, position)


def _remembered(layer: LayerKV, query: Array, block: Block, group: Group) -> dict[str, dict[str, Array]]:
    """Returns the memories of a replay's queries after a block of rotated queries [B, H, n, D]."""
    replay = group.replay
    wanted = [each for each in group.memory if each.of_replay]
    if not wanted or replay is None:
        return {}
    batch, kv_heads = layer.position.shape[:2]
    # [B, K, G, n, D]
    grouped = jax.lax.stop_gradient(query.astype(jnp.float32)).reshape(batch, kv_heads, -1, *query.shape[2:])
    # [B]: the index of the block's first token in the replay, and the number of tokens of the replay
    first = block.replayed + replay.added(block.replayed // replay.chunk)
    total = block.prompt + replay.added(-(-block.prompt // replay.chunk))
    queries = Queries(grouped, grouped, block.position, first, total)
    return {each.name: each.update(layer.memory[each.name], queries) for each in wanted}


def _rotated(
    layer: LayerKV, inputs: StepInputs, block: Block, group: Group, args: LayerArgs
) -> tuple[Array, Array, Array]:
    """Returns the block's queries [B, H, n, D] and keys [B, K, n, D], and the prompt's keys [B, K, S, D], rotated."""
    query, own, held = inputs.query, inputs.rotated_key, layer.key
    if inputs.rotation is not None:
        return query, own, inputs.rotation.apply(held, layer.position).astype(own.dtype)
    if args.rope is None or group.policy.positions == "original":
        return query, own, held
    # Nothing has been evicted: the rank of a slot is its position.
    frequencies = args.rope.frequencies(jnp.maximum(block.prompt, block.newest + 1))
    query, own = (args.rope.rotate(x, block.position, frequencies) for x in (query, own))
    return query, own, args.rope.rotate(held, layer.position, frequencies)


def _scores(
    layer: LayerKV,
    query: Array,
    keys: tuple[Array, Array],
    inputs: StepInputs,
    block: Block,
    replay: Replay,
    args: LayerArgs,
) -> Array:
    """Returns the statistic of a replay after a block, [B, K, S] float32.

    Args:
      layer: the prompt's slots.
      query: [B, H, n, D], rotated.
      keys: [B, K, S, D] of the prompt and [B, K, n, D] of the block, rotated.
      inputs: the block's tokens.
      block: their positions, and the chunk that they replay.
      replay: the size of the chunk, and the number of first slots in its softmax.
      args: of the layer.
    """
    old, size = layer.stats[REPLAYED], layer.position.shape[2]
    place = _places(block, replay, size)
    # [B, K, M]: the slots of these positions
    slots = jnp.take_along_axis(_slot_of(layer.position), jnp.maximum(place, 0)[:, None], axis=2)
    at = jnp.broadcast_to(place[:, None], slots.shape)
    key = jnp.concatenate([jnp.take_along_axis(keys[0], slots[..., None], axis=2), keys[1]], axis=2)
    # [B, K, M, D]
    value = jnp.take_along_axis(layer.value, slots[..., None], axis=2)
    values = jnp.concatenate([value, inputs.value], axis=2)
    own_at = jnp.broadcast_to(block.position[:, None], keys[1].shape[:3])
    # [B, K, M + n]
    position = jnp.concatenate([at, own_at], axis=2)
    heads, kv_heads = query.shape[1], key.shape[1]
    if replay.output_norm:
        # Each query head has its own output projection, and is treated as a KV head: [B, H, M + n, ...].
        key, values, position = (jnp.repeat(x, heads // kv_heads, axis=1) for x in (key, values, position))
    problem = attention.problem(
        query, key, values, query_position=block.position, key_position=position, scale=inputs.scale,
        soft_cap=args.soft_cap, window=args.window, needs=frozenset({LARGEST}), group_reduce="max",
    )  # fmt: skip
    if replay.output_norm:
        assert args.hidden_norm is not None
        (weight,) = problem.weights
        problem = problem.replace(weights=(weight / jnp.maximum(args.hidden_norm, jnp.finfo(jnp.float32).tiny),))
    _, columns = attention.attend_and_reduce(problem, "xla")
    # [B, K, M] or [B, H, M]
    new = columns[LARGEST.name][:, :, : place.shape[1]]
    if replay.output_norm:
        new = (new * _output_norms(value, args)).reshape(old.shape[0], kv_heads, heads // kv_heads, -1).max(axis=2)
    # A slot out of bounds is not written to.
    target = jnp.where(at >= 0, slots, size)
    write = jax.vmap(jax.vmap(lambda row, slot, score: row.at[slot].max(score, mode="drop")))
    scores: Array = write(old, target, jax.lax.stop_gradient(new))
    return scores


def _places(block: Block, replay: Replay, size: int) -> Array:
    """Returns the positions of the first slots and of a chunk, [B, M] int32; -1 = beyond the prompt, or repeated."""
    # [B, 1]
    start, length = block.replayed[:, None], block.prompt[:, None]
    sinks = jnp.arange(min(replay.sinks, size), dtype=jnp.int32)[None]
    chunk = start + jnp.arange(min(replay.chunk, size), dtype=jnp.int32)
    sinks = jnp.where(sinks < jnp.minimum(start, length), sinks, EMPTY)
    return jnp.concatenate([sinks, jnp.where(chunk < length, chunk, EMPTY)], axis=1)


def _slot_of(position: Array) -> Array:
    """Returns the slot of each position, [B, K, S] int32; undefined where no slot has the position."""
    size = position.shape[2]
    place = jnp.where(position >= 0, position, size)
    number = jnp.arange(size, dtype=jnp.int32)
    return jax.vmap(jax.vmap(lambda at: jnp.zeros(size, jnp.int32).at[at].set(number, mode="drop")))(place)


def _output_norms(value: Array, args: LayerArgs) -> Array:
    """Returns ‖W_o v‖₂ of values [B, K, M, D] for each query head, [B, H, M] float32."""
    assert args.output_gram is not None
    batch, kv_heads, size, dim = value.shape
    # [K, G, D, D]
    gram = args.output_gram.reshape(kv_heads, -1, dim, dim)
    value = value.astype(jnp.float32)
    squares = jnp.einsum("bkmd,kgde,bkme->bkgm", value, gram, value, precision=jax.lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.maximum(squares, 0.0)).reshape(batch, -1, size)


def evict_prompt(
    layer: LayerKV, group: Group, budget: Array | None, prompt: Prompt, total: Array, index: Array, args: LayerArgs
) -> LayerKV:
    """Evicts from a prompt that has been replayed.

    Args:
      layer: the prompt's slots.
      group: of the prompt phase.
      budget: [B] int32 slots per KV head, or None.
      prompt: the prompts.
      total: [B] int32, see `KVState`.
      index: int32, the number of the layer.
      args: of the layer, with the factor of the logits.
    """
    if group.policy.budget is None:
        return layer
    assert args.scale is not None
    block = Block(
        position=prompt.length[:, None] - 1, prompt=prompt.length, total=total, budget=budget, layer=index
    )  # fmt: skip
    pool = Pool(layer, None, layer.position, layer.stats, layer.index, {})
    keys, rotation = (layer.key,), None
    placed, original = keys, group.policy.positions == "original"
    if original and group.storage.frame == UNROTATED and prompt.rope is not None and prompt.frequencies is not None:
        rotation = KeyRotation(prompt.rope, prompt.frequencies)
        placed = (rotation.apply(layer.key, layer.position),)
    # The queries of the prompt are no longer held; the layer has the memories of them.
    made = Operands(layer.key, placed, (layer.value,), placed)
    per_slot = PerSlot(layer.stats, {name: layer.index[name] for name in group.selection.per_slot})
    frame = KeyFrame(original, prompt.rope, prompt.frequencies)
    seen = QueryView(frame, layer.memory, args.scale, args.soft_cap, args.window, args.params or {})
    own = dataclasses.replace(group, replay=None, evicts_one=False)
    after, moved, memory = finish(pool, per_slot, block, own, budget, rotation, made, seen)
    return after.replace(stats=moved.stats, index=layer.index | moved.index, memory=memory)
