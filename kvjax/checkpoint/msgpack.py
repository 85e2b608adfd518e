"""Where the arrays of a Flax msgpack file lie, without reading them.

``flax.serialization`` can only decode a whole file in memory, twice over. A checkpoint needs little of msgpack: nested
maps with string keys, whose leaves are arrays in Flax's extension type, or in pieces where one would pass 1 GiB.
"""

import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import CheckpointError

Keys = tuple[str, ...]
_ARRAY = 1  # Flax's extension type of an array: msgpack of (shape, dtype's name, bytes)
_CHUNKED = "__msgpack_chunked_array__"


@dataclasses.dataclass(frozen=True)
class Extent:
    """An array in a file: its shape, the name of its NumPy dtype, and (offset, bytes) of its pieces in order."""

    shape: tuple[int, ...]
    dtype: str
    extents: list[tuple[int, int]]


def msgpack_arrays(path: Path) -> dict[Keys, Extent]:
    """Every array of a file, by the keys that lead to it.

    Raises:
      CheckpointError: truncated, damaged, or something else than nested maps of arrays.
    """
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            tree, end = _Walker(data).value(0)
            if not isinstance(tree, dict) or end != len(data):
                raise ValueError("no map, or bytes after it")
            return dict(_leaves(tree, ()))
        except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged: no whole msgpack of Flax parameters ({error})."
            ) from None


def _leaves(tree: dict[str, Any], keys: Keys) -> Iterator[tuple[Keys, Extent]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value.get(_CHUNKED):
            shape = tuple(value["shape"][str(i)] for i in range(len(value["shape"])))
            pieces = [value["chunks"][str(i)] for i in range(len(value["chunks"]))]
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
                raise ValueError(f"the pieces of {key} do not add up to {shape}")
            yield (*keys, key), Extent(shape, pieces[0].dtype, [extent for piece in pieces for extent in piece.extents])
        elif isinstance(value, dict):
            yield from _leaves(value, (*keys, key))
        elif isinstance(value, Extent):
            yield (*keys, key), value
        else:
            raise ValueError(f"{key} is no array")


class _Walker:
    """Decodes msgpack (msgpack.org, "Formats"); byte strings become their (offset, bytes)."""

    def __init__(self, data: mmap.mmap):
        self.data = data

    def number(self, at: int, code: str) -> tuple[int, int]:
        size = struct.calcsize(f">{code}")
        return struct.unpack(f">{code}", self.span(at, size))[0], at + size

    def span(self, at: int, size: int) -> bytes:
        if at + size > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, inside a value of {size} bytes at {at}")
        return self.data[at : at + size]

    def value(self, at: int) -> tuple[Any, int]:
        """The value at a byte, and where the next one begins."""
        tag, at = self.data[at], at + 1
        if tag < 0x80:
            return tag, at
        if tag < 0x90:
            return self.mapping(at, tag & 0x0F)
        if tag < 0xA0:
            return self.sequence(at, tag & 0x0F)
        if tag < 0xC0:
            return self.text(at, tag & 0x1F)
        if tag >= 0xE0:
            return tag - 0x100, at
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
        if 0xC4 <= tag <= 0xC6:
            return self.blob(*reversed(self.number(at, "BHI"[tag - 0xC4])))
        if 0xC7 <= tag <= 0xC9:
            size, at = self.number(at, "BHI"[tag - 0xC7])
            return self.extension(at, size)
        if tag in (0xCA, 0xCB):
            return self.number(at, "fd"[tag - 0xCA])
        if 0xCC <= tag <= 0xD3:
            return self.number(at, "BHIQbhiq"[tag - 0xCC])
        if 0xD4 <= tag <= 0xD8:
            return self.extension(at, 1 << (tag - 0xD4))
        if 0xD9 <= tag <= 0xDB:
            return self.text(*reversed(self.number(at, "BHI"[tag - 0xD9])))
        if tag in (0xDC, 0xDD):
            return self.sequence(*reversed(self.number(at, "HI"[tag - 0xDC])))
        if tag in (0xDE, 0xDF):
            return self.mapping(*reversed(self.number(at, "HI"[tag - 0xDE])))
        raise ValueError(f"byte {tag:#x} begins no value")

    def text(self, at: int, size: int) -> tuple[str, int]:
        return self.span(at, size).decode("utf-8"), at + size

    def blob(self, at: int, size: int) -> tuple[tuple[int, int], int]:
        if at + size > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, inside {size} bytes at {at}")
        return (at, size), at + size

    def sequence(self, at: int, count: int) -> tuple[list[Any], int]:
        values = []
        for _ in range(count):
            value, at = self.value(at)
            values.append(value)
        return values, at

    def mapping(self, at: int, count: int) -> tuple[dict[str, Any], int]:
        values = {}
        for _ in range(count):
            key, at = self.value(at)
            if not isinstance(key, str):
                raise ValueError("a key is no text")  # of the data, not of the caller
            values[key], at = self.value(at)
        return values, at

    def extension(self, at: int, size: int) -> tuple[Extent, int]:
        kind, at = self.data[at], at + 1
        if kind != _ARRAY:
            raise ValueError(f"extension type {kind} is no array")
        (shape, dtype, (start, length)), end = self.value(at)
        count = length // math.prod(shape) if math.prod(shape) else 0
        if not isinstance(dtype, str) or end != at + size or count * math.prod(shape) != length:
            raise ValueError(f"an array of shape {shape} does not fit its {length} bytes")
        return Extent(tuple(shape), dtype, [(start, length)]), end
