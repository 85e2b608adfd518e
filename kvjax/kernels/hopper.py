"""Parts of the kernels for Hopper GPUs: layouts, operands of tensor cores, and numbers as sums of 16-bit parts.

Tensor cores multiply 16-bit numbers exactly, but not float32. A float32 number is split into three bfloat16 parts; the
six largest products of parts give the product to nearly the last bit.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kvjax.typing import Ref

Array = jax.Array
TILE = 64  # slots of a tile
ROWS = 64  # rows of a tensor core's product
MAX_DIM = 256  # the largest number of features of a head
MATRIX = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)  # layouts of one number per row, and per column
# Lane semantics use the layouts given here. Layout inference, the default of newer jax, fails for these kernels.
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
INDEX = (...,) if "idx" in inspect.signature(plgpu.load).parameters else ()  # of all of a reference
# Shared memory per program if a multiprocessor runs two programs, and if it runs one; excludes what Mosaic uses itself.
SHARED_BYTES = 109 << 10, 222 << 10


class InParts:
    """A mixin for dataclasses with the dtype of arrays that are passed to tensor cores in parts.

    Attributes:
      dtype: of the arrays.
    """

    dtype: Any

    @property
    def parts(self) -> int:
        """The number of 16-bit parts of each array."""
        return num_parts(self.dtype)

    @property
    def part_dtype(self) -> Any:
        """The dtype of a part."""
        return part_dtype(self.dtype)


def check_dim(dim: int) -> None:
    """Checks that the kernels support a head size.

    Raises:
      ValueError: if they do not.
    """
    if dim % 16 or not TILE <= dim <= MAX_DIM:
        raise ValueError(f"it takes head sizes of {TILE} to {MAX_DIM}, a multiple of 16, not {dim}.")


def full(shape: tuple[int, ...], fill: float, layout: Any) -> Array:
    """Returns an array in registers that is filled with one number, in the given layout."""
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def load(ref: Ref, layout: Any) -> Array:
    """Loads a reference into registers in a layout that need not be the fastest to load."""
    # Before jax 0.11, an index comes second.
    return plgpu.load(ref, *INDEX, layout=layout, optimized=False)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts one number per row: [rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts one number per column: [columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (1,))


def tiled(lines: Array, tile: int, fill: float, minimum: int = 1) -> Array:
    """Cuts lines into tiles: [..., S] -> [..., tiles, tile].

    The last tile that holds slots ends with the last slot, so that every copy moves a whole tile and stays inside the
    array.

    Args:
      lines: one number for each slot.
      tile: slots of a tile.
      fill: the number for slots that the last tile repeats and for additional tiles.
      minimum: the smallest number of tiles.
    """
    size = lines.shape[-1]
    whole, before = size // tile * tile, lines.shape[:-1]
    tiles = max(-(-size // tile), minimum)
    # [..., repeated slots]
    hidden = jnp.full((*before, -size % tile), fill, lines.dtype)
    # [..., slots of additional tiles]
    beyond = jnp.full((*before, (tiles - -(-size // tile)) * tile), fill, lines.dtype)
    # [..., tiles * tile]
    filled = jnp.concatenate([lines[..., :whole], hidden, lines[..., whole:], beyond], axis=-1)
    return filled.reshape(*before, tiles, tile)


def untiled(column: Array, size: int) -> Array:
    """Joins tiles that were cut by `tiled`: [..., tiles * TILE] -> [..., S]."""
    whole = size // TILE * TILE
    last = column[..., whole + -size % TILE : -(-size // TILE) * TILE]
    return jnp.concatenate([column[..., :whole], last], axis=-1)


def num_parts(dtype: object) -> int:
    """Returns the number of 16-bit parts of an array."""
    return 3 if dtype == jnp.float32 else 1


def part_dtype(dtype: object) -> Any:
    """Returns the dtype of a part."""
    return jnp.bfloat16 if num_parts(dtype) > 1 else dtype


def parts(x: Array) -> list[Array]:
    """Splits x into 16-bit arrays that add up to it."""
    found = []
    for _ in range(num_parts(x.dtype) - 1):
        found.append(leading(x))
        x = x - found[-1]
    return [part.astype(part_dtype(x.dtype)) for part in (*found, x)]


def leading(x: Array) -> Array:
    """Truncates float32 to its 8 leading bits, which bfloat16 represents; three such parts contain all 24 bits."""
    # This acts on the bits, since XLA removes a cast to bfloat16 and back.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
    return lax.bitcast_convert_type(bits, jnp.float32)


def operand(shape: tuple[int, ...], dtype: DTypeLike, columns: int | None = None) -> Any:
    """Returns shared memory in the order in which tensor cores read an operand.

    Args:
      shape: [..., rows, D].
      dtype: a dtype of 16 bits.
      columns: the number of columns that determines the order, if it differs from D; None = D.
    """
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * 16)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    )
