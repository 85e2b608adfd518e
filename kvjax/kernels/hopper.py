"""What the kernels for Hopper GPUs share: layouts, operands of tensor cores, and numbers as sums of 16-bit parts.

float32 is cut into three bfloat16 parts, whose six products are exact to nearly the last bit; tensor cores take no
wider numbers exactly.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array
TILE = 64  # slots
ROWS = 64  # of a tensor core's product
MOST_DIM = 256  # features of a head
MATRIX = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)  # layouts of one number per row, and per column
# Lane: layouts are those written here; inferring them, the default of newer jax, fails for these kernels.
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
SHARED_BYTES = 109 << 10, 222 << 10  # per program, where a processor runs two and where it runs one, without Mosaic's


def check_dim(dim: int) -> None:
    """Refuses head sizes that the kernels do not take.

    Raises:
      ValueError: with the size.
    """
    if dim % 16 or not TILE <= dim <= MOST_DIM:
        raise ValueError(f"it takes head sizes of {TILE} to {MOST_DIM}, a multiple of 16, not {dim}.")


def full(shape: tuple[int, ...], fill: float, layout: Any) -> Array:
    """An array of one number in registers, in the layout of what it is combined with."""
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (1,))


def tiled(lines: Array, tile: int, fill: float, least: int = 1) -> Array:
    """[..., S] -> [..., tiles, tile], at least `least` tiles; the last that holds slots ends with the last slot.

    So copies are of whole tiles and stay inside an array. Slots that the last tile repeats, and tiles beyond it, are
    `fill`.
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
    """The number of 16-bit arrays that add up to an array."""
    return 3 if dtype == jnp.float32 else 1


def part_dtype(dtype: Any) -> Any:
    return jnp.bfloat16 if num_parts(dtype) > 1 else dtype


def parts(x: Array) -> list[Array]:
    """The 16-bit arrays that add up to x."""
    found = []
    for _ in range(num_parts(x.dtype) - 1):
        found.append(leading(x))
        x = x - found[-1]
    return [part.astype(part_dtype(x.dtype)) for part in (*found, x)]


def leading(x: Array) -> Array:
    """float32 cut to its 8 leading bits, a bfloat16; three such parts make all 24."""
    # On the bits, since XLA removes a cast to bfloat16 and back.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
    return lax.bitcast_convert_type(bits, jnp.float32)


def operand(shape: tuple[int, ...], dtype: Any, columns: int | None = None) -> Any:
    """Shared memory in the order that tensor cores read.

    Args:
      shape: [..., rows, D].
      dtype: of 16 bits.
      columns: of the operand that it is multiplied with, whose order it shares; None = D.
    """
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * 16)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    )
