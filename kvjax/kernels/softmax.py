"""What the references share: which slots are visible, logits, and column sums of a tile of probabilities."""

import jax
import jax.numpy as jnp

from kvjax.kernels.problem import Problem

Array = jax.Array
NEGATIVE = float(jnp.finfo(jnp.float32).min)
TIE = 1 - 2.0**-18  # a probability that is computed again may round to below the uniform share that it equals


def visible(problem: Problem) -> Array:
    """Which slots each query sees, [B, K, n, S] bool: live ones at its position or before, within its window."""
    # [B, 1, n, 1] and [B, K, 1, S]
    query, key = problem.query_position[:, None, :, None], problem.key_position[:, :, None, :]
    mask = (key >= 0) & (key <= query)
    reach = _reach(problem)
    if reach is None:
        return mask
    near = key > query - reach
    return mask & (near if problem.exempt is None else near | problem.exempt[:, :, None, :])


def _reach(problem: Problem) -> Array | int | None:
    """The number of newest positions that a query sees, an int or [B, 1, 1, 1] int32; None = all."""
    if problem.band is None:
        return problem.window
    band = problem.band[:, None, None, None]
    return band if problem.window is None else jnp.minimum(band, problem.window)


def count_seen(mask: Array) -> Array:
    """The number of slots that each query sees, [..., n] float32, of a mask [..., n, S]."""
    return jnp.sum(mask, axis=-1, dtype=jnp.float32)


def scores(problem: Problem) -> Array:
    """The logits, [B, K, G, n, S] float32."""
    batch, kv_heads, group, n, dim = problem.query.shape
    # [B, K, G * n, D]. Group and query as one dimension: with two, XLA's CPU compiler transposes a copy of the keys
    # (jax 0.10.2).
    rows = problem.query.reshape(batch, kv_heads, group * n, dim)
    # [B, K, G * n, S]
    logits = jnp.einsum("bkqd,bksd->bkqs", rows, problem.key, preferred_element_type=jnp.float32)
    # [B, K, G, n, S]
    logits = logits.reshape(batch, kv_heads, group, n, -1) * problem.scale
    return logits if problem.log_weight is None else logits + problem.log_weight[:, :, None, None]


def probabilities(logits: Array, mask: Array) -> tuple[Array, Array]:
    """Softmax over the slots that a query sees, in float32; zeros, not NaN, for a query that sees nothing.

    Args:
      logits: [B, K, G, n, S] float32.
      mask: [B, K, n, S] bool.

    Returns:
      The probabilities [B, K, G, n, S], and the log-sum-exps [B, K, G, n], -inf for a query that sees nothing.
    """
    mask = mask[:, :, None]
    logits = jnp.where(mask, logits, NEGATIVE)
    # [B, K, G, n, 1]
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weight = jnp.where(mask, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    known = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(known), -jnp.inf)
    return weight / known, lse[..., 0]


def column_sums(problem: Problem, probability: Array, mask: Array, share: Array | None) -> dict[str, Array]:
    """Σ_i w_i f(m[i, j]) over the queries i, for every statistic that needs attention.

    Args:
      problem: with the queries of a tile, or all of them.
      probability: [B, K, G, n, S] float32.
      mask: [B, K, n, S] bool, which slots each query sees.
      share: [B, K, n] float32, the m from which on a slot is ``above``; None where no statistic asks for it.

    Returns:
      Statistic name -> [B, K, S] or [B, K, S, words] float32.
    """
    # [B, K, n, S]
    m = jnp.mean(probability, axis=2) if problem.group_reduce == "mean" else jnp.max(probability, axis=2)
    sums = {}
    for statistic, weight in zip(problem.statistics, problem.weights, strict=True):
        match statistic.transform:
            case "identity":
                term = m
            case "square":
                term = jnp.square(m)
            case "above":
                assert share is not None
                term = (mask & (m >= share[..., None])).astype(jnp.float32)
            case "one":
                raise ValueError("counts need no attention; see kvjax.attention")
        # In full float32: by default, GPUs and TPUs would multiply fewer bits.
        sums[statistic.name] = jnp.einsum("bkts,bt...->bks...", term, weight, precision=jax.lax.Precision.HIGHEST)
    return sums


def uniform_share(seen: Array) -> Array:
    """The probability of each slot if it were the same for all, less what rounding may take from a tie.

    Args:
      seen: the number of slots that each query sees. Of a single slot any probability above a half is all.
    """
    return jnp.where(seen > 1, TIE / jnp.maximum(seen, 1.0), 0.5)
