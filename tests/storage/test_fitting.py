"""Levels that are fitted to a calibration: k-means, plain and weighted by gradients, and Q-Norm."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.errors import StorageError
from kvjax.models.gradients import gradients
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Samples, kvquant
from kvjax.storage.fitting import kmeans_levels, normalised
from kvjax.storage.tables import lookup, nearest_level
from tests.laws import replay
from tests.laws.test_shared_sides import DIM, LENGTHS, random, samples
from tests.tiny import random_tokens, tiny

BITS, SHARE = 3, 0.2


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: programs are many, and small."""


def error(x: np.ndarray, levels: np.ndarray, weights: np.ndarray) -> float:
    return float(np.sum(weights * np.min((x[:, None] - levels) ** 2, axis=1)))


def best(x: np.ndarray, count: int, weights: np.ndarray) -> float:
    """The least error of any division of a few numbers into intervals."""
    order = np.argsort(x)
    x, weights = x[order], weights[order]
    found = []
    for ends in itertools.combinations(range(1, len(x)), count - 1):
        parts = zip((0, *ends), (*ends, len(x)), strict=True)
        means = [np.average(x[a:b], weights=weights[a:b]) for a, b in parts]
        found.append(error(x, np.array(means), weights))
    return min(found)


@pytest.mark.parametrize("weighted", [False, True])
def test_few_numbers_are_divided_in_the_best_way(weighted):
    rng = np.random.default_rng(1)
    centres = np.array([-0.9, -0.2, 0.1, 0.8])
    x = np.concatenate([centre + 0.03 * rng.normal(size=4) for centre in centres])
    weights = rng.uniform(0.1, 9, len(x)) if weighted else np.ones(len(x))
    levels = kmeans_levels(x, 2, weights if weighted else None)
    assert np.all(np.diff(levels) > 0)
    np.testing.assert_allclose(error(x, levels, weights), best(x, 4, weights), rtol=1e-9)


def test_levels_are_where_numbers_weigh_most():
    x = np.random.default_rng(2).normal(size=4000)
    plain, heavy = kmeans_levels(x, BITS), kmeans_levels(x, BITS, np.where(x > 1, 100.0, 0.01))
    # Of a normal distribution they are those of Lloyd and Max.
    np.testing.assert_allclose(plain, [-2.152, -1.344, -0.756, -0.245, 0.245, 0.756, 1.344, 2.152], atol=0.12)
    assert np.sum(heavy > 1) > np.sum(plain > 1)
    np.testing.assert_array_equal(kmeans_levels(x, BITS, np.zeros(len(x))), plain)
    few = kmeans_levels(np.array([0.5, 0.5, -0.5]), BITS)
    assert np.all(np.diff(few) >= 0) and error(np.array([0.5, -0.5]), few, np.ones(2)) == 0


def test_mean_and_deviation_stay():
    x = np.random.default_rng(3).normal(0.3, 1.0, size=5000).clip(-1, 1)
    levels = kmeans_levels(x, 2)
    decoded = normalised(levels, x)
    coded = np.abs(x[:, None] - levels).argmin(axis=1)
    np.testing.assert_allclose([decoded[coded].mean(), decoded[coded].std()], [x.mean(), x.std()], rtol=1e-9)
    # The same ratio and the same shift of all levels.
    assert np.ptp(np.diff(decoded) / np.diff(levels)) < 1e-9


@pytest.mark.parametrize("bits", [2, 5])
def test_tables_that_are_arrays_are_those_that_are_constants(bits):
    table = np.sort(np.random.default_rng(4).uniform(-1, 1, 1 << bits)).astype(np.float32)
    y = np.random.default_rng(5).uniform(-1.2, 1.2, (4, 9)).astype(np.float32)
    codes = jax.jit(nearest_level)(jnp.asarray(table), y)
    np.testing.assert_array_equal(codes, nearest_level(tuple(table.tolist()), y))
    np.testing.assert_array_equal(jax.jit(lookup)(jnp.asarray(table), codes), table[np.asarray(codes)])


def test_a_calibration_has_the_tables_of_a_layer():
    held = kvquant(BITS, SHARE, table="kmeans", qnorm=True)
    given = samples()
    made = Calibration.of(held, [given], Rope(dim=DIM))
    assert made.nbytes == 2 * 4 * given.key.shape[1] * DIM + 2 * 2 * 4 * 2**BITS
    key, value = made.layers[0]["key"], made.layers[0]["value"]
    y = (given.key - (key["lower"] + key["upper"]) / 2) / ((key["upper"] - key["lower"]) / 2)
    y = np.asarray(y, np.float64)
    np.testing.assert_allclose(key["levels"][0], kmeans_levels(y[np.abs(y) <= 1], BITS), atol=1e-5)
    # Values without the smallest and the largest entry, between the others' extremes.
    rest = np.sort(given.value.astype(np.float64), axis=-1)[..., 1:-1]
    low, high = rest[..., :1], rest[..., -1:]
    entries = ((rest - (low + high) / 2) / ((high - low) / 2)).ravel()
    np.testing.assert_allclose(value["levels"][0], kmeans_levels(entries, BITS), atol=1e-5)
    np.testing.assert_allclose(value["decoded"][0], normalised(kmeans_levels(entries, BITS), entries), atol=1e-5)


