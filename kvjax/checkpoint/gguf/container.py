"""Reads the header of a GGUF file: metadata, and the place of each tensor.

The package ``gguf`` has a reader too. It maps the whole file into memory and makes several NumPy arrays for each string
of the vocabulary, which takes seconds for a vocabulary of 49,152 tokens where this takes a fifth of one. Types of
tensors, their names and their dequantisation are taken from the package.
"""

import dataclasses
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kvjax.errors import CheckpointError, shown
from kvjax.models.values import MAX_ELEMENTS

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 has other lengths and was in use for two months of 2023
ALIGNMENT = 32  # bytes, unless `general.alignment` is another number
MAX_DIMENSIONS = 4
MIN_ENTRY = 8  # bytes that the header has at least for a tensor, a setting or a string of an array
STRING, ARRAY = 8, 9  # types of metadata
#: Type of metadata -> format of `struct`, of those of a fixed size.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: The name of a part of a model that is split over files: stem, number, count.
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

Metadata = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor.

    Attributes:
      path: the file.
      name: the name in the file, such as ``blk.0.attn_q.weight``.
      shape: the shape with the contiguous dimension last, [out, in] of a projection.
      kind: the number of its type, see ``gguf.GGMLQuantizationType``.
      offset: of its first byte in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def block(self) -> tuple[int, int]:
        """The number of elements and the number of bytes of a block.

        Raises:
          CheckpointError: if the type is unknown, or rows are not divided by blocks.
        """
        import gguf

        if self.kind not in set(gguf.GGMLQuantizationType):
            raise CheckpointError(f"{self.name} in {self.path} is of type {self.kind}, which gguf does not know.")
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.kind)]
        if self.shape[-1] % elements:
            raise CheckpointError(
                f"{self.path} is damaged: rows of {self.name} have {self.shape[-1]} elements, not a multiple of "
                f"{elements}."
            )
        return elements, size

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        elements, size = self.block
        return math.prod(self.shape) // elements * size


