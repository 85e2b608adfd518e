"""What the decode and prefill references share: masks, and column sums of a tile of probabilities."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.statistics import Statistic

Array = jax.Array
NEGATIVE = float(jnp.finfo(jnp.float32).min)


def visible(
    query_position: Array, key_position: Array, window: int | Array | None, exempt: Array | None = None
) -> Array:
    """Which slots each query sees: live ones at its position or before, within its sliding window.

    Args:
      query_position: [B, t] int32, -1 = padding, which sees nothing.
      key_position: [B, K, S] int32, -1 = empty.
      window: newest positions a query may see, itself included, or None; an int, or [B] int32.
      exempt: [B, K, S] bool, slots that are seen beyond the window too; None = none.

    Returns:
      [B, K, t, S] bool.
    """
    query = query_position[:, None, :, None]
    key = key_position[:, :, None, :]
    mask = (key >= 0) & (key <= query)
    if window is None:
        return mask
    if isinstance(window, jax.Array):
        window = window[:, None, None, None]
    near = key > query - window
    return mask & (near if exempt is None else near | exempt[:, :, None, :])


def probabilities(logits: Array, mask: Array) -> Array:
    """Softmax over the slots a query sees, in float32; a query that sees nothing gets zeros, not NaN.

    Args:
      logits: [B, K, G, t, S] float32.
      mask: [B, K, t, S] bool.
    """
    mask = mask[:, :, None]
    logits = jnp.where(mask, logits, NEGATIVE)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weight = jnp.where(mask, jnp.exp(logits - top), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total > 0, total, 1.0)


def column_sums(
    statistics: Sequence[Statistic], weights: Sequence[Array], probability: Array, mask: Array, group_reduce: str
) -> dict[str, Array]:
    """Σ_i w_i f(m[i, j]) of one tile of queries, for every statistic that needs attention.

    Args:
      statistics: what to report; weights: w of each, [B, t] or [B, t, words] float32, 0 for padding.
      probability: [B, K, G, t, S] float32.
      mask: [B, K, t, S] bool, who sees whom.
      group_reduce: ``mean`` or ``max`` over G.

    Returns:
      Statistic name -> [B, K, S] or [B, K, S, words] float32.
    """
    # [B, K, t, S]
    m = jnp.mean(probability, axis=2) if group_reduce == "mean" else jnp.max(probability, axis=2)
    sums = {}
    for statistic, weight in zip(statistics, weights, strict=True):
        match statistic.transform:
            case "identity":
                term = m
            case "square":
                term = jnp.square(m)
            case "above":
                seen = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
                term = (mask & (m >= 1 / jnp.maximum(seen, 1))).astype(jnp.float32)
            case "one":
                raise ValueError("counts need no attention; see kvjax.attention")
        # In full float32: left alone, GPUs and TPUs would multiply fewer bits.
        sums[statistic.name] = jnp.einsum("bkts,bt...->bks...", term, weight, precision=jax.lax.Precision.HIGHEST)
    return sums
