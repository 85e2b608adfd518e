"""KVQuant: keys by channel and before rotation, in unequal levels, with outliers beside them (arXiv:2401.18079)."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.numerics.top_k import indices_of_largest
from kvjax.storage.base import UNROTATED, Codec, Parts, Shapes, Storage, factory
from kvjax.storage.fitting import FITTED, Fit
from kvjax.storage.levels import Levels
from kvjax.storage.packing import pack, packed_size, unpack
from kvjax.storage.rounding import as_stored, divide
from kvjax.storage.side import CALIBRATION, Samples, Side
from kvjax.storage.sparse import Sparse, index_dtype
from kvjax.storage.tables import Table, lookup, nearest_level

Array = jax.Array

ROUNDING = 1e-9  # of a product of two floats that is a whole number on paper


@dataclasses.dataclass(frozen=True)
class Quantiles(Side):
    """Two quantiles of each channel of the calibration vectors, between which all but a share of the entries lie.

    Levels are fitted to the entries between them.

    Attributes:
      outliers: the share f; the quantiles are f/2 and 1 - f/2, interpolated linearly.
      fit: the tables of levels.
    """

    outliers: float
    fit: Fit
    when = CALIBRATION
    shared = FITTED

    @property
    def gradients(self) -> bool:
        """Whether `prepare` looks at gradients; see `Side`."""
        return self.fit.weighted

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        ends = ((dim,), jnp.dtype(jnp.float32))
        return {"lower": ends, "upper": ends, **self.fit.parts()}

    def prepare(self, samples: Samples) -> Mapping[str, np.ndarray]:
        x = samples.own.astype(np.float64)
        # [K, D] each
        lower, upper = np.quantile(x, [self.outliers / 2, 1 - self.outliers / 2], axis=0)
        ends = {"lower": lower, "upper": upper}
        if not self.fit.parts():
            return ends
        half = (upper - lower) / 2
        y = (x - (lower + upper) / 2) / np.where(half == 0, 1.0, half)
        return ends | self.fit.prepare(y, np.abs(y) <= 1, samples)


@dataclasses.dataclass(frozen=True)
class ChannelLevels(Codec):
    """Holds the nearest level of (x - mid) / half, where a side maps the levels to the range of each channel.

    mid and half are the middle and half the distance of two quantiles; half is taken as 1 where it is 0. The entries of
    largest |x - mid| / half that exceed 1, up to the share of outliers, are held in the model's dtype beside their
    channels, by ascending channel; unused places have the channel D. Other entries saturate at the ends of the table.

    Attributes:
      bits: bits of a code, 1 to 8.
      outliers: the share of the entries that may be held exactly, in (0, 1).
      table: see `Fit`.
      qnorm: see `Fit`.
    """

    bits: int
    outliers: float
    table: Table | str | None = None
    qnorm: bool = False

    def __post_init__(self) -> None:
        levels = Levels(self.bits, self.table, self.qnorm)
        object.__setattr__(self, "bits", levels.bits)
        object.__setattr__(self, "table", levels.table)
        object.__setattr__(self, "outliers", _share(self.outliers))

    @property
    def side(self) -> Side:
        return Quantiles(self.outliers, self.fit)

    @property
    def fit(self) -> Fit:
        """How the tables are made."""
        return Fit(self.bits, self.table, self.qnorm)

    def count(self, dim: int) -> int:
        """Returns the number of entries that may be held exactly, of `dim`."""
        return math.ceil(self.outliers * dim - ROUNDING)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        count = self.count(dim)
        return {
            "codes": ((packed_size(dim, self.bits),), jnp.dtype(jnp.uint8)),
            "index": ((count,), index_dtype(dim)),
            "value": ((count,), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        dim = x.shape[-1]
        middle, half = _range(side)
        # [..., D]
        y = divide(x - middle, half)
        # [..., c]: of equal ones, the lower channel comes first
        channel = indices_of_largest(jnp.abs(y), self.count(dim))
        size = jnp.take_along_axis(jnp.abs(y), channel, axis=-1)
        index = jnp.sort(jnp.where(size > 1, channel, dim), axis=-1)
        value = jnp.take_along_axis(x, index, axis=-1, mode="fill", fill_value=0)
        outlying = jnp.any(_is_channel(index, dim), axis=-2)
        codes = jnp.where(outlying, 0, nearest_level(self.fit.levels(side), y))
        return {
            "codes": pack(codes, self.bits),
            "index": index.astype(index_dtype(dim)),
            "value": as_stored(value, dtype),
        }

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        middle, half = _range(side)
        # [..., D]
        rest = middle + half * lookup(self.fit.decoded(side), unpack(parts["codes"], self.bits, dim))
        # [..., c, D]
        own = _is_channel(parts["index"], dim)
        value = jnp.where(own, parts["value"].astype(jnp.float32)[..., None], 0.0)
        return jnp.where(jnp.any(own, axis=-2), jnp.sum(value, axis=-2), rest)


def _range(side: Parts | None) -> tuple[Array, Array]:
    """Returns the middle of each channel's range and half its width."""
    assert side is not None
    lower, upper = side["lower"], side["upper"]
    half = (upper - lower) / 2
    return (lower + upper) / 2, jnp.where(half == 0, 1.0, half)


def _is_channel(index: Array, dim: int) -> Array:
    """Returns which channel each index is, [..., c, dim] bool; none for the index dim."""
    return index[..., None] == jnp.arange(dim, dtype=index.dtype)


def _share(outliers: object) -> float:
    share = number_argument("storage kvquant: outliers", outliers, minimum=0, maximum=1, error=StorageError)
    if share in (0, 1):
        raise StorageError(f"storage kvquant: outliers must be a share between 0 and 1; got {outliers!r}.")
    return share


@factory
def kvquant(
    bits: int = 3,
    outliers: float = 0.01,
    sinks: int = 1,
    table: Table | str | None = None,
    *,
    value_table: Table | str | None = None,
    qnorm: bool = False,
    residual: int = 0,
) -> Storage:
    """Holds keys by channel and values by token in unequal levels, with outliers beside them (KVQuant, 2401.18079).

    Keys are held as they are before RoPE and rotated to their positions in each step. The range of each channel of keys
    comes from a calibration (`kvjax.calibrate`); that of a value is its own.

    Args:
      bits: bits of a code, 1 to 8.
      outliers: the share of entries that are held exactly, in (0, 1); of a value, at least the smallest and the
        largest.
      sinks: the number of first positions that stay exact.
      table: 2^bits ascending levels in [-1, 1] of keys; None = `normal_levels(bits)`; ``kmeans``: fitted to the keys
        of each layer by the calibration; ``fisher``: the same, entries weighted by the squared gradients of the loss.
      value_table: the same of values; None = `table`.
      qnorm: whether levels are decoded so that the mean and the deviation of the calibration stay (Q-Norm).
      residual: the number of newest positions that stay exact.

    Raises:
      StorageError: an argument out of range; later, a head of too few features.

    The paper's number of outliers varies from vector to vector; here its largest is fixed, and what exceeds it
    saturates. Nothing is fitted while decoding.
    """
    count_argument("storage kvquant: sinks", sinks, error=StorageError)
    key = ChannelLevels(bits, outliers, table, qnorm)
    value = Sparse(Levels(bits, table if value_table is None else value_table, qnorm), key.outliers)
    return Storage(
        key=key, value=value, residual=residual, sinks=sinks, frame=UNROTATED, name=f"kvquant{key.bits}"
    )  # fmt: skip
