"""Codes that choose among the levels of a table, such as quantiles of a normal distribution (NF4, arXiv:2305.14314)."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.memory import DEVICE
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.packing import MOST_BITS, pack, packed_size, unpack
from kvjax.storage.rounding import as_stored

Array = jax.Array
Table = tuple[float, ...]

TAIL = (1 / 32 + 1 / 30) / 2  # the probability beyond the outermost levels, on each side
FEW = 16  # levels that are compared and selected one by one


@functools.cache
def normal_levels(bits: int) -> Table:
    """Returns 2^bits ascending quantiles of a normal distribution, scaled to [-1, 1]; half of them are at most 0.

    Args:
      bits: bits of a code, 1 to 8.

    Raises:
      StorageError: `bits` is out of range.
    """
    bits = count_argument("normal_levels: bits", bits, minimum=1, maximum=MOST_BITS, error=StorageError)
    quantile, half = statistics.NormalDist().inv_cdf, 1 << (bits - 1)
    lower = [quantile(TAIL + (0.5 - TAIL) * i / max(half - 1, 1)) for i in range(half)]
    upper = [quantile(0.5 + (0.5 - TAIL) * i / half) for i in range(1, half + 1)]
    return (*(z / -lower[0] for z in lower), *(z / upper[-1] for z in upper))


def midpoints(table: Sequence[float]) -> np.ndarray:
    """Returns the middle of each two neighbours of an ascending table, float32."""
    entries = np.asarray(table, np.float64)
    return ((entries[1:] + entries[:-1]) / 2).astype(np.float32)


def nearest_level(table: Sequence[float], y: Array) -> Array:
    """Returns the index of the level nearest to each number, int32; of two the lower.

    Args:
      table: ascending.
      y: float32.
    """
    middle = midpoints(table)
    if len(table) > FEW:
        return jnp.searchsorted(middle, y, method="scan_unrolled").astype(jnp.int32)
    codes = jnp.zeros(y.shape, jnp.int32)
    for each in middle:
        codes += (y > each).astype(jnp.int32)
    return codes


def lookup(table: Sequence[float], codes: Array) -> Array:
    """Returns the level of each code, float32.

    A gather of single numbers is slow on most devices, so that few levels are selected by the bits of the codes.

    Args:
      table: 2^bits numbers.
      codes: integers below 2^bits.
    """
    if len(table) > FEW:
        return jnp.asarray(table, jnp.float32).at[codes].get(mode="promise_in_bounds")
    found: list[Any] = [np.float32(each) for each in table]
    bit = 0
    while len(found) > 1:
        odd = (codes >> bit) & 1 != 0
        found = [jnp.where(odd, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        bit += 1
    return found[0]


@dataclasses.dataclass(frozen=True)
class Levels(Codec):
    """Holds the nearest level of (x - offset) / range, where offset and range map the levels to the vector's extremes.

    offset = (smallest + largest) / 2, range = (largest - smallest) / 2, taken as 1 where it is 0.

    Attributes:
      bits: bits of a code, 1 to 8.
      table: 2^bits ascending levels in [-1, 1]; None = `normal_levels(bits)`.
    """

    bits: int
    table: Table | None = None

    def __post_init__(self) -> None:
        bits = count_argument("storage levels: bits", self.bits, minimum=1, maximum=MOST_BITS, error=StorageError)
        object.__setattr__(self, "bits", bits)
        if self.table is not None:
            table = _checked(self.table, bits)
            object.__setattr__(self, "table", None if table == normal_levels(bits) else table)

    @property
    def levels(self) -> Table:
        """The table, as it is used."""
        return normal_levels(self.bits) if self.table is None else self.table

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {
            "codes": ((packed_size(dim, self.bits),), jnp.dtype(jnp.uint8)),
            "offset": ((), jnp.dtype(dtype)),
            "range": ((), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: Any, dtype: DTypeLike) -> Parts:
        return self.encode_without(x, jnp.zeros(x.shape, bool), side, dtype)

    def encode_without(self, x: Array, left_out: Array, side: Any, dtype: DTypeLike) -> Parts:
        # [..., 1]; halves first, since the sum may be too large
        low = jnp.min(jnp.where(left_out, jnp.inf, x), axis=-1, keepdims=True) / 2
        high = jnp.max(jnp.where(left_out, -jnp.inf, x), axis=-1, keepdims=True) / 2
        middle = low + high
        offset = as_stored(jnp.where(middle == 0, 0.0, middle), dtype)
        width = as_stored(high - low, dtype)
        # Decoding uses the rounded numbers.
        step = width.astype(jnp.float32)
        y = (x - offset.astype(jnp.float32)) / jnp.where(step == 0, 1.0, step)
        # [..., D]
        codes = jnp.where(left_out, 0, nearest_level(self.levels, y))
        return {"codes": pack(codes, self.bits), "offset": offset[..., 0], "range": width[..., 0]}

    def decode(self, parts: Parts, side: Any, dim: int) -> Array:
        # [..., D]
        level = lookup(self.levels, unpack(parts["codes"], self.bits, dim))
        offset, width = (parts[name].astype(jnp.float32)[..., None] for name in ("offset", "range"))
        return offset + width * level


def _checked(table: Any, bits: int) -> Table:
    """Returns a table as a tuple of floats."""
    listed = list(table) if isinstance(table, Sequence | np.ndarray) and not isinstance(table, str) else []
    checked = tuple(
        number_argument("storage levels: a level", each, minimum=-1, maximum=1, error=StorageError) for each in listed
    )
    if len(checked) != 1 << bits or any(high <= low for low, high in itertools.pairwise(checked)):
        raise StorageError(
            f"storage levels: table must be {1 << bits} ascending numbers in [-1, 1] for {bits} bits, such as "
            f"normal_levels({bits}); got {table!r}."
        )
    return checked


@factory
def levels(bits: int = 4, table: Table | None = None, *, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values as codes of the nearest level between the extremes of each vector.

    Args:
      bits: bits of a code, 1 to 8.
      table: 2^bits ascending levels in [-1, 1]; None = `normal_levels(bits)`.
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    codec = Levels(bits, table)
    return Storage(key=codec, value=codec, residual=residual, memory=memory, name=f"levels{codec.bits}")
