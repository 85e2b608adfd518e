"""Gates of heads: the blend and its loss against the definition and a split cache, and what training finds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.training.config import TrainConfig, decoder_config
from experiments.training.induction import initial_parameters
from kvjax import analysis, policies
from kvjax.analysis import gates
from kvjax.cache.state import Block
from kvjax.cache.step.interface import LayerArgs
from kvjax.errors import InputError
from kvjax.models.decoder import Decoder
from kvjax.models.gates import Gates
from tests.tiny import random_tokens, tiny

TOKENS, LENGTHS = random_tokens(2, 30, seed=3), np.array([30, 19], np.int32)


@pytest.mark.parametrize("window", [None, 7])
def test_blend_is_the_definition(window):
    rng = np.random.default_rng(0)
    batch, kv_heads, group, n, dim, sinks, recent, cap = 2, 3, 2, 24, 8, 3, 4, 5.0
    query, output = rng.normal(size=(2, batch, kv_heads * group, n, dim))
    key, value = rng.normal(size=(2, batch, kv_heads, n, dim))
    share = np.array([0.0, 0.4, 1.0])
    expected = np.zeros_like(output)
    for b, h, i in np.ndindex(batch, kv_heads * group, LENGTHS[1]):
        k = h // group
        seen = [
            j for j in range(i + 1) if (j < sinks or i - j <= recent) and (window is None or i - j < window)
        ]  # fmt: skip
        logits = cap * np.tanh(key[b, k, seen] @ query[b, h, i] * dim**-0.5 / cap)
        weight = np.exp(logits - logits.max())
        streaming = weight @ value[b, k, seen] / weight.sum()
        expected[b, h, i] = share[k] * output[b, h, i] + (1 - share[k]) * streaming
    position = np.where(np.arange(n) < LENGTHS[1], np.arange(n), -1)[None].repeat(batch, 0)
    row = jnp.full((batch,), LENGTHS[1], jnp.int32)
    block = Block(jnp.asarray(position, jnp.int32), row, row, ())
    arrays = (jnp.asarray(each, jnp.float32) for each in (output, query, key, value))
    made = Gates(jnp.asarray(share, jnp.float32), sinks, recent)
    got = made.blend(*arrays, block, LayerArgs(soft_cap=cap, window=window))
    np.testing.assert_allclose(got[:, :, : LENGTHS[1]], expected[:, :, : LENGTHS[1]], atol=2e-6)


@pytest.mark.sampled(0)
def test_gates_of_zero_and_one_are_a_split_cache():
    """A prompt in one shot is then what the cache computes token by token."""
    model, table = tiny(layers=3).model, np.array([[1, 0], [0, 0], [0, 1]])
    own = [Gates(jnp.asarray(row, jnp.float32), 2, 5) for row in table]
    hidden = gates.hidden_states(model.params, own, jnp.asarray(TOKENS), jnp.asarray(LENGTHS), config=model.config)
    logits = Decoder(model.config).apply({"params": model.params}, hidden, method="logits")
    got = jax.nn.log_softmax(np.asarray(logits, np.float64))
    policy = policies.duo_attention(table, sinks=2, recent=5)
    expected = kvjax.log_likelihood(model, TOKENS, policy, prompt_length=1, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        own = got[row, np.arange(length - 1), TOKENS[row, 1:length]]
        np.testing.assert_allclose(own, expected.logprobs[row, : length - 1], atol=3e-5)
    full = kvjax.log_likelihood(model, TOKENS, policies.full(), prompt_length=1, lengths=LENGTHS)
    assert np.abs(full.logprobs - expected.logprobs).max() > 1e-2


@pytest.mark.sampled(0)
def test_the_loss_and_its_gradient():
    model = tiny(layers=3).model
    share = jnp.asarray(np.random.default_rng(1).uniform(0.2, 0.9, (3, 2)), jnp.float32)
    compared = np.zeros(TOKENS.shape, bool)
    compared[0, 20:29], compared[1, 15:18] = True, True
    data = (jnp.asarray(TOKENS), jnp.asarray(compared), jnp.asarray(LENGTHS))
    loss = jax.jit(functools.partial(
        gates.gate_loss, model.params, config=model.config, sinks=2, recent=4, penalty=0.3
    ))  # fmt: skip
    value, slope = jax.value_and_grad(loss)(share, *data)
    # The definition, from the hidden states of both models.
    own = [Gates(row, 2, 4) for row in share]
    one, two = (
        np.asarray(gates.hidden_states(model.params, each, data[0], data[2], config=model.config), np.float64)
        for each in (own, None)
    )
    expected = np.mean(np.square(one - two)[compared]) + 0.3 * np.mean(share)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(loss(jnp.ones_like(share), *data), 0.3, rtol=1e-6)
    step = 0.02
    for index in np.ndindex(3, 2):
        up, down = (float(loss(share.at[index].add(sign * step), *data)) for sign in (1, -1))
        np.testing.assert_allclose(slope[index], (up - down) / (2 * step), rtol=2e-2, atol=2e-4)
    assert np.abs(np.asarray(slope) - 0.3 / 6).max() > 1e-3


def test_passkeys_stand_in_the_text_and_at_its_end():
    text = np.arange(1000, 1200)
    made = analysis.passkeys(text, rows=3, width=150, keys=4, length=6, cue=2, draw_from=np.arange(50))
    assert made.tokens.shape == made.answers.shape == (3, 150)
    for tokens, answers in zip(*made, strict=True):
        asked = tokens[-24:].reshape(4, 6)
        filler = tokens[:-24][tokens[:-24] >= 1000]
        assert filler.size == 150 - 48 and (np.diff(filler) == 1).all()
        found = [key.tolist() in [tokens[i : i + 6].tolist() for i in range(120)] for key in asked]
        assert all(found) and len({tuple(key) for key in asked}) == 4
        np.testing.assert_array_equal(answers[-24:].reshape(4, 6), [[0, 0, 1, 1, 1, 1]] * 4)
        assert not answers[:-24].any()
    assert not np.array_equal(made.tokens[0], made.tokens[1])
    again = analysis.passkeys(text, rows=3, width=150, keys=4, length=6, cue=2, draw_from=np.arange(50))
    np.testing.assert_array_equal(again.tokens, made.tokens)


@pytest.mark.sampled(0)
def test_the_head_that_looks_far_back_is_found():
    """KV head 0 of the second layer is an induction head; that of the first layer looks one token back."""
    config = dataclasses.replace(decoder_config(TrainConfig(), bos=0), max_positions=300, num_layers=2, windows=())
    model = kvjax.Model(config, initial_parameters(config, jax.random.key(0)))
    text = random_tokens(1, 60, seed=7)[0]
    made = analysis.passkeys(text, rows=4, keys=2, length=8, draw_from=np.arange(2, 200))
    found = analysis.head_gates(model, *made, sinks=2, recent=6, steps=30, learning_rate=0.1)
    expected = np.zeros(found.gates.shape, bool)
    expected[1, 0] = True
    assert found.gates[1, 0] > 0.8 and found.gates[~expected].max() < 0.2
    np.testing.assert_array_equal(found.heads(0.01), expected)
    assert found.losses.shape == (30,) and found.losses[-1] < 0.5 * found.losses[0]
    assert found.heads(1.0).all() and not found.heads(0.0).any()


MARKS = np.ones(TOKENS.shape, bool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: analysis.head_gates(model, TOKENS, MARKS[:, :20]), "answers must be true or false for each of"),
        (lambda model: analysis.head_gates(model, TOKENS, MARKS.astype(int)), "answers must be true or false"),
        (
            lambda model: analysis.head_gates(model, TOKENS, np.arange(30) > [[5], [25]], lengths=LENGTHS),
            "row 1 has no answers",
        ),
        (lambda model: analysis.head_gates(model, TOKENS, MARKS, steps=0), "steps must be a whole number of at least"),
        (lambda model: analysis.head_gates(model, TOKENS, MARKS, penalty=-1), "penalty must be a number from 0"),
        (lambda model: analysis.passkeys([], rows=1), "text must be a sequence of token ids"),
        (lambda model: analysis.passkeys(TOKENS[0], width=100), "width=100 is not valid: a row has 640 tokens"),
        (lambda model: analysis.passkeys(TOKENS[0], length=4, cue=4), "cue must be a whole number from 1 to 3"),
        (lambda model: analysis.HeadGates(np.ones((1, 2)), np.ones(1)).heads(1.5), "share must be a number from 0 to"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(InputError, match=message):
        make(tiny().model)
