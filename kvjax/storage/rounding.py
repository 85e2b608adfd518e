"""Rounding that does not depend on how XLA simplifies a program."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array

FLOAT32 = jnp.finfo(jnp.float32)
WIDE = 1e30  # float16 ends at 65,504; bfloat16 and float32 end at 3e38


def nearest(x: Array, dtype: DTypeLike) -> Array:
    """Rounds to the nearest number of `dtype`, ties to even; subnormal numbers of `dtype` are kept.

    A cast to `dtype` and back is not enough: XLA may remove the pair and keep the unrounded number.

    Args:
      x: float32, within the range of `dtype`.
      dtype: a floating-point type no wider than float32.

    Returns:
      float32 of x's shape. A cast to `dtype` does not change it.
    """
    info = jnp.finfo(dtype)
    if info.nmant >= FLOAT32.nmant:
        return x
    rounded = jax.lax.reduce_precision(x, exponent_bits=FLOAT32.nexp, mantissa_bits=info.nmant)
    smallest_normal = float(info.smallest_normal)
    if smallest_normal <= float(FLOAT32.smallest_normal):
        return rounded
    # Below the smallest normal number the spacing no longer shrinks; it is a power of two, so both products are exact.
    spacing = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < smallest_normal, jnp.round(x * (1 / spacing)) * spacing, rounded)


def as_stored(x: Array, dtype: DTypeLike) -> Array:
    """Rounds to the nearest number of `dtype`, ties to even, and saturates at its largest finite number.

    Args:
      x: float32.
      dtype: the model's dtype.

    Returns:
      `dtype`, of x's shape.
    """
    maximum = min(float(jnp.finfo(dtype).max), float(FLOAT32.max))
    return nearest(jnp.clip(x, -maximum, maximum), dtype).astype(dtype)


def within(x: Array, dtype: DTypeLike) -> Array:
    """Converts what a codec decodes to to the model's dtype, whose largest number it may exceed by its error.

    Args:
      x: float32.
      dtype: the model's.
    """
    maximum = float(jnp.finfo(dtype).max)
    # Real vectors come near the largest number of float16 only.
    return jnp.clip(x, -maximum, maximum).astype(dtype) if maximum < WIDE else x.astype(dtype)


def divide(x: Array, divisor: float | Array) -> Array:
    """Divides with one rounding.

    XLA replaces a division by a constant, or by an array that is broadcast, with a product by the reciprocal, which
    rounds twice: 7.5 may become 7.4999995, whose nearest code is another one. Here each number has a divisor of its
    own, since it depends on `x` where `x` is NaN.

    Args:
      x: float32.
      divisor: not 0; a number, or float32 that broadcasts to the shape of `x`.
    """
    return x / jnp.where(jnp.isnan(x), x, jnp.asarray(divisor, jnp.float32))
