"""The programs that copy rows of a cache, feed tokens to the copies, and change the size of their arrays."""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.resize import resized
from kvjax.cache.state import EMPTY, Block, KVState, Layer, LayerKV
from kvjax.generation import compiling
from kvjax.generation.prefill import GroupBudgets
from kvjax.generation.program import program
from kvjax.models.bound import BoundDecoder, bind, logprob_of, over_logits
from kvjax.models.config import DecoderConfig
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params

Array = jax.Array
T = TypeVar("T")
How = Literal["blocks", "steps"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How tokens are fed.

    Attributes:
      held: the groups of heads of each layer between the calls.
      during: the same while tokens are fed, with room for the tokens of a block.
      how: in blocks of `block` tokens, or one token at a time in as many steps as the longest row has tokens.
      block: the number of tokens of a block.
      is_prompt: whether the view of a policy has the tokens as part of the prompt.
      compresses: whether slots are evicted at the end of the tokens as at the end of a prompt, by their queries alone.
    """

    held: Phase
    during: Phase
    how: How
    block: int
    is_prompt: bool
    compresses: bool = False


def _feed(
    params: Params,
    state: KVState,
    logits: Array,
    rows: Array | None,
    tokens: Array,
    lengths: Array,
    real: Array | None,
    budget: GroupBudgets | None = None,
    turn_budget: GroupBudgets | None = None,
    *,
    config: DecoderConfig,
    plan: Plan,
) -> tuple[Array, KVState]:
    """Feeds tokens to copies of rows of a cache, or to the rows themselves.

    Args:
      params: of the decoder.
      state: the cache.
      logits: [B, V] float32, those of the cache's newest tokens.
      rows: [R] int32, the row that each copy is of; None = the rows themselves.
      tokens: [R, n] int32; in blocks, n is a multiple of the block.
      lengths: [R] int32, the number of tokens of each; a row without a token is only copied.
      real: [R] bool; the other copies are padding, and hold nothing afterwards. None with `rows`.
      budget: of the copies, see `KVState`; None = those of the rows.
      turn_budget: the same while the tokens are fed; None = `budget`.
      config: the decoder.
      plan: how tokens are fed.

    Returns:
      The logits after the last token of each, [R, V] float32, and the copies.
    """
    compiling.traced()
    stacked = stacked_runs(state.layers)
    # [R, V]
    before, kv = (logits, state) if rows is None or real is None else _copied(state, logits, rows, real)
    end = kv.length + lengths
    kv = kv.replace(
        prompt=jnp.where((lengths > 0) & plan.is_prompt, end, kv.prompt), total=jnp.maximum(kv.total, end)
    )  # fmt: skip
    if budget is not None:
        kv = kv.replace(budget=budget)
    after = kv.budget
    if turn_budget is not None:
        kv = kv.replace(budget=turn_budget)
    decoder = bind(config, params)
    kv = resized_state(kv, plan.held, plan.during, fresh=plan.compresses)
    runs = decoder.runs_now(kv, plan.during)
    kv, decoder = arranged_state(kv, runs), decoder.looped(runs)

    def newest_of(last: Array, x: Array, first: Array | int) -> Array:
        """Updates the last hidden states [R, E]."""
        step = x.shape[1]
        # [R]: the row's last token in the block
        index = jnp.clip(lengths - 1 - first, 0, step - 1)
        # [R, E]
        own = jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
        return jnp.where((lengths > first)[:, None], own, last)

    # [R, E]
    begun = jnp.zeros((tokens.shape[0], decoder.config.embed_size), decoder.dtype)
    kv, last = _fed(decoder, kv, tokens, lengths, plan, begun, newest_of)
    # [R, V]
    newest = jnp.where((lengths > 0)[:, None], decoder.logits(last), before)
    kv = resized_state(kv, plan.during, plan.held, fresh=plan.compresses).replace(budget=after)
    return newest, arranged_state(kv, stacked)


feed_copies = program(static_argnames=("config", "plan"))(_feed)
feed_rows = program(static_argnames=("config", "plan"), donate_argnames=("state",))(_feed)  # instead of copies of them


@program(static_argnames=("config", "plan"))
def score_copies(
    params: Params,
    state: KVState,
    logits: Array,
    rows: Array,
    tokens: Array,
    lengths: Array,
    *,
    config: DecoderConfig,
    plan: Plan,
) -> tuple[Array, Array, KVState]:
    """Copies rows of a cache and scores a continuation of each copy. The last token of each is not fed.

    Args:
      params: of the decoder.
      state: the cache of the contexts; not donated.
      logits: [B, V] float32 after each context.
      rows: [R] int32, the context of each continuation.
      tokens: [R, n] int32, the continuations; in blocks, n - 1 is a multiple of the block.
      lengths: [R] int32, the number of tokens of each; 0 = none.
      config: the decoder.
      plan: how tokens are fed.

    Returns:
      The log-probability of each token, [R, n] float32, 0 from the end of the continuation on; whether all its tokens
      are the most probable ones, [R] bool; and the copies of the cache afterwards.
    """
    compiling.traced()
    stacked = stacked_runs(state.layers)
    # [R, V]
    before, kv = _copied(state, logits, rows, lengths > 0)
    # [R] each
    first_score, best = score_logits(before, tokens[:, 0])
    # [R, n]
    scores = jnp.zeros(tokens.shape, jnp.float32).at[:, 0].set(first_score)
    if tokens.shape[1] > 1:
        decoder = bind(config, params)
        kv = resized_state(kv, plan.held, plan.during)
        runs = decoder.runs_now(kv, plan.during)
        kv, decoder = arranged_state(kv, runs), decoder.looped(runs)
        fed = jnp.maximum(lengths - 1, 0)

        def add(made: tuple[Array, Array], x: Array, first: Array | int) -> tuple[Array, Array]:
            """Adds the scores of the tokens after those of a block."""
            scores, best = made
            # [R, step]
            target = jax.lax.dynamic_slice_in_dim(tokens, first + 1, x.shape[1], axis=1)
            # [R, step] each
            more, agrees = over_logits(decoder, x, target, score_logits)
            at = first + jnp.arange(x.shape[1], dtype=jnp.int32)
            best &= jnp.all(agrees | (at >= fed[:, None]), axis=1)
            return jax.lax.dynamic_update_slice_in_dim(scores, more, first + 1, axis=1), best

        kv, (scores, best) = _fed(decoder, kv, tokens[:, :-1], fed, plan, (scores, best), add)
        kv = resized_state(kv, plan.during, plan.held)
    known = jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]
    return jnp.where(known, scores, 0.0), best, arranged_state(kv, stacked)


def score_logits(logits: Array, target: Array) -> tuple[Array, Array]:
    """The log-probability of tokens [...] under logits [..., V], and whether they are the most probable ones."""
    # [..., 1]
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)
    # [..., V]
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    better = (logits > chosen) | ((logits == chosen) & (token < target[..., None]))
    return logprob_of(logits, target), ~jnp.any(better, axis=-1)


def _fed(
    decoder: BoundDecoder,
    kv: KVState,
    tokens: Array,
    lengths: Array,
    plan: Plan,
    made: T,
    add: Callable[[T, Array, Array | int], T],
) -> tuple[KVState, T]:
    """Feeds tokens.

    Args:
      decoder: the decoder.
      kv: the cache.
      tokens: [R, n] int32.
      lengths: [R] int32, the number of tokens of each row.
      plan: how tokens are fed.
      made: arrays that are made of hidden states.
      add: adds those of the tokens from a number on, [R, step, E], to these arrays.

    Returns:
      The cache, and the arrays.
    """
    width = tokens.shape[1]
    start, step = kv.length, plan.block if plan.how == "blocks" else 1
    # [step]
    inside = jnp.arange(step, dtype=jnp.int32)

    def feed(first: Array | int, kv: KVState, made: T, ids: Array) -> tuple[KVState, T]:
        """Feeds the tokens from number `first` on, [R, step]."""
        # [R, step]
        at = first + inside
        position = jnp.where(at < lengths[:, None], start[:, None] + at, -1)
        turn = start if plan.compresses else None
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget, turn=turn)
        # [R, step, E]
        x, kv = decoder.hidden(ids, kv, block, plan.during)
        return kv, add(made, x, first)

    if plan.how == "blocks" and width == step:
        return feed(0, kv, made, tokens)

    def body(number: Array, carry: tuple[KVState, T]) -> tuple[KVState, T]:
        first = number * step
        # [R, step]
        ids = jax.lax.dynamic_slice_in_dim(tokens, first, step, axis=1)
        return feed(first, *carry, ids)

    ended: tuple[KVState, T] = jax.lax.fori_loop(0, -(-jnp.max(lengths) // step), body, (kv, made))
    return ended


@program()
def copy_rows(state: KVState, logits: Array, rows: Array, real: Array) -> tuple[Array, KVState]:
    """Copies rows of a cache; for the arguments see `feed_copies`."""
    return _copied(state, logits, rows, real)


def _copied(state: KVState, logits: Array, rows: Array, real: Array) -> tuple[Array, KVState]:
    kv: KVState = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, rows), state)
    layers = jax.tree.map(lambda group: _emptied(group, real), kv.layers, is_leaf=lambda x: isinstance(x, LayerKV))
    return host_memory.take_rows(logits, rows), kv.replace(length=jnp.where(real, kv.length, 0), layers=layers)


@program(static_argnames=("before", "after"))
def resize(state: KVState, *, before: Phase, after: Phase) -> KVState:
    """Moves a cache into arrays of other sizes; see `resized_state`."""
    return resized_state(state, before, after)


def resized_state(state: KVState, before: Phase, after: Phase, *, fresh: bool = False) -> KVState:
    """Moves a cache into the arrays of other groups, for more or fewer tokens than those before.

    Args:
      state: the cache.
      before: its groups of heads.
      after: the others.
      fresh: whether statistics and memories are those of `after`, and begin anew.
    """
    if not fresh and all(
        one.slots == two.slots and one.storage == two.storage
        for pair in zip(before, after, strict=True) for one, two in zip(*pair, strict=True)
    ):  # fmt: skip
        return state
    # Layers that are alike in few slots need not be in more.
    stacked = tuple(run for run in stacked_runs(state.layers) if len({after[index] for index in run.layers}) == 1)
    layers = tuple(
        Layer(
            resized(own, old, new, state.length, fresh=fresh) for own, old, new in zip(layer, olds, news, strict=True)
        )
        for layer, olds, news in zip(arranged_state(state, ()).layers, before, after, strict=True)
    )
    return arranged_state(state.replace(layers=layers), stacked)


def _emptied(layer: LayerKV, real: Array) -> LayerKV:
    """Returns slots, of a layer or of a stack of layers, without those of the rows that are not real, [B] bool."""
    # [B, 1, 1] or [B, 1, 1, 1]
    mask = real.reshape(-1, *(1,) * (layer.position.ndim - 1))
    return layer.replace(position=jnp.where(mask, layer.position, EMPTY))
