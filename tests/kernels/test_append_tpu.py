"""The kernel that writes one slot per head of coded arrays: interpreted, races detected, against XLA's scatter."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode import append_tpu
from kvjax.parallel import host_memory

BATCH, KV_HEADS, SLOTS = 2, 3, 256
#: Bytes with slots along the lanes and along the rows; scales of two groups, and of whole vectors.
NUMBERS = [((64,), jnp.uint8), ((128,), jnp.uint8), ((2,), jnp.bfloat16), ((2,), jnp.float32), ((), jnp.bfloat16)]


def test_slots_are_those_of_xla(interpreted):
    rng = np.random.default_rng(0)

    def some(slots):
        made = [rng.integers(0, 256, (BATCH, KV_HEADS, slots, *shape)) for shape, _ in NUMBERS]
        return [jnp.asarray(x, dtype) for x, (_, dtype) in zip(made, NUMBERS, strict=True)]

    arrays, new = some(SLOTS), some(1)
    # Two heads have no slot to write to.
    slots = jnp.asarray([[[0], [130], [SLOTS]], [[SLOTS - 1], [SLOTS], [33]]], jnp.int32)
    got = jax.jit(append_tpu.write)(arrays, slots, new)
    for ours, x, one in zip(got, arrays, new, strict=True):
        np.testing.assert_array_equal(ours, host_memory.write(x, slots, one))
