"""Prefill, the decode loop, and the two things users run: `generate` and `log_likelihood`.

A prompt goes in at once or in blocks; decoding is one jitted loop whose state is donated, traced once however many
tokens follow. Budgets and capacities are settled on the host first, so that every user error is raised before tracing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from kvjax import cache
from kvjax.allocation import Allocation, allocate
from kvjax.cache import Block, KVState
from kvjax.errors import InputError
from kvjax.inputs import Batch, check_batch, check_count
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.policies.base import Policy, check
from kvjax.sampling import Greedy, Sampler

Array = jax.Array
PAD = -1  # generated tokens after a row's stop token
CHUNK = 64  # tokens of one call of the decode loop; between calls the host sees stops and moves the progress bar
SCORE_ROWS = 512  # prompt tokens whose logits exist at once when scoring


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: [B, max_new_tokens] int32; `PAD` after a row's stop token.
      lengths: [B] int32 new tokens of each row, its stop token included.
      logprobs: [B, max_new_tokens] float32 log-probability of each under the model (before temperature), 0 for PAD.
      state: the cache after every token but each row's last, which was never fed back.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    state: KVState


class LogLikelihood(NamedTuple):
    """What `log_likelihood` returns.

    Attributes:
      logprobs: [B, T - 1] float32: entry t is the log-probability of token t + 1 given those before; 0 past a row's end.
      state: the cache after all tokens.
    """

    logprobs: Array
    state: KVState


class Prefilled(NamedTuple):
    """A prompt that has gone in: what decoding starts from.

    Attributes:
      logits: [B, V] float32 of each row's last prompt token.
      state: the cache; budget: one [B] int32 a layer.
    """

    logits: Array
    state: KVState
    budget: tuple[Array, ...]


def generate(
    model: Model,
    tokens: Any,
    policy: Policy,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    prefill_block: int | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    progress: bool = False,
) -> Generation:
    """Continues prompts under a policy.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int prompt tokens, rows padded at the end.
      policy: what the cache keeps.
      max_new_tokens: at least 1.
      lengths: [B] real tokens of each row; None = all T.
      sampler: how a token is chosen.
      key: random key for a sampler that samples; None = `jax.random.key(0)`.
      prefill_block: the prompt goes in blocks of so many tokens; None = in one shot.
      stop: token ids that end a row; the stop token itself is returned.
      stream: called with [B] int32 after every token, `PAD` for rows that have ended.
      progress: show a progress bar.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    prefilled = prefill(
        model, tokens, policy, max_new_tokens=max_new_tokens, lengths=lengths, prefill_block=prefill_block
    )
    return decode(
        model, prefilled, policy, max_new_tokens=max_new_tokens, sampler=sampler, key=key, stop=stop, stream=stream,
        progress=progress,
    )  # fmt: skip


def prefill(
    model: Model,
    tokens: Any,
    policy: Policy,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    prefill_block: int | None = None,
) -> Prefilled:
    """Runs prompts through the model and leaves a cache with room for `max_new_tokens`; arguments as in `generate`."""
    check(policy)
    check_count("max_new_tokens", max_new_tokens)
    batch = check_batch(model.config, tokens, lengths, new_tokens=max_new_tokens)
    # The last new token is never fed back.
    total = int(batch.lengths.max()) + max_new_tokens - 1
    block, allocation = _allocate(model, policy, batch.lengths, total, prefill_block)
    with model.on_mesh():
        budget = model.place(allocation.budget)
        logits, _, state = _prefill(
            model.params, model.place(batch.tokens), model.place(batch.lengths), budget, config=model.config,
            policy=policy, capacity=allocation.capacity, block_capacity=allocation.block_capacity, block=block,
            score=False,
        )  # fmt: skip
    return Prefilled(logits, state, budget)


