"""Policies with parameters: their calibrations, and the scores that tokens get once."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.cache import CacheSpec
from kvjax.errors import PolicyError, StorageError
from kvjax.generation import compiling
from kvjax.numerics.rope import Rope
from kvjax.policies.components import KeyFrame
from kvjax.policies.triattention import standardised
from kvjax.policies.written import placed
from tests.parameters import without_parameters
from tests.tiny import kept, random_tokens, tiny

SIZES = policies.ModelSizes(kv_heads=1, queries=2, dim=8, hidden=16, rotary=8)


@pytest.fixture(scope="module")
def worked(shared_data):
    """Returns the inputs of a case, and its result."""
    cases = np.load(shared_data / "examples" / "methods_cases.npz")
    about = json.loads(bytes(cases["cases"]))
    return lambda case: ({name: cases[f"{case}_in_{name}"] for name in about[case]["inputs"]}, cases[f"{case}_out"])


def test_worked_calibrations(worked):
    (given, mean), (_, size) = worked(20), worked(21)
    query = np.swapaxes(given["query_unrotated"], 0, 1)
    made = policies.QuerySpread().prepare(policies.TextSamples(query, query), SIZES)
    np.testing.assert_allclose(made["mean"][0], np.concatenate([mean.real, mean.imag], axis=1), atol=1e-6)
    np.testing.assert_allclose(made["size"][0], size, atol=1e-6)
    given, direction = worked(40)
    query = np.swapaxes(given["query"], 0, 1)
    made = policies.QueryDirection().prepare(policies.TextSamples(query, query), SIZES)
    np.testing.assert_allclose(made["direction"], direction, atol=1e-6)


def test_worked_scores(worked):
    given, raw = worked(22)
    mean, rope = given["mean"], Rope(dim=8)
    parts = {"mean": np.concatenate([mean.real, mean.imag], axis=1), "size": given["abs"]}
    row = jnp.full(1, 237, jnp.int32)
    view = policies.View(
        jnp.asarray(given["position"], jnp.int32)[None, None], jnp.asarray(given["key"])[None, None], None, row, row,
        row, 0, True, frame=KeyFrame(True, rope, rope.frequencies(row)),
        params={"triattention": {name: jnp.asarray(x, jnp.float32)[None] for name, x in parts.items()}},
    )  # fmt: skip
    np.testing.assert_allclose(policies.FutureLogit(4096).raw(view)[0, 0], raw, atol=2e-5)
    given, combined = worked(23)
    found = standardised(jnp.asarray(given["raw"])[None, None], jnp.ones((1, 1, 60), bool))
    np.testing.assert_allclose(found[0, 0], combined, atol=1e-5)
    given, norm = worked(33)
    value, kernel = (jnp.asarray(given[name])[None] for name in ("value", "wo"))
    token = policies.Token(None, None, None, value[None], None, None, kernel)
    np.testing.assert_allclose(policies.OutputNorm().write(token, {})[0, 0], norm, rtol=1e-5)


@pytest.mark.sampled(0)
def test_a_calibration_is_saved_with_both_axes_and_used_by_each(tmp_path):
    """For a policy and a storage; without it, or with one of another kind, there is an error that says what to do."""
    plain = without_parameters(tiny().model)
    tokens = random_tokens(2, 30)
    spec = CacheSpec(policies.qfilters(10, every=2), storage.low_rank(4, 4))
    made = kvjax.calibrate(plain, tokens, spec)
    made.save(tmp_path / "both.safetensors")
    read = kvjax.load_calibration(tmp_path / "both.safetensors")
    assert read.hash == made.hash and read.policies == made.policies
    run = {"prompt_length": 20, "calibration": read}
    got = kvjax.log_likelihood(plain, tokens, spec, **run)
    inside = kvjax.log_likelihood(kvjax.calibrated(plain, spec, made), tokens, spec, prompt_length=20)
    np.testing.assert_array_equal(got.logprobs, inside.logprobs)
    # What only one of the two needs may come from both.
    kvjax.log_likelihood(plain, tokens, spec.policy, **run)
    with pytest.raises(PolicyError, match=r"reads parameters 'qfilters' .* does not have; make it with kvjax"):
        kvjax.log_likelihood(plain, tokens, spec.policy, prompt_length=20)
    with pytest.raises(PolicyError, match=r"reads parameters 'triattention'"):
        kvjax.log_likelihood(plain, tokens, policies.triattention(10), **run)
    with pytest.raises(PolicyError, match=r"are trained|is trained|trained"):
        kvjax.calibrate(plain, tokens, policies.learned(10))
    with pytest.raises(PolicyError, match="h2o needs no calibration"):
        kvjax.calibrate(plain, tokens, policies.h2o(10))
    with pytest.raises(StorageError, match="low_rank"):
        kvjax.log_likelihood(plain, tokens, spec, prompt_length=20)


def test_arrays_are_data(monkeypatch):
    """Two sets of arrays share a program, and keep other slots."""
    model, tokens = tiny().model, random_tokens(1, 24)
    policy = policies.learned(8, recent=3, sinks=2)
    traces = []
    monkeypatch.setattr(compiling, "traced", lambda: traces.append(1))
    first = kvjax.log_likelihood(model, tokens, policy, prompt_length=12)
    assert traces
    traces.clear()
    other = jax.tree.map(lambda x: x, model.params)
    for index in range(model.config.num_layers):
        gate = other[f"layer_{index}"]["attention"]["policy"]["linear_gate"]
        gate["kernel"] = -gate["kernel"]
    second = kvjax.log_likelihood(model.__class__(model.config, other), tokens, policy, prompt_length=12)
    assert not traces
    assert kept(first.state, 0) != kept(second.state, 0)


@pytest.mark.sampled(0)
def test_a_threshold_of_tokens_after_a_prompt_that_is_kept():
    """In the first layer, whose scores do not depend on what is held, the same tokens go as without the prompt."""
    model, tokens = tiny().model, random_tokens(1, 40)
    policy = policies.learned(30, recent=2, threshold=0.0)
    alone = kept(kvjax.log_likelihood(model, tokens, policy, prompt_length=10).state, 0)[0]
    got = kvjax.log_likelihood(model, tokens, policies.phases(policies.full(), policy), prompt_length=10)
    for mine, theirs in zip(kept(got.state, 0)[0], alone, strict=True):
        assert mine == [*range(10), *(each for each in theirs if each >= 10)]
        assert 12 < len(mine) < 38


@pytest.mark.sampled(0)
def test_a_split_of_heads_takes_its_own_rows():
    """Each group of heads reads the parameters of its heads: as if all heads were under one policy."""
    model, tokens = tiny().model, random_tokens(2, 30)
    whole = kvjax.log_likelihood(model, tokens, policies.qfilters(9, every=1), prompt_length=15)
    own = policies.qfilters(9, every=1)
    table = ((True, False), (False, True))
    split = kvjax.log_likelihood(model, tokens, policies.split_heads(table, own, own), prompt_length=15)
    np.testing.assert_allclose(split.logprobs, whole.logprobs, atol=1e-5)
    # Both groups of a layer read the same arrays, which count once.
    (needed,) = own.params
    held = [model.params[f"layer_{i}"]["attention"]["policy"][needed.name] for i in range(model.config.num_layers)]
    assert split.layout.calibration_bytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(held)) > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "gate",
    [
        policies.MlpGate(5, output="log_sigmoid"),
        policies.QkvGate(6),
        policies.SinkGate(3, 4),
        policies.ChannelGate("query", 2),
        policies.ChannelGate("key", 3, output="sigmoid"),
        policies.AttentionGate(3, 2, output="none"),
    ],
    ids=str,
)
def test_gates(gate, monkeypatch):
    """Against the formulas in float64."""
    monkeypatch.setattr("kvjax.policies.gates.CHUNK", 2)
    rng, n = np.random.default_rng(0), 3
    sizes = policies.ModelSizes(kv_heads=2, queries=2, dim=4, hidden=7, rotary=4)
    params = {part: rng.normal(size=shape) for part, shape in gate.parts(sizes).items()}
    made = gate.initial(jax.random.key(0), sizes)
    assert {part: x.shape for part, x in made.items()} == {part: x.shape for part, x in params.items()}
    hidden, query = rng.normal(size=(1, n, 7)), rng.normal(size=(1, 2, 2, n, 4))
    key, value = rng.normal(size=(2, 1, 2, n, 4))
    given = [jnp.asarray(x, jnp.float32) for x in (hidden, query, key, value, query)]
    token = policies.Token(*given, jnp.arange(n)[None], None)
    got = gate({part: jnp.asarray(x, jnp.float32) for part, x in params.items()}, token)
    for t in range(n):
        for head in range(2):
            if isinstance(gate, policies.ChannelGate):
                x = query[0, head, 0, t, 2] if gate.source == "query" else key[0, head, t, 3]
                expected = params["weight"][head] * x + params["bias"][head]
                if gate.output == "sigmoid":
                    expected = 1 / (1 + np.exp(-expected))
            elif isinstance(gate, policies.AttentionGate):
                expected = _attention_gate(params, hidden[0], t, head)
            elif isinstance(gate, policies.SinkGate):
                expected = _sink_gate(params, hidden[0, t], head, gate.width)
            else:
                x = hidden[0, t]
                if isinstance(gate, policies.QkvGate):
                    x = np.concatenate([query[0, :, :, t].ravel(), key[0, :, t].ravel(), value[0, :, t].ravel()])
                up = params["up"][0] @ x + params["up_bias"][0]
                if isinstance(gate, policies.MlpGate):
                    up = np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in up])
                else:
                    up = up / (1 + np.exp(-up))
                expected = params["down"][head] @ up + params["down_bias"][head]
                if gate.output == "log_sigmoid":
                    expected = -np.log1p(np.exp(-expected))
            np.testing.assert_allclose(got[0, head, t], expected, atol=2e-5)


def _attention_gate(params, hidden, t, head):
    made = []
    for query, key, value in zip(*(params[part][0] for part in ("query", "key", "value")), strict=True):
        weights = np.exp((query @ hidden[t]) @ (key @ hidden.T) / np.sqrt(3))
        made.extend(value @ hidden.T @ weights / weights.sum())
    return params["out"][head] @ made + params["bias"][head]


def _sink_gate(params, x, head, width):
    def rms(y):
        return y / np.sqrt(np.mean(y**2))

    key, scores = rms(params["key"][head] @ x), []
    for g in range(2):
        query = rms(params["query"][head, g] @ x)
        own = key @ query / np.sqrt(width) + params["bias"][head, g]
        scores.append(1 / (1 + np.exp(params["base"][head] @ query / np.sqrt(width) - own).sum()))
    return np.mean(scores)


def test_a_score_is_placed_by_position():
    """Slots are in any order; padding writes nothing; a score that differs in its last bits is that of the slot."""
    position = jnp.array([[[7, 3, -1, 5, 6]], [[1, 0, -1, -1, -1]]])
    old = jnp.array([[[9.0, 2.0, 9.0, 9.0, 9.0]], [[4.0, 5.0, 0.0, 0.0, 0.0]]])
    new = jnp.array([[[10.0, 2.0 + 2e-7, 30.0]], [[7.0, 8.0, 9.0]]])
    got = placed(old, new, position, jnp.array([[5, 6, 7], [-1, -1, -1]]))
    np.testing.assert_array_equal(got, [[[30.0, 2.0, 9.0, 10.0, 2.0]], [[4.0, 5.0, 0.0, 0.0, 0.0]]])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: policies.learned(8, gate=3), "is not a gate"),
        (lambda: policies.learned(8, threshold="high"), "threshold"),
        (lambda: policies.learned(None, threshold=0.0), "needs a budget"),
        (lambda: policies.critical(policies.strided(8, stride=3)), "is not an amount"),
        (lambda: policies.critical(policies.h2o(8), first_stage=2.0), "first_stage"),
        (lambda: policies.adakv(policies.learned(8, every=None, threshold=0.0)), "cannot be shared"),
        (lambda: policies.triattention(8, longest=0), "longest"),
        (lambda: policies.MlpGate(activation="tanh"), "activation"),
        (lambda: policies.learned(8, gate=policies.AttentionGate()), "every=1 is not valid: .* of a whole prompt"),
    ],
)
def test_arguments_are_checked(make, error):
    with pytest.raises(PolicyError, match=error):
        make()
