"""Scoring texts by teacher forcing, the cache evolving exactly as in generation."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from kvjax.attention import Implementation
from kvjax.cache.limits import Limits, power_of_two
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.cache.state import Block, KVState
from kvjax.inputs import check_batch, check_prompt
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.prefill import SCORE_ROWS, bind, logprobs_of, prepare, run_prompts
from kvjax.selection.base import Selection
from kvjax.storage.base import Storage

Array = jax.Array
SMALLEST_TEXT = 256  # tokens of the array that a shorter text is padded to


class LogLikelihood(NamedTuple):
    """What `log_likelihood` returns.

    Attributes:
      logprobs: [B, T - 1] float32: entry t is the log-probability of token t + 1 given those before; 0 past the end.
      state: the cache after all tokens.
    """

    logprobs: Array
    state: KVState


def log_likelihood(
    model: Model,
    tokens: Any,
    policy: Policy | CacheSpec,
    *,
    prompt_length: Any,
    lengths: Any = None,
    prefill_block: int | None = None,
    progress: bool = False,
    implementation: Implementation = "xla",
    storage: Storage | None = None,
    selection: Selection | None = None,
    limits: Limits | None = None,
) -> LogLikelihood:
    """Scores texts by teacher forcing; the cache evolves exactly as in generation.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      policy: what the cache keeps, or a `CacheSpec`.
      prompt_length: int or [B]: so many tokens of each row go in as the prompt, the rest one by one.
      lengths: [B] real tokens of each row; None = all T. A row shorter than its prompt is all prompt.
      prefill_block: as in `generate`.
      progress: show a progress bar.
      implementation: see `kvjax.attention`. Kernels have no gradient, which scores are taken for; xla has.
      storage: as in `generate`.
      selection: as in `generate`.
      limits: as in `generate`, where all new tokens are fed.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    spec = as_spec(policy, storage, selection)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    prompt = check_prompt(prompt_length, batch.lengths)
    total, width = int(batch.lengths.max()), int(prompt.max())
    steps = int((batch.lengths - prompt).max())
    # A loop whose length is data serves texts of any length; one that is static has a gradient.
    differentiated = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model.params))
    with model.on_mesh(), tqdm(total=total, desc="score", unit="tok", disable=not progress) as bar:
        prepared = prepare(
            model, spec, prompt, batch.lengths, width=width if steps else batch.width, prefill_block=prefill_block,
            limits=limits, implementation=implementation,
        )  # fmt: skip
        _, scores, state = run_prompts(model, batch.tokens, prompt, batch.lengths, prepared, score=True)
        bar.update(width)
        if steps:
            size = max(power_of_two(total, SMALLEST_TEXT), scores.shape[1])
            scores = jnp.pad(scores, ((0, 0), (0, size - scores.shape[1])))
            ids = np.zeros((len(prompt), size), np.int32)
            ids[:, :total] = batch.tokens
            ids, ends = model.place((ids, batch.lengths))
        for start in range(0, steps, SCORE_ROWS):
            count = min(SCORE_ROWS, steps - start)
            scores, state = score_steps(
                model.params, state, scores, ids, ends, jnp.int32(count), config=model.config,
                phase=prepared.layout.decode, static_steps=count if differentiated else None,
            )  # fmt: skip
            if progress:
                jax.block_until_ready(scores)
            bar.update(count)
    known = np.arange(1, total) < batch.lengths[:, None]
    if differentiated:
        return LogLikelihood(jnp.where(known, scores[:, : total - 1], 0.0), state)
    # On the host: a slice of every length would be a program of its own.
    return LogLikelihood(jnp.asarray(np.where(known, np.asarray(scores)[:, : total - 1], np.float32(0))), state)


@functools.partial(
    jax.jit, static_argnames=("config", "phase", "static_steps"), donate_argnames=("state", "scores")
)
def score_steps(params, state, scores, tokens, lengths, steps, *, config, phase, static_steps=None):
    """Feeds the next tokens of each row; writes what they say of the ones after into scores [B, T].

    Args:
      tokens: [B, T] int32.
      lengths: [B] int32 tokens of each row.
      steps: the number of tokens to feed, int32; unused where `static_steps` says it.
      phase: the groups of each layer.
      static_steps: the same number as a part of the program, which then has a gradient.
    """
    decoder = bind(config, params)
    rows, width = tokens.shape
    row = jnp.arange(rows)

    def body(_, carry):
        kv, scores = carry
        at = kv.length
        active = at < lengths
        token = tokens[row, jnp.minimum(at, width - 1)]
        position = jnp.where(active, at, -1)[:, None]
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        x, kv = decoder.hidden(token[:, None], kv, block, phase)
        target = tokens[row, jnp.minimum(at + 1, width - 1)]
        logprob = logprobs_of(decoder, x, target[:, None])[:, 0]
        # Past a row's end nothing is written.
        return kv, scores.at[row, jnp.where(active, at, width)].set(logprob, mode="drop")

    state, scores = jax.lax.fori_loop(0, steps if static_steps is None else static_steps, body, (state, scores))
    return scores, state
