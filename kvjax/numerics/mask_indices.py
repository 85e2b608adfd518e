"""Compaction: where the marked entries of a mask are, in arrays of a fixed width."""

import jax
import jax.numpy as jnp

Array = jax.Array
WORD = 32  # slots whose marks are packed into one uint32
HALVES = (16, 8, 4, 2, 1)  # steps of a binary search in a word


def compact(mask: Array, width: int) -> tuple[Array, Array]:
    """Gathers the first slots that a mask marks, ascending, into arrays of `width`.

    Args:
      mask: [B, K, S] bool.
      width: W, which may be larger than S.

    Returns:
      slots: [B, K, W] int32, in bounds everywhere.
      valid: [B, K, W] bool, False after the last marked slot.
    """
    batch, kv_heads, size = mask.shape
    words = -(-size // WORD)
    # [B, K, words, WORD]
    marks = jnp.pad(mask, ((0, 0), (0, 0), (0, words * WORD - size))).reshape(batch, kv_heads, words, WORD)
    # [B, K, words] uint32: mark i is bit i
    word = jnp.sum(marks.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32), axis=3, dtype=jnp.uint32)
    # [B, K, words]: marks of each word, and up to its end. Running sums over all slots would be far slower on a CPU.
    marked = jax.lax.population_count(word).astype(jnp.int32)
    until = jnp.cumsum(marked, axis=2)
    # [B, K, W]: the word that holds the i-th mark, and the number of marks before it in that word
    number = jnp.arange(width, dtype=jnp.int32)
    found = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, number, side="right").astype(jnp.int32)))(until)
    holder = jnp.minimum(found, words - 1)
    left = number - jnp.take_along_axis(until - marked, holder, axis=2)
    bits = jnp.take_along_axis(word, holder, axis=2)
    # [B, K, W]: the bit of that mark in its word
    bit = jnp.zeros_like(holder)
    for half in HALVES:
        low = (bits >> bit.astype(jnp.uint32)) & jnp.uint32((1 << half) - 1)
        below = jax.lax.population_count(low).astype(jnp.int32)
        above = left >= below
        left = jnp.where(above, left - below, left)
        bit = jnp.where(above, bit + half, bit)
    return jnp.minimum(holder * WORD + bit, size - 1), number < until[:, :, -1:]
