"""One step of one layer: select, append, attend, observe, evict, settle.

The slots of a layer are arrays whose shape never changes. `position` alone says which slots are live, how old they are
and where RoPE rotates them; the order of slots has no meaning. While decoding, eviction frees one slot per head and the
next token is written there, so that nothing is compacted or copied.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.context_parallel import step as context
from kvjax.cache.context_parallel.operands import Common
from kvjax.cache.groups import Group
from kvjax.cache.slots import after_reading, constrain, constrain_slots
from kvjax.cache.state import EMPTY, Block, Layer, LayerKV, PerSlot
from kvjax.cache.step import attend, evict, fused_kernel
from kvjax.cache.step.operands import (
    Pool,
    Turn,
    joined,
    pieces,
    placed,
    pool_of,
    prompt_pool,
    rotated_by_rank,
    run_after_inputs,
)
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.cache.step.step_end import finish
from kvjax.kernels.coded import as_array
from kvjax.numerics.rope import Rope
from kvjax.selection.base import Selection
from kvjax.storage import store as held
from kvjax.storage.base import UNROTATED
from kvjax.storage.side import PROMPT, PromptView, Sides, rows_of

Array = jax.Array


class Seen(NamedTuple):
    """The operands of attention in a step, for `kvjax.analysis`.

    Attributes:
      query: [B, H, n, D], rotated.
      key: [B, K, S, D], rotated; None for slots on several devices, and for a pool in host memory, whose keys XLA would
        move even if they are not used.
      position: [B, K, S] int32; -1 for a slot that is empty or not read.
      log_weight: [B, K, S] float32 added to the logits, or None.
      held: [B, K, S] int32; -1 for a slot that is empty.
      choice: [B, K, S] bool, whether a selection chose the slot; None if everything is read.
    """

    query: Array
    key: Array | None
    position: Array
    log_weight: Array | None
    held: Array
    choice: Array | None = None


def step_layer(
    layer: Layer | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    block: Block,
    groups: tuple[Group, ...],
    rope: Rope | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    guess: Array | None = None,
    skew: Array | None = None,
    sides: Sides | None = None,
) -> tuple[Array, Layer, tuple[Seen | None, ...]]:
    """Runs `step` for each group of heads of a layer.

    Args:
      layer: the cache so far; None if the block is the whole prompt.
      query: [B, H, n, D], not rotated.
      key: [B, K, n, D], not rotated.
      value: [B, K, n, D].
      block: the tokens of the step, of this layer.
      groups: the layer's groups of heads.
      rope: the layer's rotary embedding.
      scale: factor of the logits; None for D ** -0.5.
      soft_cap: of the logits, see `Problem`.
      window: the layer's sliding window.
      guess: [B, H, n, D] the query that selections choose by if they look ahead, not rotated; None if none does.
      skew: [K, D, D], see `kvjax.models.skew`; None = the identity.
      sides: of a calibration, leaves [K, ...] or [1, ...]; None = the storage has none.

    Returns:
      The output [B, H, n, D], the layer's cache afterwards, and the operands of attention of each group.
    """
    batch, _, n, dim = query.shape
    kv_heads = key.shape[1]

    def of_heads(x: Array, heads: np.ndarray) -> Array:
        """Returns the query heads [B, H', n, D] of some KV heads."""
        return x.reshape(batch, kv_heads, -1, n, dim)[:, heads].reshape(batch, -1, n, dim)

    outputs, afters, saw = [], [], []
    order: list[int] = []
    for number, (group, budget) in enumerate(zip(groups, block.budget, strict=True)):
        before = None if layer is None else layer[number]
        own, guessed, skewed, shared = (query, key, value), guess, skew, sides
        if group.heads is not None:
            heads = np.asarray(group.heads)
            own = (of_heads(query, heads), key[:, heads], value[:, heads])
            guessed = None if guess is None else of_heads(guess, heads)
            skewed = None if skew is None else skew[heads]
            shared = rows_of(sides, group.heads)
            order += group.heads
        output, after, seen = step(
            before, *own, block=block, group=group, budget=budget, rope=rope, scale=scale, soft_cap=soft_cap,
            window=window, guess=guessed, skew=skewed, sides=shared,
        )  # fmt: skip
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
    rope: Rope | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    guess: Array | None = None,
    skew: Array | None = None,
    sides: Sides | None = None,
) -> tuple[Array, LayerKV, Seen | None]:
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
      rope: the layer's rotary embedding.
      scale: factor of the logits; None for D ** -0.5.
      soft_cap: of the logits, see `Problem`.
      window: the layer's sliding window.
      guess: see `step_layer`.
      skew: see `step_layer`.
      sides: see `step_layer`.

    Returns:
      The output [B, H, n, D], the cache afterwards, and the operands of attention (None if a kernel ran the step).
    """
    _check(layer, query, key, value, block, budget)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    by_rank, fresh = group.policy.positions == "cache", layer is None
    frequencies = None if rope is None or by_rank else rope.frequencies(block.total)
    rotate, turn, rotated = None, None, key
    if rope is not None and frequencies is not None:
        rotate = functools.partial(rope.rotate, frequencies=frequencies)
        query, rotated = (rope.rotate(x, block.position, frequencies) for x in (query, key))
        guess = None if guess is None else rope.rotate(guess, block.position, frequencies)
        if group.storage.frame == UNROTATED:
            # Keys that are held as they are before rotation are rotated to their positions in each step.
            turn = Turn(rope, frequencies)
    key = rotated if turn is None else key
    if group.step is not None and layer is not None:
        assert soft_cap is None, "kernels of whole steps refuse soft-caps; see `kvjax.kernels.registry`"
        output, after = fused_kernel.step(
            layer, query, key, value, group=group, budget=budget, newest=block.newest, scale=scale, window=window
        )
        return output, after, None
    if group.slot_axes and layer is not None:
        if group.watch is not None:
            layer = layer.replace(index=_watched(layer.index, group.watch, query, rotated, block, skew))
        output, after, looked = context.step(
            layer, query, key, value, block=block, group=group, budget=budget, rope=rope,
            common=Common(sides or {}, None if turn is None else turn.frequencies), hint=context.Hint(guess, skew),
            scale=scale, soft_cap=soft_cap, window=window,
        )  # fmt: skip
        own = jnp.broadcast_to(block.position[:, None], key.shape[:3])
        all_slots = jnp.concatenate([layer.position, own], axis=2)
        if looked is None:
            return output, after, Seen(query, None, all_slots, None, all_slots)
        read = jnp.concatenate([jnp.where(looked.read, layer.position, EMPTY), own], axis=2)
        choice = jnp.pad(looked.chosen, ((0, 0), (0, 0), (0, own.shape[2])))
        return output, after, Seen(query, None, read, None, all_slots, choice)
    if layer is None:
        pool = prompt_pool(key, value, block, group)
    else:
        pool = pool_of(layer, key, value, block, group, rotated=rotated, skew=skew, sides=sides)
    if group.watch is not None:
        pool = pool._replace(index=_watched(pool.index, group.watch, query, rotated, block, skew))
    options: dict[str, Any] = {
        "query_position": block.position, "scale": scale, "soft_cap": soft_cap, "window": window, "causal": fresh,
        "prompt": block.prompt, "group_reduce": group.policy.group_reduce,
    }  # fmt: skip

    def attended(pool: Pool, query: Array, *, whole: bool = False) -> tuple[Array, tuple[Any, ...], tuple[Any, ...]]:
        """Returns the operands of attention, with keys rotated; see `pieces`."""
        keys, values = pieces(pool, group, whole=whole)
        if rope is not None and by_rank:
            query, keys = rotated_by_rank(pool, keys, query, block, rope, fresh)
        return query, placed(pool, keys, turn), values

    def look(pool: Pool, query: Array) -> tuple[Array, dict[str, Array], Any, Array, Array | None]:
        """Returns the output, the columns, the selection's index, and what was read and chosen (see `Reading`)."""
        query, keys, values = attended(pool, query)
        chosen = attend.read(
            pool, query, keys, values, block, group, guess=guess, rotate=rotate, budget=budget,
            scale=scale, soft_cap=soft_cap, window=window, skew=skew,
        )  # fmt: skip
        if fresh and group.selection.whole_text:
            output, columns = attend.attend_text(query, chosen, pool, group, **options)
        else:
            output, columns = attend.attend(query, chosen, pool, group, log_weight, **options)
        index = chosen.index if chosen.view is None else group.selection.settle(chosen.index, columns, chosen.view)
        return output, columns, index, chosen.position, chosen.chosen

    log_weight = None if fresh or group.policy.merge is None else group.policy.merge.log_weight(pool.stats)
    output, columns, index, read, chosen = run_after_inputs(look, pool, query)
    columns |= attend.columns_of(chosen, pool, block, group)
    if pool.own is not None:
        pool = pool._replace(position=_after_reading(pool, output))
    # If KV heads are replicated but query heads are not, XLA would otherwise merge in parts and gather the cache.
    columns = constrain(columns)
    # [B]
    queries = jnp.sum(block.position >= 0, axis=1, dtype=jnp.int32)
    stats = evict.observe(pool.stats, group.needs, columns, queries)
    per_slot = PerSlot(stats, {name: index[name] for name in group.selection.per_slot})
    after, moved = finish(pool, per_slot, block, group, budget, turn)
    after = after.replace(stats=moved.stats, index=index | moved.index)
    if fresh and group.decode_group is not None:
        made = _prompt_sides(after, query, key, value, block, group.decode_group)
        after = after.replace(sides=made)
        after = convert(after, group, group.decode_group, Prompt(block.prompt, rope, frequencies, skew, sides))
    # The slots of a prompt in one shot are in the arrays of the decoding phase.
    then = group.decode_group if fresh else None
    after = constrain(after) if then is None or not then.slot_axes else constrain_slots(after, then.per_head)
    if group.storage.on_host:
        return output, after, Seen(query, None, read, log_weight, pool.position, chosen)
    # XLA removes this second call unless the caller uses its result.
    query, keys, _ = attended(pool, query, whole=True)
    return (
        output,
        after,
        Seen(query, joined(tuple(map(as_array, keys))), read, log_weight, pool.position, chosen),
    )


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


