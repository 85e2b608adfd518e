"""Floating-point numbers of 4 bits: sign, 2 bits of exponent, 1 of mantissa (e2m1, OCP MX specification, v1.0)."""

import itertools

import jax
import jax.numpy as jnp

Array = jax.Array

BITS = 4
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code
LEVELS = (*MAGNITUDES, *(-each for each in MAGNITUDES))
LARGEST = MAGNITUDES[-1]
SIGN = 1 << (BITS - 1)


def nearest_codes(magnitude: Array, negative: Array, unit: int = 1) -> Array:
    """Returns the codes of the nearest numbers, int32; ties go to the even code.

    Args:
      magnitude: integers or float32, at least 0, in units of 1/`unit`; those above the largest number saturate.
      negative: bool of the same shape, signs; that of a number that rounds to 0 is kept.
      unit: a power of two; of integers at least 4, so that the middle of two numbers is one.
    """
    codes = jnp.zeros(magnitude.shape, jnp.int32)
    for code, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = jnp.asarray((low + high) / 2 * unit, magnitude.dtype)
        # An odd code's upper neighbour is even, and takes the tie.
        codes += (magnitude >= middle if code % 2 else magnitude > middle).astype(jnp.int32)
    return jnp.where(negative, codes | SIGN, codes)
