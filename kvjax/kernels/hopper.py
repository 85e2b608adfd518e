"""What the kernels for Hopper GPUs share: layouts, operands of tensor cores, and numbers as sums of 16-bit parts.

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
MATRIX = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)  # layouts of what a matrix has per row, and per column
# Lane: layouts are those written here; inferring them, the default of newer jax, fails for these kernels.
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
SHARED_BYTES = 109 << 10, 222 << 10  # of a program, where a processor runs two, and where one; the rest is Mosaic's


def full(shape: tuple[int, ...], fill: float, layout: Any) -> Array:
    """One number in registers, in the layout of what it meets."""
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (1,))


def tiled(lines: Array, tile: int, fill: float, least: int = 1) -> Array:
    """[..., S] -> [..., tiles, tile], `least` tiles or more; the last that holds slots ends with the last slot.

    So copies are of whole tiles and stay inside an array. What the last tile repeats, and tiles beyond, are `fill`.
    """
    size = lines.shape[-1]
    whole, before = size // tile * tile, lines.shape[:-1]
    tiles = max(-(-size // tile), least)
    hidden = jnp.full((*before, -size % tile), fill, lines.dtype)
    beyond = jnp.full((*before, (tiles - -(-size // tile)) * tile), fill, lines.dtype)
    filled = jnp.concatenate([lines[..., :whole], hidden, lines[..., whole:], beyond], axis=-1)
    return filled.reshape(*before, tiles, tile)


def untiled(column: Array, size: int) -> Array:
    """[..., tiles * `TILE`], tiles as above -> [..., S]."""
    whole = size // TILE * TILE
    last = column[..., whole + -size % TILE : -(-size // TILE) * TILE]
    return jnp.concatenate([column[..., :whole], last], axis=-1)


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


def operand(shape: tuple[int, ...], dtype: Any, beside: int | None = None) -> Any:
    """Shared memory of [..., rows, D] of 16 bits, in the order that tensor cores read; of [..., rows, `TILE`] where it
    multiplies one of `beside` columns, whose order it shares."""
    swizzle = plgpu.find_swizzle((beside or shape[-1]) * 16)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    )
