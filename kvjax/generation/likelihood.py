"""Scores texts by teacher forcing. The cache evolves as it does in generation."""

import dataclasses
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from kvjax.cache import shared_prefix
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import CacheLayout, Phase, kept
from kvjax.cache.planning.limits import power_of_two
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState
from kvjax.errors import InputError
from kvjax.generation import compiling, selection_record
from kvjax.generation.context import Context
from kvjax.generation.decoding import CHUNK, decode_steps, first_token
from kvjax.generation.generate import check_room
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.generation.prefill import prepare, run_prompts
from kvjax.generation.program import program
from kvjax.generation.sampling import Greedy
from kvjax.generation.selection_record import Record
from kvjax.inputs import check_batch, check_prompt, check_stop
from kvjax.models.bound import SCORE_ROWS, bind, logprobs_of
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.numerics.finite import PAD, check_finite
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy
from kvjax.storage.gradient import differentiable
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array
SMALLEST_TEXT = 256  # shorter texts are padded to this number of tokens


class LogLikelihood(NamedTuple):
    """The result of `log_likelihood`.

    Attributes:
      logprobs: [B, T - 1] float32. Entry t is the log-probability of token t + 1 given the tokens before it, and 0 from
        the end of the row on.
      state: the cache after all tokens.
      record: what selections chose after the prompts, if it was asked for; otherwise None.
      layout: the static description of the cache.
    """

    logprobs: Array
    state: KVState
    record: Record | None = None
    layout: CacheLayout | None = None

    def __repr__(self) -> str:
        return one_line(self)

    def kept(self, layer: int) -> list[list[np.ndarray]]:
        """Returns the positions that a layer still holds; see `kvjax.generation.generate.Generation.kept`."""
        return kept(self.layout, self.state, layer, len(self.logprobs))


