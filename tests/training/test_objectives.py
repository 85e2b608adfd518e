"""Losses of gates against their definitions, on the attention of a tiny model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, training
from kvjax.analysis.gates import run_text
from kvjax.errors import PolicyError
from kvjax.generation.prefill import prefill
from kvjax.models.config import model_sizes
from tests.tiny import kept, random_tokens, tiny

TOKENS = random_tokens(2, 24, seed=4)
PROGRESS = training.Progress(jnp.float32(0.5), jnp.float32(0.25), jax.random.key(7))


def made(gate, slots=8):
    model = tiny().model
    setup = training.Setup(model.config, gate, (training.Retention(slots, recent=2),) * model.config.num_layers)
    return model, setup, setup.initial(jax.random.key(1))


def loss(objective, model, setup, gates):
    tokens = jnp.asarray(TOKENS)
    return jax.jit(lambda gates: objective.loss(setup, model.params, gates, tokens, PROGRESS))(gates)


def layer_inputs(model):
    """The inputs of each layer's attention, and the attention [B, K, G, T, T] in float64."""
    lengths = jnp.full(2, TOKENS.shape[1], jnp.int32)
    _, inputs = run_text(model.params, None, jnp.asarray(TOKENS), lengths, config=model.config)
    return inputs


@pytest.mark.sampled(0)
def test_next_tokens_are_those_of_a_trained_calibration():
    """The loss is that of `learned` with the calibration of the same gates, token by token."""
    gate = policies.MlpGate(4)
    model, setup, gates = made(gate)
    got = loss(training.NextToken(), model, setup, gates)
    calibration = training.calibration_of(model, gate, gates)
    policy = setup.retention[0].policy(gate)
    expected = kvjax.log_likelihood(model, TOKENS, policy, prompt_length=1, calibration=calibration).logprobs
    assert float(got) == pytest.approx(-float(np.mean(expected)), abs=2e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plus", [False, True])
def test_replays_are_what_kvzip_ranks_by(plus):
    """The largest scores are of the slots that it keeps."""
    model, policy = tiny().model, policies.kvzip(10, sinks=0, chunk=16, plus=plus)
    replayer = training.Replayer.of(model, policy, 2, TOKENS.shape[1])
    found = jax.jit(replayer.scores)(model.params, jnp.asarray(TOKENS))
    state = prefill(model, TOKENS, policy, max_new_tokens=1).state
    for row in range(2):
        for layer, heads in enumerate(kept(state, row)):
            for head, positions in enumerate(heads):
                best = np.argsort(np.asarray(found[layer][row, head]), kind="stable")[-10:]
                assert sorted(best.tolist()) == positions
    with pytest.raises(PolicyError, match="h2o replays no prompt"):
        training.Replayer.of(model, policies.h2o(4), 2, TOKENS.shape[1])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("form", ["log", "cross_entropy"])
def test_replayed_scores(form):
    gate = policies.LinearGate(output="sigmoid" if form == "cross_entropy" else "none")
    model, setup, gates = made(gate)
    replayer = training.Replayer.of(model, policies.kvzip(10, plus=form == "log"), 2, TOKENS.shape[1])
    objective = training.ReplayedScore(replayer, form)
    targets = jax.jit(replayer.scores)(model.params, jnp.asarray(TOKENS))
    expected = []
    for own, inputs, z in zip(gates, layer_inputs(model), np.asarray(targets, np.float64), strict=True):
        score = np.einsum("bne,ke->bkn", np.asarray(inputs.hidden, np.float64), own["kernel"])
        if form == "log":
            expected.append(np.mean((score - np.log(z)) ** 2))
        else:
            share = 1 / (1 + np.exp(-score))
            expected.append(-np.mean(z * np.log(share) + (1 - z) * np.log(1 - share)))
    assert float(loss(objective, model, setup, gates)) == pytest.approx(np.mean(expected), rel=1e-4)
    # Steps that share a batch have the same loss, whatever the gate reads.
    for own, hidden_only in ((gate, True), (policies.QkvGate(4, output=gate.output), False)):
        model, setup, gates = made(own)
        examples = jax.jit(functools.partial(objective.examples, setup))(model.params, jnp.asarray(TOKENS))
        assert (examples.heads is None) == hidden_only
        shared = objective.error(setup, gates, examples)
        assert float(shared) == pytest.approx(float(loss(objective, model, setup, gates)), rel=1e-6)
    wrong = policies.SinkGate(output="log_sigmoid") if form == "cross_entropy" else None
    if wrong is not None:
        with pytest.raises(PolicyError, match=r"must return a number in \[0, 1\]"):
            objective.check(wrong)


def test_distillation():
    """Nothing is lost where nothing decays; what is held beyond the budget counts."""
    gate = policies.LinearGate(output="log_sigmoid")
    model, setup, gates = made(gate, slots=6)
    gates = [{"kernel": 0 * each["kernel"], "bias": each["bias"] + 30} for each in gates]
    assert float(loss(training.Distillation(0.0), model, setup, gates)) == pytest.approx(0.0, abs=1e-5)
    held = np.mean([max(0, t + 1 - 6) for t in range(TOKENS.shape[1])])
    assert float(loss(training.Distillation(0.5), model, setup, gates)) == pytest.approx(0.5 * held, rel=1e-4)
    gates = [each | {"bias": each["bias"] - 30} for each in gates]
    # β = 1/2: a geometric series.
    held = np.mean([max(0, 2 * (1 - 0.5 ** (t + 1)) - 1) for t in range(TOKENS.shape[1])])
    one = training.Setup(setup.config, gate, (training.Retention(1),) * len(gates))
    with_capacity, without = (loss(training.Distillation(weight), model, one, gates) for weight in (1.0, 0.0))
    assert float(with_capacity - without) == pytest.approx(held, rel=1e-4) and float(without) > 0.01
    with pytest.raises(PolicyError, match="must return log β"):
        training.Distillation().check(policies.MlpGate())


def constant(gates, bias):
    return [{"kernel": 0 * each["kernel"], "bias": 0 * each["bias"] + bias} for each in gates]


def test_delayed_evictions():
    """Samples of evictions at one logit: the target rises to a quarter of the way in the number of slots."""
    gate = policies.LinearGate(output="sigmoid")
    model, setup, gates = made(gate)
    keys = jax.random.split(PROGRESS.key, len(gates))
    noise = np.stack([np.asarray(jax.random.logistic(key, (2, 2, 24)), np.float64) for key in keys])
    alpha = np.mean(1 / (1 + np.exp((0.3 + noise) / 0.5)))
    some, none = (
        float(loss(training.DelayedEviction(target), model, setup, constant(gates, 0.3))) for target in (0.9, 0.0)
    )
    # 10 times fewer slots at the end
    target = 1 - 1 / (1 + 0.25 * 9)
    assert some - none == pytest.approx(target - alpha, abs=1e-5) and none > 1e-3
    # Nothing goes, and a third of the tokens stays at the end.
    got = float(loss(training.DelayedEviction(), model, setup, constant(gates, 60.0)))
    assert got == pytest.approx(1 - 1 / (1 + 0.25 * 2), abs=1e-5)
    with pytest.raises(PolicyError, match="give output='sigmoid'"):
        training.DelayedEviction().check(policies.LinearGate())


def test_evictions_from_a_prompt():
    """The loss of the tokens after the prompt, and the share of its slots that the cache holds."""
    model, gate, prompt = tiny().model, policies.AttentionGate(4), 16
    setup = training.Setup(model.config, gate, (training.Retention(prompt, threshold=0.5, prompt=prompt),) * 2)
    gates = [{part: 4 * x for part, x in each.items()} for each in setup.initial(jax.random.key(1))]
    some, none = (float(loss(training.PromptEviction(*each), model, setup, gates)) for each in ((0.5, 0.1), (0.0,)))
    policy, calibration = setup.retention[0].policy(gate), training.calibration_of(model, gate, gates)
    found = kvjax.log_likelihood(model, TOKENS, policy, prompt_length=prompt, calibration=calibration)
    assert none == pytest.approx(-float(np.mean(found.logprobs[:, prompt - 1 :])), abs=2e-5)
    held = [sum(at < prompt for at in head) for row in range(2) for layer in kept(found.state, row) for head in layer]
    assert min(held) < 8 < max(held)
    assert some - none == pytest.approx(0.5 * abs(np.mean(held) / prompt - 0.1), abs=1e-5)
    with pytest.raises(PolicyError, match="which must be run in one block"):
        kvjax.log_likelihood(
            model, TOKENS, policy, prompt_length=prompt, prefill_block=4, calibration=calibration
        )  # fmt: skip
    with pytest.raises(PolicyError, match="Retention with the same prompt"):
        loss(training.PromptEviction(), *made(policies.LinearGate(output="sigmoid")))


def test_admission():
    """Costs of tokens that all have one score, and no error where all are admitted."""
    gate = policies.LinearGate(output="sigmoid")
    model, setup, gates = made(gate)
    some, none = (float(loss(training.Admission(weight), model, setup, constant(gates, -1.0))) for weight in (0.5, 0.0))
    share, score = [min(3 / (24 - t), 1) for t in range(24)], 1 / (1 + np.exp(1.0))
    assert some - none == pytest.approx(0.5 * np.mean([o + (1 - o) * (1 - (score - 1) ** 2) for o in share]), rel=1e-4)
    assert none > 1e-4
    assert float(loss(training.Admission(0.04), model, setup, constant(gates, 60.0))) == pytest.approx(0.04, abs=1e-5)


def test_answers():
    gate = policies.LinearGate()
    model, setup, gates = made(gate)
    prompt, rope, expected = 16, model.config.rope, []
    at = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (2, 24))
    for own, inputs in zip(gates, layer_inputs(model), strict=True):
        frequencies = rope.frequencies(jnp.full(2, 24, jnp.int32))
        query, key = (np.asarray(rope.rotate(x, at, frequencies), np.float64) for x in (inputs.query, inputs.key))
        logits = np.einsum("bkgtd,bkjd->bkgtj", query.reshape(2, 2, 2, 24, 8), key) / np.sqrt(8)
        weights = np.where(np.tri(24, dtype=bool), np.exp(logits), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        target = weights[..., prompt:, :prompt].max(axis=(2, 3))
        score = np.einsum("bne,ke->bkn", np.asarray(inputs.hidden, np.float64), own["kernel"])[..., :prompt]
        distance = np.abs(score - target)
        smooth = np.where(distance < 1, distance**2 / 2, distance - 0.5)
        expected.append(smooth.mean() + 0.0025 * np.mean((score[..., 1:] - score[..., :-1]) ** 2))
    got = loss(training.AnswerAttention(prompt), model, setup, gates)
    assert float(got) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.sampled(0)
def test_training_of_a_merge():
    """One text is learned by the merge, and the first loss is that of the cache with its first parameters."""
    model, policy = tiny().model, policies.h2o(8, recent=2, every=4, merge=policies.lococo(4, 3))
    found = training.train_merge(model, policy, TOKENS[:1], prefill_block=4, steps=12, rows=1, learning_rate=0.1)
    options = {"prompt_length": TOKENS.shape[1], "prefill_block": 4}
    got = kvjax.log_likelihood(model, TOKENS[:1], policy, calibration=found.calibration, **options).logprobs
    assert -np.mean(got) < found.losses[0] - 0.02
    weights = policy.merge.weights
    layers = [weights.initial(key, model_sizes(model.config)) for key in jax.random.split(jax.random.key(0), 2)]
    first = training.calibration_of(model, weights, layers)
    got = kvjax.log_likelihood(model, TOKENS[:1], policy, calibration=first, **options).logprobs
    assert -np.mean(got) == pytest.approx(found.losses[0], abs=2e-5)
    with pytest.raises(PolicyError, match="has no merge with parameters"):
        training.train_merge(model, policies.h2o(8, merge=policies.d2o()), TOKENS)


@pytest.mark.sampled(0)
def test_training_on_tokens():
    """One text is learned: the loss under the cache with the calibration is below that of the first gate."""
    model, gate = tiny().model, policies.LinearGate()
    retention = training.Retention(8, recent=2)
    found = training.train_gate(model, gate, TOKENS[:1], retention, steps=15, rows=1, learning_rate=0.05)
    expected = kvjax.log_likelihood(
        model, TOKENS[:1], retention.policy(gate), prompt_length=1, calibration=found.calibration
    )
    assert -np.mean(expected.logprobs) < found.losses[0] - 0.02 and len(found.losses) == 15
    with pytest.raises(PolicyError, match="retention has 1 layers, and the model 2"):
        training.train_gate(model, gate, TOKENS, [retention])
