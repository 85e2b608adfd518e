"""A matrix that an index chooses among several: the weights of a layer, in a loop over layers.

XLA would copy a slice of stacked weights before it multiplies by it, and stacking would take their memory twice.
kvjax's own code has all matrices as operands and reads one of them; XLA's products of many rows are branches, one of
which runs.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.products import native
from kvjax.products.choice import MAX_ROWS
from kvjax.products.forms import NATIVE_DTYPES, dot
from kvjax.summary import one_line

Array = jax.Array


@jax.tree_util.register_pytree_node_class
class IndexedMatrix:
    """One of several matrices.

    Attributes:
      matrices: [in, out] each.
      index: int32, which of them this is.
    """

    def __init__(self, matrices: tuple[Array, ...], index: Array) -> None:
        self.matrices = matrices
        self.index = index

    def __repr__(self) -> str:
        return one_line(self)

    def tree_flatten(self) -> tuple[tuple[tuple[Array, ...], Array], None]:
        return (self.matrices, self.index), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[tuple[Array, ...], Array]) -> "IndexedMatrix":
        return cls(*children)


def can_index(matrix: object) -> bool:
    """Whether a matrix may be one of an `IndexedMatrix`."""
    return getattr(matrix, "ndim", None) == 2 and jnp.dtype(getattr(matrix, "dtype", None)).name in NATIVE_DTYPES


def indexed_product(x: Array, kernel: IndexedMatrix, dtype: DTypeLike) -> Array:
    """Multiplies [..., in] by the matrix: [..., out] of a dtype; on CPUs, where kvjax's own products can be used."""
    rows, (inputs, outputs) = math.prod(x.shape[:-1]), kernel.matrices[0].shape
    if rows > MAX_ROWS:
        branches: list[Callable[[Array], Array]] = [
            functools.partial(dot, kernel=matrix, transposed=False, dtype=dtype) for matrix in kernel.matrices
        ]
        # [..., out]
        return jax.lax.switch(kernel.index, branches, x)
    result = jax.ShapeDtypeStruct((1, rows, outputs), jnp.float32)
    call = jax.ffi.ffi_call(native.INDEXED_PRODUCT, result, vmap_method="sequential")
    # [1, rows, in]
    given = x.astype(jnp.float32).reshape(1, rows, inputs)
    # [..., out]
    return call(given, kernel.index, *kernel.matrices, transposed=False).reshape(*x.shape[:-1], outputs).astype(dtype)
