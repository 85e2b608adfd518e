"""Levels that are fitted to a calibration: weighted k-means, and Q-Norm (KVQuant, arXiv:2401.18079)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import choice_argument
from kvjax.errors import StorageError
from kvjax.storage.side import Parts, Samples, Shapes
from kvjax.storage.tables import Table, checked_table, normal_levels

Array = jax.Array

KMEANS, FISHER = "kmeans", "fisher"
LEVELS, DECODED = "levels", "decoded"  # parts of a side
FITTED = frozenset({LEVELS, DECODED})  # the heads of a layer share them
ITERATIONS = 500  # of k-means, at most; a few dozen are the rule


def kmeans_levels(entries: np.ndarray, bits: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Fits 2^bits ascending levels to numbers by k-means, [2^bits] float64.

    They are a local minimum of the weighted sum of squared distances: the better one of those that Lloyd's iteration
    reaches from equally heavy parts of the numbers and from equally wide ones. A level that is nearest to no number
    stays.

    Args:
      entries: [n], at least one.
      bits: bits of a code.
      weights: [n] of the numbers, not negative; None, or all 0 = equal ones.
    """
    order = np.argsort(entries, kind="stable")
    x = entries[order].astype(np.float64)
    w = np.ones(len(x)) if weights is None or not weights.any() else weights[order].astype(np.float64)
    # [n + 1]: sums over the first numbers, so that the sums of any interval are differences
    mass, total = (np.concatenate([[0.0], np.cumsum(each)]) for each in (w, w * x))
    count = 1 << bits
    shares = (np.arange(count) + 0.5) / count
    starts = (
        x[np.minimum(np.searchsorted(mass[1:], shares * mass[-1]), len(x) - 1)],
        x[0] + shares * (x[-1] - x[0]),
    )
    found = [_refined(x, mass, total, start) for start in starts]
    return min(found, key=lambda each: each[0])[1]


def _refined(x: np.ndarray, mass: np.ndarray, total: np.ndarray, levels: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the weighted sum of squared distances, less a constant, and the levels after Lloyd's iteration."""
    for _ in range(ITERATIONS):
        # Of a number halfway between two levels the lower one is the nearest.
        ends = np.concatenate([[0], np.searchsorted(x, (levels[1:] + levels[:-1]) / 2, side="right"), [len(x)]])
        own, sums = np.diff(mass[ends]), np.diff(total[ends])
        moved = np.where(own > 0, sums / np.where(own > 0, own, 1.0), levels)
        error = float(np.sum(own * moved**2 - 2 * moved * sums))
        if np.array_equal(moved, levels):
            break
        levels = moved
    return error, levels


def normalised(levels: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Returns the levels as they are decoded: the mean and the deviation of what is decoded are those of the numbers.

    Args:
      levels: [2^bits] float64, by which numbers are encoded.
      entries: [n] float64.
    """
    coded = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, entries, side="left")]
    spread = coded.std()
    ratio = entries.std() / spread if spread > 0 else 1.0
    decoded: np.ndarray = levels * ratio + (entries.mean() - coded.mean() * ratio)
    return decoded


@dataclasses.dataclass(frozen=True)
class Fit:
    """The tables by which the entries of a layer's keys, or values, are encoded and decoded.

    Attributes:
      bits: bits of a code.
      table: 2^bits ascending levels in [-1, 1]; None = `normal_levels(bits)`; ``kmeans``: those of k-means of a
        calibration; ``fisher``: the same, numbers weighted by the squared gradients of the loss.
      qnorm: whether levels are decoded as others than they are encoded by, so that the mean and the deviation of the
        numbers of a calibration stay (Q-Norm).

    Raises:
      StorageError: an attribute that is not valid.
    """

    bits: int
    table: Table | str | None = None
    qnorm: bool = False

    def __post_init__(self) -> None:
        choice_argument("storage levels: qnorm", self.qnorm, (False, True), error=StorageError)
        if isinstance(self.table, str):
            choice_argument("storage levels: table", self.table, (KMEANS, FISHER), error=StorageError)
        elif self.table is not None:
            table = checked_table(self.table, self.bits)
            object.__setattr__(self, "table", None if table == normal_levels(self.bits) else table)

    @property
    def weighted(self) -> bool:
        """Whether the levels depend on gradients."""
        return self.table == FISHER

    @property
    def given(self) -> Table | None:
        """The levels, unless they come from a calibration."""
        if isinstance(self.table, str):
            return None
        return normal_levels(self.bits) if self.table is None else self.table

    def parts(self) -> Shapes:
        """Returns what comes from a calibration: name -> (shape, dtype)."""
        names = [LEVELS] * (self.given is None) + [DECODED] * self.qnorm
        return {name: ((1 << self.bits,), jnp.dtype(jnp.float32)) for name in names}

    def prepare(self, entries: np.ndarray, chosen: np.ndarray, samples: Samples) -> dict[str, np.ndarray]:
        """Fits tables.

        Args:
          entries: [n, K, D] float64, as they are encoded.
          chosen: [n, K, D] bool, those that the tables are for.
          samples: what they come from.

        Returns:
          The `parts`, [1, 2^bits] float64.

        Raises:
          StorageError: gradients are needed, and there are none.
        """
        own = entries[chosen]
        if self.weighted and samples.name not in samples.gradients:
            raise StorageError(
                f"storage levels: table='{FISHER}' needs the gradients of a model; calibrate with kvjax.calibrate, or "
                f"use table='{KMEANS}'."
            )
        if self.given is None:
            weights = np.square(samples.gradients[samples.name].astype(np.float64))[chosen] if self.weighted else None
            levels = kmeans_levels(own, self.bits, weights) if own.size else np.asarray(normal_levels(self.bits))
        else:
            levels = np.asarray(self.given, np.float64)
        made = {LEVELS: levels[None], DECODED: (normalised(levels, own) if own.size else levels)[None]}
        return {name: made[name] for name in self.parts()}

    def levels(self, side: Parts | None) -> Table | Array:
        """Returns the levels to encode by."""
        if self.given is not None:
            return self.given
        assert side is not None
        return side[LEVELS].reshape(-1)

    def decoded(self, side: Parts | None) -> Table | Array:
        """Returns what codes are decoded to."""
        if not self.qnorm:
            return self.levels(side)
        assert side is not None
        return side[DECODED].reshape(-1)
