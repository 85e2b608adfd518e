"""Directions of keys and values: what they compute, their training, and the greedy search of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies, storage
from kvjax.analysis import directions
from kvjax.analysis.gates import hidden_states
from kvjax.cache.state import Block
from kvjax.cache.step.interface import LayerArgs
from kvjax.errors import InputError, StorageError
from kvjax.models.decoder import Decoder
from kvjax.models.nested import Directions, Nested
from tests.tiny import random_tokens, tiny

DIM, LAYERS, HEADS = 8, 2, 2
TOKENS, LENGTHS = random_tokens(3, 32, seed=3), np.array([32, 19, 27], np.int32)
ALL = storage.low_rank(DIM, DIM)


@functools.cache
def start():
    return kvjax.calibrate(tiny().model, TOKENS, ALL, lengths=LENGTHS)


@functools.cache
def measure():
    model, data = tiny().model, (jnp.asarray(TOKENS), jnp.asarray(LENGTHS))
    expected = hidden_states(model.params, None, *data, config=model.config)
    made = jax.jit(functools.partial(directions.divergence, config=model.config))
    return lambda sides, ranks: made(model.params, sides, ranks, expected, *data)


def loss(ranks, calibration=None):
    return float(measure()(list((calibration or start()).layers), jnp.asarray(ranks, jnp.int32)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 6, 1])
def test_attention_is_the_definition(window):
    rng = np.random.default_rng(0)
    batch, kv_heads, group, n, cap = 2, 3, 2, 14, 4.0
    query = rng.normal(size=(batch, kv_heads * group, n, DIM))
    key, value = rng.normal(size=(2, batch, kv_heads, n, DIM))
    basis = np.linalg.qr(rng.normal(size=(2, kv_heads, DIM, DIM)))[0]
    mean, rank = rng.normal(size=(2, kv_heads, DIM)), np.array([[1, 5, 8], [3, 8, 2]])

    def short(x, side, k):
        own = basis[side, k][:, : rank[side, k]]
        return (x - mean[side, k]) @ own @ own.T + mean[side, k]

    expected = np.zeros_like(query)
    for b, h, i in np.ndindex(batch, kv_heads * group, n):
        k = h // group
        seen = [j for j in range(i + 1) if window is None or i - j < window]
        keys, values = (np.stack([x[b, k, j] if j == i else short(x[b, k, j], side, k) for j in seen])
                        for side, x in enumerate((key, value)))  # fmt: skip
        logits = cap * np.tanh(keys @ query[b, h, i] * DIM**-0.5 / cap)
        weight = np.exp(logits - logits.max())
        expected[b, h, i] = weight @ values / weight.sum()
    row = jnp.full((batch,), n, jnp.int32)
    block = Block(jnp.tile(jnp.arange(n, dtype=jnp.int32), (batch, 1)), row, row, ())
    own = (
        Directions(jnp.asarray(basis[i], jnp.float32), jnp.asarray(mean[i], jnp.float32), jnp.asarray(rank[i]))
        for i in range(2)
    )
    arrays = (jnp.asarray(x, jnp.float32) for x in (query, query, key, value))
    got = Nested(*own).blend(*arrays, block, LayerArgs(soft_cap=cap, window=window))
    np.testing.assert_allclose(got, expected, atol=5e-6)


@pytest.mark.sampled(0)
def test_ranks_are_what_a_cache_of_these_directions_computes():
    model, ranks = tiny().model, np.array([[[3, 6], [8, 2]], [[4, 4], [5, 7]]], np.int32)
    key, value = np.moveaxis(ranks, 1, 0)
    held, found = storage.low_rank(key, value), analysis.Ranks(key, value, 0.0)
    own = [
        Nested(*(Directions(layer[name]["basis"], layer[name]["mean"], jnp.asarray(rank))
                 for name, rank in zip(("key", "value"), each, strict=True)))
        for layer, each in zip(start().layers, ranks, strict=True)
    ]  # fmt: skip
    hidden = hidden_states(model.params, own, jnp.asarray(TOKENS), jnp.asarray(LENGTHS), config=model.config)
    logits = Decoder(model.config).apply({"params": model.params}, hidden, method="logits")
    got = jax.nn.log_softmax(np.asarray(logits, np.float64))
    expected = kvjax.log_likelihood(
        model, TOKENS, policies.full(), prompt_length=1, lengths=LENGTHS, storage=held,
        calibration=analysis.shortened(start(), found),
    )  # fmt: skip
    for row, length in enumerate(LENGTHS):
        each = got[row, np.arange(length - 1), TOKENS[row, 1:length]]
        np.testing.assert_allclose(each, expected.logprobs[row, : length - 1], atol=5e-5)
    assert loss(ranks) > 1e-3 > 1e-6 > abs(loss(np.full_like(ranks, DIM)))


@pytest.mark.sampled(0)
def test_training_keeps_directions_orthogonal_and_makes_few_of_them_better():
    model = tiny().model
    made = analysis.train_directions(model, TOKENS, start(), lengths=LENGTHS, steps=30, learning_rate=0.03, rows=3)
    assert made.losses.shape == (30,) and "trained for 30 steps" in made.calibration.method
    for before, after in zip(start().layers, made.calibration.layers, strict=True):
        for name in ("key", "value"):
            basis = np.asarray(after[name]["basis"], np.float64)
            np.testing.assert_allclose(basis.swapaxes(1, 2) @ basis, np.tile(np.eye(DIM), (HEADS, 1, 1)), atol=2e-5)
            assert np.abs(basis - before[name]["basis"]).max() > 1e-2
            np.testing.assert_array_equal(after[name]["mean"], before[name]["mean"])
    few = np.full((LAYERS, 2, HEADS), 3)
    assert loss(few, made.calibration) < 0.9 * loss(few)
    assert abs(loss(np.full_like(few, DIM), made.calibration)) < 1e-5


@pytest.mark.sampled(0)
def test_all_directions_are_rotated_by_one_solution():
    """Several calls of LAPACK at once wait for each other's threads on a machine of two cores, with 64 directions."""
    sides = [dict(layer) for layer in start().layers]
    turn = [{name: jnp.zeros_like(layer[name]["basis"]) for name in ("key", "value")} for layer in sides]
    turned = functools.partial(directions._turned, sides)
    assert jax.jit(turned).lower(turn).as_text().count("custom_call @lapack_sgetrf") == 1
    for new, old in zip(turned(turn), sides, strict=True):
        for name in turn[0]:
            np.testing.assert_allclose(new[name]["basis"], old[name]["basis"], atol=1e-6)