def decode(
    model: Model,
    prefilled: Prefilled,
    policy: Policy,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    progress: bool = False,
) -> Generation:
    """Generates from a prefilled prompt, whose state is consumed (donated); arguments as in `generate`."""
    key = jax.random.key(0) if key is None else key
    stop_ids = np.asarray(sorted({int(s) for s in stop}), np.int32)
    options = dict(config=model.config, policy=policy, sampler=sampler)
    produced: list[tuple[np.ndarray, np.ndarray]] = []
    done = 1
    with model.on_mesh(), tqdm(total=max_new_tokens, desc="decode", unit="tok", disable=not progress) as bar:
        carry, first, logprob = _first(prefilled.logits, prefilled.state, key, stop_ids, sampler=sampler)
        produced.append((np.asarray(first)[:, None], np.asarray(logprob)[:, None]))
        bar.update()
        if stream:
            stream(produced[0][0][:, 0])
        while done < max_new_tokens and (not len(stop_ids) or bool(carry.active.any())):
            steps = min(1 if stream else CHUNK, max_new_tokens - done)
            carry, ids, logprobs = _decode(model.params, carry, prefilled.budget, stop_ids, steps, **options)
            produced.append((np.asarray(ids)[:, :steps], np.asarray(logprobs)[:, :steps]))
            if stream:
                stream(produced[-1][0][:, 0])
            done += steps
            bar.update(steps)
    pad = ((0, 0), (0, max_new_tokens - done))
    ids, logprobs = (np.concatenate(parts, axis=1) for parts in zip(*produced, strict=True))
    ids = np.pad(ids, pad, constant_values=PAD)
    return Generation(ids, np.sum(ids != PAD, axis=1, dtype=np.int32), np.pad(logprobs, pad), carry.state)


