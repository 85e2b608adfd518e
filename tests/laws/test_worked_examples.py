"""The worked examples that come with the definitions, on a trained model, compiled as users compile it."""

import json

import numpy as np
import pytest

import kvjax
from kvjax import policies
from tests import conftest


@pytest.fixture(scope="module")
def examples(shared_data):
    return np.load(shared_data / "examples" / "policy_cases.npz")


@pytest.fixture(scope="module")
def stories(shared_data):
    return kvjax.load(shared_data / "data" / "models" / "stories260K-hf")


@pytest.fixture(autouse=True)
def optimised():
    """The suite compiles without optimisations, for speed; what users run is checked here."""
    with conftest.optimised():
        yield


@pytest.mark.parametrize("case", range(16))
def test_kept_slots_and_log_probabilities(examples, stories, case):
    about = json.loads(bytes(examples["cases"]))[case]
    arguments = dict(about["policy"])
    name = arguments.pop("name")
    got = kvjax.log_likelihood(
        stories,
        examples[f"{case}_tokens"],
        policies.by_name(name, **arguments),
        prompt_length=about["prompt_length"],
        prefill_block=about["prefill_block"],
    )
    np.testing.assert_allclose(got.logprobs, examples[f"{case}_logprobs"], atol=3e-5, rtol=0)
    if f"{case}_kept" in examples:
        kept = [np.sort(np.asarray(layer.position), axis=2) for layer in got.state.layers]
        live = examples[f"{case}_kept"].shape[-1]
        assert all((positions >= 0).sum(axis=2).max() == live for positions in kept)
        np.testing.assert_array_equal([positions[..., -live:] for positions in kept], examples[f"{case}_kept"])
