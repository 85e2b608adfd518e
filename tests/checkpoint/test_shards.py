"""The shards that a process reads are those parts of the whole parameters, and no other bytes are read for them."""

import dataclasses
import math
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.checkpoint import names, readers, shards
from kvjax.models import families
from tests.checkpoint import folders


@dataclasses.dataclass(frozen=True)
class Devices:
    """As much of a sharding as `shards.read` looks at: this process has one device, which holds a half of one axis."""

    axis: int
    half: int

    def index(self, shape):
        size = shape[self.axis]
        start, stop = self.half * size // 2, (self.half + 1) * size // 2
        return tuple(
            slice(start, stop) if axis == self.axis % len(shape) else slice(None) for axis in range(len(shape))
        )

    def addressable_devices_indices_map(self, shape):
        return {"a device": self.index(shape), "one of the same shard": self.index(shape)}


# Plain; fused and [in, out]; fused by head; pairs of neighbours; fused in order; experts.
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "cohere", "phi3", "mixtral"])
def test_shards_are_parts_of_the_whole(family, tmp_path, monkeypatch):
    config = families.read(folders.raw_config(family))
    params, bytes_read = folders.random_params(config), []
    save_file(folders.tensors(config, params), tmp_path / "model.safetensors")
    stored = readers.safetensors(tmp_path / "model.safetensors")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: bytes_read.append(size) or pread(file, size, at))
    for tensor in names.tensors(config):
        # Projections are divided between heads of four features, and inputs anywhere.
        for axis in (-1, -2)[: len(tensor.shapes[0])]:
            for half in (0, 1):
                places = [Devices(axis, half)] * len(tensor.paths)
                bytes_read.clear()
                found = shards.read(tensor, stored[tensor.name], np.dtype(np.float32), places)
                for path, shape, own, place in zip(tensor.paths, tensor.shapes, found, places, strict=True):
                    whole = folders.get(params, path)
                    whole = whole[tensor.index] if tensor.stack else whole
                    (part,) = own.parts
                    np.testing.assert_array_equal(part, whole[place.index(shape)])
                    assert part.flags.c_contiguous and own.shape == shape
                needed = sum(4 * math.prod(part.shape) for each in found for part in each.parts)
                assert sum(bytes_read) == needed, tensor.name


@pytest.mark.parametrize("transposed", [False, True])
def test_a_block_of_a_tensor(transposed):
    array = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    asked = []

    def pieces(ranges):
        for start, stop in ranges:
            asked.append((start, stop))
            yield array.reshape(-1)[start:stop]

    stored = readers.Stored("x", "file", (6, 8), "F32", pieces, transposed)
    whole = array.T if transposed else array
    ranges = [[(1, 2), (4, 6)], [(0, 3), (5, 6)]]
    rows, columns = ([i for first, last in each for i in range(first, last)] for each in ranges)
    for flip in (False, True):
        part = stored.read_block(ranges, np.dtype(np.float32), transposed_memory=flip)
        np.testing.assert_array_equal(part, whole[np.ix_(rows, columns)])
        np.testing.assert_array_equal(stored.read(np.dtype(np.float32), transposed_memory=flip), whole)
    # What lies together is read at once.
    asked.clear()
    stored.read_block([[(0, 6)], [(0, 8)]] if not transposed else [[(0, 8)], [(0, 6)]], np.dtype(np.float32))
    stored.read_block([[(0, 8)], [(1, 3)]] if transposed else [[(1, 3)], [(0, 8)]], np.dtype(np.float32))
    assert asked == [(0, 48), (8, 24)]
