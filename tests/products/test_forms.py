"""Every form of a product computes the same, whatever the shape; kept slots do not depend on the form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import products
from kvjax.products import choice, native
from kvjax.products.forms import FORMS
from tests.laws.test_slots import CASES, assert_same, describe, run_library, run_reference

SHAPES = [(1, 1), (3, 5), (16, 48), (97, 31), (400, 130), (384, 513), (1030, 1040), (2, 5000)]  # inputs, outputs


def operands(rows, inputs, outputs, transposed, dtype="float32"):
    rng = np.random.default_rng(rows + inputs)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), dtype)
    return x, jnp.asarray(rng.standard_normal((outputs, inputs) if transposed else (inputs, outputs)), dtype)


def usable(name, kernel, transposed):
    if reason := FORMS[name].refuses(kernel, transposed):
        pytest.skip(reason)
    return lambda x, kernel: FORMS[name].run(x, kernel, transposed, x.dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_product(name, transposed):
    compared = 0
    for place, (inputs, outputs) in enumerate(SHAPES):
        for rows in (1, (2, 3, 7, 8)[place % 4], (33, 64)[place % 2]):
            x, kernel = operands(rows, inputs, outputs, transposed)
            if FORMS[name].refuses(kernel, transposed):
                continue
            expected = np.asarray(x, np.float64) @ np.asarray(kernel.T if transposed else kernel, np.float64)
            got = FORMS[name].run(x, kernel, transposed, x.dtype)
            np.testing.assert_allclose(got, expected, atol=1e-6 * inputs, err_msg=f"{rows} x {inputs} x {outputs}")
            compared += 1
    if not compared:
        pytest.skip(FORMS[name].refuses(kernel, transposed))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
@pytest.mark.parametrize("name", ["dot", "native"])
@pytest.mark.parametrize("batch", [(1, 1), (3,), (2, 40)], ids=str)
def test_a_batch_of_matrices(name, transposed, batch):
    rng = np.random.default_rng(len(batch))
    for rows, inputs, outputs in ((1, 37, 530), (4, 64, 1100), (3, 700, 64)):
        x = jnp.asarray(rng.standard_normal((*batch, rows, inputs)), jnp.float32)
        kernel = jnp.asarray(rng.standard_normal((*batch, inputs, outputs)), jnp.float32)
        stored = jnp.swapaxes(kernel, -1, -2) if transposed else kernel
        expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
        np.testing.assert_allclose(usable(name, stored, transposed)(x, stored), expected, atol=1e-6 * inputs)


@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
def test_bfloat16_weights_are_multiplied_in_float32(transposed):
    x, kernel = operands(5, 200, 70, transposed, "bfloat16")
    got = usable("native", kernel, transposed)(x, kernel)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel.T if transposed else kernel, np.float64)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))
    wide = FORMS["native"].run(x, kernel, transposed, jnp.float32)
    np.testing.assert_allclose(wide, exact, atol=1e-4)


#: Inputs and outputs: less than a vector, parts of a vector at the end, several parts of the inputs, blocks of them.
ODD_SHAPES = [(3, 5), (300, 90), (64, 700), (80, 77), (768, 130), (1030, 515)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
def test_a_row_does_not_depend_on_its_neighbours(transposed, dtype, width):
    """Nor on how many they are, nor on the matrices of a batch: bit for bit."""
    # bfloat16 differs in how weights are read, not in how products are summed.
    for inputs, outputs in ODD_SHAPES if dtype == "float32" else ODD_SHAPES[1::2]:
        x, kernel = operands(13, inputs, outputs, transposed)
        kernel = kernel.astype(dtype)
        run = lambda x, kernel: FORMS["native"].run(x, kernel, transposed, jnp.float32)  # noqa: E731
        order = np.random.default_rng(0).permutation(13)

        @jax.jit  # one program for all numbers of rows, which compiles in a fifth of the time
        def products(x, kernel, run=run, order=order):
            alone, batches = {}, {}
            for rows in (1, 2, 3, 4, 5, 8, 12):
                part = x[1 : 1 + rows]
                alone[rows] = run(part, kernel)
                batches[rows] = run(part[None], kernel[None])[0], run(jnp.stack([part] * 3), jnp.stack([kernel] * 3))[1]
            both = run(jnp.stack([x, x]), jnp.stack([kernel, kernel]))
            return run(x, kernel), run(x[order], kernel), both, alone, batches

        whole, ordered, both, alone, batches = products(x, kernel)
        np.testing.assert_array_equal(ordered, whole[order])
        np.testing.assert_array_equal(both, np.stack([whole, whole]))
        for rows, one in alone.items():
            for got in (one, *batches[rows]):
                np.testing.assert_array_equal(got, whole[1 : 1 + rows], err_msg=f"{rows} x {inputs} x {outputs}")


@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
def test_the_product_at_each_width(transposed, width):
    for rows, (inputs, outputs) in zip((1, 2, 7, 8, 33, 64), ODD_SHAPES, strict=True):
        x, kernel = operands(rows, inputs, outputs, transposed)
        expected = np.asarray(x, np.float64) @ np.asarray(kernel.T if transposed else kernel, np.float64)
        got = FORMS["native"].run(x, kernel, transposed, x.dtype)
        np.testing.assert_allclose(got, expected, atol=1e-6 * inputs, err_msg=f"{rows} x {inputs} x {outputs}")


@pytest.mark.parametrize("name", FORMS)
def test_forms_have_gradients_and_batches(name):
    x, kernel = operands(3, 384, 20, False)
    kernel = kernel / np.float32(np.sqrt(384))  # products near 1, whose sine does not multiply their rounding
    run = usable(name, kernel, False)
    for got, expected in zip(
        jax.grad(lambda x, k: jnp.sum(jnp.sin(run(x, k))), (0, 1))(x, kernel),
        jax.grad(lambda x, k: jnp.sum(jnp.sin(x @ k)), (0, 1))(x, kernel),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    stacked = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(run, (0, None))(stacked, kernel), stacked @ kernel, atol=1e-4)
    np.testing.assert_allclose(run(stacked, kernel), stacked @ kernel, atol=1e-4)


def test_products_without_inputs_or_outputs():
    for inputs, outputs in ((0, 5), (5, 0)):
        x, kernel = operands(2, inputs, outputs, False)
        np.testing.assert_array_equal(usable("native", kernel, False)(x, kernel), np.zeros((2, outputs)))


def test_a_wrong_number_of_rows_is_an_error():
    x, kernel = operands(choice.MAX_ROWS + 1, 32, 32, False)
    run = usable("native", kernel, False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="too many rows"):
        jax.block_until_ready(run(x, kernel))


@pytest.fixture
def setting():
    before = choice.setting()
    yield products.use
    products.use(before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES[:1], ids=describe)
@pytest.mark.parametrize("name", FORMS)
def test_the_same_slots_stay(name, case, setting):
    if name == "native" and native.load():
        pytest.skip(native.load())
    setting(name)
    assert_same(run_library(case, case.block), run_reference(case, case.block))
