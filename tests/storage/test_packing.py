"""Packing of codes and rounding of numbers, compared with the definition bit by bit and with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.storage import pack, unpack
from kvjax.storage.rounding import as_stored, divide, nearest
from tests.reference import codecs as reference


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_nearest_is_numpys_rounding(dtype):
    rng = np.random.default_rng(2)
    kind = jnp.dtype(dtype)
    most = float(jnp.finfo(kind).max)
    x = (rng.normal(size=4000) * 2.0 ** rng.integers(-30, 9, 4000)).astype(np.float32)
    every = (
        np.arange(2**16, dtype=np.uint16).view(kind)
        if kind.itemsize == 2
        else np.arange(256, dtype=np.uint8).view(kind)
    )
    every = np.unique(every[np.isfinite(every.astype(np.float32))].astype(np.float64))
    ties = ((every[1:] + every[:-1]) / 2).astype(np.float32)
    normal = float(jnp.finfo(jnp.float32).smallest_normal)
    x = np.concatenate([x, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    x = x[(np.abs(x) <= most) & (np.abs(x) >= 2 * normal)]
    for round_ in (lambda x: nearest(x, kind), lambda x: as_stored(x, kind)):
        np.testing.assert_array_equal(jax.jit(round_)(x).astype(jnp.float32), x.astype(kind).astype(np.float32))


def test_division_by_a_constant_rounds_once():
    x = np.random.default_rng(3).normal(size=2000).astype(np.float32)
    for divisor in (3.0, 15.0, 255.0, 448.0, 0.013):
        np.testing.assert_array_equal(jax.jit(lambda x: divide(x, divisor))(x), x / np.float32(divisor))  # noqa: B023


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("bits", "dim"), [(bits, dim) for bits in range(1, 9) for dim in (7 + bits, 16)] + [(3, 1)])
def test_packing_is_one_bit_stream(bits, dim):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 2, dim)).astype(np.int32)
    packed = jax.jit(lambda codes: pack(codes, bits))(codes)
    assert packed.dtype == jnp.uint8 and packed.shape == (3, 2, -(-dim * bits // 8))
    expected = [reference.pack(row, bits) for row in codes.reshape(-1, dim).tolist()]
    np.testing.assert_array_equal(packed.reshape(6, -1), expected)
    unpacked = jax.jit(lambda packed: unpack(packed, bits, dim))(packed)
    assert unpacked.dtype == jnp.uint8
    np.testing.assert_array_equal(unpacked, codes)
    # The unused bits of the last byte are 0.
    assert int(packed[..., -1].max()) < 2 ** ((dim * bits - 1) % 8 + 1)


def test_packing_by_hand():
    np.testing.assert_array_equal(pack(jnp.array([1, 2, 3, 15]), 4), [0x21, 0xF3])  # even channels in the low half
    np.testing.assert_array_equal(pack(jnp.array([1, 2, 3]), 3), [0b11010001, 0b0])
    np.testing.assert_array_equal(pack(jnp.array([True, False, True]), 1), [5])
    np.testing.assert_array_equal(pack(jnp.array([-1, 16]), 4), [0x0F])  # the lowest bits


def test_no_gathers():
    """Shifts of slices alone, for any number of bits."""
    for bits in range(1, 9):
        both = jax.make_jaxpr(lambda codes: unpack(pack(codes, bits), bits, 24))(jnp.zeros((2, 24), jnp.int32))  # noqa: B023
        assert "gather" not in str(both) and "scatter" not in str(both)
