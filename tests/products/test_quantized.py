"""Quantised matrices: codes by the definition, products by the decoded matrix, and one decoded matrix at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.products import native, product
from kvjax.products.codes import weights_product
from kvjax.products.quantized import WIDTHS, QuantizedMatrix, by_place, dequantize, group_size, pack, quantize, unpack
from tests.reference.weights import random_codes, rounded

INPUTS, OUTPUTS, GROUP = 24, 5, 8


def matrix(seed=0, inputs=INPUTS, outputs=OUTPUTS):
    return np.random.default_rng(seed).standard_normal((inputs, outputs)).astype(np.float32)


def in_order(quantized):
    """Codes as [in, out]."""
    return np.asarray(unpack(quantized.codes, quantized.bits)).reshape(quantized.shape)


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_are_those_of_the_definition(bits):
    exact = matrix()
    expected, got = rounded(exact, bits, GROUP), quantize(jnp.asarray(exact), bits, GROUP, jnp.float32)
    np.testing.assert_array_equal(in_order(got), expected.codes)
    np.testing.assert_array_equal(got.zero, expected.zero)
    np.testing.assert_allclose(got.scale, expected.scale, rtol=1e-6)
    np.testing.assert_allclose(dequantize(got), expected.matrix(), rtol=1e-5, atol=1e-7)
    assert got.shape == exact.shape and got.group == GROUP
    assert got.codes.nbytes == exact.size * bits // 8
    error = np.abs(np.asarray(dequantize(got)) - exact).reshape(-1, GROUP, OUTPUTS)
    assert (error <= (0.5 + 1e-4) * np.asarray(got.scale)[:, None]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_belong_to_the_rounded_scale(dtype):
    exact = matrix()
    got = quantize(jnp.asarray(exact), 8, GROUP, jnp.dtype(dtype))
    assert got.scale.dtype == dtype
    scale = np.repeat(np.asarray(got.scale, np.float64), GROUP, axis=0)
    zero = np.repeat(np.asarray(got.zero, np.float64), GROUP, axis=0)
    np.testing.assert_array_equal(in_order(got), np.clip(np.round(exact / scale) + zero, 0, 255))


def test_groups_without_a_range():
    """Zeros, one number, numbers of one sign, and numbers at the ends of float32."""
    columns = np.stack([
        np.zeros(8), np.full(8, 0.25), np.full(8, -3.0), np.linspace(1, 8, 8), np.linspace(-3e38, 3e38, 8),
        np.linspace(1e-37, 8e-37, 8),
    ], axis=1).astype(np.float32)  # fmt: skip
    got = quantize(jnp.asarray(columns), 4, 8, jnp.float32)
    assert np.isfinite(np.asarray(got.scale)).all()
    decoded = np.asarray(dequantize(got))
    np.testing.assert_array_equal(decoded[:, 0], 0)
    np.testing.assert_allclose(decoded[:, 1:3], columns[:, 1:3], rtol=1e-6)
    error = np.abs(decoded.astype(np.float64) - columns)
    assert (error <= (0.5 + 1e-4) * np.asarray(got.scale, np.float64)).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("rows", [(1,), (2, 3)])
def test_product_is_that_of_the_decoded_matrix(bits, act_order, rows):
    coded = random_codes(INPUTS, OUTPUTS, bits, GROUP, seed=bits, act_order=act_order)
    order = np.argsort(coded.group_of, kind="stable")
    quantized = QuantizedMatrix(
        codes=pack(jnp.asarray(coded.codes[order], jnp.uint8), bits, GROUP),
        scale=jnp.asarray(coded.scale, jnp.float32),
        zero=jnp.asarray(coded.zero, jnp.uint8),
        order=jnp.asarray(order, jnp.int32) if act_order else None,
        bits=bits,
    )
    np.testing.assert_allclose(dequantize(quantized), coded.matrix(), rtol=1e-5, atol=1e-7)
    x = np.random.default_rng(1).standard_normal((*rows, INPUTS)).astype(np.float32)
    x[(0,) * x.ndim] = -np.abs(x[(0,) * x.ndim])  # the sign of the first number must not matter
    expected = x.astype(np.float64) @ coded.matrix()
    np.testing.assert_allclose(jax.jit(product)(x, quantized), expected, atol=2e-6)
    if not act_order:  # the form of accelerators, whose caller has sorted x
        np.testing.assert_allclose(by_place(x, quantized, x.dtype), expected, atol=2e-6)
    half = product(jnp.asarray(x, jnp.bfloat16), quantized)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", WIDTHS)
def test_kvjaxs_own_code_multiplies_by_codes(bits, native_products):
    for outputs, group, rows in ((1, 8, 1), (77, 24, 3), (200, 48, 8), (64, 96, 64)):
        coded = quantize(jnp.asarray(matrix(bits, 96, outputs)), bits, group, jnp.float32)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 96)), jnp.float32)
        numbers = np.asarray(dequantize(coded), np.float64)
        expected = np.asarray(x, np.float64) @ numbers
        np.testing.assert_allclose(jax.jit(product)(x, coded), expected, atol=1e-4, err_msg=f"{outputs} outputs")
    assert native.CODED_WEIGHTS in jax.jit(product).lower(x, coded).as_text()
    assert native.CODED_WEIGHTS not in jax.jit(product).lower(jnp.ones((65, 96)), coded).as_text(), "too many rows"
    np.testing.assert_array_equal(product(x[3:5], coded), product(x, coded)[3:5])
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(product(x, coded))))(x)
    np.testing.assert_allclose(slope, np.cos(expected) @ numbers.T, atol=1e-4)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_row_of_codes_does_not_depend_on_its_neighbours(bits, width):
    # Without AVX-512, a matrix with more than 4,096 columns is read four rows of codes at a time. With AVX-512, one row
    # of x is multiplied by 256 columns at a time: 577 columns are two times 256 and a remainder.
    for inputs, outputs, group in ((96, 77, 24), (96, 200, 96), (384, 70, 48), (64, 577, 32), (48, 8451, 24)):
        coded = quantize(jnp.asarray(matrix(bits, inputs, outputs)), bits, group, jnp.float32)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((64, inputs)), jnp.float32)
        for zero in (coded.zero, coded.zero.astype(jnp.float32)):  # codes, or numbers between two codes
            parts = coded.codes, coded.scale, zero, bits
            whole = weights_product(x, *parts)
            np.testing.assert_allclose(whole, np.asarray(x) @ np.asarray(dequantize(coded)), atol=1e-4)
            for rows in (1, 2, 3, 4, 5, 8, 12):
                np.testing.assert_array_equal(weights_product(x[1 : 1 + rows], *parts), whole[1 : 1 + rows])
            for columns in np.split(np.arange(outputs), range(4000, outputs, 4000)):  # none is wide
                own = coded.codes[..., columns], coded.scale[:, columns], zero[:, columns], bits
                np.testing.assert_array_equal(weights_product(x[:5], *own), whole[:5, columns])


@pytest.mark.parametrize(
    ("inputs", "group", "bits", "expected"),
    [(768, 64, 4, 64), (100, 64, 4, 50), (90, 64, 4, 30), (90, 64, 8, 45), (90, None, 4, 90), (7, 64, 8, 7),
     (7, 64, 4, None), (6, 64, 2, None), (68, 64, 2, 68 // 17)],
)  # fmt: skip
def test_groups_divide_the_inputs_and_fill_bytes(inputs, group, bits, expected):
    assert group_size(inputs, group, bits) == expected


def test_a_loop_decodes_one_matrix_at_a_time():
    """Codes do not change from step to step: without care all of them are decoded, before the loop."""
    layers, inputs, outputs = 6, 256, 512
    up = [quantize(jnp.asarray(matrix(i, inputs, outputs)), 4, 64, jnp.float32) for i in range(layers)]
    down = [quantize(jnp.asarray(matrix(i, outputs, inputs)), 4, 64, jnp.float32) for i in range(layers)]

    @jax.jit
    def loop(up, down, x, steps):
        def step(_, x):
            for one, other in zip(up, down, strict=True):
                x = product(product(x, one), other)
            return x

        return jax.lax.fori_loop(0, steps, step, x)

    compiled = loop.lower(up, down, jnp.ones((1, inputs)), 3).compile()
    memory = compiled.memory_analysis()
    exact = inputs * outputs * 4
    assert memory.argument_size_in_bytes < 2 * layers * exact * (0.625 + 0.02) / 4
    assert memory.temp_size_in_bytes < 2 * exact
