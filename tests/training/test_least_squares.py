"""Gates that are fitted in closed form: the minimum that an optimizer finds, with ridges that validation chose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax import policies, training
from kvjax.errors import PolicyError
from kvjax.training import least_squares
from kvjax.training.least_squares import RIDGES, Moments
from tests.tiny import random_tokens, tiny

TOKENS = random_tokens(12, 24, seed=4)
GATE = policies.LinearGate()


def objective(rows=2, form="log"):
    return training.ReplayedScore(training.Replayer.of(tiny().model, policies.kvzip(10, plus=True), rows, 24), form)


@pytest.mark.sampled(0)
def test_no_optimizer_gets_below_it():
    """L-BFGS on the loss of the objective, with the same ridges, ends at the same loss. Its gradient vanishes there."""
    model, own = tiny().model, objective()
    found = training.fit_gate(model, GATE, TOKENS, objective=own, rows=2)
    setup = training.Setup(model.config, GATE, (training.Retention(8),) * 2)
    batches = jnp.asarray(TOKENS).reshape(6, 2, 24)
    examples = jax.lax.map(jax.jit(lambda tokens: own.examples(setup, model.params, tokens)), batches)
    # [L]: the ridge's unit in each layer
    variance = [jnp.var(hidden.reshape(-1, hidden.shape[-1]), axis=0).mean() for hidden in examples.hidden]

    def loss(gates):
        fitted = jnp.mean(jax.vmap(lambda each: own.error(setup, gates, each))(examples))
        penalty = [
            jnp.asarray(ridge, jnp.float32) * unit * jnp.sum(jnp.square(gate["kernel"]), axis=1)
            for ridge, unit, gate in zip(found.ridge, variance, gates, strict=True)
        ]
        return fitted + jnp.mean(jnp.stack(penalty))

    optimizer = optax.lbfgs()

    def step(carry, _):
        gates, memory = carry
        value, slope = jax.value_and_grad(loss)(gates)
        change, memory = optimizer.update(slope, memory, gates, value=value, grad=slope, value_fn=loss)
        return (optax.apply_updates(gates, change), memory), value

    start = jax.tree.map(jnp.zeros_like, setup.initial(jax.random.key(0)))
    with jax.numpy_dtype_promotion("standard"):
        _, losses = jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=40))()
    gates = [layer[GATE.name] for layer in found.calibration.layers]
    best = float(loss(gates))
    assert best == pytest.approx(float(losses[-1]), rel=1e-3) and best <= losses.min() + 1e-6 < 0.95 * losses[0]
    slopes = [optax.tree.norm(jax.grad(loss)(each)) for each in (gates, start)]
    assert slopes[0] < 1e-4 * slopes[1]


def test_ridges_are_those_of_the_smallest_error_on_other_texts():
    """Against the normal equations of centred features, one ridge and head at a time."""
    rng = np.random.default_rng(1)
    x, other = (rng.normal(size=(1, n, 5)) @ rng.normal(size=(5, 5)) + 3 for n in (9, 40))
    truth = rng.normal(size=(2, 5))
    targets = [np.einsum("bne,ke->bkn", each, truth) + rng.normal(size=(1, 2, each.shape[1])) for each in (x, other)]
    own, held = Moments.of(x, targets[0]), Moments.of(other, targets[1])

    def solved(x, y, ridge):
        centred = x - x.mean(axis=0)
        scatter = centred.T @ centred
        kernel = np.linalg.solve(scatter + ridge * np.trace(scatter) / 5 * np.eye(5), centred.T @ (y - y.mean()))
        return kernel, y.mean() - kernel @ x.mean(axis=0)

    found = least_squares.fit([own], [held])
    for head in range(2):
        errors = []
        for ridge in RIDGES:
            kernel, bias = solved(x[0], targets[0][0, head], ridge)
            errors.append(np.mean((other[0] @ kernel + bias - targets[1][0, head]) ** 2))
        assert found.ridge[0, head] == RIDGES[int(np.argmin(errors))]
        joined = np.concatenate([x, other], axis=1)[0], np.concatenate([each[0, head] for each in targets])
        kernel, bias = solved(*joined, found.ridge[0, head])
        np.testing.assert_allclose(found.gates[0]["kernel"][head], kernel, rtol=1e-4)
        np.testing.assert_allclose(found.gates[0]["bias"][head], bias, rtol=1e-4)
    assert found.loss == pytest.approx(np.mean(held.errors(own.solutions(np.asarray(RIDGES))).min(axis=0)))


def test_refused_with_the_reason():
    model = tiny().model
    for gate, form, texts, message in (
        (policies.MlpGate(4), "log", TOKENS, "has no closed form"),
        (policies.LinearGate(output="sigmoid"), "log", TOKENS, "has no closed form"),
        (GATE, "cross_entropy", TOKENS, "is not a squared error"),
        (GATE, "log", TOKENS[:3], "3 texts cannot be divided into at least 2 batches of rows=2"),
    ):
        with pytest.raises(PolicyError, match=message):
            training.fit_gate(model, gate, texts, objective=objective(form=form), rows=2)
