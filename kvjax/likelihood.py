"""Scoring texts by teacher forcing, the cache evolving exactly as in generation."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from kvjax import attention
from kvjax.attention import Implementation
from kvjax.cache import Block, KVState
from kvjax.inputs import check_batch, check_positions, check_prompt
from kvjax.models.model import Model
from kvjax.policies.base import Policy, check
from kvjax.prefill import SCORE_ROWS, allocate_for, bind, logprobs_of, prefill_steps

Array = jax.Array


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
    policy: Policy,
    *,
    prompt_length: Any,
    lengths: Any = None,
    prefill_block: int | None = None,
    progress: bool = False,
    implementation: Implementation = "xla",
) -> LogLikelihood:
    """Scores texts by teacher forcing; the cache evolves exactly as in generation.

    Args:
      tokens: [B, T] or [T] int, rows padded at the end.
      prompt_length: int or [B]: so many tokens of each row go in as the prompt, the rest one by one.
      lengths: [B] real tokens of each row; None = all T. A row shorter than its prompt is all prompt.
      policy, prefill_block, progress: as in `generate`.
      implementation: see `attention.attend`. Kernels have no gradient, which scores are taken for; xla has.

    Raises:
      InputError, PolicyError: before anything is traced.
    """
    policy = check(policy)
    check_positions(model.config, policy.positions)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    prompt = check_prompt(prompt_length, batch.lengths)
    total = int(batch.lengths.max())
    implementation = attention.resolve(implementation, model.platform)
    block, allocation = allocate_for(model, policy, prompt, batch.lengths, prefill_block, implementation)
    steps = int((batch.lengths - prompt).max())
    with model.on_mesh(), tqdm(total=total, desc="score", unit="tok", disable=not progress) as bar:
        place = model.place
        budget, decode_budget = place((allocation.budget, allocation.decode_budget))
        ids, ends, starts = place((batch.tokens, batch.lengths, prompt))
        width = int(prompt.max())
        # One token more than the prompt, so that its last one is scored too.
        _, logprobs, state = prefill_steps(
            model.params, ids[:, : width + 1], starts, budget, config=model.config, policy=policy,
            capacity=allocation.capacity, block_capacity=allocation.block_capacity, block=block, score=True,
            implementation=implementation,
        )  # fmt: skip
        scores = jnp.zeros((ids.shape[0], total - 1), jnp.float32).at[:, : logprobs.shape[1]].set(logprobs)
        bar.update(width)
        for start in range(0, steps, SCORE_ROWS):
            count = min(SCORE_ROWS, steps - start)
            scores, state = score_steps(
                model.params,
                state,
                scores,
                ids,
                ends,
                decode_budget,
                config=model.config,
                policy=policy.then or policy,
                steps=count,
                implementation=implementation,
            )
            if progress:
                jax.block_until_ready(scores)
            bar.update(count)
    return LogLikelihood(jnp.where(np.arange(1, total) < batch.lengths[:, None], scores, 0.0), state)


STATIC = ("config", "policy", "steps", "implementation")


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames=("state", "scores"))
def score_steps(params, state, scores, tokens, lengths, budget, *, config, policy, steps, implementation="xla"):
    """Feeds the next `steps` tokens of each row; writes what they say of the ones after into scores [B, T - 1]."""
    decoder = bind(config, params)
    rows, total = tokens.shape
    row = jnp.arange(rows)

    def body(kv, _):
        at = kv.length
        active = at < lengths
        token = tokens[row, jnp.minimum(at, total - 1)]
        position = jnp.where(active, at, -1)[:, None]
        block = Block(position=position, budget=budget, policy=policy, decoding=True, implementation=implementation)
        x, kv = decoder.hidden(token[:, None], kv, block)
        target = tokens[row, jnp.minimum(at + 1, total - 1)]
        logprob = logprobs_of(decoder, x, target[:, None])[:, 0]
        return kv, (jnp.where(active, at, total), logprob)

    state, (at, logprobs) = jax.lax.scan(body, state, length=steps)
    # [B, steps]; entries past the end are dropped
    return scores.at[row[:, None], at.T].set(logprobs.T, mode="drop"), state
