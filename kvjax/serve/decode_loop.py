"""The rows that serve requests, and the jitted functions that admit requests to them and decode.

Everything that differs between requests is data of a row: stop tokens, sampling, how many tokens remain. So one program
decodes all of them, and a row takes another request without a new trace.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import shared_prefix
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import Phase
from kvjax.cache.state import Block, KVState
from kvjax.generation import compiling
from kvjax.generation.decoding import CHUNK
from kvjax.generation.program import program
from kvjax.models.bound import BoundDecoder, bind
from kvjax.models.config import DecoderConfig
from kvjax.numerics.finite import PAD, only_finite
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params
from kvjax.serve.sampling import Leaf, Settings, choose
from kvjax.serve.swap import put_row

Array = jax.Array


class Rows(NamedTuple):
    """The carry of the decode loop. The first dimension of every leaf is the number of rows, R.

    Attributes:
      state: the cache.
      token: [R] int32, the token of each row that has not been fed to the model.
      active: [R] bool, whether the row's request has not ended.
      remaining: [R] int32, the number of tokens that may still be chosen.
      fresh: [R] bool, whether `token` was chosen when the request was admitted, and has not been reported.
      logprob: [R] float32, the log-probability of a fresh token.
      stop: [R, n] int32, token ids that end the row's request, `PAD` where there are fewer.
      key: [R] random keys, of each row's request.
      sampling: the settings of each row's sampler.
      seen: [R, V] bool, the tokens of each row's prompt, those that are given, and those that were chosen.
      given: [R, n] int32, tokens that are fed before any is chosen.
      given_length: [R] int32, how many these are.
      fed: [R] int32, how many of them have been fed or are in `token`.
    """

    state: KVState
    token: Array
    active: Array
    remaining: Array
    fresh: Array
    logprob: Array
    stop: Array
    key: Array
    sampling: Settings
    seen: Array
    given: Array
    given_length: Array
    fed: Array


class Entry(NamedTuple):
    """The arguments of a request for its row.

    Attributes:
      key: [] random key.
      number: [] int32, see `kvjax.serve.Request`.
      max_new_tokens: [] int32.
      stop: [n] int32, `PAD` where there are fewer.
      sampling: scalars.
      seen: [V] bool, see `Rows`.
      given: [n] int32, see `Rows`.
      given_length: [] int32.
      behind: [] int32, the tokens of a prefix that all rows follow; see `kvjax.cache.shared_prefix`.
    """

    key: Leaf
    number: Leaf
    max_new_tokens: Leaf
    stop: Leaf
    sampling: Settings
    seen: Leaf
    given: Leaf
    given_length: Leaf
    behind: Leaf


class DraftCounts(NamedTuple):
    """The counts of the rounds of a chunk.

    Attributes:
      drafted: [] int32, the tokens that were drafted for all rows.
      accepted: [] int32, those that were accepted.
    """

    drafted: Leaf
    accepted: Leaf


class Chunk(NamedTuple):
    """The result of a call of `decode_chunk`, here or in `kvjax.serve.draft_rows`.

    Attributes:
      tokens: [R, W] int32, the new tokens; `PAD` where there is none. Here W = 1 + CHUNK: the token that was chosen
        when a request was admitted, and those of each step.
      logprobs: [R, W] float32, their log-probabilities. One that is not finite, whose token is `PAD`, has ended its
        row.
      active: [R] bool, whether each row's request goes on.
      steps: [] int32, the number of steps taken.
      row_steps: [R] int32, the number of steps in which each row's request had not ended.
      drafts: if steps are rounds of drafts, their counts; otherwise None.
    """

    tokens: Leaf
    logprobs: Leaf
    active: Leaf
    steps: Leaf
    row_steps: Leaf
    drafts: DraftCounts | None = None


@program(static_argnames=("rows",))
def empty_rows(state: KVState, entry: Entry, *, rows: int) -> Rows:
    """Makes rows without requests.

    Args:
      state: any cache in the arrays of the decoding phase; its content is of no matter.
      entry: any request.
      rows: the number of rows.
    """

    def many(x: Array) -> Array:
        return jnp.broadcast_to(x, (rows, *x.shape))

    # [R]
    none, no = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)
    held = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, none), state)
    return Rows(
        state=held, token=none, active=no, remaining=none, fresh=no, logprob=jnp.zeros((rows,), jnp.float32),
        stop=many(entry.stop), key=many(entry.key), sampling=jax.tree.map(many, entry.sampling), seen=many(entry.seen),
        given=many(entry.given), given_length=none, fed=none,
    )  # fmt: skip


@program(donate_argnames=("rows",))
def admit(rows: Rows, state: KVState, logits: Array, source: Array, row: Array, entry: Entry) -> Rows:
    """Replaces one row by a request whose prompt has been run.

    Args:
      rows: the rows; donated.
      state: the caches of some prompts; not donated.
      logits: [P, V] float32 after these prompts.
      source: int32, which of the prompts.
      row: int32, the row to replace.
      entry: the request.
    """
    # [1] each
    one = source[None]
    own: KVState = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, one), state)
    # Another prompt's layers may be in other stacks.
    own = arranged_state(own, stacked_runs(rows.state.layers))
    key = jax.random.fold_in(entry.key, entry.number)[None]
    sampling = jax.tree.map(lambda x: x[None], entry.sampling)
    # [1, V]
    seen = entry.seen[None]
    chosen, logprob = choose(host_memory.take_rows(logits, one), own.length + entry.behind, key, seen, sampling)
    fresh = entry.given_length[None] == 0
    token = jnp.where(fresh, only_finite(chosen, logprob), entry.given[:1])
    remaining = entry.max_new_tokens[None] - fresh.astype(jnp.int32)
    ended = fresh & ((remaining == 0) | (token == PAD) | _is_stop(token, entry.stop[None]))
    new = Rows(
        state=own, token=token, active=~ended, remaining=remaining, fresh=fresh, logprob=logprob, stop=entry.stop[None],
        key=key, sampling=sampling, seen=_with_token(seen, token), given=entry.given[None],
        given_length=entry.given_length[None], fed=jnp.ones((1,), jnp.int32),
    )  # fmt: skip
    return put_row(rows, row, new)


# Steps taken, rows, row-steps [R], tokens and log-probabilities [R, 1 + CHUNK].
_Loop = tuple[Array, Rows, Array, Array, Array]


@program(static_argnames=("config", "phase", "min_row_steps"), donate_argnames=("rows",))
def decode_chunk(
    params: Params,
    rows: Rows,
    going_on: Array,
    steps: Array,
    idle: Array,
    *,
    config: DecoderConfig,
    phase: Phase,
    min_row_steps: int,
) -> tuple[Rows, Chunk]:
    """Decodes until `steps` steps are taken, every request has ended, or enough rows are idle.

    Args:
      params: of the decoder.
      rows: the rows; donated.
      going_on: [R] bool, whether each row's request has not been ended by the host.
      steps: int32, the most steps, at most `CHUNK`.
      idle: int32, the number of idle rows at which the loop ends, since there are requests for them.
      config: the decoder.
      phase: the groups of heads of each layer.
      min_row_steps: the number of row-steps before which idle rows do not end the loop.
    """
    compiling.traced()
    decoder, stacked = bind(config, params), stacked_runs(rows.state.layers)
    runs = decoder.runs_now(rows.state, phase)
    decoder = decoder.looped(runs)
    count, behind = rows.token.shape[0], shared_prefix.length_of(params)
    rows = rows._replace(active=rows.active & going_on, state=arranged_state(rows.state, runs))

    def unfinished(loop: _Loop) -> Array:
        i, rows, row_steps, *_ = loop
        return chunk_continues(i, steps, rows.active, idle, row_steps, min_row_steps)

    def body(loop: _Loop) -> _Loop:
        i, rows, row_steps, tokens, logprobs = loop
        active = rows.active
        state, logits = feed(decoder, rows.state, rows.token, active, phase)
        # [R] each
        chosen, logprob = choose(logits, state.length + behind, rows.key, rows.seen, rows.sampling)
        chosen = only_finite(chosen, logprob)
        given = rows.fed < rows.given_length
        index = jnp.minimum(rows.fed, rows.given.shape[1] - 1)[:, None]
        token = jnp.where(given, jnp.take_along_axis(rows.given, index, axis=1)[:, 0], chosen)
        new = active & ~given
        remaining = rows.remaining - new.astype(jnp.int32)
        ended = new & ((remaining == 0) | (token == PAD) | _is_stop(token, rows.stop))
        # [R, 1 + CHUNK]
        tokens = tokens.at[:, i + 1].set(jnp.where(new, chosen, PAD))
        logprobs = logprobs.at[:, i + 1].set(jnp.where(new, logprob, 0.0))
        row_steps += active.astype(jnp.int32)
        fed = rows.fed + (active & given).astype(jnp.int32)
        rows = rows._replace(
            state=state, token=token, active=active & ~ended, remaining=remaining, fed=fed,
            seen=_with_token(rows.seen, jnp.where(active, token, PAD)),
        )  # fmt: skip
        return i + 1, rows, row_steps, tokens, logprobs

    # [R, 1 + CHUNK]
    tokens = jnp.full((count, 1 + CHUNK), PAD, jnp.int32).at[:, 0].set(jnp.where(rows.fresh, rows.token, PAD))
    logprobs = jnp.zeros((count, 1 + CHUNK), jnp.float32).at[:, 0].set(jnp.where(rows.fresh, rows.logprob, 0.0))
    # [R]
    none, reported = jnp.zeros((count,), jnp.int32), jnp.zeros_like(rows.fresh)
    loop = (jnp.int32(0), rows._replace(fresh=reported), none, tokens, logprobs)
    taken, rows, row_steps, tokens, logprobs = jax.lax.while_loop(unfinished, body, loop)
    rows = rows._replace(state=arranged_state(rows.state, stacked))
    return rows, Chunk(tokens, logprobs, rows.active, taken, row_steps)


def chunk_continues(
    taken: Array, steps: Array, active: Array, idle: Array, row_steps: Array, min_row_steps: int
) -> Array:
    """Whether a chunk takes a further step, [] bool.

    Args:
      taken: [] int32, the steps so far.
      steps: see `decode_chunk`.
      active: [R] bool, whether each row's request has not ended.
      idle: see `decode_chunk`.
      row_steps: [R] int32, see `Chunk`.
      min_row_steps: see `decode_chunk`.
    """
    busy = jnp.sum(active, dtype=jnp.int32)
    refill = (active.shape[0] - busy >= idle) & (jnp.sum(row_steps) >= min_row_steps)
    return (taken < steps) & (busy > 0) & ~refill


def feed(decoder: BoundDecoder, state: KVState, token: Array, active: Array, phase: Phase) -> tuple[KVState, Array]:
    """Feeds one token to each active row.

    Args:
      decoder: the decoder.
      state: the cache.
      token: [R] int32.
      active: [R] bool; the cache of other rows stays as it is.
      phase: the groups of heads of each layer.

    Returns:
      The cache, and the logits after the token, [R, V] float32.
    """
    # [R, 1]
    position = jnp.where(active, state.length, -1)[:, None]
    block = Block(position=position, prompt=state.prompt, total=state.total, budget=state.budget)
    # [R, 1, E]
    x, state = decoder.hidden(jnp.maximum(token, 0)[:, None], state, block, phase)
    return state, decoder.logits(x[:, 0])


def _with_token(seen: Array, token: Array) -> Array:
    """Adds tokens [R], of which `PAD` is none, to those that rows have, [R, V] bool."""
    return seen | (jnp.arange(seen.shape[1], dtype=jnp.int32) == token[:, None])


def _is_stop(token: Array, stop: Array) -> Array:
    """Whether tokens [R] are among the stop tokens [R, n] of their rows: [R] bool."""
    return jnp.any(token[:, None] == stop, axis=1)
