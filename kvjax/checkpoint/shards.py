"""Reads the parts of parameters that this process's devices hold, where a mesh spans several processes.

Each process reads the bytes of its own shards, and none is sent to another.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from kvjax.checkpoint.memory import own
from kvjax.checkpoint.names import Shape, Tensor
from kvjax.checkpoint.readers import Range, Stored

Key = tuple[Range, ...]  # the indices of a shard, by axis


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["keys", "shape"])
@dataclasses.dataclass
class Shards:
    """The shards of a parameter, or of one entry of a stack of parameters, that this process needs.

    Attributes:
      parts: their elements; of a stack [stack, ...] each.
      keys: their indices on the axes of `shape`.
      shape: of the parameter or of the entry.
    """

    parts: list[np.ndarray]
    keys: tuple[Key, ...]
    shape: Shape

    @property
    def whole(self) -> Shape:
        """The shape of the parameter, with the axis of the stack."""
        return (*self.parts[0].shape[: self.parts[0].ndim - len(self.shape)], *self.shape)

    def assemble(self, place: Sharding) -> jax.Array:
        """Moves the shards to this process's devices; every process must call it.

        Args:
          place: the sharding of the whole parameter, by which the shards were chosen.
        """
        known = dict(zip(self.keys, self.parts, strict=True))

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return known[_key(index[-len(self.shape) :], self.shape)]

        return jax.make_array_from_callback(self.whole, place, part, dtype=self.parts[0].dtype)


def read(tensor: Tensor, stored: Stored, dtype: np.dtype, places: Sequence[Sharding]) -> list[Shards]:
    """Reads what this process needs of a tensor of a checkpoint.

    Args:
      tensor: the tensor.
      stored: where it is.
      dtype: of the result.
      places: the sharding of each of its parameters.

    Returns:
      The shards of each parameter.

    Raises:
      CheckpointError: see `Stored.read`.
    """
    found = []
    for number, (shape, place) in enumerate(zip(tensor.shapes, places, strict=True)):
        whole = (tensor.stack, *shape) if tensor.stack else shape
        indices = place.addressable_devices_indices_map(whole).values()
        # Devices that hold the same shard share what is read.
        keys = tuple(
            dict.fromkeys(_key(index[len(whole) - len(shape) :], shape) for index in indices if index is not None)
        )
        found.append(Shards([_read(tensor, stored, dtype, number, key) for key in keys], keys, shape))
    return found


def _key(index: Sequence[slice], shape: Shape) -> Key:
    """The indices of a shard."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _read(tensor: Tensor, stored: Stored, dtype: np.dtype, number: int, key: Key) -> np.ndarray:
    """Reads a shard of the parameter of a number."""
    *inputs, (first, last) = key
    # Pairs of a head are read together.
    unit = tensor.neighbours or 1
    begin, end = first // unit * unit, -(-last // unit) * unit
    outputs = list(_outputs(tensor, number, begin, end))
    ranges = [*([each] for each in inputs), outputs]
    array = stored.read_block(
        ranges[::-1] if tensor.out_first else ranges, dtype, transposed_memory=tensor.out_first and not unit > 1
    )
    # [in, out] or [out]
    array = array.T if tensor.out_first else array
    if unit > 1:
        # [..., heads, D / 2, 2] -> [..., heads, 2, D / 2]
        pairs = array.reshape(*array.shape[:-1], -1, unit // 2, 2).swapaxes(-1, -2)
        array = pairs.reshape(*array.shape)[..., first - begin : last - begin]
    return array if array.flags.c_contiguous else own(array)


def _outputs(tensor: Tensor, number: int, first: int, last: int) -> Iterator[Range]:
    """The outputs of the tensor that are those of one of its parameters, see `Tensor.split_outputs`."""
    if not tensor.heads:
        before = sum(shape[-1] for shape in tensor.shapes[:number])
        yield before + first, before + last
        return
    dim = tensor.shapes[number][-1] // tensor.heads
    for head in range(first // dim, -(-last // dim)):
        # The features of a head follow those of the same head of the parameters before.
        before = (head * len(tensor.paths) + number - head) * dim
        yield before + max(first, head * dim), before + min(last, (head + 1) * dim)