def log_likelihood(
    model: Model,
    tokens: Any,
    policy: Policy,
    *,
    prompt_length: Any,
    lengths: Any = None,
    prefill_block: int | None = None,
    progress: bool = False,
) -> LogLikelihood:
    """Scores texts by teacher forcing; the cache evolves exactly as in generation.

    Args:
      tokens: [B, T] or [T] int, rows padded at the end.
      prompt_length: int or [B]: so many tokens of each row go in as the prompt, the rest one by one.
      lengths: [B] real tokens of each row; None = all T. A row shorter than its prompt is all prompt.
      policy, prefill_block, progress: as in `generate`.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    check(policy)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    prompt = np.broadcast_to(np.asarray(prompt_length), batch.lengths.shape)
    if not np.issubdtype(prompt.dtype, np.integer) or prompt.min() < 1:
        raise InputError(f"prompt_length must be whole numbers of at least 1; got {prompt_length!r}.")
    prompt = np.minimum(prompt, batch.lengths).astype(np.int32)
    total = int(batch.lengths.max())
    block, allocation = _allocate(model, policy, prompt, total, prefill_block)
    steps = int((batch.lengths - prompt).max())
    with model.on_mesh(), tqdm(total=total, desc="score", unit="tok", disable=not progress) as bar:
        place = model.place
        budget, ids, ends, starts = place((allocation.budget, batch.tokens, batch.lengths, prompt))
        width = int(prompt.max())
        # One token more than the prompt, so that its last one is scored too.
        _, logprobs, state = _prefill(
            model.params, ids[:, : width + 1], starts, budget, config=model.config, policy=policy,
            capacity=allocation.capacity, block_capacity=allocation.block_capacity, block=block, score=True,
        )  # fmt: skip
        scores = jnp.zeros((ids.shape[0], total - 1), jnp.float32).at[:, : logprobs.shape[1]].set(logprobs)
        bar.update(width)
        for start in range(0, steps, SCORE_ROWS):
            count = min(SCORE_ROWS, steps - start)
            scores, state = _score(
                model.params, state, scores, ids, ends, budget, config=model.config, policy=policy, steps=count
            )
            if progress:
                jax.block_until_ready(scores)
            bar.update(count)
    return LogLikelihood(jnp.where(np.arange(1, total) < batch.lengths[:, None], scores, 0.0), state)


def _allocate(
    model: Model, policy: Policy, prompt: np.ndarray, total: int, prefill_block: int | None
) -> tuple[int | None, Allocation]:
    """Block size (None = one shot) and slots; a block that holds the longest prompt is one shot."""
    if prefill_block is not None:
        check_count("prefill_block", prefill_block)
        prefill_block = None if prefill_block >= prompt.max() else prefill_block
    return prefill_block, allocate(policy, prompt, total, model.config.num_layers, prefill_block or 1)


@functools.partial(
    jax.jit, static_argnames=("config", "policy", "capacity", "block_capacity", "block", "score"), inline=False
)
def _prefill(params, tokens, lengths, budget, *, config, policy, capacity, block_capacity, block, score):
    """Prompts, in one shot or in blocks.

    Args:
      tokens: [B, T] int32; lengths: [B] prompt lengths; when scoring, T is one more than the longest if there is one.

    Returns:
      logits [B, V] of each row's last prompt token; logprobs [B, T - 1] of the tokens after the first, or None;
      the state, with decode capacities.
    """
    decoder, variables, dtype = _decoder(config, params)
    rows, width = tokens.shape
    step = width if block is None else block
    count = -(-width // step)
    padded = jnp.pad(tokens, ((0, 0), (0, count * step + 1 - width)))
    hidden = functools.partial(decoder.apply, variables, method="hidden")

    def consume(kv, start, ids, targets, block_slots):
        position = start + jnp.arange(step, dtype=jnp.int32)
        position = jnp.where(position < lengths[:, None], position, -1)
        # [B, step, E]
        x, kv = hidden(ids, kv, Block(position=position, budget=budget, policy=policy, capacity=block_slots))
        at = jnp.clip(lengths - 1 - start, 0, step - 1)
        # [B, E]
        last = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        return kv, last, _logprobs(decoder, variables, x, targets) if score else jnp.zeros((rows, 0), jnp.float32)

    if block is None:
        kv, last, logprobs = consume(None, 0, tokens, padded[:, 1 : width + 1], capacity)
    else:
        layers = [
            cache.empty(policy, rows, config.num_kv_heads, slots, config.head_dim, dtype) for slots in block_capacity
        ]
        kv = KVState(tuple(layers), jnp.zeros((rows,), jnp.int32))
        blocks = [x.reshape(rows, count, step).swapaxes(0, 1) for x in (padded[:, :-1], padded[:, 1:])]

        def body(carry, inputs):
            kv, last = carry
            start, ids, targets = inputs
            kv, newest, logprobs = consume(kv, start, ids, targets, None)
            here = (lengths - 1 >= start) & (lengths - 1 < start + step)
            return (kv, jnp.where(here[:, None], newest, last)), logprobs

        starts = jnp.arange(count, dtype=jnp.int32) * step
        last = jnp.zeros((rows, config.embed_size), dtype)
        (kv, last), logprobs = jax.lax.scan(body, (kv, last), (starts, *blocks))
        kv = kv.replace(
            layers=tuple(cache.resize(layer, slots) for layer, slots in zip(kv.layers, capacity, strict=True))
        )
        logprobs = logprobs.swapaxes(0, 1).reshape(rows, -1)
    logits = decoder.apply(variables, last, method="logits")
    return logits, logprobs[:, : width - 1], kv


class _Carry(NamedTuple):
    state: KVState
    token: Array  # [B] int32, chosen and not yet fed
    active: Array  # [B] bool
    key: Array


@functools.partial(jax.jit, static_argnames=("sampler",), donate_argnames=("state",))
def _first(logits, state, key, stop, *, sampler):
    """Chooses each row's first new token; returns the carry, the token [B] and its logprob [B]."""
    token, logprob = _choose(logits, state.length, key, sampler)
    return _Carry(state, token, _unstopped(token, stop), key), token, logprob


