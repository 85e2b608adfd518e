"""A matrix that an index chooses among several: the weights of a layer, in a loop over layers.

XLA would copy a slice of stacked weights before it multiplies by it, and stacking would take their memory twice.
kvjax's own code has all matrices as operands and reads one of them; XLA's products of many rows are branches, one of
which runs.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.products import native
from kvjax.products.choice import MAX_ROWS
from kvjax.products.codes import indexed_weights_product
from kvjax.products.forms import NATIVE_DTYPES, dot
from kvjax.products.quantized import QuantizedMatrix, quantized_product
from kvjax.summary import one_line

Array = jax.Array


@jax.tree_util.register_pytree_node_class
class IndexedMatrix:
    """One of several matrices.

    Attributes:
      matrices: [in, out] each, all of one shape and dtype; or quantised ones, which hold inputs in their own order.
      index: int32, which of them this is.
    """

    def __init__(self, matrices: tuple[Array | QuantizedMatrix, ...], index: Array) -> None:
        self.matrices = matrices
        self.index = index

    def __repr__(self) -> str:
        return one_line(self)

    def tree_flatten(self) -> tuple[tuple[tuple[Array | QuantizedMatrix, ...], Array], None]:
        return (self.matrices, self.index), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[tuple[Array | QuantizedMatrix, ...], Array]) -> "IndexedMatrix":
        return cls(*children)


def can_index(matrix: object) -> bool:
    """Whether a matrix may be one of an `IndexedMatrix`."""
    if isinstance(matrix, QuantizedMatrix):
        # The scales of all matrices would be converted for each product.
        return len(matrix.shape) == 2 and matrix.order is None and matrix.dtype == jnp.float32
    return getattr(matrix, "ndim", None) == 2 and jnp.dtype(getattr(matrix, "dtype", None)).name in NATIVE_DTYPES


def indexed_product(x: Array, kernel: IndexedMatrix, dtype: DTypeLike) -> Array:
    """Multiplies [..., in] by the matrix: [..., out] of a dtype; on CPUs, where kvjax's own products can be used."""
    if coded := [each for each in kernel.matrices if isinstance(each, QuantizedMatrix)]:
        return _coded_product(x, kernel.index, coded, dtype)
    matrices = [each for each in kernel.matrices if not isinstance(each, QuantizedMatrix)]
    rows, (inputs, outputs) = math.prod(x.shape[:-1]), matrices[0].shape
    if rows > MAX_ROWS:
        branches: list[Callable[[Array], Array]] = [
            functools.partial(dot, kernel=matrix, transposed=False, dtype=dtype) for matrix in matrices
        ]
        # [..., out]
        return jax.lax.switch(kernel.index, branches, x)
    result = jax.ShapeDtypeStruct((1, rows, outputs), jnp.float32)
    call = jax.ffi.ffi_call(native.INDEXED_PRODUCT, result, vmap_method="sequential")
    # [1, rows, in]
    given = x.astype(jnp.float32).reshape(1, rows, inputs)
    # [..., out]
    return call(given, kernel.index, *matrices, transposed=False).reshape(*x.shape[:-1], outputs).astype(dtype)


def _coded_product(x: Array, index: Array, matrices: Sequence[QuantizedMatrix], dtype: DTypeLike) -> Array:
    """Multiplies [..., in] by one of several quantised matrices."""
    first, rows = matrices[0], math.prod(x.shape[:-1])
    if 0 < rows <= MAX_ROWS and native.load(native.INDEXED_CODED_WEIGHTS) is None:
        codes, scales, zeros = zip(*((each.codes, each.scale, each.zero) for each in matrices), strict=True)
        y = indexed_weights_product(x.reshape(rows, -1), index, codes, scales, zeros, first.bits)
        # [..., out]
        return y.reshape(*x.shape[:-1], -1).astype(dtype)
    # Codes are few bytes to copy, and one program then decodes those of any layer.
    matrix = jax.lax.switch(index, [lambda each=each: each for each in matrices])
    multiply = functools.partial(dot, transposed=False, dtype=dtype)
    return quantized_product(x, matrix, multiply, dtype, native=False)
