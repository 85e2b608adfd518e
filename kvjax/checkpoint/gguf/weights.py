"""Tensors of a GGUF file under the names of Hugging Face checkpoints, dequantised piece by piece."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator

import numpy as np

from kvjax.checkpoint import names
from kvjax.checkpoint.gguf import codes
from kvjax.checkpoint.gguf.architectures import Architecture, architecture_of
from kvjax.checkpoint.gguf.container import Container, TensorInfo
from kvjax.checkpoint.gguf.elements import check_type, elements_of
from kvjax.checkpoint.readers import Range, Stored
from kvjax.errors import CheckpointError
from kvjax.models.config import DecoderConfig
from kvjax.products.quantized import QuantizedMatrix
from kvjax.typing import Foreign

#: Tensors that hold settings, which `architectures` reads, and no parameters.
SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: A tensor of one entry of a parameter, such as an expert's, which GGUF files stack.
_ENTRY = re.compile(r"(.*\.(?:experts|norms))\.(\d+)(\..*)")
ROTATED = {("attention", "query"), ("attention", "key")}


def tensors(container: Container, config: DecoderConfig) -> list[names.Tensor]:
    """Returns every tensor of a decoder, as `kvjax.checkpoint.names.tensors`, in the order that GGUF files have.

    llama.cpp turns pairs of neighbouring features in some architectures; their files have the outputs of query and key
    projections in that order.
    """
    found = names.tensors(config)
    if not architecture_of(container).neighbours:
        return found
    return [
        dataclasses.replace(tensor, neighbours=config.head_dim) if tensor.paths[0][1:3] in ROTATED else tensor
        for tensor in found
    ]


def stored(container: Container, config: DecoderConfig) -> list[Stored]:
    """Returns the tensors of a file: those that the decoder has under their names in Hugging Face checkpoints.

    Those that it does not have keep their names in the file.

    Raises:
      CheckpointError: if a tensor is of a type that kvjax does not read.
    """
    architecture, found, used = architecture_of(container), [], set()
    for tensor in names.tensors(config):
        name, index = _name_in_file(tensor.name, config.num_layers, architecture)
        if name in container.tensors:
            used.add(name)
            offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
            found.append(_stored(container.tensors[name], tensor, index, offset))
    rest = [info for name, info in container.tensors.items() if name not in used and name not in SETTINGS]
    return found + [_stored(info) for info in rest]


def coded(container: Container, config: DecoderConfig, tensor: names.Tensor) -> list[QuantizedMatrix] | None:
    """Reads the parameters of a tensor as the codes that the file has; None if it has none of that kind.

    Args:
      container: the file.
      config: the decoder.
      tensor: of `tensors`.
    """
    name, index = _name_in_file(tensor.name, config.num_layers, architecture_of(container))
    info = container.tensors.get(name)
    if info is None or codes.kind_of(info) not in codes.KEPT:
        return None
    return codes.read(info, tensor, index)


def _name_in_file(name: str, layers: int, architecture: Architecture) -> tuple[str, int | None]:
    """Converts the name of a tensor in Hugging Face checkpoints to the one in GGUF files.

    Returns:
      The name, and the index of the entry if the file stacks several tensors to one. A name that the package ``gguf``
      does not know stays as it is.
    """
    index = None
    if entry := _ENTRY.fullmatch(name):
        stem = entry[1].removesuffix(".norms")
        name, index = stem + entry[3], int(entry[2])
    found = _names(layers, architecture.name).get_name(name, try_suffixes=(".weight", ".bias"))
    return found or name, index


@functools.lru_cache(maxsize=4)
def _names(layers: int, architecture: str) -> Foreign:
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, layers)


def _stored(
    info: TensorInfo, tensor: names.Tensor | None = None, index: int | None = None, offset: float = 0.0
) -> Stored:
    """Returns a tensor, or one entry of a stack.

    Args:
      info: the place in the file.
      tensor: the tensor of the decoder, None for one that it does not have.
      index: of the entry, None for the whole tensor.
      offset: what the file adds to each number.
    """
    check_type(info)
    layout = info.shape if index is None else info.shape[1:]
    if index is not None and index >= info.shape[0]:
        raise CheckpointError(f"{info.name} in {info.path} is {list(info.shape)}, and has no entry {index}.")
    # Vectors have one dimension in the file, whatever the decoder calls them.
    size = int(np.prod(layout))
    start = (index or 0) * size

    def pieces(ranges: Iterable[Range]) -> Iterator[np.ndarray]:
        for first, last in ranges:
            for piece in elements_of(info, start + first, start + last):
                yield piece - np.float32(offset) if offset else piece

    return Stored(tensor.name if tensor else info.name, info.path.name, layout, "F32", pieces)
