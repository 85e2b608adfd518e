"""Gram matrices of the output projection, for the norms of projected values."""

import functools

import jax
import jax.numpy as jnp

from kvjax.products import IndexedMatrix, QuantizedMatrix
from kvjax.products.quantized import dequantize

Array = jax.Array


def output_gram(kernel: Array | QuantizedMatrix | IndexedMatrix, heads: int) -> Array:
    """Returns W Wᵀ of each query head's part W [D, hidden] of an output projection, so that ‖v W‖² = v (W Wᵀ) vᵀ.

    Args:
      kernel: [H * D, hidden].
      heads: H.

    Returns:
      [H, D, D] float32.
    """
    if isinstance(kernel, IndexedMatrix):
        branches = [functools.partial(output_gram, matrix, heads) for matrix in kernel.matrices]
        return jax.lax.switch(kernel.index, branches)
    matrix = dequantize(kernel) if isinstance(kernel, QuantizedMatrix) else kernel
    # [H, D, hidden]
    parts = matrix.astype(jnp.float32).reshape(heads, -1, matrix.shape[-1])
    return jnp.einsum("hdi,hei->hde", parts, parts, precision=jax.lax.Precision.HIGHEST)
