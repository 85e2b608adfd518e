"""TurboQuant: codes of the coordinates of a vector that a fixed orthogonal matrix has turned (arXiv:2504.19874).

The coordinates of a turned vector are close to normal whatever the vector is, so that one table of levels fits all: no
calibration, and no range but the vector's length. The paper's levels are of a coordinate of the unit sphere, these are
of its limit, the normal distribution; its variant for inner products, with a second code of one bit, is not here.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import Affine
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.exponents import BIAS, power_of_two, split
from kvjax.storage.hadamard import MAX_SEED, hadamard, random_signs
from kvjax.storage.packing import pack, packed_size, unpack
from kvjax.storage.rounding import as_stored, divide
from kvjax.storage.tables import Table, lookup, nearest_level

Array = jax.Array

WITHIN = 3  # vectors are scaled to numbers within ±2^WITHIN before they are turned
SUM_BITS = 30  # of the sums of integers

#: Levels of least mean squared error for the standard normal distribution (Lloyd-Max): the positive ones, by bits.
POSITIVE = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}


def normal_centroids(bits: int) -> Table:
    """Returns the 2^bits ascending levels of a standard normal number, for 2, 3 or 4 bits."""
    return (*(-each for each in reversed(POSITIVE[bits])), *POSITIVE[bits])


def turn(x: Array, seed: int) -> Array:
    """Returns √D·M x, M an orthogonal matrix that depends on D and the seed alone.

    For D a power of two M = H·diag(σ)/√D, H Hadamard's matrix and σ random signs; sums and differences in log2(D) steps
    apply it. Other M are random orthogonal matrices.

    Args:
      x: [..., D] float32.
      seed: of the signs or the matrix, 0 to 2^32 - 1.
    """
    dim = x.shape[-1]
    if _is_power_of_two(dim):
        return hadamard(x * random_signs(dim, seed))
    return jnp.matmul(x, _columns(dim, seed), precision=jax.lax.Precision.HIGHEST)


def turn_back(y: Array, seed: int) -> Array:
    """Returns Mᵀ y / √D, the inverse of `turn`.

    Args:
      y: [..., D] float32.
      seed: as in `turn`.
    """
    dim = y.shape[-1]
    if _is_power_of_two(dim):
        return hadamard(y) * (random_signs(dim, seed) / dim)
    return jnp.matmul(y, _columns(dim, seed).T, precision=jax.lax.Precision.HIGHEST) / dim


def _turn_alike(x: Array, seed: int) -> Array:
    """`turn` of x within ±2^WITHIN, to the same bits in every program and whatever the number of vectors.

    Float32 sums depend on their order, and so would a code near a tie.
    """
    dim = x.shape[-1]
    if _is_power_of_two(dim):
        # Integers small enough that no sum of D of them overflows; all of a constant vector are the same.
        unit = 2.0 ** (SUM_BITS - WITHIN) / dim
        signed = jnp.round(x * unit).astype(jnp.int32) * random_signs(dim, seed).astype(np.int32)
        return hadamard(signed).astype(jnp.float32) * (1 / unit)
    # A matrix product may add up in another order for another number of vectors.
    return jnp.sum(x[..., :, None] * _columns(dim, seed), axis=-2)


def _is_power_of_two(dim: int) -> bool:
    return dim & (dim - 1) == 0


def _columns(dim: int, seed: int) -> Array:
    """Returns √D·Mᵀ [D, D] float32: row j is what channel j adds."""
    return jnp.asarray(_matrix(dim, seed))


@functools.lru_cache
def _matrix(dim: int, seed: int) -> np.ndarray:
    q, r = np.linalg.qr(np.random.RandomState(seed).randn(dim, dim))
    return (math.sqrt(dim) * q * np.where(np.diag(r) < 0, -1, 1)).T.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class TurboQuant(Codec):
    """Holds the length of a vector and, for each coordinate after `turn`, the nearest level for normal numbers.

    scale = ‖x‖, y = √D·(M x) / scale, scale taken as 1 where it is 0; a vector of zeros decodes to zeros. A decoded
    vector is not stretched to the length of the original.

    Attributes:
      bits: bits of a code, 2, 3 or 4.
      seed: of M, which keys, values, heads and layers share; 0 to 2^32 - 1.
    """

    bits: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        name = "storage turboquant"
        object.__setattr__(self, "bits", count_argument(f"{name}: bits", self.bits, error=StorageError))
        choice_argument(f"{name}: bits", self.bits, tuple(POSITIVE), error=StorageError)
        seed = count_argument(f"{name}: seed", self.seed, maximum=MAX_SEED, error=StorageError)
        object.__setattr__(self, "seed", seed)

    @property
    def levels(self) -> Table:
        """Levels of y, ascending."""
        return normal_centroids(self.bits)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {
            "codes": ((packed_size(dim, self.bits),), jnp.dtype(jnp.uint8)),
            "scale": ((), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # [..., 1]; x times 2^(127 + WITHIN - 1 - exponent) is within ±2^WITHIN, and no square of it too large or small
        exponent = jnp.maximum(jnp.max(split(x)[1], axis=-1, keepdims=True), WITHIN - 1)
        unit = power_of_two(2 * BIAS + WITHIN - 1 - exponent)
        # [..., D]
        x = x * unit
        # [..., 1]
        scale = as_stored(jnp.sqrt(_sum_of_squares(x)) / unit, dtype)
        # The length in the units of x, as it is stored.
        length = jnp.where(scale == 0, 1.0, scale.astype(jnp.float32)) * unit
        codes = nearest_level(self.levels, divide(_turn_alike(x, self.seed), length))
        return {"codes": pack(codes, self.bits), "scale": scale[..., 0]}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D]
        y = lookup(self.levels, unpack(parts["codes"], self.bits, dim))
        return parts["scale"].astype(jnp.float32)[..., None] * turn_back(y, self.seed)

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine:
        made = Affine(
            codes=parts["codes"], scale=parts["scale"][..., None], bits=self.bits, levels=self.levels, dim=dim
        )  # fmt: skip
        # The transpose of Mᵀ / √D is √D·M / D.
        return made.within(lambda q: turn(q, self.seed) / dim, lambda a: turn_back(a, self.seed))


def _sum_of_squares(x: Array) -> Array:
    """Returns [..., 1], added up in the same order in every program."""
    # A product and a sum may become one operation that rounds once; a choice between them prevents it.
    x = jnp.where(jnp.isnan(x), 0.0, x * x)
    while (size := x.shape[-1]) > 1:
        half = size // 2
        x = jnp.concatenate([x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]], axis=-1)
    return x


@factory
def turboquant(
    bits: int = 4,
    seed: int = 0,
    residual: int = 0,
    *,
    key_bits: int | None = None,
    value_bits: int | None = None,
    memory: Memory = DEVICE,
) -> Storage:
    """Holds keys and values as their length and codes of their coordinates in a random basis.

    Args:
      bits: bits of a code, 2, 3 or 4.
      seed: of the basis, which keys, values, heads and layers share; 0 to 2^32 - 1.
      residual: the number of newest positions that stay exact.
      key_bits: bits of keys; None = `bits`.
      value_bits: bits of values; None = `bits`.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    key = TurboQuant(bits if key_bits is None else key_bits, seed)
    value = TurboQuant(bits if value_bits is None else value_bits, seed)
    name = f"turboquant{key.bits}" if key == value else f"turboquant_k{key.bits}v{value.bits}"
    return Storage(key=key, value=value, residual=residual, memory=memory, name=name)
