"""Keeps the smallest and the largest entries of each vector exactly (KVQuant, arXiv:2401.18079, section 3.4)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.numerics.top_k import indices_of_largest
from kvjax.storage.base import Codec, Parts, Shapes
from kvjax.storage.fitting import FITTED
from kvjax.storage.levels import VectorTable
from kvjax.storage.rounding import as_stored
from kvjax.storage.side import CALIBRATION, Samples, Side
from kvjax.storage.wrapping import Wrapped, Wrapping, check_codec, wrap

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TableWithoutOutliers(Side):
    """Levels that are fitted to the entries of calibration vectors that are no outliers.

    Attributes:
      table: how they are fitted.
      outliers: see `Sparse`.
    """

    table: VectorTable
    outliers: int | float
    when = CALIBRATION
    shared = FITTED

    @property
    def gradients(self) -> bool:
        """Whether `prepare` looks at gradients; see `Side`."""
        return self.table.gradients

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return self.table.parts(dim, dtype)

    def prepare(self, samples: Samples) -> Mapping[str, np.ndarray]:
        dim = samples.own.shape[-1]
        count = outlier_count(self.outliers, dim)
        # [n, K, D]
        order = np.argsort(samples.own, axis=-1, kind="stable")
        outliers = np.concatenate([order[..., :count], order[..., dim - count :]], axis=-1)
        left_out = np.zeros(samples.own.shape, bool)
        np.put_along_axis(left_out, outliers, True, axis=-1)
        return self.table.fitted(samples, left_out)


def outlier_count(outliers: int | float, dim: int) -> int:
    """Returns the number of smallest, and of largest, entries of `dim` that are outliers.

    Args:
      outliers: see `Sparse`.
      dim: entries of a vector.

    Raises:
      StorageError: all entries would be outliers.
    """
    count = max(1, round(outliers * dim / 2)) if isinstance(outliers, float) else outliers
    if 2 * count >= dim:
        raise StorageError(
            f"sparse: outliers={outliers!r} takes the {count} smallest and the {count} largest of {dim} channels; at "
            "least one must be left."
        )
    return count


@dataclasses.dataclass(frozen=True)
class Sparse(Wrapping):
    """Holds outliers in the model's dtype beside their channels, and codes the other entries without them.

    Outliers are the n smallest and the n largest entries, of equal ones the lower channels being the smaller. They are
    held by ascending channel, and do not widen the range of what is coded.

    Attributes:
      codec: of the other entries.
      outliers: n, or the share of all entries, in (0, 1), which is 2n: n = max(1, round(outliers · D / 2)).
    """

    codec: Codec
    outliers: int | float

    def __post_init__(self) -> None:
        check_codec("sparse", self.codec)
        if isinstance(self.codec, Sparse):
            raise StorageError(f"sparse: codec={self.codec!r} already has outliers; increase their number instead.")
        if isinstance(self.outliers, float | np.floating):
            share = number_argument("sparse: outliers", self.outliers, minimum=0, maximum=1, error=StorageError)
            if share in (0, 1):
                raise StorageError(f"sparse: outliers, as a share, must be above 0 and below 1; got {self.outliers!r}.")
            object.__setattr__(self, "outliers", share)
            return
        count = count_argument("sparse: outliers, unless a share,", self.outliers, minimum=1, error=StorageError)
        object.__setattr__(self, "outliers", count)

    @property
    def side(self) -> Side | None:
        """The part that vectors share, or None: that of `codec`. Levels are fitted without outliers."""
        side = self.codec.side
        return TableWithoutOutliers(side, self.outliers) if isinstance(side, VectorTable) else side

    def count(self, dim: int) -> int:
        """Returns n for vectors of `dim` numbers; see `outlier_count`."""
        return outlier_count(self.outliers, dim)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        count = 2 * self.count(dim)
        return self.codec.parts(dim, dtype) | {
            "index": ((count,), index_dtype(dim)),
            "value": ((count,), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        dim = x.shape[-1]
        count = self.count(dim)
        # Comparisons of 0 and -0 differ between operations.
        compared = jnp.where(x == 0, 0.0, x)
        # [..., n] each; of equal numbers the first is taken, which among the largest is the highest channel
        smallest = indices_of_largest(-compared, count)
        largest = dim - 1 - indices_of_largest(compared[..., ::-1], count)
        # [..., 2n]
        index = jnp.sort(jnp.concatenate([smallest, largest], axis=-1), axis=-1)
        value = jnp.take_along_axis(x, index, axis=-1)
        outlying = jnp.any(_places(index, dim), axis=-2)
        rest = self.codec.encode_without(x, outlying, side, dtype)
        return {**rest, "index": index.astype(index_dtype(dim)), "value": as_stored(value, dtype)}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D]
        rest = self.codec.decode({name: parts[name] for name in parts if name not in ("index", "value")}, side, dim)
        # [..., 2n, D]
        places = _places(parts["index"], dim)
        value = jnp.where(places, parts["value"].astype(jnp.float32)[..., None], 0.0)
        return jnp.where(jnp.any(places, axis=-2), jnp.sum(value, axis=-2), rest)


def index_dtype(dim: int) -> Any:
    """Returns the dtype of channels, which also holds D itself: uint8 for up to 255 channels, else uint16."""
    return jnp.dtype(jnp.uint8 if dim <= np.iinfo(np.uint8).max else jnp.uint16)


def _places(index: Array, dim: int) -> Array:
    """Returns which channel each index is: [..., n, dim] bool."""
    return index[..., None] == jnp.arange(dim, dtype=index.dtype)


def sparse(codec: Wrapped, outliers: int | float) -> Wrapped:
    """Keeps the smallest and the largest entries of each vector exactly.

    Args:
      codec: a codec of the other entries, or a storage whose keys and values both keep outliers.
      outliers: a whole number n: the n smallest and the n largest; or the share of all entries, in (0, 1), at least one
        on each side.

    Returns:
      A codec, or a storage.

    Raises:
      StorageError: an argument out of range; later, a head all of whose channels would be outliers.
    """
    return wrap("sparse", codec, lambda each: Sparse(each, outliers))
