"""What the kernels for Hopper GPUs share: operands of tensor cores, and numbers as sums of 16-bit parts.

float32 is three bfloat16 parts and six products, near to its last bits; tensor cores take no wider numbers exactly.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array
TILE = 64  # slots
ROWS = 64  # of a tensor core's product
SHARED_BYTES = 111 << 10, 224 << 10  # of a program, where a processor runs two, and where one; 3 KiB are Mosaic's


def num_parts(dtype: Any) -> int:
    """Arrays of 16 bits that a number is the sum of."""
    return 3 if dtype == jnp.float32 else 1


def part_dtype(dtype: Any) -> Any:
    return jnp.bfloat16 if num_parts(dtype) > 1 else dtype


def parts(x: Array) -> list[Array]:
    """Arrays of 16 bits that sum up to x."""
    found = []
    for _ in range(num_parts(x.dtype) - 1):
        found.append(leading(x))
        x = x - found[-1]
    return [part.astype(part_dtype(x.dtype)) for part in (*found, x)]


def leading(x: Array) -> Array:
    """float32 cut to the 8 leading bits, a bfloat16; three times makes all 24."""
    # By its bits: XLA removes a cast to bfloat16 and back.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
    return lax.bitcast_convert_type(bits, jnp.float32)


def operand(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of [..., rows, D] of 16 bits, in the order that tensor cores read."""
    swizzle = plgpu.find_swizzle(shape[-1] * 16)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    )
