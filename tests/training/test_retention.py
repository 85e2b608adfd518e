"""The budget in parallel against eviction token by token, and gradients of gated attention against differences."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import training
from kvjax.errors import PolicyError
from kvjax.training import Retention

N = 40
VISIBLE, WEIGHTS, SOFT = (50, 51, 52), 53, 54  # of methods_cases.npz


@pytest.fixture(scope="module")
def worked(shared_data):
    """Returns what is kept, the inputs and the result of a case."""
    cases = np.load(shared_data / "examples" / "methods_cases.npz")
    about = json.loads(bytes(cases["cases"]))

    def case(number):
        arguments = dict(about[number]["arguments"])
        arguments.pop("temperature", None)
        given = {name: jnp.asarray(cases[f"{number}_in_{name}"]) for name in about[number]["inputs"]}
        return Retention(arguments.pop("budget"), **arguments), given, cases[f"{number}_out"]

    return case


@pytest.mark.parametrize("number", VISIBLE)
def test_worked_masks(worked, number):
    retention, given, expected = worked(number)
    np.testing.assert_array_equal(training.visible(given["score"], retention), expected)


def test_worked_weights(worked):
    retention, given, expected = worked(WEIGHTS)
    got = training.gated_weights(given["logits"], given["score"], retention, temperature=0.5)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    retention, given, expected = worked(SOFT)
    np.testing.assert_allclose(training.soft_gates(given["score"], retention, temperature=0.5), expected, atol=1e-6)


def stepped(score, retention):
    """[n, n] bool: a list of live slots, which each token joins when it has been seen."""
    live, seen = [], np.zeros((len(score),) * 2, bool)
    for t in range(len(score)):
        live.append(t)
        seen[t, live] = True
        if retention.prompt is not None and t != retention.prompt - 1:
            continue
        safe = {j for j in live if j > t - retention.recent or j < retention.sinks}
        if retention.threshold is not None:
            live = [j for j in live if j in safe or score[j] >= retention.threshold]
        if len(live) >= retention.slots + retention.every:
            order = sorted(live, key=lambda j: (j in safe, score[j], j), reverse=True)
            live = sorted(order[: retention.slots])
    return seen


@pytest.mark.parametrize(
    "retention",
    [
        Retention(8),
        Retention(8, recent=3, sinks=2),
        Retention(9, recent=4, every=5),
        Retention(6, recent=2, sinks=4, every=2),
        Retention(12, recent=4, sinks=1, threshold=0.25),
        Retention(60, recent=2, threshold=-0.5),
        Retention(9, recent=3, sinks=2, prompt=25),
        Retention(16, recent=3, sinks=2, prompt=25, threshold=0.1),
    ],
    ids=str,
)
def test_what_stepping_keeps(retention):
    # Rounded, so that some scores are equal.
    score = np.round(np.random.default_rng(0).normal(size=(2, N)), 1).astype(np.float32)
    got = training.visible(jnp.asarray(score), retention)
    for row in range(2):
        np.testing.assert_array_equal(got[row], stepped(score[row], retention))


def gated(logits, gates):
    """[n, n] float64: weights whose gates are given."""
    weights = gates * np.tril(np.exp(logits))
    return weights / weights.sum(axis=1, keepdims=True)


def border(score, retention, t):
    """θ of query t and the slots that it gates, from the slots that stepping keeps; None where nothing goes."""
    before = t - 1
    if retention.threshold is None:
        rounds = [r for r in range(t) if r >= (first := retention.slots + retention.every - 1)
                  and (r - first) % retention.every == 0]  # fmt: skip
        before = rounds[-1] if rounds else -1
    gated = list(range(retention.sinks, before - retention.recent + 1))
    unlimited = Retention(retention.slots, retention.recent, retention.sinks, every=retention.every)
    seen = stepped(score, unlimited)[t]
    stay, go = [score[j] for j in gated if seen[j]], [score[j] for j in gated if not seen[j]]
    found = (min(stay) + max(go)) / 2 if stay and go else max(go) + 1 if go else -np.inf
    found = found if retention.threshold is None else max(found, retention.threshold)
    return found, gated


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "retention",
    [Retention(8, recent=3, sinks=2), Retention(7, recent=2, every=4), Retention(12, recent=4, threshold=0.0),
     Retention(5, recent=4, sinks=1)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("relax", ["st", "soft"])
def test_gradients(retention, relax):
    """Straight through: that of the weights by gates, at gates of 0 and 1, times that of soft gates by scores."""
    rng, n, temperature = np.random.default_rng(1), 24, 0.5
    score, logits, factor = rng.normal(size=n), 2 * rng.normal(size=(n, n)), rng.normal(size=(n, n))
    soft, slope = np.tri(n), np.zeros((n, n))
    for t in range(n):
        theta, slots = border(score, retention, t)
        if np.isfinite(theta):
            soft[t, slots] = 1 / (1 + np.exp(-(score[slots] - theta) / temperature))
            slope[t, slots] = soft[t, slots] * (1 - soft[t, slots]) / temperature
    point = stepped(score, retention).astype(np.float64) if relax == "st" else soft
    by_gate, small = np.zeros((n, n)), 1e-5
    for t, j in np.argwhere(np.tri(n)):
        change = np.zeros((n, n))
        change[t, j] = small
        up, down = (gated(logits, point + x) for x in (change, -change))
        by_gate[t, j] = np.sum(factor * (up - down)) / (2 * small)

    def loss(logits, score):
        weights = training.gated_weights(logits, score, retention, temperature=temperature, relax=relax)
        return jnp.sum(weights * jnp.asarray(factor, jnp.float32))

    given = jnp.asarray(logits, jnp.float32), jnp.asarray(score, jnp.float32)
    np.testing.assert_allclose(training.soft_gates(given[1], retention, temperature=temperature), soft, atol=1e-5)
    value, (by_logits, by_score) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*given)
    weights = gated(logits, point)
    assert float(value) == pytest.approx(np.sum(factor * weights), abs=1e-4)
    np.testing.assert_allclose(by_score, np.sum(by_gate * slope, axis=0), atol=2e-4)
    expected = weights * (factor - np.sum(factor * weights, axis=1, keepdims=True))
    np.testing.assert_allclose(by_logits, expected, atol=2e-5)


def test_far_logits():
    """An evicted slot of a very large logit leaves the weights of the others exact, and all gradients finite."""
    score = jnp.asarray([-9.0, 1.0, 2.0, 3.0, 4.0])
    logits = jnp.zeros((5, 5)).at[:, 0].set(500.0)

    def last(logits, score):
        return training.gated_weights(logits, score, Retention(2), temperature=1.0)[4]

    np.testing.assert_allclose(last(logits, score), [0, 0, 1 / 3, 1 / 3, 1 / 3], atol=1e-6)
    for slope in jax.jit(jax.jacobian(last, argnums=(0, 1)))(logits, score):
        assert np.all(np.isfinite(slope))


def test_decay():
    logits, score = np.random.default_rng(2).normal(size=(2, 6, 6))
    score = -np.abs(score[0])
    got = training.decayed_weights(jnp.asarray(logits, jnp.float32), jnp.asarray(score, jnp.float32))
    beta = np.exp(score)
    for t in range(6):
        weights = np.exp(logits[t, : t + 1]) * beta[: t + 1] ** (t - np.arange(t + 1))
        np.testing.assert_allclose(got[t, : t + 1], weights / weights.sum(), atol=1e-6)
        assert not np.any(got[t, t + 1 :])


def test_masks():
    """The logits of tokens that have left the newest positions get the logarithm of their probability."""
    logits = np.random.default_rng(3).normal(size=(9, 9))
    keep = np.random.default_rng(4).uniform(size=9)
    given = jnp.asarray(logits, jnp.float32), jnp.log(jnp.asarray(keep, jnp.float32))
    got = training.masked_weights(*given, Retention(9, recent=3, sinks=1))
    for t in range(9):
        factor = [1.0 if j < 1 or t - j <= 3 else keep[j] for j in range(t + 1)]
        weights = factor * np.exp(logits[t, : t + 1])
        np.testing.assert_allclose(got[t, : t + 1], weights / weights.sum(), atol=1e-6)
        assert not np.any(got[t, t + 1 :])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Retention(0), "slots"),
        (lambda: Retention(8, recent=6, sinks=3), "protect more than slots=8"),
        (lambda: Retention(8, threshold=0.0, every=2), "every=2 is not valid with threshold"),
        (lambda: Retention(8, prompt=9, every=2), "every=2 is not valid with prompt=9"),
        (lambda: training.gated_weights(None, jnp.zeros(3), Retention(2), temperature=1.0, relax="hard"), "relax"),
    ],
)
def test_arguments_are_checked(make, error):
    with pytest.raises(PolicyError, match=error):
        make()
