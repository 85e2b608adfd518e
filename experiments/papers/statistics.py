"""Whether one cache is better than another: a paired bootstrap over rows, an exact sign test over prompts.

Both are a few lines of NumPy and integers. Draws come from a seed and from the text of the comparison, so that the
order of comparisons does not matter.
"""

import dataclasses
import math
import zlib

import numpy as np
from numpy.typing import ArrayLike

MIN_ROWS, MIN_PROMPTS = 32, 128  # that a comparison needs for a verdict
RESAMPLES = 10_000
LEVEL = 0.05  # of a test; intervals have a level of 95 %


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two caches on the same rows or prompts.

    Attributes:
      what: in words, the first cache before the second.
      difference: the mean of the first minus the mean of the second.
      number: of pairs.
      enough: whether these are as many as a verdict needs.
      low: of the 95 % interval of the difference; None for a sign test.
      high: likewise.
      p: the probability of the sign test, two-sided; None for a bootstrap.
    """

    what: str
    difference: float
    number: int
    enough: bool
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0, or the sign test rejects equality."""
        if self.p is not None:
            return self.p < LEVEL
        assert self.low is not None and self.high is not None
        return self.low > 0 or self.high < 0

    @property
    def lower(self) -> bool:
        """Whether the first is lower than the second."""
        return self.differs and self.difference < 0

    @property
    def higher(self) -> bool:
        """Whether the first is higher than the second."""
        return self.differs and self.difference > 0

    @property
    def result(self) -> str:
        """``lower``, ``higher`` or ``no difference``."""
        return "lower" if self.lower else "higher" if self.higher else "no difference"

    def row(self) -> dict[str, str]:
        """A line of a table."""
        interval = f"p = {self.p:.3g}" if self.p is not None else f"{self.low:+.4f} to {self.high:+.4f}"
        return {
            "comparison": self.what, "difference": f"{self.difference:+.4f}", "95 % interval, or sign test": interval,
            "pairs": str(self.number), "result": self.result,
        }  # fmt: skip


def paired_bootstrap(
    what: str, one: ArrayLike, other: ArrayLike, *, seed: int, resamples: int = RESAMPLES
) -> Comparison:
    """Compares the means of two measurements of the same rows.

    Args:
      what: see `Comparison`.
      one: [rows] numbers.
      other: [rows] numbers.
      seed: of the draws.
      resamples: the number of draws of as many rows with replacement.
    """
    # [rows]
    gap = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    rng = np.random.default_rng([seed, zlib.crc32(what.encode())])
    # [resamples]
    means = gap[rng.integers(gap.size, size=(resamples, gap.size))].mean(axis=1)
    low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2])
    return Comparison(what, float(gap.mean()), gap.size, gap.size >= MIN_ROWS, float(low), float(high))


def sign_test(what: str, one: ArrayLike, other: ArrayLike) -> Comparison:
    """Compares two answers to the same prompts, by the prompts that only one of them has right.

    Args:
      what: see `Comparison`.
      one: [prompts] bool.
      other: [prompts] bool.
    """
    first, second = np.asarray(one, bool), np.asarray(other, bool)
    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    number = only_first + only_second
    fewer = sum(math.comb(number, k) for k in range(min(only_first, only_second) + 1))
    p = float(min(1.0, 2 * fewer / 2**number))
    gap = float(first.mean() - second.mean())
    return Comparison(what, gap, first.size, first.size >= MIN_PROMPTS, p=p)
