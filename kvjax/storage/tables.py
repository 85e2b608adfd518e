"""Tables of levels, from which codes choose, such as quantiles of a normal distribution (NF4, arXiv:2305.14314)."""

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.storage.packing import MAX_BITS

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
    bits = count_argument("normal_levels: bits", bits, minimum=1, maximum=MAX_BITS, error=StorageError)
    quantile, half = statistics.NormalDist().inv_cdf, 1 << (bits - 1)
    lower = [quantile(TAIL + (0.5 - TAIL) * i / max(half - 1, 1)) for i in range(half)]
    upper = [quantile(0.5 + (0.5 - TAIL) * i / half) for i in range(1, half + 1)]
    return (*(z / -lower[0] for z in lower), *(z / upper[-1] for z in upper))


def midpoints(table: Sequence[float] | Array) -> Any:
    """Returns the middle of each two neighbours of an ascending table, float32."""
    if isinstance(table, jax.Array):
        return table[1:] / 2 + table[:-1] / 2
    entries = np.asarray(table, np.float64)
    return ((entries[1:] + entries[:-1]) / 2).astype(np.float32)


def nearest_level(table: Sequence[float] | Array, y: Array) -> Array:
    """Returns the index of the level nearest to each number, int32; of two the lower.

    Args:
      table: ascending; numbers, or [2^bits] float32.
      y: float32.
    """
    middle = midpoints(table)
    if len(table) > FEW:
        return jnp.searchsorted(middle, y, method="scan_unrolled").astype(jnp.int32)
    codes = jnp.zeros(y.shape, jnp.int32)
    for each in middle:
        codes += (y > each).astype(jnp.int32)
    return codes


def lookup(table: Sequence[float] | Array, codes: Array) -> Array:
    """Returns the level of each code, float32.

    A gather of single numbers is slow on most devices, so that few levels are selected by the bits of the codes.

    Args:
      table: 2^bits numbers, or [2^bits] float32.
      codes: integers below 2^bits.
    """
    if len(table) > FEW:
        return jnp.asarray(table, jnp.float32).at[codes].get(mode="promise_in_bounds")
    found: list[Any] = list(table) if isinstance(table, jax.Array) else [np.float32(each) for each in table]
    bit = 0
    while len(found) > 1:
        odd = (codes >> bit) & 1 != 0
        found = [jnp.where(odd, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        bit += 1
    return found[0]


def checked_table(table: object, bits: int) -> Table:
    """Returns a table as a tuple of floats.

    Raises:
      StorageError: it is not 2^bits ascending numbers in [-1, 1].
    """
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