@cache_keywords(implementation="xla")
def log_likelihood(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    lengths: ArrayLike | None = None,
    progress: bool = False,
    record: bool = False,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> LogLikelihood:
    """Scores texts by teacher forcing. The cache evolves as it does in generation.

    The score has a gradient with respect to ``model.params`` and `calibration`; it passes straight through the codes of
    a storage, and which slots are evicted or read is a constant to it.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end; or a list of rows of any lengths.
      policy: which slots the cache keeps, or a `CacheSpec`.
      prompt_length: int or [B] int, the number of tokens of each row that are processed as its prompt. The others are
        fed one at a time.
      lengths: [B] int, the number of real tokens of each row; None for T. A row that is shorter than its prompt length
        is all prompt.
      progress: whether to show a progress bar.
      record: whether to record what selections choose; not with a kernel that does a whole step, nor in a gradient.
      options: see `kvjax.CacheOptions`. The default implementation is XLA, because the kernels have no gradient. All
        tokens after the prompt are fed to the model, and count as new tokens of the limits.
      cache: fields of the options.

    Raises:
      InputError: if tokens, lengths or options are not valid for the model; before anything is traced.
      PolicyError: if the policy, storage and selection cannot be combined; before anything is traced.
      StorageError: see `kvjax.generate`.
      ConfigError: if an implementation was requested by name that cannot run.
      NonFiniteError: if a log-probability is not finite; ``error.result`` is the `LogLikelihood`. Not raised while a
        gradient is traced.
    """
    options = options_of(options, cache, "log_likelihood", implementation="xla")
    model, spec = options.resolve(model, policy)
    limits = options.limits
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    prompt = check_prompt(prompt_length, batch.lengths)
    total, width = int(batch.lengths.max()), int(prompt.max())
    steps = int((batch.lengths - prompt).max())
    recorded: list[tuple[selection_record.Steps | None, int]] = []
    # A loop whose length is data serves texts of any length; only a loop of static length has a gradient.
    differentiated = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model.params))
    if differentiated:
        spec = dataclasses.replace(spec, storage=differentiable(spec.storage))
    with model.on_mesh(), tqdm(total=total, desc="score", unit="tok", disable=not progress) as bar:
        prepared = prepare(
            model, spec, prompt, batch.lengths, width=width if steps else batch.width, options=options, pad_rows=True
        )  # fmt: skip
        _, scores, state = run_prompts(model, batch.tokens, prompt, batch.lengths, prepared, score=True)
        bar.update(width)
        if steps:
            # One program for all texts within the limits, or within a power of two.
            size = power_of_two(total, SMALLEST_TEXT) if limits is None else limits.prompt + limits.new_tokens
            size = max(size, scores.shape[1])
            # [B, size]
            scores = jnp.pad(scores, ((0, 0), (0, size - scores.shape[1])))
            # [B, size]
            ids = np.zeros((prepared.rows, size), np.int32)
            ids[: len(prompt), :total] = batch.tokens
            ids, ends = model.place((ids, np.pad(batch.lengths, (0, prepared.rows - len(prompt)))))
        maximum = selection_record.STEPS if record else SCORE_ROWS
        for start in range(0, steps, maximum):
            count = min(maximum, steps - start)
            with compiling.announced(compiling.tokens_of(prepared.layout.decode)):
                scores, state, own = score_steps(
                    model.params, state, scores, ids, ends, jnp.int32(count), config=model.config,
                    phase=prepared.layout.decode, static_steps=count if differentiated else None, record=record,
                )  # fmt: skip
            recorded.append((own, count))
            if progress:
                jax.block_until_ready(scores)
            bar.update(count)
    rows = len(prompt)
    made = selection_record.joined(recorded, prepared.layout, rows)
    # [B, total - 1]
    known = np.arange(1, total) < batch.lengths[:, None]
    if differentiated:
        return LogLikelihood(jnp.where(known, scores[:rows, : total - 1], 0.0), state, layout=prepared.layout)
    # On the host, because XLA would compile a program for every length of the slice; so would `jnp.asarray`.
    whole = distributed.to_host(scores)[:rows, : total - 1]
    whole = np.where(known, whole, np.float32(0))
    result = LogLikelihood(jax.device_put(whole), state, made, prepared.layout)
    check_finite(whole, result)
    return result


def score_continuation(model: Model, prefilled: Context, tokens: np.ndarray, *, progress: bool = False) -> np.ndarray:
    """Scores a continuation of each prompt, which is fed token by token as in generation.

    This runs the programs of greedy generation, for prompts and for tokens after them.

    Args:
      model: see `log_likelihood`.
      prefilled: from `kvjax.generation.prefill.prefill`. Its state is copied, so that it can be decoded too.
      tokens: [B, n] int32, n at most its `max_new_tokens`.
      progress: see `log_likelihood`.

    Returns:
      The log-probability of each token, [B, n] float32.

    Raises:
      InputError: there are too few slots for n tokens, or the tokens are not valid for the model or the prompts.
      NonFiniteError: a log-probability is not finite; ``error.result`` has all of them.
    """
    new = check_batch(model.config, tokens, None, new_tokens=0).tokens
    rows, count = new.shape
    if rows != prefilled.num_rows:
        raise InputError(
            f"tokens has {rows} rows, but {prefilled.num_rows} prompts were prefilled; give one row for each."
        )
    check_room(prefilled, count)
    prompt = np.asarray(distributed.to_host(prefilled.state.length))
    # [B, count]
    ids = np.full((len(prompt), count), PAD, np.int32)
    ids[:rows] = new
    phase, parts = prefilled.layout.decode, []
    with model.on_mesh(), tqdm(total=count, desc="score", unit="tok", disable=not progress) as bar:
        # Arguments as of `kvjax.generation.generate.decode`, for whose programs jit then has entries.
        request, key, stop = np.zeros(len(prompt), np.int32), jax.random.key(0), check_stop(())
        state = jax.tree.map(_copied, prefilled.state)
        carry, _, logprobs = first_token(
            prefilled.logits, state, model.place(request), key, stop, None, model.place(ids[:, 0]),
            shared_prefix.length_of(model.params), sampler=Greedy(),
        )  # fmt: skip
        parts.append(logprobs[:, None])
        bar.update()
        for start in range(1, count, CHUNK):
            part = ids[:, start : start + CHUNK]
            steps = part.shape[1]
            forced = model.place(np.pad(part, ((0, 0), (0, CHUNK - steps)), constant_values=PAD))
            with compiling.announced(compiling.tokens_of(phase)):
                carry, _, logprobs, _ = decode_steps(
                    model.params, carry, stop, steps, forced, config=model.config, phase=phase,
                    sampler=Greedy(), record=False,
                )  # fmt: skip
            if progress:
                jax.block_until_ready(logprobs)
            parts.append(logprobs)
            bar.update(steps)
    # [B, count]
    whole = np.concatenate(distributed.to_host(tuple(parts)), axis=1)[:rows, :count]
    check_finite(whole, whole)
    return whole