@functools.partial(jax.jit, static_argnames=("config", "policy", "sampler"), donate_argnames=("carry",))
def _decode(params, carry, budget, stop, steps, *, config, policy, sampler):
    """Up to `CHUNK` tokens, fewer if `steps` says so or every row has stopped.

    A `lax.scan` whose length is data: one trace serves any number of tokens, and stopped batches end early.

    Returns:
      The carry, tokens [B, CHUNK] and logprobs [B, CHUNK].
    """
    decoder, variables, _ = _decoder(config, params)
    rows = carry.token.shape[0]

    def unfinished(loop):
        i, carry, _, _ = loop
        return (i < steps) & jnp.any(carry.active)

    def body(loop):
        i, carry, ids, logprobs = loop
        kv, active = carry.state, carry.active
        # A row that has ended feeds padding, which leaves it unchanged.
        position = jnp.where(active, kv.length, -1)[:, None]
        block = Block(position=position, budget=budget, policy=policy)
        x, kv = decoder.apply(variables, jnp.maximum(carry.token, 0)[:, None], kv, block, method="hidden")
        logits = decoder.apply(variables, x[:, 0], method="logits")
        token, logprob = _choose(logits, kv.length, carry.key, sampler)
        token, logprob = jnp.where(active, token, PAD), jnp.where(active, logprob, 0.0)
        ids, logprobs = ids.at[:, i].set(token), logprobs.at[:, i].set(logprob)
        return i + 1, _Carry(kv, token, active & _unstopped(token, stop), carry.key), ids, logprobs

    ids = jnp.full((rows, CHUNK), PAD, jnp.int32)
    loop = (jnp.int32(0), carry, ids, jnp.zeros((rows, CHUNK), jnp.float32))
    return jax.lax.while_loop(unfinished, body, loop)[1:]


@functools.partial(jax.jit, static_argnames=("config", "policy", "steps"), donate_argnames=("state", "scores"))
def _score(params, state, scores, tokens, lengths, budget, *, config, policy, steps):
    """Feeds the next `steps` tokens of each row; writes what they say of the ones after into scores [B, T - 1]."""
    decoder, variables, _ = _decoder(config, params)
    rows, total = tokens.shape
    row = jnp.arange(rows)

    def body(kv, _):
        at = kv.length
        active = at < lengths
        token = tokens[row, jnp.minimum(at, total - 1)]
        block = Block(position=jnp.where(active, at, -1)[:, None], budget=budget, policy=policy)
        x, kv = decoder.apply(variables, token[:, None], kv, block, method="hidden")
        target = tokens[row, jnp.minimum(at + 1, total - 1)]
        logprob = _logprobs(decoder, variables, x, target[:, None])[:, 0]
        return kv, (jnp.where(active, at, total), logprob)

    state, (at, logprobs) = jax.lax.scan(body, state, length=steps)
    # [B, steps]; entries past the end are dropped
    return scores.at[row[:, None], at.T].set(logprobs.T, mode="drop"), state


def _decoder(config: DecoderConfig, params: Any) -> tuple[Decoder, Any, Any]:
    dtype = params["embed"]["tokens"].dtype
    return Decoder(config, dtype), {"params": params}, dtype


def _choose(logits: Array, length: Array, key: Array, sampler: Sampler) -> tuple[Array, Array]:
    """A token and its log-probability per row: [B, V] -> [B], [B]. Keys depend on row and position alone."""
    rows = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda row, n: jax.random.fold_in(jax.random.fold_in(key, row), n))(rows, length)
    token = sampler(logits, keys)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def _unstopped(token: Array, stop: Array) -> Array:
    return ~jnp.any(token[:, None] == stop[None], axis=1)


def _logprobs(decoder: Decoder, variables: Any, hidden: Array, targets: Array) -> Array:
    """log p(target) of each position: hidden [B, n, E], targets [B, n] -> [B, n]; logits exist a part at a time."""

    def score(x, target):
        logits = decoder.apply(variables, x, method="logits")
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    n = hidden.shape[1]
    if n <= SCORE_ROWS:
        return score(hidden, targets)
    parts = -(-n // SCORE_ROWS)
    pad = parts * SCORE_ROWS - n
    x = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(hidden.shape[0], parts, SCORE_ROWS, -1).swapaxes(0, 1)
    y = jnp.pad(targets, ((0, 0), (0, pad))).reshape(hidden.shape[0], parts, SCORE_ROWS).swapaxes(0, 1)
    scores = jax.lax.map(lambda xy: score(*xy), (x, y))
    return scores.swapaxes(0, 1).reshape(hidden.shape[0], -1)[:, :n]


__all__ = ["Batch", "Generation", "LogLikelihood", "Prefilled", "decode", "generate", "log_likelihood", "prefill"]
