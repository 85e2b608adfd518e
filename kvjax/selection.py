"""Order statistics over slots without a sort: which are the `count` largest. A leaf: the cache and policies import it.

A radix search: sixteen ways a round, eight rounds for 32 bits, each a comparison and a sum over the slots. A sort takes
a CPU more than four times as long.
"""

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
BITS = 4  # of a round
SIGN = np.uint32(1 << 31)


def largest(value: Array, position: Array, count: Array | int) -> Array:
    """The live slots whose values are the `count` largest; of equal ones the newer.

    Args:
      value: [..., S] float32, +-inf allowed, NaN not.
      position: [..., S] int32, distinct; negative = empty, never chosen.
      count: int32 that broadcasts against [..., 1]; all live slots where there are no more.

    Returns:
      [..., S] bool.
    """
    live = position >= 0
    count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), (*value.shape[:-1], 1))
    keys = _ordered(value)
    threshold = _threshold(keys, live, count)
    above = live & (keys > threshold)
    tied = live & (keys == threshold)
    left = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)

    # Mostly the threshold is one slot's alone, and all that are tied are chosen.
    excess = jnp.any(jnp.sum(tied, axis=-1, keepdims=True, dtype=jnp.int32) > left)
    ages = position.astype(jnp.uint32)
    oldest = jax.lax.cond(excess, lambda: _threshold(ages, tied, left), lambda: jnp.zeros_like(threshold))
    return above | (tied & (ages >= oldest) & (left > 0))


def _ordered(value: Array) -> Array:
    """uint32 that compare as the floats do."""
    # -0.0 and 0.0 are equal, and have different bits.
    value = jnp.where(value == 0, jnp.float32(0), value.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _threshold(keys: Array, among: Array, count: Array) -> Array:
    """[..., 1] uint32: the `count`-th largest key of those `among`; 0 where they are fewer."""
    ways = jnp.arange(1, 1 << BITS, dtype=jnp.uint32)

    def narrow(i: Array, prefix: Array) -> Array:
        shift = jnp.uint32(32 - BITS) - jnp.uint32(BITS) * jnp.asarray(i, jnp.uint32)
        # [..., ways]
        candidates = prefix | (ways << shift)
        reach = among[..., None, :] & (keys[..., None, :] >= candidates[..., None])
        # How many of the ascending candidates still have enough keys at or above them.
        enough = jnp.sum(reach, axis=-1, dtype=jnp.int32) >= count
        digit = jnp.sum(enough, axis=-1, keepdims=True, dtype=jnp.int32).astype(jnp.uint32)
        return prefix | (digit << shift)

    return jax.lax.fori_loop(0, 32 // BITS, narrow, jnp.zeros((*keys.shape[:-1], 1), jnp.uint32))
