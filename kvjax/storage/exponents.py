"""Exponents and mantissas from the bits of float32 numbers, and their rounding in integers.

Integer arithmetic is exact, in any order and in any program. Subnormal numbers, which XLA may take as 0 elsewhere, are
numbers like any other here.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

BIAS = 127
LARGEST_EXPONENT = 254  # of a finite number, with the bias
MANTISSA = 23  # bits, without the leading one
MAX_SHIFT = MANTISSA + 2  # from here on a mantissa rounds to 0

_LEADING = 1 << MANTISSA
_MAGNITUDE = 0x7FFFFFFF


def split(x: Array) -> tuple[Array, Array, Array]:
    """Splits numbers into sign, exponent and mantissa: |x| = mantissa · 2^(max(exponent, 1) - 150).

    Args:
      x: float32, finite.

    Returns:
      negative (bool; also of -0), exponent (int32, ⌊log2 |x|⌋ + 127; 0 for zeros and subnormal numbers) and mantissa
      (int32, below 2^24), each of x's shape.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits & _MAGNITUDE) >> MANTISSA
    mantissa = (bits & (_LEADING - 1)) | jnp.where(exponent > 0, _LEADING, 0)
    return bits < 0, exponent, mantissa


def shifted(mantissa: Array, shift: Array) -> Array:
    """Divides by 2^shift and rounds to nearest, ties to even.

    Args:
      mantissa: int32, from 0 to 2^24.
      shift: int32 of at least 1.
    """
    shift = jnp.minimum(shift, MAX_SHIFT)
    half = jnp.left_shift(1, shift - 1)
    odd = jnp.right_shift(mantissa, shift) & 1
    # Adding a little less than a half carries beyond it; a tie carries only if the quotient is odd.
    return jnp.right_shift(mantissa + half - 1 + odd, shift)


def scaled(x: Array, exponent: Array) -> Array:
    """Returns x · 2^(exponent - 127), exact unless the result is subnormal, which may be 0.

    Args:
      x: float32.
      exponent: integers from -125 to 254.
    """
    # Two factors, since one may be too small for a normal number.
    normal = jnp.maximum(exponent.astype(jnp.int32), 1)
    return (x * power_of_two(normal)) * power_of_two(exponent - normal + BIAS)


def power_of_two(exponent: Array) -> Array:
    """Returns 2^(exponent - 127), exactly.

    Args:
      exponent: integers from 1 to 254.

    Returns:
      float32.
    """
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << MANTISSA, jnp.float32)
