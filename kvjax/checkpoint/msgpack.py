"""Finds the arrays in a Flax msgpack file without reading them.

``flax.serialization`` decodes a whole file in memory, which needs twice the size of the file. Checkpoints use a small
part of msgpack: nested maps with string keys, whose leaves are arrays in an extension type of Flax. Flax splits arrays
of more than 1 GiB into several chunks.
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
Value = Any  # a decoded value; a byte string is represented by (offset, bytes), an array by an `Extent`
_ARRAY = 1  # Flax's extension type for an array: msgpack of (shape, name of the dtype, bytes)
_CHUNKED = "__msgpack_chunked_array__"  # key of the map that Flax writes for an array in chunks


@dataclasses.dataclass(frozen=True)
class Extent:
    """The location of an array in a file.

    Attributes:
      shape: of the array.
      dtype: name of its NumPy dtype.
      extents: the offset and the size in bytes of each chunk, in order.
    """

    shape: tuple[int, ...]
    dtype: str
    extents: list[tuple[int, int]]


def msgpack_arrays(path: Path) -> dict[Keys, Extent]:
    """Finds every array of a file.

    Args:
      path: the file.

    Returns:
      The keys that lead to an array -> its location.

    Raises:
      CheckpointError: if the file is truncated or damaged, or holds anything else than nested maps of arrays.
    """
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            tree, end = _Decoder(data).value(0)
            if not isinstance(tree, dict) or end != len(data):
                raise ValueError("it is not a map, or bytes follow it")
            return dict(_leaves(tree, ()))
        except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged: it is not a complete msgpack of Flax parameters ({error})."
            ) from None


def _leaves(tree: dict[str, Value], keys: Keys) -> Iterator[tuple[Keys, Extent]]:
    """Yields the arrays of a decoded map, with the chunks of an array joined.

    Raises:
      ValueError: if a leaf is not an array.
    """
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
            raise ValueError(f"{key} is not an array")


class _Decoder:
    """Decodes msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md, "Formats") without reading byte strings.

    Each method takes the offset of a value and returns the value and the offset of the next one.

    Attributes:
      data: the file.
    """

    def __init__(self, data: mmap.mmap):
        self.data = data

    def number(self, at: int, code: str) -> tuple[int, int]:
        """Decodes a big-endian number with the `struct` format character `code`."""
        size = struct.calcsize(f">{code}")
        return struct.unpack(f">{code}", self.span(at, size))[0], at + size

    def span(self, at: int, size: int) -> bytes:
        """Returns `size` bytes."""
        if at + size > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, inside a value of {size} bytes at {at}")
        return self.data[at : at + size]

    def value(self, at: int) -> tuple[Value, int]:
        """Decodes any value. The names of the formats are those of the specification."""
        tag, at = self.data[at], at + 1
        if tag < 0x80:  # positive fixint
            return tag, at
        if tag < 0x90:  # fixmap
            return self.mapping(at, tag & 0x0F)
        if tag < 0xA0:  # fixarray
            return self.sequence(at, tag & 0x0F)
        if tag < 0xC0:  # fixstr
            return self.text(at, tag & 0x1F)
        if tag >= 0xE0:  # negative fixint
            return tag - 0x100, at
        if tag in (0xC0, 0xC2, 0xC3):  # nil, false, true
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
        if 0xC4 <= tag <= 0xC6:  # bin 8, 16, 32
            return self.blob(*reversed(self.number(at, "BHI"[tag - 0xC4])))
        if 0xC7 <= tag <= 0xC9:  # ext 8, 16, 32
            size, at = self.number(at, "BHI"[tag - 0xC7])
            return self.extension(at, size)
        if tag in (0xCA, 0xCB):  # float 32, 64
            return self.number(at, "fd"[tag - 0xCA])
        if 0xCC <= tag <= 0xD3:  # uint 8 to 64, int 8 to 64
            return self.number(at, "BHIQbhiq"[tag - 0xCC])
        if 0xD4 <= tag <= 0xD8:  # fixext 1 to 16
            return self.extension(at, 1 << (tag - 0xD4))
        if 0xD9 <= tag <= 0xDB:  # str 8, 16, 32
            return self.text(*reversed(self.number(at, "BHI"[tag - 0xD9])))
        if tag in (0xDC, 0xDD):  # array 16, 32
            return self.sequence(*reversed(self.number(at, "HI"[tag - 0xDC])))
        if tag in (0xDE, 0xDF):  # map 16, 32
            return self.mapping(*reversed(self.number(at, "HI"[tag - 0xDE])))
        raise ValueError(f"byte {tag:#x} is not the start of a value")

    def text(self, at: int, size: int) -> tuple[str, int]:
        """Decodes a string of `size` bytes."""
        return self.span(at, size).decode("utf-8"), at + size

    def blob(self, at: int, size: int) -> tuple[tuple[int, int], int]:
        """Returns the offset and the size of a byte string of `size` bytes."""
        if at + size > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, inside {size} bytes at {at}")
        return (at, size), at + size

    def sequence(self, at: int, count: int) -> tuple[list[Value], int]:
        """Decodes `count` values."""
        values = []
        for _ in range(count):
            value, at = self.value(at)
            values.append(value)
        return values, at

    def mapping(self, at: int, count: int) -> tuple[dict[str, Value], int]:
        """Decodes `count` pairs of a key and a value."""
        values = {}
        for _ in range(count):
            key, at = self.value(at)
            if not isinstance(key, str):
                # A ValueError as for other damage, and not a TypeError, which is for wrong arguments.
                raise ValueError("a key is not a string")
            values[key], at = self.value(at)
        return values, at

    def extension(self, at: int, size: int) -> tuple[Extent, int]:
        """Decodes the shape, the dtype and the location of an array of Flax's extension type, of `size` bytes."""
        kind, at = self.data[at], at + 1
        if kind != _ARRAY:
            raise ValueError(f"extension type {kind} is not an array")
        (shape, dtype, (start, length)), end = self.value(at)
        count = length // math.prod(shape) if math.prod(shape) else 0
        if not isinstance(dtype, str) or end != at + size or count * math.prod(shape) != length:
            raise ValueError(f"an array of shape {shape} does not fit its {length} bytes")
        return Extent(tuple(shape), dtype, [(start, length)]), end
