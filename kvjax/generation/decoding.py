"""The jitted decode loop, with a donated state, which is traced once for any number of new tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_prefix
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import Phase
from kvjax.cache.state import Block, KVState
from kvjax.generation import compiling, selection_record
from kvjax.generation.program import program
from kvjax.generation.sampling import Sampler, penalised, penalty_of
from kvjax.models.bound import bind, logprob_of
from kvjax.models.config import DecoderConfig
from kvjax.numerics.finite import PAD, only_finite
from kvjax.parallel.sharding import Params

Array = jax.Array
CHUNK = 64  # tokens per call of the decode loop; between calls the host checks for stops and updates the progress bar


class Carry(NamedTuple):
    """The carry of the decode loop. The first dimension of every leaf but the key is the batch.

    Attributes:
      state: the cache.
      token: [B] int32, the token of each row that was chosen last and has not been fed to the model.
      active: [B] bool, whether the row has not ended.
      request: [B] int32, the id of each row's request.
      key: the random key, which all requests share.
      seen: [B, V] bool, the tokens that each row's prompt has and those that were generated, if the sampling method has
        a repetition penalty; otherwise None. A row that takes another request takes that request's.
    """

    state: KVState
    token: Array
    active: Array
    request: Array
    key: Array
    seen: Array | None = None


def nothing_forced(rows: int) -> np.ndarray:
    """Returns what `decode_steps` takes as `forced` where the sampling method chooses every token."""
    return np.full((rows, CHUNK), PAD, np.int32)


# The number of steps taken, the carry, tokens and log-probabilities [B, CHUNK], and the record.
Loop = tuple[Array, Carry, Array, Array, selection_record.Steps | None]


@program(static_argnames=("sampler",), donate_argnames=("state",))
def first_token(
    logits: Array,
    state: KVState,
    request: Array,
    key: Array,
    stop: Array,
    seen: Array | None = None,
    forced: Array | None = None,
    behind: Array | int = 0,
    *,
    sampler: Sampler,
) -> tuple[Carry, Array, Array]:
    """Chooses the first new token of each row; see `decode_steps`.

    Args:
      logits: [B, V] float32, after each row's last prompt token.
      state: the cache; donated.
      request: [B] int32, the id of each row's request.
      key: [] or [B] random key.
      stop: [n] int32, token ids that end a row.
      seen: from `seen_tokens`.
      forced: [B] int32, the tokens to take; `PAD` for those that the sampling method chooses. None if it chooses all.
      behind: [1] int32, the tokens of a prefix that all rows follow; see `kvjax.cache.shared_prefix`.
      sampler: the sampling method.

    Returns:
      The carry of the decode loop, the tokens [B] int32 and their log-probabilities [B] float32. A row whose
      log-probability is not finite has ended, and its token is `PAD`.
    """
    # [B]
    token, logprob, ongoing = _choose(logits, state.length + behind, request, key, seen, sampler, stop, forced)
    # A row without a prompt is padding.
    active = ongoing & (state.length > 0)
    return Carry(state, token, active, request, key, _with_token(seen, token)), token, logprob


@program(static_argnames=("config", "phase", "sampler", "record"), donate_argnames=("carry",))
def decode_steps(
    params: Params,
    carry: Carry,
    stop: Array,
    steps: Array | int,
    forced: Array | None = None,
    *,
    config: DecoderConfig,
    phase: Phase,
    sampler: Sampler,
    record: bool = False,
) -> tuple[Carry, Array, Array, selection_record.Steps | None]:
    """Generates up to `CHUNK` tokens per row, or takes them from a text, whose tokens it then scores.

    The length of the loop and the tokens of a text are data, so that one program generates and scores any number of
    tokens. The loop ends early when every row has ended.

    Args:
      params: of the decoder.
      carry: from `first_token` or the previous call; donated.
      stop: [n] int32, token ids that end a row.
      steps: int32, the number of tokens to generate, at most `CHUNK`.
      forced: [B, CHUNK] int32, the tokens to take; `PAD` for those that the sampling method chooses. None = it
        chooses all; this is another program.
      config: the decoder.
      phase: the groups of heads of each layer.
      sampler: the sampling method.
      record: whether to record what selections choose.

    Returns:
      The carry, the tokens [B, CHUNK] int32, `PAD` where none was generated, their log-probabilities [B, CHUNK]
      float32, and the record or None. A row ends with a log-probability that is not finite, whose token is `PAD`.
      Forced tokens end no row.
    """
    compiling.traced()
    stacked = stacked_runs(carry.state.layers)
    decoder = bind(config, params)
    runs = decoder.runs_now(carry.state, phase)
    carry = carry._replace(state=arranged_state(carry.state, runs))
    decoder = decoder.looped(runs)
    rows, behind = carry.token.shape[0], shared_prefix.length_of(params)

    def unfinished(loop: Loop) -> Array:
        i, carry, *_ = loop
        return (i < steps) & jnp.any(carry.active)

    def body(loop: Loop) -> Loop:
        i, carry, ids, logprobs, recorded = loop
        kv, active = carry.state, carry.active
        # [B, 1]: padding for a row that has ended, which leaves its cache unchanged
        position = jnp.where(active, kv.length, -1)[:, None]
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        # [B, 1]
        token = jnp.maximum(carry.token, 0)[:, None]
        # [B, 1, E]
        if recorded is None:
            x, kv = decoder.hidden(token, kv, block, phase)
        else:
            x, kv, choices = decoder.step(token, kv, block, phase)
            recorded = selection_record.add(recorded, i, choices, phase, active)
        # [B, V]
        logits = decoder.logits(x[:, 0])
        # [B]
        given = None if forced is None else forced[:, i]
        position = kv.length + behind
        token, logprob, ongoing = _choose(
            logits, position, carry.request, carry.key, carry.seen, sampler, stop, given
        )  # fmt: skip
        token, logprob = jnp.where(active, token, PAD), jnp.where(active, logprob, 0.0)
        # [B, CHUNK]
        ids, logprobs = ids.at[:, i].set(token), logprobs.at[:, i].set(logprob)
        carry = carry._replace(state=kv, token=token, active=active & ongoing, seen=_with_token(carry.seen, token))
        return i + 1, carry, ids, logprobs, recorded

    # [B, CHUNK]
    ids = jnp.full((rows, CHUNK), PAD, jnp.int32)
    recorded = selection_record.empty(phase, rows, config.num_kv_heads) if record else None
    loop = (jnp.int32(0), carry, ids, jnp.zeros((rows, CHUNK), jnp.float32), recorded)
    _, carry, ids, logprobs, recorded = jax.lax.while_loop(unfinished, body, loop)
    return carry._replace(state=arranged_state(carry.state, stacked)), ids, logprobs, recorded


def _choose(
    logits: Array,
    length: Array,
    request: Array,
    key: Array,
    seen: Array | None,
    sampler: Sampler,
    stop: Array,
    forced: Array | None,
) -> tuple[Array, Array, Array]:
    """Chooses a token for each row.

    Args:
      logits: [B, V] float32.
      length: [B] int32, the position of the token to choose.
      request: [B] int32, the id of each row's request.
      key: [] or [B] random key. The key of a row depends on it, on the request and on the position.
      seen: see `Carry`.
      sampler: the sampling method.
      stop: [n] int32, token ids that end a row.
      forced: [B] int32 or None; see `first_token`.

    Returns:
      The tokens [B] int32, `PAD` where the log-probability is not finite and the token is not forced; their
      log-probabilities [B] float32; and whether the row has not ended, [B] bool.
    """
    # [B] random keys
    keys = jax.vmap(
        lambda key, own, n: jax.random.fold_in(jax.random.fold_in(key, own), n), in_axes=(0 if key.ndim else None, 0, 0)
    )(key, request, length)
    penalty = penalty_of(sampler)
    # [B]
    token = sampler(logits if seen is None or penalty is None else penalised(logits, seen, penalty), keys)
    taken = jnp.zeros_like(token, bool) if forced is None else forced != PAD
    token = token if forced is None else jnp.where(taken, forced, token)
    logprob = logprob_of(logits, token)
    token = jnp.where(taken, token, only_finite(token, logprob))
    ends = (token == PAD) | jnp.any(token[:, None] == stop[None], axis=1)
    return token, logprob, taken | ~ends


def _with_token(seen: Array | None, token: Array) -> Array | None:
    """Adds tokens [B], of which `PAD` is none, to those that rows have, [B, V] bool or None."""
    # A comparison instead of a scatter, for which a mesh might gather the rows.
    return None if seen is None else seen | (jnp.arange(seen.shape[1], dtype=jnp.int32) == token[:, None])
