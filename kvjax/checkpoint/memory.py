"""Host memory that JAX can use as it is."""

import math
import mmap
from collections.abc import Sequence

import numpy as np


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory where JAX's CPU arrays may lie, so that `jax.device_put` need not copy it.

    Pages of its own, which go back to the system when the array does: the allocator would keep the holes that
    transposed tensors leave behind, and loading would hold more than the model and its largest tensor.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
    return memory[:size].view(dtype).reshape(shape)


def own(array: np.ndarray) -> np.ndarray:
    """A contiguous copy in memory of its own, `aligned`."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