def test_the_search_lowers_what_costs_least():
    found = analysis.search_ranks(tiny().model, TOKENS, start(), 0.8, lengths=LENGTHS, levels=(0.25, 0.6))
    sizes, ranks = [2, 4, 8], np.full((LAYERS, 2, HEADS), DIM)
    while ranks.mean() > 0.8 * DIM:
        costs = {}
        for place in np.ndindex(ranks.shape):
            lower = ranks.copy()
            if (level := sizes.index(ranks[place])) > 0:
                lower[place] = sizes[level - 1]
                costs[place] = loss(lower)
        ranks[min(costs, key=costs.get)] = sizes[sizes.index(ranks[min(costs, key=costs.get)]) - 1]
    np.testing.assert_array_equal(np.stack([found.key, found.value], axis=1), ranks)
    np.testing.assert_allclose(found.loss, loss(ranks), rtol=1e-4)
    several = analysis.search_ranks(tiny().model, TOKENS, start(), 0.5, lengths=LENGTHS, levels=(0.5,), at_once=3)
    assert (several.key == 4).all() and (several.value == 4).all()
    everything = analysis.search_ranks(tiny().model, TOKENS, start(), 1.0, lengths=LENGTHS)
    assert (everything.key == DIM).all() and everything.loss < 1e-6


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda model: analysis.search_ranks(model, TOKENS, None, 0.5), StorageError, "give one from kvjax.calibrate"),
        (
            lambda model: analysis.search_ranks(
                model, TOKENS, kvjax.calibrate(model, TOKENS, storage.low_rank(4, DIM)), 0.5
            ),
            StorageError, "this model need",
        ),
        (
            lambda model: analysis.search_ranks(model, TOKENS, start(), 0.1), InputError,
            "share must be a number from 0.125 to 1; got 0.1",
        ),
        (
            lambda model: analysis.train_directions(model, TOKENS, start(), levels=(0.0,)), InputError,
            "give parts of a head's directions",
        ),
        (
            lambda model: analysis.train_directions(model, TOKENS, start(), steps=0), InputError,
            "steps must be a whole number of at least 1",
        ),
    ],
)  # fmt: skip
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make(tiny().model)
