"""What the decode and prefill references share: masks, and column sums of a tile of probabilities."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from kvjax.statistics import Statistic

Array = jax.Array
NEGATIVE = float(jnp.finfo(jnp.float32).min)


def visible(query_position: Array, key_position: Array, window: int | None) -> Array:
    """Which slots each query sees: live ones at its position or before, within its sliding window.

    Args:
      query_position: [B, t] int32, -1 = padding, which sees nothing.
      key_position: [B, K, S] int32, -1 = empty.
      window: newest positions a query may see, itself included, or None.

    Returns:
      [B, K, t, S] bool.
    """
    query = query_position[:, None, :, None]
    key = key_position[:, :, None, :]
    mask = (key >= 0) & (key <= query)
    return mask if window is None else mask & (key > query - window)


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
    statistics: Iterable[Statistic], probability: Array, mask: Array, age: Array, group_reduce: str
) -> dict[str, Array]:
    """Σ_i w_i f(m[i, j]) of one tile of queries, for every statistic that needs attention.

    Args:
      statistics: what to report.
      probability: [B, K, G, t, S] float32.
      mask: [B, K, t, S] bool, who sees whom.
      age: [B, t] int32, see `Statistic.query_weights`.
      group_reduce: ``mean`` or ``max`` over G.

    Returns:
      Statistic name -> [B, K, S] float32.
    """
    # [B, K, t, S]
    m = jnp.mean(probability, axis=2) if group_reduce == "mean" else jnp.max(probability, axis=2)
    sums = {}
    for statistic in statistics:
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
        sums[statistic.name] = jnp.einsum("bkts,bt->bks", term, statistic.query_weights(age))
    return sums
