"""The order of the slots of several stores in arrays that have an entry for each slot.

They follow each other. Where slots are divided over devices, they follow each other on each device: the first of
`parts` equal parts of such an array has the first part of each store, so that a device has the entries of its slots.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Array = jax.Array


def joined(pieces: Sequence[Array], parts: int = 1) -> Array:
    """Joins arrays of single stores, [B, K, S_i, ...], to one of all slots, [B, K, S, ...].

    Args:
      pieces: one for each store.
      parts: divides the slots of each store.
    """
    if len(pieces) == 1:
        return pieces[0]
    # [B, K, parts, S_i / parts, ...]
    split = [x.reshape(*x.shape[:2], parts, -1, *x.shape[3:]) if parts > 1 else x for x in pieces]
    whole = jnp.concatenate(split, axis=3 if parts > 1 else 2)
    return whole.reshape(*whole.shape[:2], -1, *whole.shape[4:]) if parts > 1 else whole


def separated(x: Array, sizes: Sequence[int], parts: int = 1) -> list[Array]:
    """Splits an array of all slots, [B, K, S, ...], into those of single stores; the inverse of `joined`.

    Args:
      x: the array.
      sizes: the number of slots of each store.
      parts: see `joined`.
    """
    if len(sizes) == 1:
        return [x]
    # [B, K, parts, S / parts, ...]
    split = x.reshape(*x.shape[:2], parts, -1, *x.shape[3:])
    own = [size // parts for size in sizes]
    starts = [sum(own[:i]) for i in range(len(own))]
    return [
        split[:, :, :, start : start + size].reshape(*x.shape[:2], -1, *x.shape[3:])
        for start, size in zip(starts, own, strict=True)
    ]
