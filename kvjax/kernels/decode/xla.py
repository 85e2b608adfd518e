"""Attention of a few queries over all slots at once, in plain XLA: one query while decoding, or a tile of a prompt."""

import jax
import jax.numpy as jnp

from kvjax.kernels import softmax
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode.coded import product
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.products import native
from kvjax.products.used_slots import attend_slots, reads_used_slots

Array = jax.Array


def attend(problem: Problem) -> Attended:
    """Computes attention over the problem's slots, in float32."""
    # [B, K, G, n, S] and [B, K, G, n]
    probability, lse = softmax.probabilities(softmax.scores(problem), softmax.visible(problem))
    return Attended(_weighted_values(problem, probability), lse)


def column_sums(problem: Problem, lse: Array, seen: Array | None = None) -> dict[str, Array]:
    """Computes the statistics of the problem's slots if its queries attend to other slots too.

    Args:
      problem: the queries and a part of the slots.
      lse: [B, K, G, n] float32, the log-sum-exps over all slots.
      seen: [B, K, n] float32, the number of slots that each query sees in all parts; None = in this part only.

    Returns:
      Statistic name -> [B, K, S, ...] float32, see `Statistic.reported`.
    """
    # [B, K, n, S]
    mask = softmax.visible(problem)
    # [B, K, G, n, S]: masked before the exponential, which would otherwise overflow and give NaN gradients
    probability = jnp.exp(jnp.where(mask[:, :, None], softmax.scores(problem) - lse[..., None], -jnp.inf))
    share = None
    if problem.needs_seen:
        # [B, K, n]
        share = softmax.uniform_share(softmax.count_seen(mask) if seen is None else seen)
    return softmax.column_sums(problem, probability, share)


def attend_and_reduce(problem: Problem) -> tuple[Attended, dict[str, Array]]:
    """Computes attention and its statistics from the same probabilities.

    Returns:
      The output [B, K, G, n, D] in value's dtype and the log-sum-exps [B, K, G, n]; and what `column_sums` returns.
    """
    check(problem, shorter_values=True)
    if _in_one_pass(problem):
        # [B, K, G, n, D] and [B, K, G, n]
        output, lse = jax.lax.platform_dependent(problem, cpu=_attend_slots, default=_attend_whole)
        return Attended(output, lse), {}
    # [B, K, n, S]
    mask = softmax.visible(problem)
    # [B, K, G, n, S] and [B, K, G, n]
    probability, lse = softmax.probabilities(softmax.scores(problem), mask)
    # [B, K, G, n, D]
    output = _weighted_values(problem, probability).astype(problem.value.dtype)
    # [B, K, n]
    share = 1 / jnp.maximum(softmax.count_seen(mask), 1) if problem.needs_seen else None
    return Attended(output, lse), softmax.column_sums(problem, probability, share)


def _in_one_pass(problem: Problem) -> bool:
    """Whether attention is that of `kvjax.products.used_slots.attend_slots` on CPUs, which reports no statistics."""
    key, value = problem.key, problem.value
    if isinstance(key, Coded) or isinstance(value, Coded) or (key.shape, key.dtype) != (value.shape, value.dtype):
        return False
    if problem.statistics or any(x is not None for x in (problem.soft_cap, problem.log_weight, problem.offset)):
        return False
    if not (softmax.leaves_out_slots(problem) and reads_used_slots(problem.query[:, :, :, 0], key)):
        return False
    return native.load(native.ATTEND) is None


def _attend_slots(problem: Problem) -> tuple[Array, Array]:
    used = softmax.used_slots(problem)
    assert used is not None
    # [B, K, G, D] and [B, K, S]: of the one query of each head
    query, seen = problem.query[:, :, :, 0], softmax.visible(problem)[:, :, 0]
    output, lse = attend_slots(query, problem.key, problem.value, seen, used, problem.scale)
    return output[:, :, :, None].astype(problem.value.dtype), lse[..., None]


def _attend_whole(problem: Problem) -> tuple[Array, Array]:
    attended = attend(problem)
    assert attended.lse is not None
    return attended.output.astype(problem.value.dtype), attended.lse


def count_seen(problem: Problem) -> Array:
    """Counts the slots that each query sees: [B, K, n] float32."""
    return softmax.count_seen(softmax.visible(problem))


def _weighted_values(problem: Problem, probability: Array) -> Array:
    """Computes the sums of values [B, K, G, n, D] float32, with probabilities [B, K, G, n, S] in value's dtype."""
    batch, kv_heads, group, n, slots = probability.shape
    # [B, K, G * n, S]
    weight = probability.reshape(batch, kv_heads, group * n, slots).astype(problem.value.dtype)
    # [B, K, G * n, D]
    output = product(weight, problem.value, dtype=jnp.float32, used=softmax.used_slots(problem))
    return output.reshape(batch, kv_heads, group, n, -1)
