"""The worked examples that come with the definitions, on a trained model; some are compiled as users compile it."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.policies.traits import parameters_of
from tests import conftest

#: The runs of methods_cases.npz.
METHODS = tuple(range(20))
#: Compiled with optimisations, which takes three times as long, and changes no more than the rounding of the others: a
#: prompt in one shot and in blocks, steps that evict one slot, and rounds that evict many.
OPTIMISED = ("policies 0", "policies 5", "methods 2")


@pytest.fixture(scope="module")
def examples(shared_data):
    return np.load(shared_data / "examples" / "policy_cases.npz")


@pytest.fixture(scope="module")
def stories(shared_data):
    return kvjax.load(shared_data / "data" / "models" / "stories260K-hf")


def calibration_of(methods, policy):
    """The arrays of a case's policy, as they are given; None for a policy without parameters."""
    names = {each.name for each in parameters_of(policy)}
    mean, size, direction = (methods[f"stories260K-hf_{name}"] for name in ("tri_mean", "tri_abs", "qfilters"))
    layers, heads, _ = mean.shape
    grouped = (layers, direction.shape[1], heads // direction.shape[1], -1)
    arrays = {
        "triattention": {
            "mean": np.concatenate([mean.real, mean.imag], axis=2).reshape(grouped),
            "size": size.reshape(grouped),
        },
        "qfilters": {"direction": direction},
    }
    given = {name: parts for name, parts in arrays.items() if name in names}
    return {name: {part: np.asarray(x, np.float32) for part, x in parts.items()} for name, parts in given.items()}


def run(model, tokens, policy, about, name, calibration=None):
    """The log-likelihood of tokens [B, T] as the case of that name has it."""
    options = {"prompt_length": about["prompt_length"], "prefill_block": about["prefill_block"]}
    with conftest.optimised() if name in OPTIMISED else contextlib.nullcontext():
        return kvjax.log_likelihood(model, tokens, policy, **options, calibration=calibration)


def assert_kept(got, kept):
    """The live positions of the run are `kept` [L, B, K, live]."""
    positions = [np.sort(np.asarray(layer.position), axis=2) for layer in got.state.layers]
    live = kept.shape[-1]
    assert all((each >= 0).sum(axis=2).max() == live for each in positions)
    np.testing.assert_array_equal([each[..., -live:] for each in positions], kept)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", range(16))
def test_kept_slots_and_log_probabilities(examples, stories, case):
    about = json.loads(bytes(examples["cases"]))[case]
    got = run(stories, examples[f"{case}_tokens"], policies.by_name(**about["policy"]), about, f"policies {case}")
    np.testing.assert_allclose(got.logprobs, examples[f"{case}_logprobs"], atol=3e-5, rtol=0)
    if f"{case}_kept" in examples:
        assert_kept(got, examples[f"{case}_kept"])


@pytest.fixture(scope="module")
def methods(shared_data):
    return np.load(shared_data / "examples" / "methods_cases.npz")


def policy_of(about):
    """The policy of a case, with its base; its tova ranks each head by itself."""
    arguments = dict(about)
    name, base = arguments.pop("name"), arguments.pop("base", None)
    if base is not None:
        return policies.COMBINATORS[name](policy_of(base), **arguments)
    return policies.by_name(name, **arguments, **({"share_heads": False} if name == "tova" else {}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", METHODS)
def test_newer_methods(methods, stories, case):
    about = json.loads(bytes(methods["cases"]))[case]
    tokens = methods[f"{about['model']}_tokens"]
    policy = policy_of(about["policy"])
    given = calibration_of(methods, policy)
    layers = [jax.tree.map(lambda x, i=index: jnp.asarray(x[i]), given) for index in range(stories.config.num_layers)]
    calibration = kvjax.Calibration(tuple(layers), "given", stories.config.rope) if given else None
    got = run(stories, tokens[None], policy, about, f"methods {case}", calibration)
    np.testing.assert_allclose(got.logprobs[0], methods[f"{case}_logprobs"], atol=3e-5, rtol=0)
    assert_kept(got, methods[f"{case}_kept"][:, None])


@pytest.mark.parametrize("policy", [policies.triattention(40), policies.qfilters(40)], ids=lambda policy: policy.name)
def test_calibrations_are_reproduced(methods, stories, policy):
    made = kvjax.calibrate(stories, methods["stories260K-hf_calibration_tokens"][None], policy)
    expected = calibration_of(methods, policy)[policy.name]
    for part, x in expected.items():
        got = np.stack([layer[policy.name][part] for layer in made.layers])
        np.testing.assert_allclose(got, x, atol=1e-4, rtol=1e-4)
