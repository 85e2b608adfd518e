"""Batches of texts of like lengths, padded to a few sizes, so that few programs serve all lengths."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvjax.cache.limits import power_of_two, quarter_steps
from kvjax.models.model import Model

T = TypeVar("T")
SMALLEST_CONTEXT = 16  # tokens that shorter contexts have arrays for


def batches(items: list[T], rows: int, size: Callable[[T], Any]) -> Iterator[list[T]]:
    """Items of like sizes together, the largest first: what does not fit memory fails at once."""
    items = sorted(items, key=size, reverse=True)
    for start in range(0, len(items), rows):
        yield items[start : start + rows]


def padded(model: Model, rows: int, texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns texts as [B, T] int32, their lengths [B] int32, and the bucket of the longest of them.

    B is `rows`, or a power of two where there are fewer texts, and a multiple of the rows that a mesh divides; further
    rows have one token.
    """
    rows = model.rows_on_mesh(min(rows, power_of_two(len(texts), 1)))
    lengths = np.ones(rows, np.int32)
    tokens = np.zeros((rows, max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], lengths[row] = text, len(text)
    return tokens, lengths, bucket(int(lengths.max()))


def bucket(length: int) -> int:
    """The size that contexts are padded to, of four for each power of two: at most a fifth of it is padding."""
    return quarter_steps(length, SMALLEST_CONTEXT)


def until(
    ended: Callable[[np.ndarray], bool] | None, count: int, spare: int
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns the `until` of `kvjax.generate`: `ended` is asked about `count` rows; the spare ones have ended."""
    if ended is None and not spare:
        return None

    def which(ids: np.ndarray) -> np.ndarray:
        rows = [ended is not None and ended(row[row >= 0]) for row in ids[:count]]
        return np.array([*rows, *[True] * spare])

    return which
