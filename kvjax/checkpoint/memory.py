"""Host memory that JAX can use without a copy."""

import math
import mmap
from collections.abc import Sequence

import numpy as np


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialised array, aligned such that `jax.device_put` to a CPU need not copy it.

    The array has memory pages of its own, which are returned to the system when it is freed. The usual allocator would
    keep the pages of temporary arrays, and loading would need more memory than the model and its largest tensor.

    Args:
      shape: of the array.
      dtype: of the array.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
    return memory[:size].view(dtype).reshape(shape)


def own(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous copy, allocated by `aligned`.

    Args:
      array: the array to copy.
    """
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
