"""Replays prompts after they end, before any slot is evicted; see `kvjax.policies.Replay`."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import CacheLayout, Phase
from kvjax.cache.state import EMPTY, Block, KVState, LayerKV
from kvjax.models.bound import BoundDecoder
from kvjax.policies.prompt_replay import OVERLAP, REPLAYED, Replay

Array = jax.Array
Scores = list[Array | None]  # for each group of heads, [B, K, S] float32; None if the group is not scored
#: The result of a replay for a group of heads: the statistic of slots, if it is scored, and the memory of queries.
Recorded = tuple[Array | None, dict[str, dict[str, Array]]]


def replayed(decoder: BoundDecoder, kv: KVState, tokens: Array, layout: CacheLayout) -> KVState:
    """Returns a cache of whole prompts with the statistics of their replay.

    Args:
      decoder: the decoder.
      kv: the cache after the prompts' last tokens, in the arrays of the prompt phase.
      tokens: [B, n] int32, the prompts; tokens after a row's prompt are not read.
      layout: the layout of the cache, with the replay.
    """
    replay, width = layout.replay, tokens.shape[1]
    assert replay is not None
    phase, runs = _replaying(layout.prompt), stacked_runs(kv.layers)
    if by_gradient := replay.by == "gradient":
        # Products with an index have no gradient.
        kv, decoder = arranged_state(kv, ()), decoder.looped(())
    chunk = min(replay.chunk, width)
    groups, tree = jax.tree.flatten(kv.layers, is_leaf=lambda x: isinstance(x, LayerKV))

    def with_scores(scores: Scores) -> KVState:
        return with_records([(score, group.memory) for score, group in zip(scores, groups, strict=True)])

    def with_records(records: list[Recorded]) -> KVState:
        own = [
            group.replace(stats=group.stats | ({} if score is None else {REPLAYED: score}), memory=memory)
            for group, (score, memory) in zip(groups, records, strict=True)
        ]
        return kv.replace(layers=jax.tree.unflatten(tree, own))

    def run(before: KVState, start: Array) -> tuple[Array, KVState, Array]:
        """Replays a chunk; returns the last layer's output [B, m, hidden], the cache, and the real tokens [B, m]."""
        ids, position = chunk_tokens(tokens, kv.prompt, start, replay, chunk)
        first = jnp.broadcast_to(start, kv.prompt.shape)
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget, replayed=first)
        x, after = decoder.stream(ids, before, block, phase)
        return x, after, position >= 0

    def by_attention(records: list[Recorded], start: Array) -> tuple[list[Recorded], None]:
        _, after, _ = run(with_records(records), start)
        made = jax.tree.leaves(after.layers, is_leaf=lambda x: isinstance(x, LayerKV))
        return [_recorded(each) for each in made], None

    def norms(log_gates: Scores, start: Array) -> Array:
        x, _, real = run(with_scores(log_gates), start)
        squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=2)
        # The root of 0 has no gradient.
        return jnp.sum(jnp.where(real, jnp.sqrt(jnp.where(real, squares, 1.0)), 0.0))

    def add_gradient(scores: Scores, start: Array) -> tuple[Scores, None]:
        found = jax.grad(norms)(jax.tree.map(jnp.zeros_like, scores), start)
        return jax.tree.map(lambda old, new: old + jnp.abs(new), scores, found), None

    starts = jnp.arange(0, width, chunk, dtype=jnp.int32)
    first = [_recorded(group) for group in groups]
    if by_gradient:
        scores, _ = jax.lax.scan(add_gradient, [score for score, _ in first], starts)
        return arranged_state(with_scores(jax.lax.stop_gradient(scores)), runs)
    records, _ = jax.lax.scan(by_attention, first, starts)
    return with_records(jax.lax.stop_gradient(records))


def _recorded(group: LayerKV) -> Recorded:
    """Returns the arrays of a group of heads that a replay writes."""
    return group.stats.get(REPLAYED), group.memory


def _replaying(phase: Phase) -> Phase:
    """Returns the phase with its groups marked as replaying."""
    return tuple(tuple(dataclasses.replace(group, replaying=True) for group in layer) for layer in phase)


def chunk_tokens(tokens: Array, lengths: Array, start: Array, replay: Replay, chunk: int) -> tuple[Array, Array]:
    """Returns the tokens of the block that replays a chunk of each prompt.

    Args:
      tokens: [B, n] int32, the prompts.
      lengths: [B] int32, the number of tokens of each.
      start: [] int32, the first position of the chunk.
      replay: the instructions.
      chunk: the number of tokens of a chunk.

    Returns:
      The ids [B, m] int32 and their positions [B, m] int32, which follow the prompt. -1 marks padding, and rows whose
      prompt ends before the chunk.
    """
    width = tokens.shape[1]
    several = width > chunk
    size = len(replay.instruction) + chunk
    if several:
        size = max(size, len(replay.later) + min(OVERLAP, width) + chunk)
    first = start == 0
    # []: tokens of the instruction, and of the prompt before the chunk
    lead = jnp.where(first, len(replay.instruction), len(replay.later))
    before = jnp.minimum(start, OVERLAP)
    # [m]
    at = jnp.arange(size, dtype=jnp.int32)
    place = start - before + at - lead
    # [B, m]
    ids = jnp.take(tokens, jnp.clip(place, 0, width - 1), axis=1)
    for text, here in ((replay.instruction, first), (replay.later, ~first)):
        if text:
            # [m]
            own = jnp.asarray(text, tokens.dtype)[jnp.minimum(at, len(text) - 1)]
            ids = jnp.where(here & (at < lead), own, ids)
    end = jnp.minimum(start + chunk, lengths)[:, None]
    real = ((at < lead) | (place < end)) & (start < lengths)[:, None]
    return ids, jnp.where(real, lengths[:, None] + at, EMPTY)
