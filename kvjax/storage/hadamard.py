"""Hadamard rotations of vectors: sums and differences of channels, after which no channel is much larger than others.

The matrix is orthonormal, so that the products of rotated queries and rotated keys are those of the vectors themselves,
and a sum of rotated values is rotated back once. It is of channels, and has nothing to do with RoPE.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.storage.rounding import FLOAT32, divide

Array = jax.Array

MAX_SEED = 2**32 - 1


def hadamard(x: Array) -> Array:
    """Multiplies by Hadamard's matrix, H_ij = (-1)^popcount(i & j).

    Args:
      x: [..., D], D a power of two.
    """
    for _ in range(x.shape[-1].bit_length() - 1):
        even, odd = x[..., ::2], x[..., 1::2]
        # Neighbours are added and subtracted; D is halved, and what was next to them is next.
        x = jnp.concatenate([even + odd, even - odd], axis=-1)
    return x


@functools.lru_cache
def random_signs(dim: int, seed: int) -> np.ndarray:
    """Returns σ [D] float32, each entry -1 or 1."""
    return np.where(np.random.RandomState(seed).random_sample(dim) < 0.5, -1, 1).astype(np.float32)


def block_size(dim: int) -> int:
    """Returns the largest power of two that divides `dim`: 128 for 128 channels, 16 for 80, 1 for 67."""
    return dim & -dim


def summable(x: Array) -> Array:
    """Clips numbers [..., D], of which those of an empty slot may be any, so that no sum of a block overflows."""
    limit = float(FLOAT32.max) / block_size(x.shape[-1])
    return jnp.clip(x, -limit, limit)


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """An orthonormal matrix M = H·diag(σ)/√b, H of blocks of b channels, b of `block_size`.

    Without signs the mean of a block is √b times as large in its first channel, and so is any other pattern that a row
    of H has: one outlier is made of many small numbers. Random signs σ make that unlikely. QuaRot
    (arXiv:2404.00456) folds them into weights and leaves them out where it rotates while a model runs;
    llama.cpp and KVarN leave them out too. So does the default: on kvjax-tiny, int4 loses no more without them on
    either of two texts, and less on one (docs/storages.md).

    Attributes:
      seed: of the signs, 0 to 2^32 - 1; None = all are 1.
    """

    seed: int | None = None

    def rotate(self, x: Array) -> Array:
        """Returns M x, to the same bits in every program and whatever the number of vectors.

        Args:
          x: [..., D] float32.
        """
        # Products with signs are exact, the order of sums is fixed, and a quotient is not merged with a later sum.
        return divide(self._blockwise(x * self._signs(x.shape[-1])), math.sqrt(block_size(x.shape[-1])))

    def rotate_back(self, y: Array) -> Array:
        """Returns Mᵀ y, the inverse of `rotate`.

        Args:
          y: [..., D] float32.
        """
        dim = y.shape[-1]
        # H is symmetric.
        return self._blockwise(y) * (self._signs(dim) / math.sqrt(block_size(dim)))

    def _signs(self, dim: int) -> np.ndarray:
        return np.ones(dim, np.float32) if self.seed is None else random_signs(dim, self.seed)

    def _blockwise(self, x: Array) -> Array:
        """Multiplies each block of [..., D] by Hadamard's matrix."""
        size = block_size(x.shape[-1])
        if size == x.shape[-1]:
            return hadamard(x)
        # [..., blocks, b]
        return hadamard(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)
