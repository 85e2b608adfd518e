"""The worked cases of selections on trained and random models: every choice, every kept slot, every log-probability."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax import policies, selection
from kvjax.models import skew

pytestmark = pytest.mark.thorough  # what is chosen does not depend on jax's version
CASES = [*((case, None) for case in range(13)), (11, False)]  # number, and whether to fold the skew


@pytest.fixture(scope="module")
def examples(shared_data):
    return np.load(shared_data / "examples" / "selection_cases.npz")


@pytest.fixture(scope="module")
def models(examples, shared_data, tmp_path_factory):
    """The plain models by name."""
    folder = tmp_path_factory.mktemp("opt")
    (folder / "config.json").write_bytes(bytes(examples["opt_config"]))
    weights = {name[4:]: examples[name].astype(np.float32) for name in examples.files if name.startswith("opt/")}
    save_file(weights, folder / "model.safetensors")
    return {"opt": kvjax.load(folder), "stories": kvjax.load(shared_data / "data" / "models" / "stories260K-hf")}


def built(look: dict) -> selection.Selection:
    arguments = {name: value for name, value in look.items() if name not in ("name", "skew")}
    name = look["name"]
    if name == "pages":
        name = "lserve" if "sub" in look else "quest"
    return selection.by_name(name, **arguments)


def kept(about: dict) -> policies.Policy:
    """The policy of a case."""
    if about["keep"] is None:
        return policies.full()
    arguments = dict(about["keep"])
    first = arguments.pop("first", 0)
    policy = policies.by_name(arguments.pop("name"), **arguments)
    if "page" in about["look"]:
        policy = policies.by_page(policy, page=about["look"]["page"])
    return policies.from_layer(policy, first=first) if first else policy


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "fold"), CASES)
def test_choices_kept_slots_and_log_probabilities(examples, models, case, fold):
    about = json.loads(bytes(examples["cases"]))[case]
    name = "opt" if about["model"] == "opt" else "stories"
    skews = bool(about["look"].get("skew"))
    model = skew.skewed(models[name], examples[f"skew_{name}"], fold=fold) if skews else models[name]
    tokens, prompt = examples[f"{case}_tokens"], about["prompt_length"]
    look, policy = built(about["look"]), kept(about)
    got = kvjax.log_likelihood(model, tokens, policy, prompt_length=prompt, selection=look, record=True)
    np.testing.assert_allclose(got.logprobs[0], examples[f"{case}_logprobs"], atol=1e-4, rtol=0)
    for layer, expected in zip(got.state.layers, examples[f"{case}_kept"], strict=True):
        for positions, own in zip(np.asarray(layer.position[0]), expected, strict=True):
            np.testing.assert_array_equal(np.sort(positions[positions >= 0]), own[own >= 0])
    if f"{case}_columns" in examples:
        for layer, expected in zip(got.state.layers, examples[f"{case}_columns"], strict=True):
            for columns, own in zip(np.asarray(layer.index.get("columns", [[]]))[0], expected, strict=False):
                np.testing.assert_array_equal(columns[columns < model.config.head_dim], own[own >= 0])
    # [steps, L, K] and [steps, L, K, W], wider than the most that was chosen
    np.testing.assert_array_equal(got.record.number[:, :, 0], examples[f"{case}_count"])
    expected = examples[f"{case}_chosen"]
    width = expected.shape[-1]
    np.testing.assert_array_equal(got.record.positions[:, :, 0, :, :width], expected)
    assert (got.record.positions[..., width:] == -1).all()
