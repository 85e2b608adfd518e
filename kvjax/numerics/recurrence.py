"""Recurrence of attention: the age of the last query that attended to a slot, and the widest gap between two of them.

A query hits a slot if it pays the slot at least a threshold of attention. The age of a query is 1 at the slot's own
position, 2 at the next one and so on; 0 is the position before the slot's birth, and means no hit. For a run of
consecutive queries, the first hit, the last hit and the widest gap between two hits are enough to join it with earlier
and later runs. The join is associative, so that blocks and tiles of queries give the same result.
"""

import jax
import jax.numpy as jnp

Array = jax.Array
COLUMNS = 3  # numbers of a block: the ages of the first and the last hit, and the widest gap between two hits
NUMBERS = 2  # numbers of a slot: the age of the last hit, and the widest gap since its birth
FAR = jnp.iinfo(jnp.int32).max


def columns(hit: Array, age: Array) -> Array:
    """Reduces queries to columns.

    Args:
      hit: [B, K, n, S] bool, queries in the order of their positions.
      age: [B, K, n, S] int32, the age of each query, at least 1 where it hits the slot.

    Returns:
      [B, K, S, 3] float32: the ages of the first and of the last hit, and the widest gap between two hits; 0 = none.
    """
    # [B, K, n, S]: the last hit up to each query, and before it
    so_far = jax.lax.cummax(jnp.where(hit, age, 0), axis=2)
    before = jnp.pad(so_far[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    # [B, K, S]
    gap = jnp.max(jnp.where(hit & (before > 0), age - before, 0), axis=2)
    first = jnp.min(jnp.where(hit, age, FAR), axis=2)
    last = so_far[:, :, -1]
    return jnp.stack([jnp.where(last > 0, first, 0), last, gap], axis=-1).astype(jnp.float32)


def join(one: Array, other: Array) -> Array:
    """Combines the columns [..., 3] of some queries with those of later queries, in the same shape."""
    (first, last, gap), (later, latest, wide) = (jnp.moveaxis(each, -1, 0) for each in (one, other))
    between = jnp.where((last > 0) & (later > 0), later - last, 0.0)
    widest = jnp.maximum(jnp.maximum(gap, wide), between)
    return jnp.stack([jnp.where(first > 0, first, later), jnp.maximum(last, latest), widest], axis=-1)


def after_block(old: Array, block: Array) -> Array:
    """Returns the numbers of a slot, [..., 2], after the columns [..., 3] of a block."""
    (last, gap), (first, latest, wide) = jnp.moveaxis(old, -1, 0), jnp.moveaxis(block, -1, 0)
    # The gap before a slot's first hit begins one position before its birth.
    before = jnp.where(first > 0, first - last, 0.0)
    return jnp.stack([jnp.maximum(last, latest), jnp.maximum(jnp.maximum(gap, wide), before)], axis=-1)
