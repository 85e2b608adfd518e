"""The worked cases of optimal and Quest on a trained model: every choice, every log-probability."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection
from kvjax.cache import Block
from kvjax.generate import prefill
from kvjax.models.decoder import Decoder


@pytest.fixture(scope="module")
def examples(shared_data):
    return np.load(shared_data / "examples" / "selection_cases.npz")


@pytest.fixture(scope="module")
def stories(shared_data):
    return kvjax.load(shared_data / "data" / "models" / "stories260K-hf")


def built(look: dict) -> selection.Selection:
    arguments = dict(look)
    name = {"pages": "quest"}.get(name := arguments.pop("name"), name)
    return selection.by_name(name, **arguments)


@functools.partial(jax.jit, static_argnames=("config", "phase"))
def read_positions(params, kv, tokens, *, config, phase):
    """[steps, L, K, S] positions that each query of one row reads; -1 = not read."""

    def body(kv, token):
        block = Block(position=kv.length[:, None], prompt=kv.prompt, total=kv.total, budget=kv.budget)
        (_, kv), kept = Decoder(config).apply(
            {"params": params}, token[None, None], kv, block, phase, method="hidden", mutable="intermediates"
        )
        layers = [kept["intermediates"][f"attention_{i}"][0] for i in range(config.num_layers)]
        return kv, [seen.position[0] for (seen,) in layers]

    return jax.lax.scan(body, kv, tokens)[1]


@pytest.mark.parametrize("case", [5, 6])
def test_choices_and_log_probabilities(examples, stories, case):
    about = json.loads(bytes(examples["cases"]))[case]
    tokens, prompt = examples[f"{case}_tokens"], about["prompt_length"]
    look = built(about["look"])
    got = kvjax.log_likelihood(stories, tokens, policies.full(), prompt_length=prompt, selection=look)
    np.testing.assert_allclose(got.logprobs[0], examples[f"{case}_logprobs"], atol=1e-4, rtol=0)

    steps = len(tokens) - prompt
    begun = prefill(stories, tokens[:prompt], policies.full(), max_new_tokens=steps + 1, selection=look)
    read = read_positions(
        stories.params, begun.state, jnp.asarray(tokens[prompt:]), config=stories.config, phase=begun.layout.decode
    )
    page = about["look"].get("page", 1)
    for layer, positions in enumerate(read):
        for step in range(steps):
            for head, expected in enumerate(examples[f"{case}_chosen"][step, layer]):
                if examples[f"{case}_count"][step, layer, head] < 0:  # a dense layer
                    continue
                newest = prompt + step
                found = np.sort(np.asarray(positions[step][head]))
                # What is always read, the new token's page, is not chosen.
                found = found[(found >= 0) & (found < newest // page * page)]
                np.testing.assert_array_equal(found, expected[expected >= 0], f"{layer=} {step=} {head=}")
