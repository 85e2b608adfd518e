"""Codes that choose among the levels of a table, between the extremes of a vector (KVQuant, arXiv:2401.18079)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import Affine
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.fitting import FITTED, Fit
from kvjax.storage.packing import MAX_BITS, pack, packed_size, unpack
from kvjax.storage.rounding import as_stored, divide
from kvjax.storage.side import CALIBRATION, Samples, Side
from kvjax.storage.tables import Table, lookup, nearest_level

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class VectorTable(Side):
    """Levels that are fitted to the entries of the calibration vectors of a layer, each between its extremes.

    Attributes:
      fit: how.
    """

    fit: Fit
    when = CALIBRATION
    shared = FITTED

    @property
    def gradients(self) -> bool:
        """Whether `prepare` looks at gradients; see `Side`."""
        return self.fit.weighted

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return self.fit.parts()

    def prepare(self, samples: Samples) -> Mapping[str, np.ndarray]:
        return self.fitted(samples, np.zeros(samples.own.shape, bool))

    def fitted(self, samples: Samples, left_out: np.ndarray) -> dict[str, np.ndarray]:
        """Fits the entries that `left_out` [n, K, D] does not mark."""
        x = samples.own.astype(np.float64)
        low = np.where(left_out, np.inf, x).min(axis=-1, keepdims=True)
        high = np.where(left_out, -np.inf, x).max(axis=-1, keepdims=True)
        half = (high - low) / 2
        return self.fit.prepare((x - (low + high) / 2) / np.where(half == 0, 1.0, half), ~left_out, samples)


@dataclasses.dataclass(frozen=True)
class Levels(Codec):
    """Holds the nearest level of (x - offset) / range, where offset and range map the levels to the vector's extremes.

    offset = (smallest + largest) / 2, range = (largest - smallest) / 2, taken as 1 where it is 0.

    Attributes:
      bits: bits of a code, 1 to 8.
      table: see `Fit`.
      qnorm: see `Fit`.
    """

    bits: int
    table: Table | str | None = None
    qnorm: bool = False

    def __post_init__(self) -> None:
        bits = count_argument("storage levels: bits", self.bits, minimum=1, maximum=MAX_BITS, error=StorageError)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "table", self.fit.table)

    @property
    def fit(self) -> Fit:
        """How the tables are made."""
        return Fit(self.bits, self.table, self.qnorm)

    @property
    def side(self) -> Side | None:
        return VectorTable(self.fit) if self.fit.parts() else None

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {
            "codes": ((packed_size(dim, self.bits),), jnp.dtype(jnp.uint8)),
            "offset": ((), jnp.dtype(dtype)),
            "range": ((), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return self.encode_without(x, jnp.zeros(x.shape, bool), side, dtype)

    def encode_without(self, x: Array, left_out: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # [..., 1]; halves first, since the sum may be too large
        low = jnp.min(jnp.where(left_out, jnp.inf, x), axis=-1, keepdims=True) / 2
        high = jnp.max(jnp.where(left_out, -jnp.inf, x), axis=-1, keepdims=True) / 2
        middle = low + high
        offset = as_stored(jnp.where(middle == 0, 0.0, middle), dtype)
        width = as_stored(high - low, dtype)
        # Decoding uses the rounded numbers.
        step = width.astype(jnp.float32)
        y = divide(x - offset.astype(jnp.float32), jnp.where(step == 0, 1.0, step))
        # [..., D]
        codes = jnp.where(left_out, 0, nearest_level(self.fit.levels(side), y))
        return {"codes": pack(codes, self.bits), "offset": offset[..., 0], "range": width[..., 0]}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D]
        level = lookup(self.fit.decoded(side), unpack(parts["codes"], self.bits, dim))
        offset, width = (parts[name].astype(jnp.float32)[..., None] for name in ("offset", "range"))
        return offset + width * level

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine | None:
        if self.side is not None:  # tables that are data
            return None
        scale, zero, levels = parts["range"][..., None], parts["offset"][..., None], tuple(self.fit.decoded(None))
        return Affine(codes=parts["codes"], scale=scale, zero=zero, bits=self.bits, levels=levels, dim=dim)


@factory
def levels(
    bits: int = 4, table: Table | str | None = None, *, qnorm: bool = False, residual: int = 0, memory: Memory = DEVICE
) -> Storage:
    """Holds keys and values as codes of the nearest level between the extremes of each vector.

    Args:
      bits: bits of a code, 1 to 8.
      table: 2^bits ascending levels in [-1, 1]; None = `normal_levels(bits)`; ``kmeans`` or ``fisher``: fitted to each
        layer by a calibration, see `kvjax.storage.fitting.Fit`.
      qnorm: whether levels are decoded so that mean and deviation stay; this takes a calibration too.
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    codec = Levels(bits, table, qnorm)
    return Storage(key=codec, value=codec, residual=residual, memory=memory, name=f"levels{codec.bits}")
