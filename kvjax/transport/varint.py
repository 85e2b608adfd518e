"""Arrays of positions as differences of variable length: a difference from -64 to 63 takes one byte."""

import math
from collections.abc import Sequence

import numpy as np

from kvjax.errors import CheckpointError


def encode(values: np.ndarray) -> bytes:
    """Encodes whole numbers of 32 bits, an array of any shape."""
    flat = values.reshape(-1).astype(np.int64)
    steps = np.diff(flat, prepend=0)
    # Even for numbers of at least 0, odd for those below.
    left = np.where(steps < 0, -2 * steps - 1, 2 * steps).astype(np.uint64)
    # [n]
    sizes = np.ones(len(left), np.int64)
    for place in range(1, 5):
        sizes += (left >> np.uint64(7 * place)) > 0
    made = np.zeros(int(sizes.sum()), np.uint8)
    starts = np.cumsum(sizes) - sizes
    for place in range(5):
        there = sizes > place
        digit = (left[there] >> np.uint64(7 * place)) & np.uint64(127)
        more = sizes[there] > place + 1
        made[starts[there] + place] = digit.astype(np.uint8) | np.where(more, 128, 0).astype(np.uint8)
    return made.tobytes()


def decode(data: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Decodes arrays that follow each other, int32 of the given shapes.

    Raises:
      CheckpointError: the data are not of these arrays.
    """
    raw = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(raw < 128)
    counts = [math.prod(shape) for shape in shapes]
    if len(last) != sum(counts) or (len(last) and last[-1] != len(raw) - 1):
        raise CheckpointError("the message is damaged: its positions are not those of the context.")
    starts = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)
    sizes, number = last - starts + 1, np.zeros(len(last), np.uint64)
    if len(sizes) and sizes.max() > 5:
        raise CheckpointError("the message is damaged: a position is too large.")
    for place in range(5):
        there = sizes > place
        number[there] |= (raw[starts[there] + place].astype(np.uint64) & np.uint64(127)) << np.uint64(7 * place)
    half = (number >> np.uint64(1)).astype(np.int64)
    steps = np.where(number & np.uint64(1), -half - 1, half)
    parts = np.split(steps, np.cumsum(counts)[:-1])
    return [np.cumsum(part).astype(np.int32).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
