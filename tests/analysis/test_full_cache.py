"""Measures of the full cache against the reference's whole attention matrices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis
from kvjax.analysis import full_cache, rows, scan
from kvjax.errors import InputError
from kvjax.kernels.prefill.xla import tile_rows
from kvjax.models.parameters import parameter_shapes
from kvjax.numerics.rope import Rope
from tests.analysis.dense import full
from tests.tiny import random_tokens, random_weights, tiny

LENGTHS = np.array([45, 22])
TOKENS = random_tokens(2, 45, seed=5)


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """So that a text takes several tiles, the last of them not full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "tile_rows", lambda row_scores, n: 16)
        yield


def matrices(heads="gqa"):
    """[H, T, T] float64 of each layer and row, [layer][row], rows of their own lengths."""
    runs = [full(tiny(heads), TOKENS[row, :length]) for row, length in enumerate(LENGTHS)]
    return [[run.probability[layer] for run in runs] for layer in range(2)]


def test_sparsity():
    got = analysis.sparsity(tiny().model, TOKENS, lengths=LENGTHS, threshold=0.1)
    for layer, by_row in enumerate(matrices()):
        for row, p in enumerate(by_row):
            seen = np.tri(LENGTHS[row], dtype=bool)
            below = (p < 0.1 * p.max(axis=-1, keepdims=True)) & seen
            np.testing.assert_allclose(got[layer, row], below.sum(axis=(1, 2)) / seen.sum(), atol=1e-6)
    assert got.min() > 0.05 and got.max() < 0.95


@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_keys_for_mass(heads):
    got = analysis.keys_for_mass(tiny(heads).model, TOKENS, lengths=LENGTHS, share=0.8)
    for layer, by_row in enumerate(matrices(heads)):
        for row, p in enumerate(by_row):
            held = np.cumsum(-np.sort(-p, axis=-1), axis=-1)
            clear = np.abs(held - 0.8).min(axis=-1) > 1e-6
            expected = np.argmax(held >= 0.8, axis=-1) + 1
            assert clear.mean() > 0.99
            np.testing.assert_array_equal(got[layer, row, :, : LENGTHS[row]][clear], expected[clear])
            assert not got[layer, row, :, LENGTHS[row] :].any()
    everything = analysis.keys_for_mass(tiny(heads).model, TOKENS, lengths=LENGTHS, share=1.0)
    assert (everything <= np.arange(1, 46)).all() and (everything >= got).all()


def test_accumulated_attention():
    got = analysis.accumulated_attention(tiny().model, TOKENS, lengths=LENGTHS)
    for layer, by_row in enumerate(matrices()):
        for row, p in enumerate(by_row):
            n = LENGTHS[row]
            mass = -np.sort(-p.sum(axis=1), axis=-1)
            np.testing.assert_allclose(got.mass[layer, row, :, :n], mass, rtol=1e-4, atol=1e-5)
            assert not got.mass[layer, row, :, n:].any()
            slopes = [np.polyfit(np.log(np.arange(1, n + 1)), np.log(head), 1)[0] for head in mass]
            np.testing.assert_allclose(got.exponent[layer, row], -np.array(slopes), rtol=1e-3)


def test_attention_std():
    got = analysis.attention_std(tiny().model, TOKENS, lengths=LENGTHS, positions=[0, 15, 16, 30])
    for layer, by_row in enumerate(matrices()):
        for row, p in enumerate(by_row):
            n = LENGTHS[row]
            for j in range(n):
                np.testing.assert_allclose(got.final[layer, row, :, j], p[:, j:, j].std(axis=1), atol=1e-5)
            assert np.isnan(got.final[layer, row, :, n:]).all()
            for index, j in enumerate(got.positions):
                line = got.trajectory[layer, row, :, index]
                assert np.isnan(line[:, :j]).all() and np.isnan(line[:, n:]).all()
                for t in range(j, n):
                    np.testing.assert_allclose(line[:, t], p[:, j : t + 1, j].std(axis=1), atol=1e-5)


