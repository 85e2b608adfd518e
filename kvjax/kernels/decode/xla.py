"""Attention of a few queries over the slots of a cache: the reference, in plain XLA."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.kernels import softmax
from kvjax.statistics import Statistic

Array = jax.Array


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_position: Array,
    key_position: Array,
    statistics: Sequence[Statistic],
    weights: Sequence[Array],
    scale: float,
    window: int | Array | None,
    exempt: Array | None,
    log_weight: Array | None,
    group_reduce: str,
) -> tuple[Array, dict[str, Array]]:
    """A few queries per head over all slots at once: one while decoding, a tile of a prompt.

    The softmax sees whole rows, so its probabilities are what the statistics are made of.

    Args:
      query: [B, K, G, n, D]; key, value: [B, K, S, D].
      query_position: [B, n] int32; key_position: [B, K, S] int32; window, exempt: see `softmax.visible`.
      log_weight: [B, K, S] float32, added to the logits, or None.
      statistics: what to report; weights: of each, [B, n] or [B, n, words] float32, see `Statistic.query_weights`.

    Returns:
      output [B, K, G, n, D] in value's dtype, and statistic name -> [B, K, S] or [B, K, S, words] float32.
    """
    batch, kv_heads, group, n, dim = query.shape
    # Group and query as one dimension: with two, XLA's CPU compiler transposes a copy of the keys (jax 0.10.2).
    rows = query.reshape(batch, kv_heads, group * n, dim)
    # [B, K, G * n, S]
    logits = jnp.einsum("bkqd,bksd->bkqs", rows, key, preferred_element_type=jnp.float32)
    mask = softmax.visible(query_position, key_position, window, exempt)
    # [B, K, G, n, S]
    scaled = logits.reshape(batch, kv_heads, group, n, -1) * scale
    if log_weight is not None:
        scaled = scaled + log_weight[:, :, None, None]
    probability = softmax.probabilities(scaled, mask)
    weight = probability.reshape(logits.shape).astype(value.dtype)
    output = jnp.einsum("bkqs,bksd->bkqd", weight, value, preferred_element_type=jnp.float32)
    sums = softmax.column_sums(statistics, weights, probability, mask, group_reduce)
    return output.reshape(query.shape).astype(value.dtype), sums
