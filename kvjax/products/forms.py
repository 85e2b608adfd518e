"""The forms of a product. All compute x W; they differ in how W is read, and in rounding."""

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.products import native

Array = jax.Array
MIN_PART = 192  # smallest number of inputs of one part of a split product
#: Dtypes of weights that the native form reads.
NATIVE_DTYPES = ("float32", "bfloat16")
#: Dtypes of caches that kvjax's own code reads.
CACHE_DTYPES = (*NATIVE_DTYPES, "float16")


Shaped = jax.ShapeDtypeStruct | Array


class Form(NamedTuple):
    """A form of a product.

    Attributes:
      run: (x, kernel, transposed, dtype of the result) -> product; see `kvjax.products.product`.
      refuses: (kernel, transposed) -> why the form cannot be used, or None.
    """

    run: Callable[..., Array]
    refuses: Callable[[Shaped, bool], str | None]


def dot(x: Array, kernel: Array, transposed: bool, dtype: DTypeLike) -> Array:
    """XLA's matrix product."""
    batch = tuple(range(kernel.ndim - 2))
    contracted = (x.ndim - 1,), (kernel.ndim - (1 if transposed else 2),)
    # [..., out]
    return jax.lax.dot_general(x, kernel, (contracted, (batch, batch)), preferred_element_type=dtype)


def _parts(inputs: int) -> int:
    """Returns the number of parts that `split` makes of a number of inputs."""
    parts = 1
    while inputs % (2 * parts) == 0 and inputs // (2 * parts) >= MIN_PART:
        parts *= 2
    return parts


def split(x: Array, kernel: Array, transposed: bool, dtype: DTypeLike) -> Array:
    """XLA's products of parts of the inputs, added up.

    Each thread then reads contiguous memory of the kernel instead of some of its columns. With a single row, a decode
    step of OPT-125M takes 19.5 ms instead of 22.1 ms.
    """
    del transposed
    inputs, outputs = kernel.shape
    parts = _parts(inputs)
    # [parts, rows, out]
    y = jnp.einsum(
        "bpi,pio->pbo", x.reshape(-1, parts, inputs // parts), kernel.reshape(parts, -1, outputs),
        preferred_element_type=dtype,
    )  # fmt: skip
    # [..., out]: XLA fuses a sum of slices into the operation that reads it, but not a reduction.
    return functools.reduce(operator.add, (y[i] for i in range(parts))).reshape(*x.shape[:-1], outputs)


def _refuses_split(kernel: Shaped, transposed: bool) -> str | None:
    if kernel.ndim > 2:
        return "it is for one matrix"
    if transposed:
        return "the outputs of a transposed kernel are contiguous already"
    return None if _parts(kernel.shape[0]) > 1 else f"{kernel.shape[0]} inputs do not divide into parts"


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def native_product(x: Array, kernel: Array, transposed: bool, dtype: DTypeLike) -> Array:
    """kvjax's own code for a few rows; see native.cc. Sums are float32."""
    *batch, inputs, outputs = kernel.shape[:-2] + (kernel.shape[:-3:-1] if transposed else kernel.shape[-2:])
    count = math.prod(batch)
    # [count, rows, in]
    rows = x.astype(jnp.float32).reshape(count, math.prod(x.shape[len(batch) : -1]), inputs)
    result = jax.ShapeDtypeStruct((*rows.shape[:2], outputs), jnp.float32)
    call = jax.ffi.ffi_call(native.TARGET, result, vmap_method="sequential")
    y = call(rows, kernel.reshape(count, *kernel.shape[-2:]), transposed=transposed)
    # [..., out]
    return y.reshape(*x.shape[:-1], outputs).astype(dtype)


@native_product.defjvp
def _native_jvp(
    transposed: bool, dtype: DTypeLike, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    tangent = dot(dx, kernel, transposed, dtype) + dot(x, dkernel, transposed, dtype)
    return native_product(x, kernel, transposed, dtype), tangent


def _refuses_native(kernel: Shaped, transposed: bool) -> str | None:
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
