"""The worked cases of selections on trained and random models: every choice, every kept slot, every log-probability."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax import policies, selection
from kvjax.cache import Block
from kvjax.generate import prefill
from kvjax.models import skew
from kvjax.models.decoder import Decoder

pytestmark = pytest.mark.thorough  # what is chosen does not depend on jax's version
CASES = [*((case, None) for case in range(13)), (11, False), (12, False)]  # number, and whether to fold the skew


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


@functools.partial(jax.jit, static_argnames=("config", "phase"))
def chosen_positions(params, kv, tokens, *, config, phase):
    """[steps, L, K, S] positions that were chosen for each query of one row; -1 = not chosen, -2 = a dense layer."""

    def body(kv, token):
        block = Block(position=kv.length[:, None], prompt=kv.prompt, total=kv.total, budget=kv.budget)
        (_, kv), kept = Decoder(config).apply(
            {"params": params}, token[None, None], kv, block, phase, method="hidden", mutable="intermediates"
        )
        layers = [kept["intermediates"][f"attention_{i}"][0] for i in range(config.num_layers)]
        found = [
            jnp.full(seen.position[0].shape, -2)
            if seen.choice is None
            else jnp.where(seen.choice, seen.position, -1)[0]
            for (seen,) in layers
        ]
        return kv, found

    return jax.lax.scan(body, kv, tokens)


@pytest.mark.parametrize(("case", "fold"), CASES)
def test_choices_kept_slots_and_log_probabilities(examples, models, case, fold):
    about = json.loads(bytes(examples["cases"]))[case]
    name = "opt" if about["model"] == "opt" else "stories"
    skews = bool(about["look"].get("skew"))
    model = skew.skewed(models[name], examples[f"skew_{name}"], fold=fold) if skews else models[name]
    tokens, prompt = examples[f"{case}_tokens"], about["prompt_length"]
    look, policy = built(about["look"]), kept(about)
    got = kvjax.log_likelihood(model, tokens, policy, prompt_length=prompt, selection=look)
    np.testing.assert_allclose(got.logprobs[0], examples[f"{case}_logprobs"], atol=1e-4, rtol=0)
    for layer, expected in zip(got.state.layers, examples[f"{case}_kept"], strict=True):
        for positions, own in zip(np.asarray(layer.position[0]), expected, strict=True):
            np.testing.assert_array_equal(np.sort(positions[positions >= 0]), own[own >= 0])

    steps = len(tokens) - prompt
    begun = prefill(model, tokens[:prompt], policy, max_new_tokens=steps + 1, selection=look)
    if f"{case}_columns" in examples:
        for layer, expected in zip(begun.state.layers, examples[f"{case}_columns"], strict=True):
            for columns, own in zip(np.asarray(layer.index.get("columns", [[]]))[0], expected, strict=False):
                own = own[own >= 0]
                np.testing.assert_array_equal(columns[columns < model.config.head_dim], own)
    _, chosen = chosen_positions(
        model.params, begun.state, jnp.asarray(tokens[prompt:]), config=model.config, phase=begun.layout.decode
    )
    for layer, positions in enumerate(chosen):
        for step in range(steps):
            for head, expected in enumerate(examples[f"{case}_chosen"][step, layer]):
                about_it = f"{layer=} {step=} {head=}"
                found = np.sort(np.asarray(positions[step][head]))
                count = examples[f"{case}_count"][step, layer, head]
                if count < 0:  # a dense layer
                    assert (found == -2).all(), about_it
                    continue
                np.testing.assert_array_equal(found[found >= 0], expected[expected >= 0], about_it)
                assert count == (found >= 0).sum(), about_it
