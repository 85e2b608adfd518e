"""The files that hold weights, opened without reading them: every format becomes a dict of `Stored` tensors.

A tensor is read in pieces of a few megabytes, each converted to the target dtype on arrival, so that nothing but the
tensor itself is ever held, whatever dtype it is stored in.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.checkpoint.memory import aligned
from kvjax.checkpoint.msgpack import msgpack_arrays
from kvjax.errors import CheckpointError

PIECE = 1 << 20  # elements read at a time
FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
#: Bytes an element, of the dtypes that only buffers and quantised weights have.
_OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8}
_OTHERS |= {"U64": 8, "F8_E8M0": 1, "C64": 8}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
      name: in the file; file: the file's name, for errors.
      layout: shape of the stored elements; transposed: the tensor is their transpose (Flax's kernels).
      dtype: name of the stored dtype, a key of `FLOATS` if kvjax can read it.
      pieces: the elements in order, as one-dimensional arrays.
    """

    name: str
    file: str
    layout: tuple[int, ...]
    dtype: str
    pieces: Callable[[], Iterator[np.ndarray]]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout[::-1] if self.transposed else self.layout

    def read(self, dtype: np.dtype, *, transposed_memory: bool = False) -> np.ndarray:
        """The tensor in `dtype`; on request a matrix whose transpose is the contiguous one.

        Raises:
          CheckpointError: not floating point, NaN or infinite in the file, or beyond the range of `dtype`.
        """
        if self.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.name} in {self.file} is stored as {self.dtype}; kvjax reads {', '.join(FLOATS)}, and no "
                "quantised weights."
            )
        # A matrix that is wanted the other way round is written so piece by piece: it never exists twice.
        flip = transposed_memory and not self.transposed and len(self.layout) == 2
        array = aligned(self.layout[::-1], dtype).T if flip else aligned(self.layout, dtype)
        start = 0
        for piece in self.pieces():
            with np.errstate(over="ignore"):
                converted = piece.astype(dtype, copy=False)
            if not np.isfinite(converted).all():
                at = "holds NaN or infinity" if not np.isfinite(piece).all() else f"holds values beyond {dtype.name}"
                raise CheckpointError(f"{self.name} in {self.file} {at}: the checkpoint is damaged or was badly cast.")
            _fill(array, start, converted)
            start += piece.size
        return array.T if self.transposed else array


def _fill(array: np.ndarray, start: int, values: np.ndarray) -> None:
    """Writes consecutive elements from the flat index `start` on; `array` may lie in memory in any order."""
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


def _from_file(path: Path, dtype: np.dtype, extents: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The elements at (offset, bytes) of a file, a piece at a time; read rather than mapped, to hold no pages."""
    with path.open("rb") as file:
        for offset, size in extents:
            file.seek(offset)
            left = size // dtype.itemsize
            while left:
                wanted = min(left, PIECE) * dtype.itemsize
                data = file.read(wanted)
                if len(data) < wanted:
                    raise CheckpointError(f"{path} ended while it was read: is it still being written?")
                left -= wanted // dtype.itemsize
                yield np.frombuffer(data, np.uint8).view(dtype)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
      CheckpointError: absent, unreadable or something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}): it may be truncated or damaged.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but holds a {type(value).__name__}.")
    return value


def safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON header, the data.

    Raises:
      CheckpointError: truncated, or a header that contradicts itself or the file.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > total - 8:
            raise CheckpointError(f"{path} is no whole safetensors file: {total} bytes end inside its header.")
        try:
            header = json.loads(file.read(length).decode("utf-8"))
            if not isinstance(header, dict):
                raise ValueError("no object")  # caught below
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path} is damaged: its safetensors header is no JSON object.") from None
    header.pop("__metadata__", None)
    data, found, end = 8 + length, {}, 0
    for name, entry in header.items():
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            size = FLOATS[dtype].itemsize if dtype in FLOATS else _OTHERS[dtype]
            sound = all(isinstance(n, int) and n >= 0 for n in (*shape, first, last))
            if not sound or last - first != math.prod(shape) * size:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path} is damaged: its header describes {name} as {json.dumps(entry)[:200]}, which contradicts "
                "itself."
            ) from None
        end = max(end, last)
        found[name] = _stored(name, path, shape, dtype, [(data + first, last - first)])
    if data + end != total:
        what = "truncated" if data + end > total else "damaged"
        raise CheckpointError(f"{path} is {what}: its header promises {data + end} bytes, but it has {total}.")
    return found


def _stored(name: str, path: Path, shape: tuple[int, ...], dtype: str, extents: list[tuple[int, int]]) -> Stored:
    return Stored(name, path.name, shape, dtype, lambda: _from_file(path, FLOATS[dtype], extents))


_NUMPY = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def flax(path: Path) -> dict[str, Stored]:
    """The tensors of a flax_model.msgpack, under the names that the PyTorch model has.

    Flax calls an embedding's table ``embedding``, a norm's weight ``scale``, and stores a linear layer's weight as
    ``kernel`` [in, out].

    Raises:
      CheckpointError: truncated or damaged.
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
    """The tensors of a pytorch_model.bin, mapped into memory; nothing but weights is ever unpickled.

    Raises:
      CheckpointError: torch is not installed, or the file is damaged or holds something else than weights.
    """
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} is a PyTorch file, which needs torch: pip install 'kvjax[bench]' or torch, or use a checkpoint in "
            "safetensors or Flax's format."
        ) from None

    def load(mmap: bool) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
        tensors = load(mmap=zipped)  # files of torch before 1.6 cannot be mapped
    except Exception as error:  # torch raises all sorts for a damaged file
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{path} is no readable PyTorch weights file ({type(error).__name__}: {reason}): it may be truncated or "
            "damaged, or hold more than weights, which kvjax does not unpickle."
        ) from None
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} must hold a dict of tensors by name.")

    def pieces(tensor: Any) -> Iterator[np.ndarray]:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            piece = flat[start : start + PIECE]
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
            lambda tensor=tensor: pieces(tensor),  # type: ignore[misc]
        )
        for name, tensor in tensors.items()
    }
