"""Products of activations with weights or caches: forms that compute the same, of which the fastest here is used.

A decode step is limited by these products, and which form reads memory at its full speed depends on the processor, on
the number of rows and on XLA's version. Accelerators, meshes and products with small matrices or many rows use a fixed
form. Otherwise the forms are timed once on this machine; see `kvjax.products.choice`.

The forms differ in rounding. Where digits must not depend on the machine, fix the form: ``KVJAX_PRODUCTS=fixed`` in the
environment, or `use`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.products import native
from kvjax.products.choice import (
    FIXED,
    MAX_ROWS,
    Entry,
    chosen,
    explain,
    form_for,
    on_mesh,
    runs_native,
    setting,
    timings,
    use,
    use_timings,
)
from kvjax.products.forms import FORMS
from kvjax.products.indexed import IndexedMatrix, indexed_product
from kvjax.products.native import await_native
from kvjax.products.quantized import QuantizedMatrix, dequantize, quantized_product
from kvjax.products.used_slots import reads_used_slots, slots_product

Array = jax.Array

__all__ = [
    "FIXED",
    "FORMS",
    "MAX_ROWS",
    "Entry",
    "IndexedMatrix",
    "QuantizedMatrix",
    "as_matrix",
    "await_native",
    "begin",
    "chosen",
    "explain",
    "on_mesh",
    "product",
    "runs_native",
    "setting",
    "timings",
    "use",
    "use_timings",
]


def begin() -> None:
    """Starts to build kvjax's own products for the models of this process, where programs use them."""
    if runs_native():
        native.begin()


def product(
    x: Array,
    kernel: Array | QuantizedMatrix | IndexedMatrix,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    used: Array | None = None,
) -> Array:
    """Multiplies rows by a matrix, or by each matrix of a batch.

    Args:
      x: [..., in]; with a batch of matrices [*batch, rows, in].
      kernel: [in, out] or [*batch, in, out]; if `transposed`, [out, in] or [*batch, out, in]. A `QuantizedMatrix` is
        [in, out]. kvjax's own code for CPUs multiplies by its codes; otherwise it is decoded when x is known, so that a
        program holds decoded only what multiplies the same x. So is an `IndexedMatrix`.
      transposed: whether each row of the kernel is an output, as in an embedding table.
      dtype: of the result; None for that of x.
      used: [*batch] int32, of the keys (transposed) or values [*batch, S, D] of a cache: the number of slots, the first
        ones, whose products matter. If transposed, the result for others may be any finite number; otherwise x is 0 for
        them. None = all slots.

    Returns:
      [..., out].
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    if isinstance(kernel, IndexedMatrix):
        # [..., out]
        return indexed_product(x, kernel, dtype)
    if isinstance(kernel, QuantizedMatrix):
        assert not transposed, "a quantised matrix is [in, out]"
        # [..., out]
        few = 0 < math.prod(x.shape[:-1]) <= MAX_ROWS
        return quantized_product(
            x, kernel, lambda x, rows: product(x, rows, dtype=dtype), dtype,
            native=few and runs_native() and native.load(native.CODED_WEIGHTS) is None,
        )  # fmt: skip
    if used is not None and reads_used_slots(x, kernel):
        # [*batch, rows, S] or [*batch, rows, D]
        return jax.lax.platform_dependent(
            x, kernel, used, cpu=lambda x, kernel, used: slots_product(x, kernel, used, transposed, dtype),
            default=lambda x, kernel, _: FORMS["dot"].run(x, kernel, transposed, dtype),
        )  # fmt: skip
    form = form_for(x, kernel, transposed)
    if form == "dot":
        # [..., out]
        return FORMS["dot"].run(x, kernel, transposed, dtype)

    def run(name: str) -> Callable[[Array, Array], Array]:
        return lambda x, kernel: FORMS[name].run(x, kernel, transposed, dtype)

    # [..., out]
    return jax.lax.platform_dependent(x, kernel, cpu=run(form), default=run("dot"))


def as_matrix(kernel: Array | QuantizedMatrix | IndexedMatrix) -> Array:
    """Returns the numbers of a kernel, [in, out], which `product` multiplies by without making this array."""
    if isinstance(kernel, QuantizedMatrix):
        return dequantize(kernel)
    if isinstance(kernel, IndexedMatrix):
        return jax.lax.switch(kernel.index, [functools.partial(as_matrix, matrix) for matrix in kernel.matrices])
    return kernel
