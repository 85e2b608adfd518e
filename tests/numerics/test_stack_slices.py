"""Functions on slices of stacks, against the same functions on arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax.numerics import stack_slices
from kvjax.numerics.slices import Slice, is_slice
from kvjax.parallel.host_memory import write

BATCH, LAYERS, HEADS, SLOTS, DIM = 2, 3, 2, 5, 4


@pytest.fixture
def stack() -> jax.Array:
    # [B, L, K, S, D]
    return jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LAYERS, HEADS, SLOTS, DIM)), jnp.float32)


def written(x, slots, new):
    return write(x, slots, new)


def read(x, slots, new):
    return jnp.where(slots[..., None] == 1, new, x[:, :, :1] + 1)


def by_platform(x, slots, new):
    return lax.platform_dependent(x, tpu=lambda x: x * 0, default=lambda x: write(x, slots, new))


def by_data(x, slots, new):
    """Alternatives of which one reads the stack."""
    return lax.cond(slots[0, 0, 0] == 1, lambda x: x * 2 + new[0, 0, 0], lambda x: x - 1, x)


def written_by_data(x, slots, new):
    return lax.cond(slots[0, 0, 0] == 1, lambda x: write(x, slots, new), lambda x: x, x)


def padded_by_nothing(x, slots, new):
    return written(jnp.pad(x, ((0, 0),) * x.ndim), slots, new)


def jitted(x, slots, new):
    return jax.jit(written)(lax.stop_gradient(x), slots, new)


@pytest.mark.parametrize("function", [written, read, by_platform, by_data, written_by_data, padded_by_nothing, jitted])
@pytest.mark.parametrize("index", [0, LAYERS - 1])
def test_the_result_is_that_of_an_array(stack, function, index):
    # [B, K, 1]; the last head's is out of bounds, and dropped
    slots = jnp.asarray([[[1], [SLOTS]], [[3], [0]]], jnp.int32)
    # [B, K, 1, D]
    new = jnp.full((BATCH, HEADS, 1, DIM), 7.0)
    piece = Slice(stack, jnp.int32(index), "x")
    made = stack_slices.call(function, piece, slots, new)
    made = made.array if is_slice(made) else made
    np.testing.assert_array_equal(made, function(stack[:, index], slots, new))


def test_a_scatter_writes_into_the_stack(stack):
    slots, new = jnp.zeros((BATCH, HEADS, 1), jnp.int32), jnp.full((BATCH, HEADS, 1, DIM), 7.0)
    piece = Slice(stack, jnp.int32(1), "x")
    made = stack_slices.call(by_platform, piece, slots, new)
    assert is_slice(made)
    expected = np.array(stack)
    expected[:, 1, :, 0] = 7
    np.testing.assert_array_equal(piece.replaced(made), expected)


def test_a_slice_of_another_stack_is_copied(stack):
    """Two stacks may have the same shape: what is returned in place of one of them may be a slice of the other."""
    one, other = (Slice(x, jnp.int32(1), name) for x, name in ((stack, "one"), (2 * stack, "other")))
    first, second = stack_slices.call(lambda x, y: (y, x), one, other)
    np.testing.assert_array_equal(one.replaced(first), stack.at[:, 1].set(2 * stack[:, 1]))
    np.testing.assert_array_equal(other.replaced(second), (2 * stack).at[:, 1].set(stack[:, 1]))
