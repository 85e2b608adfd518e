"""Matrices of GGUF files whose codes are kept as they are: Q8_0, Q4_0 and Q4_1, in groups of 32 inputs.

A block has 32 inputs of one output: a float16 scale d, for Q4_1 a float16 minimum m too, and the codes q. A weight is
d · q (Q8_0), d · (q - 8) (Q4_0) or d · q + m (Q4_1). Two codes of 4 bits share a byte as in
`kvjax.products.quantized.QuantizedMatrix`: byte r has those of inputs r and 16 + r.
"""

from typing import Any

import numpy as np

from kvjax.checkpoint import names
from kvjax.checkpoint.gguf.container import TensorInfo
from kvjax.checkpoint.memory import own
from kvjax.checkpoint.readers import read_exactly
from kvjax.errors import CheckpointError
from kvjax.products.quantized import QuantizedMatrix

#: Type -> bits of a code, and the code of 0 (of Q4_1 each group has its own).
KEPT = {"Q8_0": (8, 128), "Q4_0": (4, 8), "Q4_1": (4, None)}
_SIGN = np.uint8(0x80)  # the bit whose change makes of a signed number the unsigned one that is 128 larger


def kind_of(info: TensorInfo) -> str:
    """Returns the name of a tensor's type."""
    import gguf

    return str(gguf.GGMLQuantizationType(info.kind).name)


def read(info: TensorInfo, tensor: names.Tensor, index: int | None) -> list[QuantizedMatrix]:
    """Reads the parameters of a tensor.

    Args:
      info: the place in the file, of a type of `KEPT`.
      tensor: the tensor of the decoder.
      index: of the entry of a stack, None for the whole tensor.
    """
    elements, size = info.block
    bits, code_of_zero = KEPT[kind_of(info)]
    outputs, inputs = info.shape[-2:]
    count = outputs * inputs // elements
    with info.path.open("rb", buffering=0) as file:
        offset = info.offset + (index or 0) * count * size
        data = read_exactly(file.fileno(), info.path, offset, count * size)
    # [out, G, bytes]
    blocks = data.reshape(outputs, inputs // elements, size)
    ends = 4 if code_of_zero is None else 2
    # [out, G]
    scale = _halves(info, blocks[..., :2])
    # [G, bytes of codes, out]
    codes = blocks[..., ends:].transpose(1, 2, 0)
    if bits == 8:  # signed, in the file
        codes = codes ^ _SIGN
    if code_of_zero is None:
        low = _halves(info, blocks[..., 2:4])
        # Without a scale all numbers of a group are its minimum: 1 times (0 + minimum), whatever the codes.
        flat = scale == 0
        codes = np.where(flat.T[:, None], np.uint8(0), codes)
        scale = np.where(flat, np.float32(1), scale)
        zero = -low / scale
    else:
        zero = np.full(scale.shape, code_of_zero, np.uint8)
    arrays = (codes, scale.T, zero.T)
    split = [tensor.split_outputs(each) for each in arrays] if tensor.rearranged else [[each] for each in arrays]
    made: list[Any] = [
        dict(zip(("codes", "scale", "zero"), map(own, each), strict=True)) for each in zip(*split, strict=True)
    ]
    return [QuantizedMatrix(bits=bits, **each) for each in made]


def _halves(info: TensorInfo, stored: np.ndarray) -> np.ndarray:
    """Converts float16 numbers of blocks, [out, G, 2] bytes, to [out, G] float32.

    Raises:
      CheckpointError: if one is NaN or infinite.
    """
    found = np.ascontiguousarray(stored).view(np.float16)[..., 0].astype(np.float32)
    if not np.isfinite(found).all():
        raise CheckpointError(f"{info.name} in {info.path} holds NaN or infinity: the checkpoint is damaged.")
    return found
