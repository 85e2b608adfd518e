"""Arrays of different dtypes as 32-bit integers, so that devices send them in one collective."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Array = jax.Array
HALF, MASK = 16, (1 << 16) - 1


def at(leaf: Array, slot: Array) -> Array:
    """Takes slots [B, K, W] of an array [B, K, S, ...]."""
    return jnp.take_along_axis(leaf, slot.reshape(*slot.shape, *(1,) * (leaf.ndim - 3)), axis=2)


def packed(tree: Mapping[str, Array], slot: Array) -> Array:
    """Packs what arrays [B, K, S, ...] hold in slots [B, K, W]: [B, K, W, m] int32.

    Args:
      tree: floats of at most 32 bits, and integers.
      slot: in bounds.
    """
    parts = [jnp.zeros((*slot.shape, 0), jnp.int32)]
    for _, leaf in sorted(tree.items()):
        found = at(leaf, slot)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            found = jax.lax.bitcast_convert_type(found.astype(jnp.float32), jnp.int32)
        parts.append(found.astype(jnp.int32).reshape(*slot.shape, _size(leaf)))
    return jnp.concatenate(parts, axis=3)


def unpacked(bits: Array, like: Mapping[str, Array]) -> dict[str, Array]:
    """Unpacks what `packed` has packed, [B, K, W, ...] each.

    Args:
      bits: [B, K, W, m] int32.
      like: arrays [B, K, S, ...] of the features and dtypes that were packed.
    """
    found, start = {}, 0
    for name, leaf in sorted(like.items()):
        part = bits[..., start : start + _size(leaf)].reshape(*bits.shape[:3], *leaf.shape[3:])
        start += _size(leaf)
        exact = jax.lax.bitcast_convert_type(part, jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else part
        found[name] = exact.astype(leaf.dtype)
    return found


def width(tree: Mapping[str, Array]) -> int:
    """Returns m, the integers of a slot."""
    return sum(map(_size, tree.values()))


def as_floats(bits: Array) -> Array:
    """Returns integers [..., m] int32 as floats [..., 2 * m], the halves of their bits, which float32 holds exactly."""
    halves = jnp.concatenate([jax.lax.shift_right_logical(bits, HALF), bits & MASK], axis=-1)
    return halves.astype(jnp.float32)


def from_floats(halves: Array) -> Array:
    """Returns the integers of `as_floats`."""
    high, low = jnp.split(halves.astype(jnp.int32), 2, axis=-1)
    return (high << HALF) | low


def _size(leaf: Array) -> int:
    size = 1
    for each in leaf.shape[3:]:
        size *= each
    return size