@dataclasses.dataclass(frozen=True)
class Container:
    """A model in GGUF.

    Attributes:
      path: the file, or the first of several.
      metadata: key -> number, text, bool or list of these.
      tensors: name -> place.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


def read(path: Path) -> Container:
    """Reads the headers of a model's file, or of all its files, ``NAME-00001-of-00003.gguf`` and so on.

    Args:
      path: the file, or any one of several.

    Raises:
      CheckpointError: if a file is missing, damaged, truncated or of another format or version.
    """
    paths = [*parts(path)]
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(paths):
        found, places = _read(part)
        if number == 0:
            metadata = found
        if doubled := tensors.keys() & places.keys():
            raise CheckpointError(f"{part} contains {min(doubled)}, which is also in another part of the model.")
        tensors |= places
    if len(paths) > 1 and metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise CheckpointError(
            f"{paths[0]} declares {shown(metadata['split.tensors.count'])} tensors in {len(paths)} files, but there "
            f"are {len(tensors)}."
        )
    return Container(paths[0], metadata, tensors)


def parts(path: Path) -> Iterator[Path]:
    """Yields the files of a model, given one of them.

    Raises:
      CheckpointError: if one is missing.
    """
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named[2]) <= int(named[3]):
        yield path
        return
    stem, count = named[1], int(named[3])
    names = [f"{stem}-{number:05}-of-{named[3]}{SUFFIX}" for number in range(1, count + 1)]
    if absent := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(
            f"{path.name} is one of {count} files of a model, but {path.parent} lacks {len(absent)} of them, "
            f"{absent[0]} first. Was the download interrupted?"
        )
    yield from (path.parent / name for name in names)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Reads the header of one file."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            return _Header(path, file, total).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None


class _Header:
    """The header of a file, read from its beginning. Every length is compared with the file before it is used."""

    def __init__(self, path: Path, file: BinaryIO, total: int):
        self.path, self.file, self.total = path, file, total

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.bytes(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with {MAGIC.decode()}.")
        version = self.number("I")
        if version not in VERSIONS:
            reason = " (of a machine with the other byte order?)" if version & 0xFFFF == 0 else ""
            valid = " and ".join(map(str, VERSIONS))
            raise CheckpointError(f"{self.path} is GGUF of version {version}{reason}; kvjax reads versions {valid}.")
        tensors, settings = self.count("tensors"), self.count("settings")
        metadata: dict[str, Any] = {}
        for _ in range(settings):
            key = self.text()
            if key in metadata:
                raise self.damaged(f"its header has {shown(key)} twice")
            metadata[key] = self.value(self.number("I"), key)
        infos = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.damaged(f"general.alignment is {shown(alignment)}")
        data = -(-self.file.tell() // alignment) * alignment
        return metadata, self.placed(infos, data, alignment)

    def tensor(self) -> TensorInfo:
        """Reads the place of a tensor, whose offset is from the beginning of the data."""
        name, dimensions = self.text(), self.number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"{shown(name)} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        if max(shape) > MAX_ELEMENTS or not 0 < math.prod(shape) <= MAX_ELEMENTS:
            raise self.damaged(f"{shown(name)} has the shape {list(shape)}")
        return TensorInfo(self.path, name, shape, self.number("I"), self.number("Q"))

    def placed(self, infos: list[TensorInfo], data: int, alignment: int) -> dict[str, TensorInfo]:
        """Returns the tensors by name, with offsets from the beginning of the file.

        Raises:
          CheckpointError: if a tensor is beyond the end of the file, overlaps another or is not aligned.
        """
        found: dict[str, TensorInfo] = {}
        end, before = data, ""
        for info in sorted(infos, key=lambda info: info.offset):
            offset, size = data + info.offset, info.nbytes
            if info.name in found:
                raise self.damaged(f"its header has {shown(info.name)} twice")
            if info.offset % alignment:
                raise self.damaged(f"{info.name} begins at byte {info.offset}, not a multiple of {alignment}")
            if offset < end:
                raise self.damaged(f"{before} and {info.name} overlap")
            end, before = offset + size, info.name
            if end > self.total:
                raise CheckpointError(
                    f"{self.path} is truncated: {info.name} ends at byte {end}, but the file has {self.total}."
                )
            found[info.name] = dataclasses.replace(info, offset=offset)
        # In the order of the file.
        return {info.name: found[info.name] for info in infos}

    def value(self, kind: int, key: str) -> Any:
        """Reads a value of metadata."""
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.damaged(f"{shown(key)} has the type {kind}")
        each, count = self.number("I"), self.number("Q")
        if each in SCALARS:
            return list(struct.unpack(f"<{count}{SCALARS[each]}", self.bytes(count * struct.calcsize(SCALARS[each]))))
        if each != STRING:
            raise self.damaged(f"{shown(key)} is an array of the type {each}")
        self.room(count * MIN_ENTRY)
        return [self.text() for _ in range(count)]

    def text(self) -> str:
        """Reads a string."""
        content = self.bytes(self.number("Q"))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            # Vocabularies have tokens that are parts of characters.
            return content.decode("utf-8", "surrogateescape")

    def number(self, form: str) -> Any:
        (found,) = struct.unpack(f"<{form}", self.bytes(struct.calcsize(form)))
        return found

    def count(self, kind: str) -> int:
        """Reads how many entries follow."""
        found: int = self.number("Q")
        if found * MIN_ENTRY > self.total:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its header declares {found} {kind}, more than {self.total} "
                "bytes can hold."
            )
        return found

    def bytes(self, size: int) -> bytes:
        self.room(size)
        found = self.file.read(size)
        if len(found) < size:
            raise self.truncated()
        return found

    def room(self, size: int) -> None:
        """Raises CheckpointError if the file ends within the next bytes."""
        if size > self.total - self.file.tell():
            raise self.truncated()

    def truncated(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged: {self.total} bytes end inside its header.")

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {reason}.")
