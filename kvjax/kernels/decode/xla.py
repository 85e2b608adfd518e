"""Attention of one new token over the slots of a cache: the reference, in plain XLA."""

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
    age: Array,
    scale: float,
    window: int | None,
    statistics: frozenset[Statistic],
    group_reduce: str,
) -> tuple[Array, dict[str, Array]]:
    """One query per head over all slots; the softmax is exact, so the probabilities are the statistics' input.

    Args:
      query: [B, K, G, 1, D]; key, value: [B, K, S, D].
      query_position: [B, 1] int32; key_position: [B, K, S] int32; age: [B, 1] int32.

    Returns:
      output [B, K, G, 1, D] in value's dtype, and statistic name -> [B, K, S] float32.
    """
    # [B, K, G, 1, S]
    logits = jnp.einsum("bkgtd,bksd->bkgts", query, key, preferred_element_type=jnp.float32)
    mask = softmax.visible(query_position, key_position, window)
    probability = softmax.probabilities(logits * scale, mask)
    output = jnp.einsum(
        "bkgts,bksd->bkgtd", probability.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    sums = softmax.column_sums(statistics, probability, mask, age, group_reduce)
    return output.astype(value.dtype), sums
