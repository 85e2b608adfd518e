"""Readers of weight files. Opening a file of any format returns a dict of `Stored` tensors, without reading them.

A tensor is read in pieces of a few megabytes, and each piece is converted to the target dtype at once. The tensor
therefore never exists in memory in both dtypes.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.checkpoint.memory import aligned
from kvjax.checkpoint.msgpack import msgpack_arrays
from kvjax.errors import CheckpointError, shown
from kvjax.models.values import MAX_ELEMENTS, Json

Range = tuple[int, int]  # from the first index to before the last
PIECE = 1 << 20  # elements per piece
MAX_REASON = 200  # characters of a library's message, or of a header's entry, that an error quotes
ZIP_MAGIC = b"PK\x03\x04"  # first bytes of a zip archive
LENGTH_BYTES = 8  # size of the length at the start of a safetensors file
MAX_HEADER = 100_000_000  # bytes of a safetensors header, as in the safetensors library
#: Names of the dtypes that kvjax reads, as in safetensors.
FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGER = "I32"  # the dtype of packed codes
READ = FLOATS | {INTEGER: np.dtype(np.int32)}
#: Bytes per element of the other dtypes, which only buffers and quantised weights have.
_OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8}
_OTHERS |= {"U64": 8, "F8_E8M0": 1, "C64": 8}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
      name: name of the tensor in the file.
      file: name of the file, for messages.
      layout: shape of the stored array.
      dtype: name of the stored dtype; a key of `FLOATS` if kvjax can read it.
      pieces: returns the elements of ranges of flat indices in order, as one-dimensional arrays.
      transposed: whether the tensor is the transpose of the stored array (kernels of Flax).
    """

    name: str
    file: str
    layout: tuple[int, ...]
    dtype: str
    pieces: Callable[[Iterable[Range]], Iterator[np.ndarray]]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.layout[::-1] if self.transposed else self.layout

    def read(self, dtype: np.dtype, *, transposed_memory: bool = False) -> np.ndarray:
        """Reads the tensor.

        Args:
          dtype: of the result.
          transposed_memory: whether the transpose of a matrix, instead of the matrix itself, is to be contiguous.

        Raises:
          CheckpointError: if the stored dtype is not a floating-point one, or an element is NaN, infinite or out of the
            range of `dtype`.
        """
        return self.read_block([[(0, size)] for size in self.shape], dtype, transposed_memory=transposed_memory)

    def read_block(
        self, ranges: Sequence[Sequence[Range]], dtype: np.dtype, *, transposed_memory: bool = False
    ) -> np.ndarray:
        """Reads a part of the tensor, and no other bytes.

        Args:
          ranges: for each axis, the indices that are read, as ranges in ascending order.
          dtype: see `read`.
          transposed_memory: see `read`.

        Raises:
          CheckpointError: see `read`.
        """
        if self.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.name} in {self.file} is stored as {self.dtype}; kvjax reads {', '.join(FLOATS)}, and quantized "
                "weights of folders whose config.json says that they are GPTQ's or AWQ's."
            )
        ranges = ranges[::-1] if self.transposed else ranges
        layout = tuple(sum(stop - start for start, stop in each) for each in ranges)
        # Each piece is written to its transposed place, so that the matrix never exists in both memory orders.
        flip = transposed_memory and not self.transposed and len(layout) == 2
        array = aligned(layout[::-1], dtype).T if flip else aligned(layout, dtype)
        start = 0
        for piece in self.pieces(_flat(ranges, self.layout)):
            with np.errstate(over="ignore"):
                converted = piece.astype(dtype, copy=False)
            if not np.isfinite(converted).all():
                at = "holds NaN or infinity" if not np.isfinite(piece).all() else f"holds values beyond {dtype.name}"
                raise CheckpointError(f"{self.name} in {self.file} {at}: the checkpoint is damaged or was badly cast.")
            _fill(array, start, converted)
            start += piece.size
        return array.T if self.transposed else array

    def read_integers(self) -> np.ndarray:
        """Reads a tensor of packed codes, or of indices.

        Raises:
          CheckpointError: if it is not stored as int32.
        """
        if self.dtype != INTEGER:
            raise CheckpointError(f"{self.name} in {self.file} is stored as {self.dtype}; it must be {INTEGER}.")
        array, start = aligned(self.layout, READ[INTEGER]), 0
        for piece in self.pieces([(0, math.prod(self.layout))]):
            _fill(array, start, piece)
            start += piece.size
        return array


def _fill(array: np.ndarray, start: int, values: np.ndarray) -> None:
    """Writes consecutive elements.

    Args:
      array: the array to write to, with any memory order.
      start: flat index of the first element.
      values: the elements, one-dimensional.
    """
    if array.flags.c_contiguous:
        array.reshape(-1)[start : start + values.size] = values
        return
    columns = array.shape[1]
    while values.size:
        row, column = divmod(start, columns)
        rows = 0 if column else values.size // columns
        count = rows * columns or min(columns - column, values.size)
        if rows:
            array[row : row + rows] = values[:count].reshape(rows, columns)
        else:
            array[row, column : column + count] = values[:count]
        start, values = start + count, values[count:]