def test_a_sink_that_hardly_varies():
    """Its standard deviation is a thousandth of its mean: sums of squares in float32 would lose it."""
    p = 0.98 + 1e-3 * np.random.default_rng(0).standard_normal(4096)
    tiles = jnp.asarray(p, jnp.float32).reshape(64, 1, 1, 1, 64, 1)
    followed = jnp.zeros((1,), jnp.int32)

    def tile(carry, probability):
        seen = jnp.ones(probability.shape, bool)
        return full_cache._follow(carry, (rows.Rows(probability, seen, jnp.zeros((1, 64), jnp.int32)),), followed)

    (count, _, squares), std = jax.lax.scan(tile, (jnp.zeros((1, 1, 1, 1)),) * 3, tiles)
    np.testing.assert_allclose(np.sqrt(squares / count).item(), p.std(), rtol=1e-3)
    np.testing.assert_allclose(std.ravel()[1::97], [p[: t + 1].std() for t in range(1, 4096, 97)], rtol=5e-3)


ARCHITECTURES = {
    "learned positions and a window": {"rope": None, "learned_positions": True, "windows": (None, 7)},
    "normalised queries, capped logits": {"qk_norm": True, "attention_scale": 0.5, "attention_soft_cap": 1.0},
    "rope in one layer": {"ropes": (None, Rope(dim=8))},
    # Frequencies that depend on the text's length: 22 tokens are within the trained length, 45 are not.
    "dynamic rope": {"rope": Rope(dim=8, scaling="dynamic", factor=4.0, original_max_positions=30)},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_those_of_the_cache_s_statistics(name):
    config = dataclasses.replace(tiny().model.config, **ARCHITECTURES[name])
    model = kvjax.Model(config, random_weights(config, 1))
    own = scan.over_tiles(model, TOKENS, LENGTHS, full_cache._add_mass, lambda *shape: jnp.zeros(shape)).carried
    scored = kvjax.log_likelihood(model, TOKENS, analysis.compare.COUNTING, prompt_length=30, lengths=LENGTHS)
    for layer, state in enumerate(scored.state.layers):
        by_head = own[layer].reshape(2, config.num_kv_heads, -1, 45).mean(axis=2)
        # Slots are in the order of the text, and more of them are allocated than the text has tokens.
        np.testing.assert_allclose(by_head, state.stats["mass"][..., :45], atol=1e-5)


@pytest.mark.parametrize("step", [full_cache._keys_needed, full_cache._follow])
def test_memory_is_linear(step):
    config = tiny().model.config

    def temporary(width):
        ints = jax.ShapeDtypeStruct((1, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        shape = (1, config.num_kv_heads, 2, width)
        one = jax.ShapeDtypeStruct(shape, jnp.float32)
        follow = step is full_cache._follow
        carry = (one,) * 3 if follow else ()
        args = (jax.ShapeDtypeStruct((8,), jnp.int32) if follow else jax.ShapeDtypeStruct((), jnp.float32),)
        lowered = scan.scan_tiles.lower(
            parameter_shapes(config), *ints, (carry, carry), args, config=config, step=step,
            tile=tile_rows(config.num_heads * width, width),
        )  # fmt: skip
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 4.5 * temporary(4096)


def test_what_cannot_work_is_refused():
    model = tiny().model
    for value in (0, 1.5, True, "half"):
        with pytest.raises(InputError, match="threshold must be a number above 0 and at most 1"):
            analysis.sparsity(model, TOKENS, threshold=value)
        with pytest.raises(InputError, match="share must be"):
            analysis.keys_for_mass(model, TOKENS, share=value)
    for positions in ([45], [-1], [0.5], []):
        with pytest.raises(InputError, match="whole numbers from 0 to 44"):
            analysis.attention_std(model, TOKENS, positions=positions)
    with pytest.raises(InputError, match="lengths"):
        analysis.sparsity(model, TOKENS, lengths=[46, 1])
