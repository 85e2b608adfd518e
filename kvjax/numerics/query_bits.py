"""One bit per query and slot, in words of 16 queries: the newest query is the lowest bit of the first word."""

import jax
import jax.numpy as jnp

Array = jax.Array

#: Queries per word: a uint16 has 16 bits, and a float32 sum of 16 distinct powers of two is exact.
WORD_BITS = 16


def shifted(old: Array, n: Array, history: int) -> Array:
    """Shifts the bits by n queries and clears those that are older than `history`.

    Args:
      old: [B, K, S, words] uint16.
      n: [B, 1, 1, 1] int32.
      history: the number of queries whose bits are kept.

    Returns:
      [B, K, S, words] uint16.
    """
    words = old.shape[3]
    # [words]
    word = jnp.arange(words, dtype=jnp.int32)
    # [B, 1, 1, words] and [B, 1, 1, 1]
    source, shift = word - n // WORD_BITS, (n % WORD_BITS).astype(jnp.uint32)

    def take(index: Array) -> Array:
        # [B, K, S, words]
        index = jnp.broadcast_to(index, (*old.shape[:3], words))
        taken = jnp.take_along_axis(old, jnp.maximum(index, 0), axis=3)
        return jnp.where(index >= 0, taken, jnp.uint16(0)).astype(jnp.uint32)

    # [B, K, S, words]
    moved = (take(source) << shift) | (take(source - 1) >> (WORD_BITS - shift))
    # [words]: the number of bits in use, which is smaller than WORD_BITS in the last word
    used = jnp.minimum(history - word * WORD_BITS, WORD_BITS).astype(jnp.uint32)
    # [B, K, S, words]
    return (moved & ((jnp.uint32(1) << used) - 1)).astype(jnp.uint16)
