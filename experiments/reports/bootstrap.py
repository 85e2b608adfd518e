"""Intervals of means, by the bootstrap."""

import zlib

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2_000
LOW, HIGH = 2.5, 97.5  # percentiles of a 95 % interval
MIN_VALUES = 8  # the fewest rows or questions that get an interval


def interval(values: ArrayLike, name: str) -> tuple[float, float]:
    """Returns the 95 % interval of a mean by the bootstrap.

    Args:
      values: of rows or questions.
      name: seeds the draws, so that these do not depend on what else is on the page.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    array = np.asarray(values, np.float64)
    # [resamples]
    means = array[rng.integers(0, array.size, (RESAMPLES, array.size))].mean(axis=1)
    low, high = np.percentile(means, [LOW, HIGH])
    return float(low), float(high)
