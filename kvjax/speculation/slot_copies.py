"""Drafts that read the target's cache: small copies of the slots that are chosen, once in each round.

A copy has its own tail of slots for drafted tokens. The target's keys and values of these tokens are those of its own
block, when they are verified, so that a copy is thrown away at the end of its round.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache.cut import cut
from kvjax.cache.groups import Group, Phase
from kvjax.cache.state import EMPTY, Block, KVState, Layer, LayerKV, exact_store
from kvjax.cache.step import evict
from kvjax.cache.step.interface import AttentionOperands
from kvjax.models.bound import BoundDecoder
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Choice
from kvjax.numerics.mask_indices import compact
from kvjax.numerics.top_k import largest
from kvjax.parallel import host_memory
from kvjax.policies.base import View
from kvjax.selection.everything import everything
from kvjax.storage import dense

Array = jax.Array
GroupBudgets = tuple[tuple[Array | None, ...], ...]  # per layer and group of heads


def plain_group(group: Group) -> Group:
    """Returns a group that reads everything and observes nothing, by XLA: that of a block that is verified."""
    return dataclasses.replace(
        group, selection=everything(), needs=frozenset(), step_implementation=None, attn_implementation="xla"
    )


def copy_group(group: Group, width: int, tail: int) -> Group:
    """Returns the group of a copy of `width` slots, with a tail for drafted tokens."""
    return dataclasses.replace(plain_group(group), storage=dense(), slots=(min(width, group.capacity) + tail,))


def copy_by_selection(
    decoder: BoundDecoder, state: KVState, token: Array, active: Array, choosing: Phase, copies: Phase, tail: int
) -> tuple[Array, KVState, KVState]:
    """Feeds the first token of a round, which chooses the slots, and copies these.

    Args:
      decoder: the target's.
      state: the target's cache.
      token: [B] int32.
      active: [B] bool, the rows that have a token.
      choosing: the groups of each layer, with the selection.
      copies: the groups of the copies.
      tail: see `copy_group`.

    Returns:
      The logits after the token, [B, V]; the copies, which hold it; and the cache of the target, which does not.
    """
    length, indices = state.length, [[group.index for group in layer] for layer in state.layers]
    # [B, 1]
    position = jnp.where(active, length, -1)[:, None]
    block = Block(position=position, prompt=state.prompt, total=state.total, budget=state.budget)
    x, after, choices = decoder.step(token[:, None], state, block, choosing)
    layers = tuple(
        Layer(
            _gather_slots(held, _read_mask(held, choice, length), group, tail)
            for held, choice, group in zip(*each, strict=True)
        )
        for each in zip(after.layers, (choices[i] for i in range(len(copies))), copies, strict=True)
    )
    made = after.replace(layers=layers, budget=_no_budget(copies))
    after = cut(after, length)
    restored = tuple(
        Layer(held.replace(index=index) for held, index in zip(*each, strict=True))
        for each in zip(after.layers, indices, strict=True)
    )
    return decoder.logits(x[:, 0]), made, after.replace(layers=restored)


def copy_by_policy(
    config: DecoderConfig, state: KVState, ranking: Phase, budgets: GroupBudgets, copies: Phase, tail: int
) -> KVState:
    """Copies the slots that a policy ranks highest.

    Args:
      config: the decoder.
      state: the target's cache, with the statistics of the policy.
      ranking: the groups of each layer, whose policies rank slots.
      budgets: [B] int32 slots of each layer and group.
      copies: the groups of the copies.
      tail: see `copy_group`.
    """
    layers = []
    for index, (layer, groups, made, budget) in enumerate(zip(state.layers, ranking, copies, budgets, strict=True)):
        copied = []
        for held, group, copy, slots in zip(layer, groups, made, budget, strict=True):
            if slots is None:
                copied.append(_gather_slots(held, held.position >= 0, copy, tail))
                continue
            on_host = any(map(host_memory.on_host, jax.tree.leaves(held.stores)))
            # Policies that look at keys are refused where these are not on the device.
            key: Any = None if on_host else held.key
            value: Any = None if on_host else held.value
            view = View(
                position=held.position, key=key, value=value, newest=state.length - 1, budget=slots,
                prompt=state.prompt, layer=index, decoding=True, scale=_scale(config),
                soft_cap=config.attention_soft_cap, window=config.kind(index).window, num_layers=config.num_layers,
            )  # fmt: skip
            priority = group.policy.priority(held.stats, view)
            priority = jnp.where(jnp.isnan(priority), -jnp.inf, priority)
            mask = largest(priority, held.position, group.policy.limit(held.stats, view))
            copied.append(_gather_slots(held, mask, copy, tail))
        layers.append(Layer(copied))
    return state.replace(layers=tuple(layers), budget=_no_budget(copies))


def _no_budget(copies: Phase) -> GroupBudgets:
    return tuple((None,) * len(layer) for layer in copies)


def _scale(config: DecoderConfig) -> float:
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def _read_mask(layer: LayerKV, choice: Choice, length: Array) -> Array:
    """Marks the slots that a step has read, and that of its own token, whose position is `length`; [B, K, S] bool."""
    # A token that is apart from the slots in its step has one afterwards.
    before = choice.position[:, :, : layer.position.shape[2]] >= 0
    return before | (layer.position == length[:, None, None])


def _gather_slots(layer: LayerKV, mask: Array, group: Group, tail: int) -> LayerKV:
    """Copies the marked slots of a layer.

    Args:
      layer: of the target.
      mask: [B, K, S] bool; no more than the group has slots besides its tail.
      group: of the copy.
      tail: see `copy_group`.
    """
    pad = ((0, 0), (0, 0), (0, tail))
    # [B, K, W] each
    slots, valid = compact(mask, group.capacity - tail)
    position = jnp.where(valid, jnp.take_along_axis(layer.position, slots, axis=2), EMPTY)
    # [B, K, W + tail, D] each
    key, value = (
        jnp.pad(host_memory.gather(layer.stores[0][side]["exact"], slots), (*pad, (0, 0))) for side in ("key", "value")
    )
    position = jnp.pad(position, pad, constant_values=EMPTY)
    return LayerKV(position=position, stores=(exact_store(key, value),), stats={}, index={}, dim=layer.dim)


def update_index(state: KVState, first: Array, count: int, choosing: Phase) -> KVState:
    """Adds verified tokens to the index of a selection, from the target's exact keys.

    Args:
      state: the target's cache, whose tokens from position `first` on are not in the index yet.
      first: [B] int32.
      count: the largest number of such tokens of a row.
      choosing: see `copy_by_selection`.
    """

    def written(layer: LayerKV, group: Group) -> LayerKV:
        index = layer.index
        if not index:
            return layer
        for number in range(count):
            at = first + number
            # [B, K]: the slot of the token; 0 for a row that has none
            slot = jnp.argmax(layer.position == at[:, None, None], axis=2).astype(jnp.int32)
            key = host_memory.gather(layer.stores[0]["key"]["exact"], slot[:, :, None])
            index = group.selection.write(index, key, slot, at < state.length)
        return layer.replace(index=index)

    layers = tuple(
        Layer(written(*each) for each in zip(layer, groups, strict=True))
        for layer, groups in zip(state.layers, choosing, strict=True)
    )
    return state.replace(layers=layers)


def update_statistics(
    state: KVState,
    operands: dict[int, tuple[AttentionOperands, ...]],
    position: Array,
    phase: Phase,
    config: DecoderConfig,
) -> KVState:
    """Adds the queries of verified tokens to the statistics. Refused tokens have left no trace in them.

    Args:
      state: the target's cache.
      operands: of the block that was verified, by layer, per group of heads.
      position: [B, n] int32 of the block's tokens, -1 for one that was refused.
      phase: the groups of each layer, with the statistics that they keep.
      config: the decoder.
    """
    # [B]
    queries = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)

    def added(layer: LayerKV, seen: AttentionOperands, group: Group, window: int | None) -> LayerKV:
        assert seen.key is not None
        problem = attention.problem(
            # The output is not used: values of one feature.
            seen.query, seen.key, seen.key[..., :1], query_position=position, key_position=seen.position,
            scale=_scale(config), soft_cap=config.attention_soft_cap, window=window, needs=group.reports,
            group_reduce=group.policy.group_reduce, prompt=state.prompt,
        )  # fmt: skip
        _, columns = attention.attend_and_reduce(problem, "xla")
        stats = evict.observe(layer.stats, group.needs, columns, queries, position.shape[1])
        return layer.replace(stats=stats)

    layers = tuple(
        Layer(added(*each, config.kind(index).window) for each in zip(layer, operands[index], groups, strict=True))
        for index, (layer, groups) in enumerate(zip(state.layers, phase, strict=True))
    )
    return state.replace(layers=layers)