def _copied(x: Array) -> Array:
    """Copies an array; of one that is on no device in particular, the copy is not either."""
    return jax.device_put(x, x.sharding if x.committed else None, may_alias=False)


@program(static_argnames=("config", "phase", "static_steps", "record"), donate_argnames=("state", "scores"))
def score_steps(
    params: Params,
    state: KVState,
    scores: Array,
    tokens: Array,
    lengths: Array,
    steps: Array,
    *,
    config: DecoderConfig,
    phase: Phase,
    static_steps: int | None = None,
    record: bool = False,
) -> tuple[Array, KVState, selection_record.Steps | None]:
    """Feeds the next tokens of each row and records the log-probability of each token after them.

    Args:
      params: of the decoder.
      state: the cache; donated.
      scores: [B, T] float32, the log-probabilities so far; donated.
      tokens: [B, T] int32.
      lengths: [B] int32, the number of tokens of each row.
      steps: int32, the number of tokens to feed; ignored if `static_steps` is given.
      config: the decoder.
      phase: the groups of heads of each layer.
      static_steps: the number of tokens to feed as a static argument, so that the function has a gradient.
      record: whether to record what selections choose, of up to `kvjax.generation.selection_record.STEPS` steps.

    Returns:
      The updated scores and cache, and the record or None.
    """
    compiling.traced()
    stacked = stacked_runs(state.layers)
    decoder = bind(config, params)
    runs = decoder.runs_now(state, phase)
    state = arranged_state(state, runs)
    decoder = decoder.looped(runs)
    rows, width = tokens.shape
    # [B]
    row = jnp.arange(rows)

    def body(number: Array, carry: tuple[KVState, Array, PyTree]) -> tuple[KVState, Array, PyTree]:
        kv, scores, recorded = carry
        # [B]: position of the token to feed
        at = kv.length
        active = at < lengths
        token = tokens[row, jnp.minimum(at, width - 1)]
        # [B, 1]
        position = jnp.where(active, at, -1)[:, None]
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        # [B, 1, E]
        if recorded is None:
            x, kv = decoder.hidden(token[:, None], kv, block, phase)
        else:
            x, kv, choices = decoder.step(token[:, None], kv, block, phase)
            recorded = selection_record.add(recorded, number, choices, phase, active)
        # [B]
        target = tokens[row, jnp.minimum(at + 1, width - 1)]
        logprob = logprobs_of(decoder, x, target[:, None])[:, 0]
        # Nothing is written for a row that has ended: its index is out of bounds.
        return kv, scores.at[row, jnp.where(active, at, width)].set(logprob, mode="drop"), recorded

    carry = (state, scores, selection_record.empty(phase, rows, config.num_kv_heads) if record else None)
    state, scores, recorded = jax.lax.fori_loop(0, steps if static_steps is None else static_steps, body, carry)
    return scores, arranged_state(state, stacked), recorded
