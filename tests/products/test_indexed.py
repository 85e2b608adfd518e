"""kvjax's own products with one of several layers, against those with the layer alone: equal to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.numerics import stack_slices
from kvjax.numerics.slices import Slice
from kvjax.products import IndexedMatrix, native, product
from kvjax.products.codes import Affine, codes_product
from kvjax.products.indexed import can_index
from kvjax.products.quantized import quantize
from kvjax.products.used_slots import attend_slots, slots_product

LAYERS = 3


@pytest.fixture(autouse=True)
def _built():
    for target in (native.INDEXED_PRODUCT, native.ATTEND, native.CODED_VECTORS, native.CODED_WEIGHTS):
        if reason := native.load(target):
            pytest.skip(reason)


def normal(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("index", range(LAYERS))
def test_a_matrix_is_the_one_of_its_index(dtype, rows, index, monkeypatch):
    monkeypatch.setattr("kvjax.products.choice._Process.setting", "native")
    x = normal(2, rows, 24, dtype=dtype)
    matrices = tuple(normal(24, 10, dtype=dtype, seed=seed) for seed in range(LAYERS))
    made = jax.jit(product)(x, IndexedMatrix(matrices, jnp.int32(index)))
    np.testing.assert_array_equal(made, product(x, matrices[index]))


@pytest.mark.parametrize("zero", [jnp.uint8, jnp.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_a_quantised_matrix_is_the_one_of_its_index(bits, rows, zero, monkeypatch):
    monkeypatch.setattr("kvjax.products.choice._Process.setting", "native")
    x = normal(rows, 32)
    matrices = tuple(quantize(normal(32, 11, seed=seed), bits, 8, jnp.float32) for seed in range(LAYERS))
    matrices = tuple(dataclasses.replace(each, zero=each.zero.astype(zero)) for each in matrices)
    for index in range(LAYERS):
        made = jax.jit(product)(x, IndexedMatrix(matrices, jnp.int32(index)))
        np.testing.assert_array_equal(made, jax.jit(product)(x, matrices[index]))


def test_a_quantised_matrix_with_an_order_or_other_scales_is_no_operand():
    made = quantize(normal(32, 11), 4, 8, jnp.float32)
    assert can_index(made)
    assert not can_index(dataclasses.replace(made, order=jnp.arange(32)))
    assert not can_index(quantize(normal(32, 11), 4, 8, jnp.bfloat16))
    assert not can_index(quantize(normal(2, 32, 11), 4, 8, jnp.float32))


def test_an_index_out_of_bounds_is_an_error():
    matrices = tuple(normal(4, 4) for _ in range(LAYERS))
    with pytest.raises(Exception, match="out of range"):
        jax.block_until_ready(product(normal(1, 4), IndexedMatrix(matrices, jnp.int32(LAYERS))))
    coded = tuple(quantize(normal(8, 4), 4, 8, jnp.float32) for _ in range(LAYERS))
    with pytest.raises(Exception, match="no such matrix"):
        jax.block_until_ready(product(normal(1, 8), IndexedMatrix(coded, jnp.int32(LAYERS))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("index", range(LAYERS))
def test_caches_are_those_of_their_layer(dtype, index):
    batch, heads, rows, slots, dim = 2, 3, 2, 300, 16
    # [B, L, K, S, D]
    stacks = [normal(batch, LAYERS, heads, slots, dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    pieces = [Slice(x, jnp.int32(index), str(i)) for i, x in enumerate(stacks)]
    keys, values = (x[:, index] for x in stacks)
    query = normal(batch, heads, rows, dim)
    used = jnp.asarray([[300, 17, 0], [256, 257, 1]], jnp.int32)
    # [B, K, 1, S]
    seen = jnp.arange(slots, dtype=jnp.int32) < used[..., None, None]

    def run(key, value):
        # [B, K, rows, S]
        logits = slots_product(query, key, used, True, jnp.float32)
        return logits, slots_product(logits, value, used, False, jnp.float32), attend_slots(
            query, key, value, seen, used, 0.25
        )  # fmt: skip

    made = stack_slices.call(run, *pieces)
    jax.tree.map(np.testing.assert_array_equal, made, run(keys, values))
    # Nothing is sliced: the custom calls read the stacks.
    text = str(jax.make_jaxpr(lambda *stacks: stack_slices.call(
        run, *(Slice(x, jnp.int32(index), str(i)) for i, x in enumerate(stacks))
    ))(*stacks))  # fmt: skip
    assert "dynamic_slice" not in text and text.count("kvjax_indexed") == 3


def test_caches_of_a_layer_that_is_not_there_are_an_error():
    stack, used = normal(1, LAYERS, 2, 8, 16), jnp.ones((1, 2), jnp.int32)
    piece = Slice(stack, jnp.int32(LAYERS), "x")
    with pytest.raises(Exception, match="no such layer"):
        jax.block_until_ready(
            stack_slices.call(lambda x: slots_product(normal(1, 2, 1, 16), x, used, True, jnp.float32), piece)
        )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("batch", "layers", "index"), [(2, 3, 0), (2, 3, 2), (1, 3, 1), (2, 1, 0)])
@pytest.mark.parametrize("scales", ["stacks", "arrays", "none"])
def test_codes_are_those_of_their_layer(batch, layers, index, scales, transposed):
    heads, slots, dim, groups = 3, 70, 32, 2
    rng = np.random.default_rng(0)
    # [B, L, K, S, bytes]; [B, L, K, S, groups]
    codes = jnp.asarray(rng.integers(0, 256, (batch, layers, heads, slots, dim // 2)), jnp.uint8)
    numbers = [normal(batch, layers, heads, slots, groups, seed=seed) for seed in (1, 2)]
    numbers = [] if scales == "none" else numbers
    used = jnp.asarray(rng.integers(0, slots + 1, (batch, heads)), jnp.int32)
    x = normal(batch, heads, 2, dim if transposed else slots)
    if not transposed:
        x = jnp.where(jnp.arange(slots) < used[..., None, None], x, 0)

    def run(codes, *numbers):
        named = dict(zip(("scale", "zero"), numbers, strict=False))
        return codes_product(x, Affine(codes=codes, bits=4, dim=dim, **named), transposed=transposed, used=used)

    def piece(x, name):
        return Slice(x, jnp.int32(index), name)

    given = [piece(each, str(i)) if scales == "stacks" else each[:, index] for i, each in enumerate(numbers)]
    made = stack_slices.call(run, piece(codes, "codes"), *given)
    expected = run(codes[:, index], *(each[:, index] for each in numbers))
    np.testing.assert_array_equal(made, expected)
    text = str(jax.make_jaxpr(lambda codes: stack_slices.call(run, piece(codes, "codes"), *given))(codes))
    assert text.count(native.INDEXED_CODED_VECTORS) == 1 and "dynamic_slice" not in text


def test_codes_of_a_layer_that_is_not_there_are_an_error():
    codes = jnp.zeros((1, LAYERS, 2, 8, 16), jnp.uint8)
    piece = Slice(codes, jnp.int32(LAYERS), "x")
    with pytest.raises(Exception, match="no such layer"):
        jax.block_until_ready(stack_slices.call(
            lambda x: codes_product(normal(1, 2, 1, 16), Affine(codes=x, bits=8, dim=16), transposed=True), piece
        ))  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2, 7, 1), (1, 1, 8, 1), (1, 2, 8, 2)])
def test_scales_of_other_caches_are_an_error(shape):
    vectors = Affine(
        codes=jnp.zeros((1, 2, 8, 16), jnp.uint8), scale=jnp.ones((1, 2, 8, 1)), zero=jnp.ones(shape), bits=8, dim=16
    )
    with pytest.raises(Exception, match="scales or zeros of other caches"):
        jax.block_until_ready(codes_product(normal(1, 2, 1, 16), vectors, transposed=True))
