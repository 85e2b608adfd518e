"""Host memory that JAX can use as it is."""

import math
from collections.abc import Sequence

import numpy as np


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory where JAX's CPU arrays may lie, so that `jax.device_put` need not copy it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def own(array: np.ndarray) -> np.ndarray:
    """A contiguous copy in memory of its own, `aligned`."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
