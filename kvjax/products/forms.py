"""The forms of a product. All compute x W; they differ in how W is read, and in rounding."""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.products import native

Array = jax.Array
MIN_PART = 192  # smallest number of inputs of one part of a split product
#: Of the dtypes that the native form reads.
NATIVE_DTYPES = ("float32", "bfloat16")


class Form(NamedTuple):
    """A form of a product.

    Attributes:
      run: (x [..., in], kernel, transposed) -> [..., out]; see `kvjax.products.product`.
      refuses: (kernel, transposed) -> why the form cannot be used, or None. The kernel may be a ShapeDtypeStruct.
    """

    run: Callable[[Array, Array, bool], Array]
    refuses: Callable[[jax.ShapeDtypeStruct | Array, bool], str | None]


def dot(x: Array, kernel: Array, transposed: bool) -> Array:
    """XLA's matrix product."""
    # [..., out]
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (int(transposed),)), ((), ())))


def _parts(inputs: int) -> int:
    """Returns the number of parts that `split` makes of a number of inputs."""
    parts = 1
    while inputs % (2 * parts) == 0 and inputs // (2 * parts) >= MIN_PART:
        parts *= 2
    return parts


def split(x: Array, kernel: Array, transposed: bool) -> Array:
    """XLA's products of parts of the inputs, added up.

    Each thread then reads contiguous memory of the kernel instead of some of its columns. With a single row, a decode
    step of OPT-125M takes 19.5 ms instead of 22.1 ms.
    """
    del transposed
    inputs, outputs = kernel.shape
    parts = _parts(inputs)
    # [parts, rows, out]
    y = jnp.einsum("bpi,pio->pbo", x.reshape(-1, parts, inputs // parts), kernel.reshape(parts, -1, outputs))
    # [..., out]: XLA fuses a sum of slices into the operation that reads it, but not a reduction.
    return functools.reduce(operator.add, (y[i] for i in range(parts))).reshape(*x.shape[:-1], outputs)


def _refuses_split(kernel: jax.ShapeDtypeStruct | Array, transposed: bool) -> str | None:
    if transposed:
        return "the outputs of a transposed kernel are contiguous already"
    return None if _parts(kernel.shape[0]) > 1 else f"{kernel.shape[0]} inputs do not divide into parts"


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def native_product(x: Array, kernel: Array, transposed: bool) -> Array:
    """kvjax's own code for a few rows; see native.cc. Sums are float32."""
    outputs = kernel.shape[0 if transposed else 1]
    # [rows, in]
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call(
        native.TARGET, jax.ShapeDtypeStruct((rows.shape[0], outputs), jnp.float32), vmap_method="sequential"
    )
    # [..., out]
    return call(rows, kernel, transposed=transposed).reshape(*x.shape[:-1], outputs).astype(x.dtype)


@native_product.defjvp
def _native_jvp(transposed: bool, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    return native_product(x, kernel, transposed), dot(dx, kernel, transposed) + dot(x, dkernel, transposed)


def _refuses_native(kernel: jax.ShapeDtypeStruct | Array, transposed: bool) -> str | None:
    del transposed
    if kernel.dtype.name not in NATIVE_DTYPES:
        return f"it reads {' and '.join(NATIVE_DTYPES)}, and the weights are {kernel.dtype.name}"
    return native.load()


#: All forms by name. The first are preferred where the difference is within the noise of a timing.
FORMS: dict[str, Form] = {
    "dot": Form(dot, lambda kernel, transposed: None),
    "split": Form(split, _refuses_split),
    "native": Form(native_product, _refuses_native),
}
