"""The best entries of several devices by their gaps to each query head's best one, joined in one collective.

The gaps are known when every device has told its best scores. The entries that have the smallest gaps for one query
head are those of its largest scores, which are known before: each device names as many for each query head as are
chosen of all. An entry that is chosen is thus named, with the score that its worth, the smallest gap, follows from.
"""

import jax
import jax.numpy as jnp

from kvjax.numerics.mask_indices import compact
from kvjax.numerics.top_k import largest
from kvjax.parallel import slot_reductions

Array = jax.Array
FAR = jnp.iinfo(jnp.int32).max


def name_best(score: Array, position: Array, count: int) -> Array:
    """Names the entries of this device with the largest scores for each query head: [B, K, G * W * 2] int32.

    Args:
      score: [B, K, G, U] float32.
      position: [B, K, U] int32, distinct per head; -1 = no candidate.
      count: the number of entries that are chosen of all devices.
    """
    batch, kv_heads, queries, units = score.shape
    width = min(count, units)
    # [B, K, G, U], then [B, K * G, U]
    at = jnp.broadcast_to(position[:, :, None], score.shape)
    score, at = (x.reshape(batch, kv_heads * queries, units) for x in (score, at))
    with slot_reductions.alone():
        slots, valid = compact(largest(score, at, width, in_kernels=False), width)
    held = jnp.where(valid, jnp.take_along_axis(at, slots, axis=2), -1)
    bits = jax.lax.bitcast_convert_type(jnp.take_along_axis(score, slots, axis=2), jnp.int32)
    return jnp.stack([held, bits], axis=3).reshape(batch, kv_heads, queries * width * 2)


def best_named(every: Array, top: Array, position: Array, count: int, without: Array | None) -> Array:
    """Marks the entries of this device that are among the `count` of largest worth of all, of equal ones the newer.

    Args:
      every: [C, B, K, G * W * 2] int32, from `name_best`, of all devices.
      top: [B, K, G, 1] float32, the largest score of all candidates.
      position: [B, K, U] int32; see `name_best`.
      count: the number of entries.
      without: [B, K, 1] int32, a position that is no candidate, or None.

    Returns:
      [B, K, U] bool.
    """
    devices, (batch, kv_heads, queries, _) = len(every), top.shape
    # [B, K, G, C * W] each
    pairs = jnp.moveaxis(every.reshape(devices, batch, kv_heads, queries, -1, 2), 0, 3)
    pairs = pairs.reshape(batch, kv_heads, queries, -1, 2)
    held, score = pairs[..., 0], jax.lax.bitcast_convert_type(pairs[..., 1], jnp.float32)
    gap = jnp.where(score >= top, 0.0, top - score)
    # [B, K, G * C * W]: by position, and what is named for several query heads by its smallest gap first
    held, gap = jax.lax.sort((held.reshape(batch, kv_heads, -1), gap.reshape(batch, kv_heads, -1)), num_keys=2)
    again = jnp.pad(held[..., 1:] == held[..., :-1], ((0, 0), (0, 0), (1, 0)))
    again = again if without is None else again | (held == without)
    with slot_reductions.alone():
        chosen = largest(-gap, jnp.where(again, -1, held), count, in_kernels=False)
    # [B, K, W'], ascending
    slots, valid = compact(chosen, min(count, chosen.shape[2]))
    found = jnp.where(valid, jnp.take_along_axis(held, slots, axis=2), FAR)
    at = jax.vmap(jax.vmap(lambda row, x: jnp.searchsorted(row, x)))(found, position)
    same = jnp.take_along_axis(found, jnp.minimum(at, found.shape[2] - 1), axis=2) == position
    return same & (position >= 0)
