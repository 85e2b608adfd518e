"""Recurrence of attention: when a slot was last attended to, and the longest time that it was not in between.

A query hits a slot if it pays it at least some share of its attention. Its age is 1 for the query at the slot's own
position, 2 for the next one and so on, so that 0 is the moment before the slot's birth, and no hit. Of consecutive
queries, the first hit, the last one and the widest gap between two hits are enough to join them with queries before and
after; the join is associative, so that blocks and tiles of queries give the same result.
"""

import jax
import jax.numpy as jnp

Array = jax.Array
COLUMNS = 3  # the age of the first hit, that of the last one, and the widest gap between two hits of a block
NUMBERS = 2  # that are kept of a slot: the age of the last hit, and the widest gap since its birth
FAR = jnp.iinfo(jnp.int32).max


def columns(hit: Array, age: Array) -> Array:
    """Reduces queries to columns.

    Args:
      hit: [B, K, n, S] bool, of queries in the order of their positions.
      age: [B, K, n, S] int32 of each query, at least 1 where it hits the slot.

    Returns:
      [B, K, S, 3] float32: the ages of the first and of the last hit, and the widest gap between two hits; 0 = none.
    """
    # [B, K, n, S]: the last hit so far, and before each query
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
    """Returns what is kept of a slot, [..., 2], after the columns [..., 3] of a block."""
    (last, gap), (first, latest, wide) = jnp.moveaxis(old, -1, 0), jnp.moveaxis(block, -1, 0)
    # The gap before a slot's first hit begins one position before its birth.
    before = jnp.where(first > 0, first - last, 0.0)
    return jnp.stack([jnp.maximum(last, latest), jnp.maximum(jnp.maximum(gap, wide), before)], axis=-1)
