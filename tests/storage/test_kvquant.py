"""KVQuant: the worked cases, the law of a step, and fitted levels."""

import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.errors import StorageError
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Storage, kvquant
from kvjax.storage.kvquant import ChannelLevels
from kvjax.storage.levels import Levels
from kvjax.storage.sparse import Sparse
from tests.laws import replay, streams
from tests.laws.test_shared_sides import BLOCK, DIM, HEADS, KV_HEADS, LENGTHS, STEPS, THETA, Case, both, check, samples
from tests.policies.test_merge import REFERENCES as MERGES
from tests.reference import replay as law
from tests.reference import shared
from tests.storage.test_sides import examples, given  # noqa: F401

BITS, SHARE = 3, 0.2  # two outliers of a key


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: programs are many, and `test_codecs` has what optimisations could change."""


@functools.cache
def quantiles() -> np.ndarray:
    """Lower and upper ends of each channel, [2, K, D]."""
    x = np.sort(samples().key.astype(np.float64), axis=0)
    at = np.array([SHARE / 2, 1 - SHARE / 2]) * (len(x) - 1)
    low, part = np.floor(at).astype(int), at % 1
    ends = x[low] + part[:, None, None] * (x[low + 1] - x[low])
    return ends.astype(np.float32).astype(np.float64)


@functools.cache
def random() -> tuple[law.Triple, law.Triple]:
    table = shared.normal_levels(BITS)
    codecs = [shared.kvquant_key(table, SHARE, *ends) for ends in quantiles().swapaxes(0, 1)]
    return streams(3, (HEADS, KV_HEADS), DIM, LENGTHS, STEPS, [*codecs, shared.kvquant_value(table, SHARE)])


def by_channel(sinks: int = 1, residual: int = 0, *, cached: bool = False) -> tuple[Storage, Any]:
    """KVQuant; what the policy rotates by rank is coded as it is."""
    made = shared.kvquant(BITS, SHARE, *quantiles(), sinks, residual, THETA)
    if cached:
        made = law.PerHead(lambda head, own=made.heads: own(head)._replace(turned_back=None))
    return kvquant(BITS, SHARE, sinks, residual=residual), made


D2O = policies.d2o(), MERGES["d2o"][1]
CASES = {
    "kvquant-full-blocks": Case(*by_channel(2, 3), both("full"), BLOCK),
    "kvquant-h2o": Case(*by_channel(), both("h2o", budget=6)),
    "kvquant-snapkv": Case(*by_channel(2), both("snapkv", budget=5, window=2, kernel=3)),
    "kvquant-keydiff": Case(*by_channel(0, 2), both("keydiff", budget=0.5)),
    "kvquant-merge": Case(*by_channel(1, 2), both("window", budget=0.5, sinks=1), None, D2O),
    "kvquant-cache": Case(*by_channel(cached=True), both("streaming_llm", budget=6, sinks=1), BLOCK, None, True),
}


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_on_what_was_stored(name):
    check(CASES[name], *random())


def test_vectors(examples):  # noqa: F811
    about = json.loads(bytes(examples["cases"]))[9]
    assert (about["bits"], about["value_outliers"], about["key_outliers"]) == (4, 1, 2)
    own = {name: examples[f"9_{name}"] for name in ("x", "levels", "key_low", "key_high", "decoded", "key_decoded")}
    table = tuple(own["levels"].tolist())
    key, value = ChannelLevels(4, 0.08, table), Sparse(Levels(4, table), 0.08)
    side = {"lower": own["key_low"], "upper": own["key_high"]}
    for codec, shared_by, prefix in ((key, side, "key_"), (value, None, "")):
        parts = codec.encode(jnp.asarray(own["x"]), shared_by, jnp.float32)
        for name, part in parts.items():
            np.testing.assert_allclose(
                part, examples[f"9_{prefix}{name}"], rtol=0 if name in ("codes", "index") else 1e-6
            )
        np.testing.assert_allclose(codec.decode(parts, shared_by, 24), own[f"{prefix}decoded"], atol=1e-5)
        size = sum(np.asarray(part)[0].nbytes for part in parts.values())
        assert codec.bytes(24, "float32") == size == 12 + 2 * 5 + (0 if prefix else 8)


def test_a_replay(examples):  # noqa: F811
    about, prompt, decode, lengths = given(examples, 13)
    table = tuple(examples["13_levels"].tolist())
    held = kvquant(about["bits"], 0.2, about["sinks"], table)
    rope = Rope(dim=8, theta=about["theta"])
    ends = {"lower": examples["13_key_low"][None], "upper": examples["13_key_high"][None]}
    made = Calibration(({"key": ends},), rope=rope)
    out, layer = replay(held, prompt, decode, lengths, rope=rope, calibration=made)
    np.testing.assert_allclose(out, examples["13_out"], atol=1e-4)
    for row in range(2):
        position = np.asarray(layer.position)[row, 0]
        np.testing.assert_array_equal(np.sort(position[position >= 0]), examples[f"13_kept_{row}_0"])
        assert position[layer.stores[0]["key"]["codes"].shape[2] :].tolist() == [0]  # the sink


def test_quantiles_are_of_the_keys_before_rotation():
    made = Calibration.of(kvquant(BITS, SHARE), [samples()])
    for name, ends in zip(("lower", "upper"), quantiles(), strict=True):
        np.testing.assert_allclose(made.layers[0]["key"][name], ends, atol=1e-6)
    assert made.nbytes == 2 * 4 * KV_HEADS * DIM and set(made.layers[0]) == {"key"}


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: kvquant(0), "bits must be a whole number from 1 to 8; got 0"),
        (lambda: kvquant(3, 0.0), "outliers must be a share between 0 and 1; got 0.0"),
        (lambda: kvquant(3, 1.5), "outliers must be a number from 0 to 1; got 1.5"),
        (lambda: kvquant(3, sinks=-1), "sinks must be a whole number of at least 0; got -1"),
        (lambda: kvquant(2, table=(0.0, 1.0)), "table must be 4 ascending numbers"),
        (lambda: kvquant(3, 0.9).bytes_per_slot(2, "float32"), "at least one must be left"),
        (lambda: storage.replay(kvquant(), *random(), LENGTHS), "kvquant3 needs a calibration of one layer"),
    ],
)
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(StorageError, match=match):
        build()
