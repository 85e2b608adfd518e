"""Parts of the reference kernels: which slots are visible, logits, softmax, and column sums of probabilities."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.kernels.decode.coded import product
from kvjax.kernels.problem import Problem
from kvjax.numerics import recurrence
from kvjax.numerics.group_reductions import max_over_group, mean_over_group
from kvjax.numerics.soft_cap import soft_capped

Array = jax.Array
NEGATIVE = float(jnp.finfo(jnp.float32).min)
TIE = 1 - 2.0**-18  # a recomputed probability may round to just below the uniform share that it equals


def visible(problem: Problem) -> Array:
    """Returns whether each query sees each slot: a live one, at its position or before, within its window.

    Returns:
      [B, K, n, S] bool.
    """
    # [B, 1, n, 1] and [B, K, 1, S]
    query, key = problem.query_position[:, None, :, None], problem.key_position[:, :, None, :]
    # [B, K, n, S]
    mask = (key >= 0) & (key <= query)
    reach = _reach(problem)
    if reach is None:
        return mask
    near = key > query - reach
    return mask & (near if problem.exempt is None else near | problem.exempt[:, :, None, :])


def _reach(problem: Problem) -> Array | int | None:
    """Returns the number of newest positions that a query sees, an int or [B, 1, 1, 1] int32; None = all."""
    if problem.band is None:
        return problem.window
    # [B, 1, 1, 1]
    band = problem.band[:, None, None, None]
    return band if problem.window is None else jnp.minimum(band, problem.window)


def count_seen(mask: Array) -> Array:
    """Counts the slots that each query sees: [..., n, S] bool -> [..., n] float32."""
    # [..., n]
    return jnp.sum(mask, axis=-1, dtype=jnp.float32)


def leaves_out_slots(problem: Problem) -> bool:
    """Whether products on CPUs leave out the slots after the last one that is seen.

    Not for a tile of queries; nor where one query reads slots that are mostly in use, which XLA does as fast.
    """
    group, n = problem.query.shape[2:4]
    return n == 1 and (group > 1 or problem.grows)


def used_slots(problem: Problem) -> Array | None:
    """Returns the number of slots up to the last one that a query sees, [B, K] int32; None to read all slots."""
    return last_seen(visible(problem)) if leaves_out_slots(problem) else None


def last_seen(mask: Array) -> Array:
    """Returns the number of slots up to the last one that a query sees: [B, K, n, S] bool -> [B, K] int32."""
    slot = jnp.arange(1, mask.shape[-1] + 1, dtype=jnp.int32)
    # [B, K]
    return jnp.max(jnp.where(mask, slot, 0), axis=(2, 3))


def scores(problem: Problem) -> Array:
    """Computes the logits, [B, K, G, n, S] float32; of one query, they may be wrong for slots that it does not see."""
    batch, kv_heads, group, n, dim = problem.query.shape
    # [B, K, G * n, D]: group and query are one dimension. With two, XLA's CPU compiler transposes a copy of the keys
    # (jax 0.10.2).
    rows = problem.query.reshape(batch, kv_heads, group * n, dim)
    # [B, K, G * n, S]
    logits = product(rows, problem.key, transposed=True, dtype=jnp.float32, used=used_slots(problem))
    # [B, K, G, n, S]
    logits = logits.reshape(batch, kv_heads, group, n, -1) * problem.scale
    logits = logits if problem.offset is None else logits + problem.offset[..., None]
    logits = soft_capped(logits, problem.soft_cap)
    return logits if problem.log_weight is None else logits + problem.log_weight[:, :, None, None]


def probabilities(logits: Array, mask: Array) -> tuple[Array, Array]:
    """Computes the softmax over the slots that a query sees, in float32.

    Args:
      logits: [B, K, G, n, S] float32.
      mask: [B, K, n, S] bool, whether each query sees each slot.

    Returns:
      The probabilities [B, K, G, n, S] and the log-sum-exps [B, K, G, n]; 0 and -inf for a query that sees no slot.
    """
    # [B, K, 1, n, S]
    mask = mask[:, :, None]
    # [B, K, G, n, S]
    logits = jnp.where(mask, logits, NEGATIVE)
    # [B, K, G, n, 1]
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # [B, K, G, n, S]
    weight = jnp.where(mask, jnp.exp(logits - top), 0.0)
    # [B, K, G, n, 1]
    total = jnp.sum(weight, axis=-1, keepdims=True)
    known = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(known), -jnp.inf)
    return weight / known, lse[..., 0]


def column_sums(problem: Problem, probability: Array, share: Array | None) -> dict[str, Array]:
    """Computes Σ_i w_i f(m[i, j]) over the queries i, or the maximum, for every statistic that needs attention.

    Args:
      problem: the queries and statistics.
      probability: [B, K, G, n, S] float32, 0 for a slot that a query does not see.
      share: [B, K, n] float32, the smallest m that counts as ``above``; None if no statistic needs it.

    Returns:
      Statistic name -> [B, K, S], [B, K, S, words] or, for ``recurrence``, [B, K, S, 3] float32.
    """
    # [B, K, n, S]
    m = mean_over_group(probability) if problem.group_reduce == "mean" else max_over_group(probability)

    def threshold() -> Array:
        assert share is not None
        # [B, K, n, 1]
        return share[..., None]

    sums = {}
    for statistic, weight in zip(problem.statistics, problem.weights, strict=True):
        if statistic.recurs:
            # [B, K, n, S]: padding attends to no slot, so its m is 0
            age = problem.query_position[:, None, :, None] - problem.key_position[:, :, None] + 1
            sums[statistic.name] = recurrence.columns(m >= statistic.threshold, age)
            continue
        # [B, K, n, S]
        term = transformed(statistic.transform, m, threshold)
        # [B, K, S] or [B, K, S, words]
        sums[statistic.name] = statistic.reduce(term, weight)
    return sums


def transformed(transform: str, m: Array, threshold: Callable[[], Array]) -> Array:
    """Computes f(m) of a statistic that needs attention; kernels trace this function too.

    Args:
      transform: ``identity``, ``square`` or ``above``; see `Statistic`.
      m: attention probabilities, reduced over the group; 0 for slots that are not seen.
      threshold: returns the smallest m that counts as ``above``, which is positive; not called for other transforms.

    Returns:
      An array with the shape of m.
    """
    match transform:
        case "identity":
            return m
        case "square":
            return m * m
        case "above":
            return jnp.where(m >= threshold(), 1.0, 0.0)
    raise ValueError(f"transform {transform!r} needs no attention; see kvjax.attention.count_queries")


def uniform_share(seen: Array) -> Array:
    """Returns the probability of each slot if all were equal, minus a margin for rounding.

    Args:
      seen: the number of slots that each query sees. For a single slot, whose probability is 1, the result is 0.5.
    """
    return jnp.where(seen > 1, TIE / jnp.maximum(seen, 1.0), 0.5)