def _watched(
    index: dict[str, Array], watch: Selection, query: Array, key: Array, block: Block, skew: Array | None
) -> dict[str, Array]:
    """Adds a block of the prompt, rotated, to the sums that a selection needs when the prompt ends."""
    batch, kv_heads, n, dim = key.shape
    sums = index or watch.start((batch, kv_heads), dim)
    # [B, K, G, n, D]
    grouped = query.reshape(batch, kv_heads, -1, n, dim)
    return watch.watch(sums, *jax.lax.stop_gradient((grouped, key)), block.position >= 0, skew)


def _after_reading(pool: Pool, output: Array) -> Array:
    """Returns the positions [B, K, S'] as they are, those of the step's own tokens after the output [B, H, n, D].

    In a step that evicts nothing, no write would depend on what is read. XLA would then copy every store that is read
    and written in the same step; see `kvjax.cache.slots.after_reading`.
    """
    batch, kv_heads = pool.position.shape[:2]
    size, n = pool.layer.position.shape[2], output.shape[2]
    # [B, K, n]: one number of each KV head
    number = output.reshape(batch, kv_heads, -1, n, output.shape[3])[:, :, 0, :, 0]
    own = after_reading(pool.position[:, :, size:], number)
    return jnp.concatenate([pool.position[:, :, :size], own], axis=2)


def _prompt_sides(after: LayerKV, query: Array, key: Array, value: Array, block: Block, group: Group) -> Sides:
    """Makes what the keys and values of each row share from its whole prompt.

    Args:
      after: the prompt's slots after eviction, token i in slot i.
      query: [B, H, n, D], as attention takes it.
      key: [B, K, n, D], as it is held.
      value: [B, K, n, D].
      block: the prompt's tokens.
      group: of the decoding phase.
    """
    if not group.storage.sides_of(PROMPT):
        return {}
    query, exact_key, exact_value = (x.astype(jnp.float32) for x in (query, key, value))
    grouped = query.reshape(*key.shape[:2], -1, *query.shape[2:])
    view = PromptView(exact_key, grouped, exact_key, exact_value, block.position, after.position >= 0)
    return constrain(held.prompt_sides(group.storage, view, value.dtype))
