"""Batches of texts of like lengths, padded to a few sizes, so that few programs serve all lengths."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvjax.cache.planning.limits import power_of_two, quarter_steps
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.models.model import Model
from kvjax.serve.text_stream import TextStream

T = TypeVar("T")
Ended = Callable[[np.ndarray], bool]  # whether the new tokens [n] of a text contain its end
SMALLEST_CONTEXT = 16  # tokens that shorter contexts have arrays for


def batches(items: list[T], rows: int, size: Callable[[T], Any]) -> Iterator[list[T]]:
    """Items of like sizes together, the largest first: what does not fit memory fails at once."""
    items = sorted(items, key=size, reverse=True)
    for start in range(0, len(items), rows):
        yield items[start : start + rows]


def padded(model: Model, rows: int, texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns texts as [B, T] int32, their lengths [B] int32, and the bucket of the longest of them.

    B is `rows`, or a power of two where there are fewer texts, and a multiple of the rows that a mesh divides. Further
    rows repeat the first text, so that nothing fails in them that does not fail in a text.
    """
    rows = model.rows_on_mesh(min(rows, power_of_two(len(texts), 1)))
    lengths = np.zeros(rows, np.int32)
    tokens = np.zeros((rows, max(map(len, texts))), np.int32)
    for row, text in enumerate([*texts, *[texts[0]] * (rows - len(texts))]):
        tokens[row, : len(text)], lengths[row] = text, len(text)
    return tokens, lengths, bucket(int(lengths.max()))


def bucket(length: int) -> int:
    """The size that contexts are padded to, of four for each power of two: at most a fifth of it is padding."""
    return quarter_steps(length, SMALLEST_CONTEXT)


def until(ended: Sequence[Ended] | None, count: int, spare: int) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns the `until` of `kvjax.generate`.

    Args:
      ended: for each of `count` rows, whether its new tokens [n] contain the end of its text; None = none of them do.
      count: the number of rows that are wanted.
      spare: the number of rows after these, which have ended.
    """
    if ended is None and not spare:
        return None

    def which(ids: np.ndarray) -> np.ndarray:
        rows = [own(row[row >= 0]) for own, row in zip(ended or (), ids, strict=False)]
        return np.array([*(rows or [False] * count), *[True] * spare])

    return which


def ends(tokenizer: Tokenizer, stops: Sequence[str], prompt: Sequence[int]) -> Ended:
    """Returns whether new tokens after a prompt contain one of some texts, or of special tokens.

    Each token is decoded once: the tokens of a call begin with those of the last one.
    """
    stream, taken = TextStream(tokenizer, stops, prompt=prompt), 0

    def ended(tokens: np.ndarray) -> bool:
        nonlocal taken
        if not stream.stopped:
            stream.take(tokens[taken:])
            taken = len(tokens)
        return stream.stopped

    return ended
