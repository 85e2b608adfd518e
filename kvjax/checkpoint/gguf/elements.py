"""Elements of GGUF tensors, dequantised some blocks at a time. A block has 1, 32 or 256 elements of a row."""

from collections.abc import Iterator

import numpy as np

from kvjax.checkpoint.gguf.container import Container, TensorInfo
from kvjax.checkpoint.readers import PIECE, read_exactly
from kvjax.errors import CheckpointError

#: Types of tensors that kvjax reads, by their names in ``gguf.GGMLQuantizationType``.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def check_type(info: TensorInfo) -> None:
    """Raises CheckpointError if a tensor is of a type that kvjax does not read."""
    import gguf

    if (kind := gguf.GGMLQuantizationType(info.kind).name) not in TYPES:
        raise CheckpointError(
            f"{info.name} in {info.path} is of type {kind}, which kvjax does not read; it reads {', '.join(TYPES)}."
        )


def elements_of(info: TensorInfo, first: int, last: int) -> Iterator[np.ndarray]:
    """Yields elements of a tensor by their flat indices, as float32.

    Args:
      info: the tensor.
      first: index of the first element.
      last: index after the last element.
    """
    import gguf

    elements, size = info.block
    kind = gguf.GGMLQuantizationType(info.kind)
    at, end = first // elements, -(-last // elements)
    # Without a buffer, which would read more than is asked for.
    with info.path.open("rb", buffering=0) as file:
        while at < end:
            count = min(max(PIECE // elements, 1), end - at)
            data = read_exactly(file.fileno(), info.path, info.offset + at * size, count * size)
            # What is not finite is an error of the reader, which names the tensor.
            with np.errstate(over="ignore", invalid="ignore"):
                # [count * elements]
                piece = gguf.quants.dequantize(data.reshape(1, -1), kind).reshape(-1)
            yield piece[max(first - at * elements, 0) : last - at * elements]
            at += count


def vector(container: Container, name: str) -> list[float] | None:
    """Reads a tensor of a few numbers; None if the file has none of that name."""
    if (info := container.tensors.get(name)) is None:
        return None
    check_type(info)
    return [float(x) for piece in elements_of(info, 0, info.shape[-1]) for x in piece]
