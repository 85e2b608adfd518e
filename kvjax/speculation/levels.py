"""The caches of levels within a program: feeding tokens, and going back to fewer of them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.cut import cut
from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import stacked_runs
from kvjax.cache.state import Block, KVState
from kvjax.generation.sampling import Sampler
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.parallel.sharding import Params

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """The static description of a level.

    Attributes:
      config: of its model.
      phase: the groups of heads of each layer of its cache, or of its copies of the target's slots.
      gamma: the number of tokens that it drafts.
      accept: the rule by which the level before accepts them.
      sampler: how tokens are chosen.
      model: the index of its model among those of the program; 0 is the target's.
      choosing: the target's groups, with the selection or the policy that chooses the slots to copy; None for a cache
        of its own.
      selects: whether a selection chooses them, and not a policy.
      tail: slots of copies for drafted tokens.
      num_snapshots: the number of states that are kept in a round, one for each token that is fed; None where a
        cache is truncated instead, since nothing but its slots remembers a token.
    """

    config: DecoderConfig
    phase: Phase
    gamma: int
    accept: str
    sampler: Sampler
    model: int = 0
    choosing: Phase | None = None
    selects: bool = False
    tail: int = 0
    num_snapshots: int | None = None

    @property
    def copies(self) -> bool:
        """Whether it reads the target's cache."""
        return self.choosing is not None


class LevelCache(NamedTuple):
    """The cache of a level in a round.

    Attributes:
      state: the cache.
      logits: [B, V] float32, after each row's newest token.
      snapshots: the state after each token of the round, leaves [B, M, ...], or None; see `LevelPlan.num_snapshots`.
      first_length: [B] int32, the number of tokens of the first of them.
      first_draft_logits: [B, V] float32, the logits that the level chose a token from before the round's first one was
        fed; None if it has not.
    """

    state: KVState
    logits: Array
    snapshots: KVState | None = None
    first_length: Array | None = None
    first_draft_logits: Array | None = None


def begin_round(plan: LevelPlan, state: KVState, logits: Array) -> LevelCache:
    """Begins a round."""
    if plan.num_snapshots is None:
        return LevelCache(state, logits)

    def first(leaf: Array) -> Array:
        # [B, M, ...]
        return jnp.zeros((leaf.shape[0], plan.num_snapshots, *leaf.shape[1:]), leaf.dtype).at[:, 0].set(leaf)

    return LevelCache(state, logits, jax.tree.map(first, state), state.length)


def feed(
    plan: LevelPlan, params: Params, cache: LevelCache, tokens: Array, position: Array
) -> tuple[Array, LevelCache]:
    """Feeds tokens, in one block if a block equals single steps.

    Args:
      plan: the level.
      params: of its model.
      cache: its cache.
      tokens: [B, n] int32.
      position: [B, n] int32, -1 = padding at the end of a row.

    Returns:
      The logits after each token, [B, n, V], and the cache.
    """
    if plan.num_snapshots is None or tokens.shape[1] == 1:
        return _feed_block(plan, params, cache, tokens, position)

    def one(cache: LevelCache, each: tuple[Array, Array]) -> tuple[LevelCache, Array]:
        logits, cache = _feed_block(plan, params, cache, each[0][:, None], each[1][:, None])
        return cache, logits[:, 0]

    cache, logits = jax.lax.scan(one, cache, (tokens.T, position.T))
    return logits.swapaxes(0, 1), cache


def _feed_block(
    plan: LevelPlan, params: Params, cache: LevelCache, tokens: Array, position: Array
) -> tuple[Array, LevelCache]:
    decoder = bind(plan.config, params).looped(stacked_runs(cache.state.layers))
    kv = cache.state
    block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
    # [B, n, E], then [B, n, V]
    x, kv = decoder.hidden(tokens, kv, block, plan.phase)
    logits = decoder.logits(x)
    count = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    # [B, V]
    newest = jnp.take_along_axis(logits, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    cache = cache._replace(state=kv, logits=jnp.where((count > 0)[:, None], newest, cache.logits))
    if cache.snapshots is not None and cache.first_length is not None:
        rows = jnp.arange(tokens.shape[0])
        index = kv.length - cache.first_length
        cache = cache._replace(
            snapshots=jax.tree.map(lambda leaf, new: leaf.at[rows, index].set(new), cache.snapshots, kv)
        )  # fmt: skip
    return logits, cache


def truncate(cache: LevelCache, length: Array) -> LevelCache:
    """Truncates rows to the first `length`, [B] int32, tokens; a row that has no more is unchanged."""
    if cache.snapshots is None or cache.first_length is None:
        return cache._replace(state=cut(cache.state, length))
    rows = jnp.arange(length.shape[0])
    index = jnp.clip(jnp.minimum(length, cache.state.length) - cache.first_length, 0)
    return cache._replace(state=jax.tree.map(lambda leaf: leaf[rows, index], cache.snapshots))
