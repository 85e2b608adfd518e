"""CacheGen's codes of keys and values: a vector as its difference from the first one of its group.

Paper: Liu et al. (arXiv:2310.07240), section 5.2. The released code codes every vector by itself; `delta=False` does.
"""

from typing import NamedTuple

import numpy as np

from kvjax.errors import InputError

GROUP = 10  # vectors, of which the first is the anchor of the others
ANCHOR_LIMIT = 127  # the largest code of an anchor
CHUNK = 1500  # vectors that are coded independently of others
MAX_CHUNK = 65_535  # counts of a chunk are numbers of 16 bits
MAX_RANGE = 65_504.0  # the largest number of float16
#: Level -> the largest codes of keys, and of values, in the first layers and in later ones.
LEVELS = {1: ((7, 7, 5), (7, 5)), 2: ((15, 7, 7), (15, 7)), 3: ((15, 15, 15), (15, 15))}


class Codes(NamedTuple):
    """Coded vectors.

    Attributes:
      codes: [..., n, D] int8.
      ranges: [..., n] float16, the largest absolute number of each vector, or of its difference.
    """

    codes: np.ndarray
    ranges: np.ndarray


def limits(layers: int, level: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the largest code of keys, and of values, in each layer.

    Args:
      layers: the number of layers of the model.
      level: 1, 2 or 3, from the fewest bytes to the most.

    Raises:
      InputError: there is no such level.
    """
    if level not in LEVELS:
        raise InputError(f"level must be 1, 2 or 3, from the fewest bytes to the most; got {level!r}.")
    key, value = LEVELS[level]
    key_ends, value_ends = (max(1, 10 * layers // 32), 20 * layers // 32), (max(1, 2 * layers // 32),)

    def of(codes: tuple[int, ...], ends: tuple[int, ...], layer: int) -> int:
        return codes[next((place for place, end in enumerate(ends) if layer < end), len(ends))]

    return tuple(of(key, key_ends, i) for i in range(layers)), tuple(of(value, value_ends, i) for i in range(layers))


def anchors(count: int, chunk: int = CHUNK) -> np.ndarray:
    """Returns which of `count` vectors are anchors, [n] bool; groups begin anew in each chunk."""
    return np.arange(count) % chunk % GROUP == 0


def encode_vectors(x: np.ndarray, limit: int, *, delta: bool = True, chunk: int = CHUNK) -> Codes:
    """Codes vectors.

    Args:
      x: [..., n, D], in the order of their positions.
      limit: the largest code.
      delta: whether vectors are coded as differences from their anchors.
      chunk: vectors that are coded independently of others.

    Raises:
      InputError: a number is not finite, or larger than float16 has.
    """
    x = np.asarray(x, np.float32)
    if not np.isfinite(x).all() or (x.size and np.abs(x).max() > MAX_RANGE):
        raise InputError(f"keys and values must be finite, and at most {MAX_RANGE:.0f}, to be coded by CacheGen.")
    if not delta:
        return _coded(x, limit)
    first = anchors(x.shape[-2], chunk)
    made = _coded(x[..., first, :], ANCHOR_LIMIT)
    # [..., n, D]
    own = _decoded(made, ANCHOR_LIMIT)[..., np.cumsum(first) - 1, :]
    difference = x - own
    if difference.size and np.abs(difference).max() > MAX_RANGE:
        raise InputError(f"keys and values differ by more than {MAX_RANGE:.0f}; code them with delta=False.")
    codes, ranges = _coded(difference, limit)
    codes[..., first, :], ranges[..., first] = made
    return Codes(codes, ranges)


def decode_vectors(coded: Codes, limit: int, *, delta: bool = True, chunk: int = CHUNK) -> np.ndarray:
    """Returns the vectors of codes, [..., n, D] float32; for the arguments see `encode_vectors`."""
    if not delta:
        return _decoded(coded, limit)
    codes, ranges = coded
    first = anchors(codes.shape[-2], chunk)
    own = _decoded(Codes(codes[..., first, :], ranges[..., first]), ANCHOR_LIMIT)
    # [..., n, D]
    whole = own[..., np.cumsum(first) - 1, :] + _decoded(coded, limit)
    whole[..., first, :] = own
    return whole


def _coded(x: np.ndarray, limit: int) -> Codes:
    """Codes each vector by its own range."""
    ranges = np.abs(x).max(axis=-1, initial=0.0).astype(np.float16)
    divisor = np.where(ranges > 0, ranges, np.float16(1)).astype(np.float32)[..., None]
    codes = np.clip(np.rint(x * np.float32(limit) / divisor), -limit, limit)
    # A range that float16 rounds to 0 has codes of 0.
    return Codes(np.where(ranges[..., None] > 0, codes, 0).astype(np.int8), ranges)


def _decoded(coded: Codes, limit: int) -> np.ndarray:
    return coded.codes.astype(np.float32) * coded.ranges.astype(np.float32)[..., None] / np.float32(limit)