def _flat(ranges: Sequence[Sequence[Range]], layout: Sequence[int]) -> Iterator[Range]:
    """Yields the flat indices of a part of an array: ranges in ascending order that do not touch.

    Args:
      ranges: for each axis, see `Stored.read_block`.
      layout: the shape of the array.
    """

    def of_axes(ranges: Sequence[Sequence[Range]], layout: Sequence[int]) -> Iterator[Range]:
        if not layout:
            yield 0, 1
            return
        inner, size = list(of_axes(ranges[1:], layout[1:])), math.prod(layout[1:])
        for first, last in ranges[0]:
            if inner == [(0, size)]:
                yield first * size, last * size
                continue
            for index in range(first, last):
                yield from ((index * size + start, index * size + stop) for start, stop in inner)

    begun: Range | None = None
    for start, stop in of_axes(ranges, layout):
        if begun is not None and begun[1] == start:
            begun = begun[0], stop
            continue
        if begun is not None:
            yield begun
        begun = start, stop
    if begun is not None:
        yield begun


def _from_file(
    path: Path, dtype: np.dtype, extents: list[tuple[int, int]], ranges: Iterable[Range]
) -> Iterator[np.ndarray]:
    """Yields elements of an array, piece by piece. Reads the file instead of mapping it, to keep no pages.

    Args:
      path: the file.
      dtype: of the elements.
      extents: the offset and the size in bytes of each chunk of the array.
      ranges: of flat indices, in ascending order.
    """
    # Without a buffer, which would read more than is asked for.
    with path.open("rb", buffering=0) as file:
        for start, stop in ranges:
            begin, end, before = start * dtype.itemsize, stop * dtype.itemsize, 0
            for offset, extent in extents:
                first, last = max(begin - before, 0), min(end - before, extent)
                for at in range(first, last, PIECE * dtype.itemsize):
                    yield read_exactly(file.fileno(), path, offset + at, min(PIECE * dtype.itemsize, last - at)).view(
                        dtype
                    )
                before += extent


def read_exactly(file: int, path: Path, offset: int, size: int) -> np.ndarray:
    """Reads bytes of an open file: [size] uint8."""
    data = os.pread(file, size, offset)
    while len(data) < size:
        if not (more := os.pread(file, size - len(data), offset + len(data))):
            raise CheckpointError(f"{path} ended while it was read: is it still being written?")
        data += more
    return np.frombuffer(data, np.uint8)


def read_json(path: Path) -> Json:
    """Reads a JSON object from a file.

    Args:
      path: the file.

    Raises:
      CheckpointError: if the file is missing or unreadable, or holds anything else than an object.
    """
    try:
        return json_object(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None


def json_object(content: bytes, where: Path) -> Json:
    """Parses a JSON object.

    Args:
      content: of a file.
      where: the file, for messages.

    Raises:
      CheckpointError: if the content is anything else than an object.
    """
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}): it may be truncated or damaged.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, but holds a {type(value).__name__}.")
    return value


def safetensors(path: Path) -> dict[str, Stored]:
    """Opens a safetensors file, which consists of the length of the header in 8 bytes, a JSON header and the data.

    As in the safetensors library, each byte of the data belongs to exactly one tensor: a header under which tensors
    overlap, or leave bytes out, would give some of them the values of others.

    Args:
      path: the file.

    Returns:
      Name -> tensor.

    Raises:
      CheckpointError: if the file is truncated, or its header is inconsistent with itself or with the file.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if total < LENGTH_BYTES or length > total - LENGTH_BYTES:
            raise CheckpointError(f"{path} is not a complete safetensors file: {total} bytes end inside its header.")
        if length > MAX_HEADER:
            raise CheckpointError(f"{path} is damaged: its safetensors header has {length} bytes, over {MAX_HEADER}.")
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_without_doubles)
            if not isinstance(header, dict):
                raise ValueError("no object")  # converted to a CheckpointError below
        except _Doubled as error:
            raise CheckpointError(
                f"{path} is damaged: its safetensors header has {shown(error.args[0])} twice."
            ) from None
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path} is damaged: its safetensors header is not a JSON object.") from None
    about = header.pop("__metadata__", None) or {}
    if not isinstance(about, dict) or not all(isinstance(each, str) for each in about.values()):
        raise CheckpointError(f"{path} is damaged: __metadata__ of its header must be texts, but is {shown(about)}.")
    data, found, end = LENGTH_BYTES + length, {}, 0
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            size = FLOATS[dtype].itemsize if dtype in FLOATS else _OTHERS[dtype]
            sound = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, first, last))
            # Sizes of a damaged header may be of any length: no product of them is computed beyond the file.
            if not sound or max((0, *shape)) > MAX_ELEMENTS or last - first != math.prod(shape) * size:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path} is damaged: its header describes {name} as {json.dumps(entry)[:MAX_REASON]}, which "
                "is inconsistent."
            ) from None
        end = max(end, last)
        spans.append((first, last, name))
        found[name] = _stored(name, path, shape, dtype, [(data + first, last - first)])
    if data + end != total:
        what = "truncated" if data + end > total else "damaged"
        raise CheckpointError(f"{path} is {what}: its header declares {data + end} bytes, but it has {total}.")
    _check_spans(path, spans)
    return found


class _Doubled(ValueError):
    """A key that a JSON object has twice."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> Json:
    """Returns a JSON object of which no key is there twice."""
    found: Json = {}
    for key, value in pairs:
        if key in found:
            raise _Doubled(key)
        found[key] = value
    return found


