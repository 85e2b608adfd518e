"""Models whose attention has a gate's weights: what a cache under `learned` computes token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.analysis.gates import hidden_states
from kvjax.errors import PolicyError
from kvjax.models.config import model_sizes
from kvjax.models.decoder import Decoder
from kvjax.models.decoder_layer import POLICY
from kvjax.training import GatedAttention, Retention
from tests.parameters import with_parameters
from tests.tiny import random_tokens, tiny

TOKENS, LENGTHS = random_tokens(2, 30, seed=3), np.array([30, 19], np.int32)


def logits_of(model, gates, relax, retention, gate, temperature=0.5):
    own = [
        GatedAttention(each, jnp.float32(temperature), gate=gate, retention=retention, relax=relax) for each in gates
    ]
    given = (jnp.asarray(TOKENS), jnp.asarray(LENGTHS))
    hidden = hidden_states(model.params, own, *given, config=model.config)
    return jax.nn.log_softmax(Decoder(model.config).apply({"params": model.params}, hidden, method="logits"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("retention", "relax", "gate"),
    [
        (Retention(8, recent=3, sinks=1), "st", policies.LinearGate()),
        (Retention(7, recent=2, every=4), "st", policies.LinearGate()),
        (Retention(12, recent=4, threshold=0.2), "st", policies.LinearGate()),
        (Retention(30, recent=4, sinks=1, threshold=0.5), "mask", policies.LinearGate(output="sigmoid")),
        (Retention(8, recent=3, threshold=0.5, prompt=14), "st", policies.AttentionGate(4)),
    ],
    ids=str,
)
def test_it_is_the_cache(retention, relax, gate):
    """The scores of later layers follow from what earlier ones evict."""
    model = with_parameters(tiny(layers=3).model, (gate,))
    gates = [model.params[f"layer_{index}"]["attention"][POLICY][gate.name] for index in range(3)]
    # A temperature near 0 makes probabilities 0 or 1.
    own = functools.partial(logits_of, model, relax=relax, retention=retention, gate=gate, temperature=1e-5)
    got = np.asarray(jax.jit(own)(gates))
    prompt = retention.prompt or 1
    expected = kvjax.log_likelihood(model, TOKENS, retention.policy(gate), prompt_length=prompt, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        own = got[row, np.arange(length - 1), TOKENS[row, 1:length]]
        np.testing.assert_allclose(own, expected.logprobs[row, : length - 1], atol=5e-5)
    full = kvjax.log_likelihood(model, TOKENS, policies.full(), prompt_length=1, lengths=LENGTHS)
    assert np.abs(full.logprobs - expected.logprobs).max() > 1e-2


@pytest.mark.sampled(0)
@pytest.mark.parametrize("relax", ["soft", "decay", "mask"])
def test_gradients_of_relaxations(relax):
    """Against a difference along a random direction."""
    model = tiny(layers=3).model
    gate = policies.MlpGate(4, output="sigmoid" if relax == "mask" else "log_sigmoid")
    keys = jax.random.split(jax.random.key(0), 3)
    gates = [gate.initial(key, model_sizes(model.config)) for key in keys]

    # The borders of soft gates are constants, and no border moves if all tokens stay above a threshold of none.
    retention = Retention(40, threshold=-1.0) if relax == "soft" else Retention(40)

    @jax.jit
    def loss(gates):
        return -jnp.mean(jnp.diagonal(logits_of(model, gates, relax, retention, gate)[0][:, TOKENS[0]]))

    slope = jax.grad(loss)(gates)
    step = jax.tree.map(lambda x: 0.05 * x / jnp.maximum(jnp.linalg.norm(x), 1e-9), slope)
    up, down = (loss(jax.tree.map(lambda x, y, sign=sign: x + sign * y, gates, step)) for sign in (1, -1))
    expected = sum(jnp.sum(x * y) for x, y in zip(*map(jax.tree.leaves, (slope, step)), strict=True))
    assert float(up - down) == pytest.approx(2 * float(expected), rel=0.05)
    assert min(float(jnp.abs(x).max()) for each in slope for x in each.values()) > 0


def test_sliding_windows_are_refused():
    model, gate = tiny(layers=3).model, policies.LinearGate()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, windows=(None, 12, None)))
    gates = [model.params[f"layer_{index}"]["attention"][POLICY][gate.name] for index in range(3)]
    with pytest.raises(PolicyError, match="a text of 30 tokens is longer than the sliding window of 12"):
        jax.eval_shape(lambda gates: logits_of(model, gates, "st", Retention(8), gate), gates)