@pytest.mark.sampled(0)
def test_fitted_tables_are_given_ones():
    """A run whose tables come from a calibration is the run in which they are constants."""
    fitted, rope = kvquant(BITS, SHARE, table="kmeans"), Rope(dim=DIM)
    arguments = (*random(), LENGTHS, policies.h2o(6), rope)
    made = Calibration.of(fitted, [samples()], rope)
    tables = [tuple(np.asarray(made.layers[0][name]["levels"][0]).tolist()) for name in ("key", "value")]
    given = kvquant(BITS, SHARE, table=tables[0], value_table=tables[1])
    ends = {name: made.layers[0]["key"][name] for name in ("lower", "upper")}
    other = Calibration(({"key": ends},), rope=rope)
    (output, layer), (plain, own) = (
        replay(held, *arguments, calibration=each) for held, each in ((fitted, made), (given, other))
    )
    np.testing.assert_array_equal(output, plain)
    jax.tree.map(np.testing.assert_array_equal, layer.stores, own.stores)


def test_gradients_of_keys_and_values():
    """Those of a loss that adds to keys and values where a layer makes them; fewer layers than the model has."""
    own, tokens, lengths = tiny().model, random_tokens(2, 9, seed=8), np.array([9, 5])
    made = kvjax.calibrate(own, tokens, kvquant(2, 0.3, table="fisher"), lengths=lengths)
    plain = kvjax.calibrate(own, tokens, kvquant(2, 0.3, table="kmeans"), lengths=lengths)
    assert "fisher" in made.method and "fisher" not in plain.method
    for one, other in zip(made.layers, plain.layers, strict=True):
        np.testing.assert_array_equal(one["key"]["lower"], other["key"]["lower"])
        assert np.abs(one["key"]["levels"] - other["key"]["levels"]).max() > 1e-3
    from kvjax.models import calibrate

    block = calibrate._block(jnp.asarray(lengths, jnp.int32), width=9, layers=2)
    x = calibrate._enter(own.params, jnp.asarray(tokens), block, config=own.config)
    found = gradients(own, x, jnp.asarray(tokens), block, rotated=False)

    def loss(layer: int, name: str, row: int, head: int, token: int, feature: int, step: float) -> float:
        shift = {side: np.zeros((2, 2, 9, 8), np.float32) for side in ("key", "value")}
        shift[name][row, head, token, feature] = step
        params = dict(own.params)
        params[f"layer_{layer}"] = dict(params[f"layer_{layer}"])
        params[f"layer_{layer}"]["attention"] = {**params[f"layer_{layer}"]["attention"], "shift": shift}
        model = kvjax.Model(own.config, params)
        scores = kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=lengths, lengths=lengths,
                                      limits=kvjax.Limits(9, 1)).logprobs  # fmt: skip
        return -float(jnp.sum(scores))

    for at in ((0, "key", 0, 1, 3, 2), (1, "value", 1, 0, 2, 5), (1, "key", 1, 1, 3, 0)):
        slope = (loss(*at, 0.03) - loss(*at, -0.03)) / 0.06
        np.testing.assert_allclose(found[at[0]][at[1]][at[2:]], slope, atol=2e-3)
    # Padding has none.
    assert all(not np.any(each[1, :, 5:]) for layer in found for each in layer.values())


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: kvquant(3, table="best"), "table='best' is not valid; use 'kmeans' or 'fisher'"),
        (lambda: kvquant(3, qnorm="yes"), "qnorm='yes' is not valid"),
        (lambda: Calibration.of(kvquant(3, table="fisher"), [samples()]), "needs the gradients of a model"),
        (
            lambda: replay(
                kvquant(3, table="kmeans"), *random(), LENGTHS, calibration=Calibration.of(kvquant(3), [samples()])
            ),
            r"is of keys: .*table=None.* needs one of .*table='kmeans'",
        ),
    ],
)  # fmt: skip
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(StorageError, match=match):
        build()


def test_levels_alone_may_be_fitted():
    held = storage.levels(2, "kmeans", qnorm=True)
    own = Samples(own=samples().key, query=None, key=samples().key, value=samples().value)
    made = Calibration.of(held, [own])
    side = held.key.side.aligned(made.layers[0]["key"], 3)
    x = samples().key.swapaxes(0, 1)
    back = held.key.decode(held.key.encode(jnp.asarray(x), side, jnp.float32), side, DIM)
    plain = storage.round_trip(storage.levels(2).key, jnp.asarray(x), None, jnp.float32)
    # Levels of three intervals lie inside; those of a normal distribution reach the extremes.
    assert float(jnp.mean((back - x) ** 2)) < 1.5 * float(jnp.mean((plain - x) ** 2))
