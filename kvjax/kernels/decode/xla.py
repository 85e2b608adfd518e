"""Attention of a few queries over all slots at once, in plain XLA: one query while decoding, or a tile of a prompt."""

import jax
import jax.numpy as jnp

from kvjax.kernels import softmax
from kvjax.kernels.coded import floats_of
from kvjax.kernels.decode.coded import product
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.products import native
from kvjax.products.used_slots import attend_slots, reads_used_slots

Array = jax.Array


def attend(problem: Problem) -> Attended:
    """Computes attention over the problem's slots, in float32."""
    if in_one_pass(problem):
        # [B, K, G, n, D] and [B, K, G, n]
        return Attended(*jax.lax.platform_dependent(problem, cpu=attend_used, default=attend_whole))
    return Attended(*attend_whole(problem))


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
    if in_one_pass(problem):
        attended = attend(problem)
        return Attended(attended.output.astype(problem.value.dtype), attended.lse), {}
    # [B, K, n, S]
    mask = softmax.visible(problem)
    # [B, K, G, n, S] and [B, K, G, n]
    probability, lse = softmax.probabilities(softmax.scores(problem), mask)
    # [B, K, G, n, D]
    output = _weighted_values(problem, probability).astype(problem.value.dtype)
    # [B, K, n]
    share = 1 / jnp.maximum(softmax.count_seen(mask), 1) if problem.needs_seen else None
    return Attended(output, lse), softmax.column_sums(problem, probability, share)


def in_one_pass(problem: Problem) -> bool:
    """Whether attention on CPUs is `attend_used`, which reports no statistics.

    Of one query, where products leave out slots; and of a block of a few that follow on others, as a verified draft.
    """
    key, value = floats_of(problem.key), floats_of(problem.value)
    if key is None or value is None or (key.shape, key.dtype) != (value.shape, value.dtype):
        return False
    if problem.statistics or any(x is not None for x in (problem.soft_cap, problem.log_weight, problem.offset)):
        return False
    batch, kv_heads, group, n, dim = problem.query.shape
    if problem.causal or (n == 1 and not softmax.leaves_out_slots(problem)):
        return False
    rows = jax.ShapeDtypeStruct((batch, kv_heads, group * n, dim), problem.query.dtype)
    return reads_used_slots(rows, key) and native.load(native.ATTEND) is None


def attend_used(problem: Problem) -> tuple[Array, Array]:
    """Attends to the slots in use by kvjax's own code, which reads keys and values once; see `attend_slots`.

    Returns:
      The output [B, K, G, n, D] and the log-sum-exps [B, K, G, n], float32.
    """
    *shape, dim = problem.query.shape
    batch, kv_heads, group, n = shape
    key, value = floats_of(problem.key), floats_of(problem.value)
    assert key is not None and value is not None
    # [B, K, n, S]
    seen = softmax.visible(problem)
    # [B, K, G * n, D]
    query = problem.query.reshape(batch, kv_heads, group * n, dim)
    output, lse = attend_slots(query, key, value, seen, softmax.last_seen(seen), problem.scale)
    return output.reshape(*shape, dim), lse.reshape(shape)


def attend_whole(problem: Problem) -> tuple[Array, Array]:
    """Computes the output and the log-sum-exps of `attend` from the probabilities of all slots."""
    # [B, K, G, n, S] and [B, K, G, n]
    probability, lse = softmax.probabilities(softmax.scores(problem), softmax.visible(problem))
    return _weighted_values(problem, probability), lse


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
