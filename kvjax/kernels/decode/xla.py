"""Attention of a few queries over all slots at once, in plain XLA: one query while decoding, a tile of a prompt."""

import jax
import jax.numpy as jnp

from kvjax.kernels import softmax
from kvjax.kernels.problem import Attended, Problem

Array = jax.Array


def attend(problem: Problem) -> Attended:
    """Attention over the problem's slots alone, in float32."""
    probability, lse = softmax.probabilities(softmax.scores(problem), softmax.visible(problem))
    return Attended(_weighted_values(problem, probability), lse)


def column_sums(problem: Problem, lse: Array, seen: Array | None = None) -> dict[str, Array]:
    """The statistics of the problem's slots, under log-sum-exps over more slots than these.

    Args:
      problem: whose queries attend to these and to other slots.
      lse: [B, K, G, n] float32 over all slots.
      seen: [B, K, n] float32 number of slots that each query sees; None = these alone.

    Returns:
      Statistic name -> [B, K, S] or [B, K, S, words] float32.
    """
    # [B, K, n, S]
    mask = softmax.visible(problem)
    # [B, K, G, n, S]; masked before the exponential, which would otherwise overflow, with gradients that are NaN
    probability = jnp.exp(jnp.where(mask[:, :, None], softmax.scores(problem) - lse[..., None], -jnp.inf))
    share = None
    if problem.needs_seen:
        share = softmax.uniform_share(softmax.count_seen(mask) if seen is None else seen)
    return softmax.column_sums(problem, probability, mask, share)


def attend_and_reduce(problem: Problem) -> tuple[Attended, dict[str, Array]]:
    """Attention and its statistics from the same probabilities.

    Returns:
      The output [B, K, G, n, D] in value's dtype and the log-sum-exps; and the statistics as of `column_sums`.
    """
    mask = softmax.visible(problem)
    probability, lse = softmax.probabilities(softmax.scores(problem), mask)
    output = _weighted_values(problem, probability).astype(problem.value.dtype)
    # [B, K, n]
    share = 1 / jnp.maximum(softmax.count_seen(mask), 1) if problem.needs_seen else None
    return Attended(output, lse), softmax.column_sums(problem, probability, mask, share)


def count_seen(problem: Problem) -> Array:
    """The number of slots that each query sees, [B, K, n] float32."""
    return softmax.count_seen(softmax.visible(problem))


def _weighted_values(problem: Problem, probability: Array) -> Array:
    """[B, K, G, n, S] float32 -> [B, K, G, n, D] float32; probabilities are rounded to value's dtype."""
    batch, kv_heads, group, n, slots = probability.shape
    # [B, K, G * n, S]
    weight = probability.reshape(batch, kv_heads, group * n, slots).astype(problem.value.dtype)
    output = jnp.einsum("bkqs,bksd->bkqd", weight, problem.value, preferred_element_type=jnp.float32)
    return output.reshape(batch, kv_heads, group, n, -1)
