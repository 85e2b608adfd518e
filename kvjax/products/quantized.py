"""Matrices as integers with a scale and a zero for each group of inputs: the leaf that `product` multiplies by.

W = scale · (code - zero), as GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) hold weights. Inputs are grouped as in
FlexGen (arXiv:2303.06865, section 4): those of a group share scale and zero.

Several codes lie in one byte, those of inputs that are far apart in their group, never those of neighbouring outputs.
The output axis stays the contiguous one, and unpacking shifts whole rows. A reshape of leading axes, which costs
nothing, makes of them the matrix in its usual order, so that a compiler can fuse shifts, subtraction and scaling into
what reads the matrix. No byte has codes of two groups, so that both axes can be divided over devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.parallel.sharding import QUANTIZED
from kvjax.products.codes import weights_product
from kvjax.summary import one_line

Array = jax.Array

BYTE = 8  # bits
MATRIX = 2  # dimensions
WIDTHS = (2, 4, 8)  # bits of a code, so that whole codes fill a byte
PARTS = QUANTIZED  # the arrays of a matrix, by the names of their fields


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale", "zero", "order"], meta_fields=["bits"]
)
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [in, out] as codes; G groups of g inputs, of which each has its scale and zero for every output.

    The matrices of several experts are one, [E, in, out], whose arrays have the experts before other dimensions.

    Attributes:
      codes: [G, g · bits / 8, out] uint8. Code c of byte row r, from the lowest bits up, is of input
        c · g · bits / 8 + r of its group.
      scale: [G, out], float.
      zero: [G, out] uint8, the code of 0; float32 where 0 is between two codes (`kvjax.checkpoint.gguf`).
      order: [in] int32, the input that each row of codes multiplies; None if that is their own order.
      bits: of a code, one of `WIDTHS`.
    """

    codes: Array
    scale: Array
    zero: Array
    order: Array | None = None
    bits: int = 4

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """[in, out], or [E, in, out]."""
        *experts, groups, rows, outputs = self.codes.shape
        return *experts, groups * rows * BYTE // self.bits, outputs

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the scales, which is that of the model."""
        return np.dtype(self.scale.dtype)

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.codes.shape[-2] * BYTE // self.bits


def is_quantized(leaf: object) -> bool:
    """Whether a leaf of a parameter tree is a `QuantizedMatrix`; serves as `is_leaf` of `jax.tree` functions."""
    return isinstance(leaf, QuantizedMatrix)


@functools.lru_cache
def group_size(inputs: int, group: int | None, bits: int) -> int | None:
    """Returns the largest size of groups up to `group` that divides the inputs and fills whole bytes, or None.

    Args:
      inputs: of the matrix.
      group: the largest size; None = all inputs.
      bits: of a code.
    """
    per_byte = BYTE // bits
    maximum = min(inputs, group or inputs) // per_byte * per_byte
    return next((size for size in range(maximum, 0, -per_byte) if inputs % size == 0), None)


def pack(codes: Array, bits: int, group: int) -> Array:
    """Packs codes into bytes.

    Args:
      codes: [in, out] uint8, below 2^bits.
      bits: of a code.
      group: inputs of a group.

    Returns:
      [G, g · bits / 8, out] uint8; see `QuantizedMatrix`.
    """
    per_byte = BYTE // bits
    # [G, codes of a byte, rows, out]
    split = codes.reshape(-1, per_byte, group // per_byte, codes.shape[-1])
    packed = split[:, 0]
    for i in range(1, per_byte):
        # [G, rows, out]
        packed = packed | (split[:, i] << (bits * i))
    return packed


def unpack(codes: Array, bits: int) -> Array:
    """Inverts `pack`: [G, g · bits / 8, out] -> [G, g, out] uint8."""
    groups, rows, outputs = codes.shape
    per_byte = BYTE // bits
    # [per_byte, 1, 1]
    shifts = (bits * np.arange(per_byte, dtype=np.uint8))[:, None, None]
    # [G, codes of a byte, rows, out]
    split = (codes[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    return split.reshape(groups, per_byte * rows, outputs)


def quantize(matrix: Array, bits: int, group: int, dtype: DTypeLike) -> QuantizedMatrix:
    """Rounds a matrix to codes, uniformly between the smallest and the largest number of each group, and 0.

    scale = (largest - smallest) / (2^bits - 1), rounded to its dtype; zero = -smallest / scale, rounded to nearest;
    code = W / scale rounded to nearest + zero, at least 0 and at most 2^bits - 1. The error of a weight is at most half
    a scale, and what rounding the scale adds.

    Args:
      matrix: [in, out], or [E, in, out], of which one matrix at a time is quantised.
      bits: one of `WIDTHS`.
      group: inputs of a group; it must divide their number and fill whole bytes, see `group_size`.
      dtype: of the scales.
    """
    if matrix.ndim > MATRIX:
        experts = [quantize(each, bits, group, dtype) for each in matrix]
        stacked: QuantizedMatrix = jax.tree.map(lambda *parts: jnp.stack(parts), *experts)
        return stacked
    # Two programs: in one, XLA may compute codes from scales that are not rounded yet.
    scale, low = _scales(matrix, bits=bits, group=group, dtype=jnp.dtype(dtype))
    codes, zero = _codes(matrix, scale, low, bits=bits)
    return QuantizedMatrix(codes, scale, zero, bits=bits)


@functools.partial(jax.jit, static_argnames=("bits", "group", "dtype"))
def _scales(matrix: Array, *, bits: int, group: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    # [G, g, out]
    grouped = matrix.reshape(-1, group, matrix.shape[-1]).astype(jnp.float32)
    # [G, out]; with 0 among the numbers of a group, the zero is a code
    low, high = jnp.minimum(jnp.min(grouped, axis=1), 0.0), jnp.maximum(jnp.max(grouped, axis=1), 0.0)
    levels = (1 << bits) - 1
    # Each is divided first: their difference may be beyond float32.
    return (high / levels - low / levels).astype(dtype), low


@functools.partial(jax.jit, static_argnames=("bits",))
def _codes(matrix: Array, scale: Array, low: Array, *, bits: int) -> tuple[Array, Array]:
    levels, groups = (1 << bits) - 1, scale.shape[0]
    # [G, out]; a group of zeros, or one too small for its scale's dtype, has scale 0 and decodes to 0
    step = scale.astype(jnp.float32)
    step = jnp.where(step == 0, 1.0, step)
    zero = jnp.clip(jnp.round(-low / step), 0, levels)
    # [G, g, out]
    grouped = matrix.reshape(groups, -1, matrix.shape[-1]).astype(jnp.float32)
    codes = jnp.clip(jnp.round(grouped / step[:, None]) + zero[:, None], 0, levels).astype(jnp.uint8)
    return pack(codes.reshape(matrix.shape), bits, matrix.shape[0] // groups), zero.astype(jnp.uint8)


def dequantize(matrix: QuantizedMatrix, dtype: DTypeLike = jnp.float32) -> Array:
    """Returns the matrix [in, out] or [E, in, out], with inputs in their own order.

    Args:
      matrix: the codes.
      dtype: of the result, which is computed in float32.
    """
    if len(matrix.shape) > MATRIX:
        return jax.vmap(functools.partial(dequantize, dtype=dtype))(matrix)
    rows = rows_of(matrix, dtype)
    return rows if matrix.order is None else jnp.zeros_like(rows).at[matrix.order].set(rows)


def outputs_of(matrix: QuantizedMatrix, index: Array, dtype: DTypeLike) -> Array:
    """Returns some outputs of a matrix, as in a table of embeddings.

    Args:
      matrix: [in, out], with inputs in their own order.
      index: [...] int32, of outputs.
      dtype: of the result.

    Returns:
      [..., in].
    """
    assert matrix.order is None
    # arrays [..., n], with n indices in place of the outputs
    codes, scale, zero = (jnp.take(each, index.ravel(), axis=-1) for each in (matrix.codes, matrix.scale, matrix.zero))
    # [in, n]
    rows = rows_of(QuantizedMatrix(codes, scale, zero, bits=matrix.bits), dtype)
    return rows.T.reshape(*index.shape, -1)


def rows_of(matrix: QuantizedMatrix, dtype: DTypeLike) -> Array:
    """Returns the matrix [in, out], with inputs in the order of its codes."""
    # [in, out]
    return _scaled(unpack(matrix.codes, matrix.bits), matrix).reshape(matrix.shape).astype(dtype)


def _scaled(codes: Array, matrix: QuantizedMatrix) -> Array:
    """Converts codes [G, n, out] of a matrix to weights, float32."""
    zero, scale = (x.astype(jnp.float32)[:, None] for x in (matrix.zero, matrix.scale))
    # [G, n, out]
    return (codes.astype(jnp.float32) - zero) * scale


def quantized_product(
    x: Array, matrix: QuantizedMatrix, multiply: Callable[[Array, Array], Array], dtype: DTypeLike, *, native: bool
) -> Array:
    """Multiplies rows by a quantised matrix.

    Args:
      x: [..., in].
      matrix: [in, out].
      multiply: the product of rows and a dense matrix, on CPUs.
      dtype: of the result.
      native: whether kvjax's own code multiplies by codes on CPUs.

    Returns:
      [..., out].
    """
    if matrix.order is not None:
        # [..., in]
        x = jnp.take(x, matrix.order, axis=-1)

    def by_rows(x: Array, matrix: QuantizedMatrix) -> Array:
        # XLA's CPU compiler writes an operand of a product to memory anyway, and for dense matrices there is a choice.
        return multiply(x, rows_of(_tied_by_value(matrix, x), x.dtype))

    @jax.custom_jvp
    def by_codes(x: Array, matrix: QuantizedMatrix) -> Array:
        y = weights_product(x.reshape(-1, x.shape[-1]), matrix.codes, matrix.scale, matrix.zero, matrix.bits)
        # [..., out]
        return y.reshape(*x.shape[:-1], -1).astype(dtype)

    by_codes.defjvp(functools.partial(jax.jvp, by_rows))
    # [..., out]
    on_cpu = by_codes if native else by_rows
    return jax.lax.platform_dependent(x, matrix, cpu=on_cpu, default=functools.partial(by_place, dtype=dtype))


def by_place(x: Array, matrix: QuantizedMatrix, dtype: DTypeLike) -> Array:
    """Multiplies by the codes at each place of a byte, [..., in] -> [..., out], and adds up in float32.

    Each operand is made of the bytes by elementwise operations alone, which compilers for accelerators fuse into the
    product. Of the whole matrix at once, XLA's TPU compiler writes codes and scales to memory, decoded and repeated.
    """
    # A compiler may decode all codes before the loop of all steps, as they do not change; so they wait for x.
    matrix, x = jax.lax.optimization_barrier((matrix, x))
    groups, rows, _ = matrix.codes.shape
    per_byte = BYTE // matrix.bits
    # [..., G, codes of a byte, rows]
    split = x.reshape(*x.shape[:-1], groups, per_byte, rows)
    y: Array | None = None
    for place in range(per_byte):
        codes = (matrix.codes >> np.uint8(matrix.bits * place)) & np.uint8((1 << matrix.bits) - 1)
        # [..., out]
        part = jnp.einsum(
            "...gr,gro->...o", split[..., place, :], _scaled(codes, matrix).astype(x.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        y = part if y is None else y + part
    assert y is not None
    return y.astype(dtype)


def _tied_by_value(matrix: QuantizedMatrix, x: Array) -> QuantizedMatrix:
    """Returns the matrix, once `x` has been computed: its bytes are given a part of x, which is always 0.

    XLA's CPU compiler drops barriers before it decides what is computed when. It would decode all matrices at once, or
    before the loop of all steps. That the part is 0 only the compiler of machine code sees.
    """
    sign = jnp.signbit(x[(0,) * x.ndim]).astype(jnp.uint8)
    zero = matrix.zero if jnp.issubdtype(matrix.zero.dtype, jnp.floating) else matrix.zero ^ (sign >> 1)
    return dataclasses.replace(matrix, codes=matrix.codes ^ (sign >> 1), zero=zero)


def quantized_shape(shape: tuple[int, ...], bits: int, group: int, dtype: DTypeLike) -> QuantizedMatrix:
    """Returns what `quantize` makes of [in, out] or [E, in, out], with `jax.ShapeDtypeStruct` for arrays."""
    *experts, inputs, outputs = shape
    groups = inputs // group
    made = {
        "codes": ((*experts, groups, group * bits // BYTE, outputs), jnp.uint8),
        "scale": ((*experts, groups, outputs), dtype),
        "zero": ((*experts, groups, outputs), jnp.uint8),
    }
    shapes: dict[str, Any] = {name: jax.ShapeDtypeStruct(*each) for name, each in made.items()}
    return QuantizedMatrix(bits=bits, **shapes)
