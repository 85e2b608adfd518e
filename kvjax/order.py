"""Order statistics over slots without a sort: which slots hold the `count` largest values.

A radix search over the bits of the values: one comparison and one sum over the slots per bit, at most 32 of them. On a
CPU this takes one fifteenth of the time of a sort.
"""

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
SIGN = np.uint32(1 << 31)  # the sign bit of a float32


def largest(value: Array, position: Array, count: Array | int) -> Array:
    """Marks the live slots with the `count` largest values; among equal values the newer slots.

    Args:
      value: [..., S] float32. Infinities are allowed, NaN is not.
      position: [..., S] int32, distinct per row. Negative for an empty slot, which is never marked.
      count: int32 that broadcasts against [..., 1]. If fewer slots are live, all of them are marked.

    Returns:
      [..., S] bool.
    """
    # [..., S]
    live = position >= 0
    # [..., 1]
    count = jnp.broadcast_to(jnp.asarray(count, jnp.float32), (*value.shape[:-1], 1))
    # [..., S]
    keys = jnp.where(live, _ordered_bits(value), 0)
    # [..., 1]
    threshold, reached = _threshold(keys, count)

    # [..., S]
    tied = live & (keys == threshold)
    # [..., S]: larger for a newer slot
    recency = jnp.where(tied, position + 1, 0).astype(jnp.uint32)

    def newest_tied() -> Array:
        # [..., 1]
        remaining = count - _count(keys > threshold)
        return _threshold(recency, remaining)[0]

    # [..., 1]: usually exactly `count` keys are at or above the threshold, and then every tied slot is marked.
    oldest_marked = jax.lax.cond(jnp.any(reached > count), newest_tied, lambda: jnp.zeros_like(threshold))
    # [..., S]
    return (keys > threshold) | (tied & (recency >= oldest_marked))


def _ordered_bits(value: Array) -> Array:
    """Maps floats [..., S] to uint32 [..., S] in the same order."""
    # [..., S]: -0.0 and 0.0 compare equal but have different bits.
    value = jnp.where(value == 0, jnp.float32(0), value.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _threshold(keys: Array, count: Array) -> tuple[Array, Array]:
    """Finds a threshold that `count` keys reach, or the fewest above `count` that ties allow.

    The threshold is a prefix of the `count`-th largest key, long enough to separate it from the next smaller key. Where
    keys are far apart, half of the rounds or fewer suffice.

    Args:
      keys: [..., S] uint32, 0 for an empty slot.
      count: [..., 1] float32.

    Returns:
      The threshold, [..., 1] uint32, which is 0 if fewer than `count` keys are above 0, and the number of keys at or
      above it, [..., 1] float32.
    """
    # On a mesh the rows are on several devices, which would have to synchronise in every round to stop early.
    unsharded = jax.sharding.get_abstract_mesh().empty

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        bit, _, reached = state
        return (bit > 0) & jnp.any(reached > count) if unsharded else bit > 0

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, prefix, reached = state
        # [..., 1]
        candidate = prefix | bit
        reaches = _count(keys >= candidate)
        enough = reaches >= count
        return bit >> 1, jnp.where(enough, candidate, prefix), jnp.where(enough, reaches, reached)

    start = (jnp.uint32(SIGN), jnp.zeros((*keys.shape[:-1], 1), jnp.uint32), _count(keys > 0))
    return jax.lax.while_loop(unfinished, narrow, start)[1:]


def _count(mask: Array) -> Array:
    """Counts the marked slots: [..., S] bool -> [..., 1] float32.

    float32 is exact below 2²⁴ and twice as fast to sum as int32 on CPUs.
    """
    # [..., 1]
    return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