def _check_spans(path: Path, spans: list[tuple[int, int, str]]) -> None:
    """Checks that tensors follow each other without an overlap or a gap.

    Args:
      path: the file.
      spans: the first offset in the data, that after the last, and the name of each tensor.

    Raises:
      CheckpointError: they do not; the message names the tensors.
    """
    end, before = 0, ""
    for first, last, name in sorted(spans):
        if first < end:
            raise CheckpointError(
                f"{path} is damaged: {before} and {name} overlap; by its header the first ends at byte {end} of the "
                f"data, and the second spans bytes {first} to {last}."
            )
        if first > end:
            where = f"between {before} and {name}" if before else f"before {name}"
            raise CheckpointError(f"{path} is damaged: bytes {end} to {first} of its data, {where}, are in no tensor.")
        end, before = last, name


def _stored(name: str, path: Path, shape: tuple[int, ...], dtype: str, extents: list[tuple[int, int]]) -> Stored:
    """Returns the tensor at the given offsets of a file."""
    return Stored(name, path.name, shape, dtype, lambda ranges: _from_file(path, READ[dtype], extents, ranges))


#: Name of a NumPy dtype -> its name in safetensors.
_NUMPY = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": INTEGER}


def flax(path: Path) -> dict[str, Stored]:
    """Opens a flax_model.msgpack file.

    Flax calls the table of an embedding ``embedding``, the weight of a norm ``scale`` and the weight of a linear layer
    ``kernel``, which it stores [in, out].

    Args:
      path: the file.

    Returns:
      Name in the PyTorch model -> tensor.

    Raises:
      CheckpointError: if the file is truncated or damaged.
    """
    found = {}
    for keys, array in msgpack_arrays(path).items():
        keys = tuple(part for key in keys for part in key.split("/"))
        *module, leaf = keys[1:] if keys[0] == "params" else keys
        name = ".".join([*module, "weight" if leaf in ("kernel", "embedding", "scale") else leaf])
        dtype = _NUMPY.get(array.dtype, array.dtype)
        size = sum(size for _, size in array.extents)
        if dtype in FLOATS and size != math.prod(array.shape) * FLOATS[dtype].itemsize:
            raise CheckpointError(
                f"{path} is damaged: {name} of shape {list(array.shape)} has {size} bytes of {dtype}."
            )
        stored = _stored(name, path, array.shape, dtype, array.extents)
        found[name] = dataclasses.replace(stored, transposed=leaf == "kernel")
    return found


def pytorch(path: Path) -> dict[str, Stored]:
    """Opens a pytorch_model.bin file and maps it into memory. Unpickles only tensors, never other objects.

    Args:
      path: the file.

    Returns:
      Name -> tensor.

    Raises:
      CheckpointError: if torch is not installed, or the file is damaged or holds anything else than tensors.
    """
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} is a PyTorch file, which needs torch: pip install 'kvjax[torch]', or use a checkpoint in "
            "safetensors or Flax's format."
        ) from None

    try:
        with path.open("rb") as file:
            zipped = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        # Files of torch before 1.6 are not zip archives and cannot be mapped.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch raises errors of many types for a damaged file
        reason = str(error).strip().split("\n")[0][:MAX_REASON]
        raise CheckpointError(
            f"{path} is not a readable PyTorch weights file ({type(error).__name__}: {reason}): it may be truncated or "
            "damaged, or hold more than weights, which kvjax does not unpickle."
        ) from None
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} must hold a dict of tensors by name.")

    def pieces(tensor: torch.Tensor, ranges: Iterable[Range]) -> Iterator[np.ndarray]:
        # [elements]
        flat = tensor.detach().reshape(-1)
        for begin, end in ranges:
            for start in range(begin, end, PIECE):
                piece = flat[start : min(start + PIECE, end)]
                if piece.dtype == torch.bfloat16:
                    yield piece.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
                else:
                    yield piece.numpy()

    return {
        name: Stored(
            name,
            path.name,
            tuple(tensor.shape),
            _NUMPY.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype)),
            lambda ranges, tensor=tensor: pieces(tensor, ranges),  # type: ignore[misc]
        )
        for name, tensor in tensors.items()
    }
