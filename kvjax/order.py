"""Order statistics over slots without a sort: which are the `count` largest. A leaf: the cache and policies import it.

A radix search: a bit a round, at most 32 rounds, each a comparison and a sum over the slots. A sort takes a CPU fifteen
times as long.
"""

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
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
    count = jnp.broadcast_to(jnp.asarray(count, jnp.float32), (*value.shape[:-1], 1))
    keys = jnp.where(live, _ordered(value), 0)
    threshold, reached = _threshold(keys, count)

    tied = live & (keys == threshold)
    ages = jnp.where(tied, position + 1, 0).astype(jnp.uint32)

    def youngest() -> Array:
        left = count - _number(keys > threshold)
        return _threshold(ages, left)[0]

    # Mostly as many are at or above the threshold as asked for, and all that are tied are chosen.
    oldest = jax.lax.cond(jnp.any(reached > count), youngest, lambda: jnp.zeros_like(threshold))
    return (keys > threshold) | (tied & (ages >= oldest))


def _ordered(value: Array) -> Array:
    """uint32 that compare as the floats do."""
    # -0.0 and 0.0 are equal, and have different bits.
    value = jnp.where(value == 0, jnp.float32(0), value.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _threshold(keys: Array, count: Array) -> tuple[Array, Array]:
    """A key that exactly `count` keys are at or above, or as few more as ties allow, and how many they are.

    A prefix of the `count`-th largest key, as long as it takes to tell it from the next: half of the rounds or less
    where keys are far from each other. 0 where fewer than `count` are above 0.

    Returns:
      [..., 1] uint32 and float32.
    """
    # On a mesh the rows are on several devices, which would have to agree at every round.
    alone = jax.sharding.get_abstract_mesh().empty

    def unsettled(state: tuple[Array, Array, Array]) -> Array:
        bit, _, reached = state
        return (bit > 0) & jnp.any(reached > count) if alone else bit > 0

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, prefix, reached = state
        candidate = prefix | bit
        reaches = _number(keys >= candidate)
        enough = reaches >= count
        return bit >> 1, jnp.where(enough, candidate, prefix), jnp.where(enough, reaches, reached)

    start = (jnp.uint32(SIGN), jnp.zeros((*keys.shape[:-1], 1), jnp.uint32), _number(keys > 0))
    return jax.lax.while_loop(unsettled, narrow, start)[1:]


def _number(chosen: Array) -> Array:
    """[..., 1]: how many slots are chosen; in float32 (exact below 2²⁴), which CPUs sum twice as fast as int32."""
    return jnp.sum(chosen, axis=-1, keepdims=True, dtype=jnp.float32)
