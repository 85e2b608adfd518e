"""A model with quantised weights is one with the decoded weights: generation, scores, host memory, plans."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection
from kvjax.errors import ConfigError, InputError
from kvjax.generation.decoding import CHUNK
from kvjax.models import shapes, skew
from kvjax.models.decoder_layer import POLICY
from kvjax.models.offload import offload
from kvjax.models.parameters import parameter_count
from kvjax.models.quantize import parameter_bytes
from kvjax.parallel import host_memory
from kvjax.planning import plan
from kvjax.products.quantized import dequantize, is_quantized
from tests.planning.test_make_plan import TINY, needs_libtpu
from tests.tiny import random_tokens, tiny

FLOAT, INT, BYTE = 4, 4, 1


@functools.cache
def coded(bits: int = 4) -> kvjax.Model:
    return kvjax.quantize_weights(tiny().model, bits, group=16)


def decoded(model: kvjax.Model) -> kvjax.Model:
    params = jax.tree.map(lambda x: dequantize(x) if is_quantized(x) else x, model.params, is_leaf=is_quantized)
    return dataclasses.replace(model, params=params)


def test_generation_is_that_of_the_decoded_weights():
    # Calibrations of policies are not weights, whatever their arrays are called.
    calibrations = (model.params["layer_0"]["attention"][POLICY] for model in (coded(), tiny().model))
    chex.assert_trees_all_equal(*calibrations)
    tokens = random_tokens(2, 20)
    arguments = {"max_new_tokens": 8}
    got = kvjax.generate(coded(), tokens, policies.h2o(12), **arguments)
    expected = kvjax.generate(decoded(coded()), tokens, policies.h2o(12), **arguments)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    for one, other in zip(got.state.layers, expected.state.layers, strict=True):
        np.testing.assert_array_equal(one[0].position, other[0].position)


@pytest.mark.sampled(0)
def test_scores_are_those_of_the_decoded_weights():
    tokens = random_tokens(2, 24)
    exact, found = (
        np.asarray(kvjax.log_likelihood(model, tokens, policies.h2o(12), prompt_length=16).logprobs)
        for model in (tiny().model, coded(8))
    )
    expected = kvjax.log_likelihood(decoded(coded(8)), tokens, policies.h2o(12), prompt_length=16).logprobs
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert 1e-5 < np.abs(found - exact).max() < 0.2


@pytest.mark.sampled(0)
def test_codes_in_host_memory():
    tokens, look = random_tokens(2, 20), selection.infinigen(2.0, first_layer=1)
    moved = offload(coded(), 0.5)
    places = [{host_memory.on_host(x) for x in jax.tree.leaves(moved.params[f"layer_{i}"])} for i in range(2)]
    assert places == [{False}, {True}]
    results = [
        kvjax.generate(model, tokens, policies.full(), selection=look, max_new_tokens=6) for model in (coded(), moved)
    ]
    np.testing.assert_array_equal(results[0].tokens, results[1].tokens)
    quantised_there = kvjax.quantize_weights(offload(tiny().model, 0.5), 4, group=16)
    for one, other in zip(jax.tree.leaves(quantised_there.params), jax.tree.leaves(moved.params), strict=True):
        assert host_memory.on_host(one) == host_memory.on_host(other)
        np.testing.assert_array_equal(one, other)


def test_a_skew_is_not_folded_into_codes():
    config = dataclasses.replace(tiny().model.config, rope=None, learned_positions=True)
    model = kvjax.quantize_weights(kvjax.Model(config, tiny().model.params), 8, group=16)
    matrices = np.broadcast_to(np.eye(config.head_dim), (2, config.num_kv_heads, config.head_dim, config.head_dim))
    with pytest.raises(InputError, match="cannot be folded into quantized weights"):
        skew.skewed(model, matrices)
    assert "skew" in skew.skewed(model, matrices, fold=False).params["layer_0"]["attention"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("weights", "share"), [("int8", 1.0), ("int4", 0.5)])
def test_a_plan_counts_the_bytes_of_codes(weights, share):
    planned = plan(TINY, policies.h2o(127), batch=2, prompt_length=200, new_tokens=57, weights=weights)
    elements = 4 * 256 * 1024 + 3 * 256 * 512  # of a layer's matrices, whose inputs divide into groups of 64
    layer = int(elements * share) + elements // 64 * (FLOAT + BYTE)
    # Two norms of each layer, the embedding, the output head and the last norm are exact.
    assert planned.weights == 2 * (layer + 2 * 256 * FLOAT) + (2 * 256 * 256 + 256) * FLOAT
    assert planned.weights == parameter_bytes(TINY, jnp.float32, kvjax.WeightCodes(int(weights[-1])))
    assert planned.parameters == parameter_count(TINY)
    assert planned.step.weights_moved == planned.weights - 256 * 256 * FLOAT
    # Matrices and the head, and 128 slots of both layers: a row's products do not depend on how weights are held.
    assert planned.step.flops == 2 * 2 * (2 * elements + 256 * 256) + 2 * 2 * 4 * 1024 * 128
    # The program itself agrees: its arguments are the weights, the cache, and the bytes of the tokens of two rows.
    arguments = planned.compiled.memory_analysis().argument_size_in_bytes
    assert planned.weights + planned.cache <= arguments < planned.weights + planned.cache + 2 * CHUNK * INT + 256
    # The decoded matrices of one input at a time, queries, keys and values, besides what a step needs anyway.
    assert planned.temporaries < 3 * 256 * 1024 * FLOAT + 100_000
    assert f"in float32, weights {weights};" in planned.table()


def test_a_plan_refuses_what_loading_would():
    with pytest.raises(ConfigError, match="'int5' is unknown"):
        plan(TINY, policies.full(), prompt_length=8, new_tokens=2, weights="int5")
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    with pytest.raises(ConfigError, match="leave out head=True"):
        plan(tied, policies.full(), prompt_length=8, new_tokens=2, weights=kvjax.WeightCodes(head=True))


@pytest.mark.sampled(0)
@needs_libtpu
def test_a_tpu_writes_no_decoded_copy():
    """At the widths of a model of 1.3 billion parameters: matrices are decoded on chip."""
    config = dataclasses.replace(shapes.by_name("opt-1.3b"), num_layers=2, windows=(), vocab_size=1024)
    planned = plan(
        config, policies.h2o(0.2), batch=4, prompt_length=200, new_tokens=12, topology="v5e:1x1", weights="int4"
    )
    matrix = 2048 * 2048 * 2
    print(f"weights {planned.weights:,}, temporaries {planned.temporaries:,}, the smallest matrix {matrix:,}")
    assert planned.temporaries < matrix
