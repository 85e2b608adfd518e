"""Entropy coding of CacheGen's codes by tables of counts, one for each channel of each head.

The coder is constriction's ANS coder, or zlib without tables where constriction is not installed; what was coded says
by which one.
"""

import importlib.util
import zlib
from typing import NamedTuple

import numpy as np

from kvjax.errors import CheckpointError, ConfigError
from kvjax.transport.inflate import inflate

ANS, ZLIB = "constriction", "zlib"


class Symbols(NamedTuple):
    """The codes of a stream whose channels have tables of their own.

    Attributes:
      codes: [n, C] int8, of which each column is a channel.
      limit: the largest code.
    """

    codes: np.ndarray
    limit: int


def coder() -> str:
    """Returns the coder that is installed."""
    return ANS if importlib.util.find_spec("constriction") else ZLIB


def count(symbols: Symbols) -> np.ndarray:
    """Returns how often each channel has each symbol, and once more, [C, 2 * limit + 1] int64."""
    size = 2 * symbols.limit + 1
    numbers = symbols.codes.astype(np.int64) + symbols.limit + size * np.arange(symbols.codes.shape[1])
    return 1 + np.bincount(numbers.reshape(-1), minlength=size * symbols.codes.shape[1]).reshape(-1, size)


def ideal_bits(symbols: Symbols, table: np.ndarray) -> float:
    """Returns the bits that symbols have by a table of counts [C, 2 * limit + 1]: the sum of -log2 p."""
    p = table / table.sum(axis=1, keepdims=True)
    chosen = p[np.arange(symbols.codes.shape[1]), symbols.codes.astype(np.int64) + symbols.limit]
    return float(-np.log2(chosen).sum())


def compress(streams: list[tuple[Symbols, np.ndarray]], by: str) -> bytes:
    """Compresses symbols into one stream.

    Args:
      streams: symbols and their tables, from which `decompress` decodes them in this order.
      by: the coder, from `coder`.
    """
    if by == ZLIB:
        return zlib.compress(b"".join(symbols.codes.tobytes() for symbols, _ in streams), 9)
    import constriction

    ans = constriction.stream.stack.AnsCoder()
    # The last one that is encoded is decoded first.
    for symbols, table in reversed(streams):
        numbers = symbols.codes.astype(np.int32) + symbols.limit
        for channel in reversed(range(numbers.shape[1])):
            ans.encode_reverse(np.ascontiguousarray(numbers[:, channel]), _model(table[channel]))
    return ans.get_compressed().astype("<u4").tobytes()


def decompress(data: bytes, shapes: list[tuple[int, int, np.ndarray]], by: str) -> list[np.ndarray]:
    """Returns the codes of a stream, [n, C] int8 each.

    Args:
      data: from `compress`.
      shapes: n, the largest code and the table of each.
      by: the coder.

    Raises:
      CheckpointError: the data are damaged.
      ConfigError: constriction, which they were coded with, is not installed.
    """
    if by == ZLIB:
        return _inflated(data, [(number, len(table)) for number, _, table in shapes])
    if coder() != ANS:
        raise ConfigError("these bytes were coded by constriction: pip install 'kvjax[transport]'.")
    import constriction

    ans, found = constriction.stream.stack.AnsCoder(np.frombuffer(data, "<u4").astype(np.uint32)), []
    for number, limit, table in shapes:
        codes = np.empty((number, len(table)), np.int8)
        for channel in range(len(table)):
            codes[:, channel] = ans.decode(_model(table[channel]), number) - limit
        found.append(codes)
    return found


def _inflated(data: bytes, shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    ends = np.cumsum([number * channels for number, channels in shapes])
    whole = np.frombuffer(inflate(data, int(ends[-1])), np.int8)
    if len(whole) != ends[-1]:
        raise CheckpointError("a stream of codes is damaged: its size is another one.")
    return [part.reshape(shape) for part, shape in zip(np.split(whole, ends[:-1]), shapes, strict=True)]


def _model(counts: np.ndarray) -> object:
    import constriction

    return constriction.stream.model.Categorical((counts / counts.sum()).astype(np.float64), perfect=False)
