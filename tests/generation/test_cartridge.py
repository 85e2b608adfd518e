"""Slots that are trained on a continuation: the gradient, the loss, and what uses the result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax import policies
from kvjax.errors import InputError
from kvjax.generation.cartridge import cartridge, continuation_loss, slots_of
from kvjax.generation.context import Context
from kvjax.generation.continuations import without_step_kernels
from kvjax.generation.likelihood import score_continuation
from kvjax.generation.prefill import prefill
from tests.tiny import random_tokens, tiny

CONTEXT, NEW = 30, 12
LENGTHS = np.array([12, 7])
TOKENS = random_tokens(2, 340, seed=4)[:, : CONTEXT + NEW]


def compacted(policy: policies.Policy | None = None) -> Context:
    return prefill(MODEL(), TOKENS[:, :CONTEXT], policy or policies.matched(6), max_new_tokens=NEW + 4)


@functools.cache
def MODEL():
    return tiny("gqa", 0, layers=2).model


@pytest.mark.sampled(0)
def test_the_gradient_is_that_of_finite_differences():
    """Along a random direction of all keys, values and weights."""
    made, model = compacted(), MODEL()
    state = made.state
    slots = slots_of(state)
    loss = jax.jit(
        functools.partial(
            continuation_loss,
            params=model.params,
            state=state,
            tokens=jnp.asarray(TOKENS[:, CONTEXT:], jnp.int32),
            lengths=jnp.asarray(LENGTHS, jnp.int32),
            config=model.config,
            phase=without_step_kernels(made.layout.decode),
        )
    )
    rng = np.random.default_rng(0)
    for name in ("key", "value", "log_weight"):
        along = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.asarray(rng.normal(size=x.shape) * (path[-1].key == name), jnp.float32),  # noqa: B023
            slots,
        )
        slope = sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), jax.grad(loss)(slots), along)))
        # Float32 rounds the loss to 1e-7: the step is where this and the third derivative are small.
        step = 2e-2
        ends = [loss(jax.tree.map(lambda x, y: x + sign * step * y, slots, along)) for sign in (1, -1)]  # noqa: B023
        assert abs(slope) > 1e-2
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), slope, rtol=2e-2, atol=2e-4)


@pytest.mark.sampled(0)
def test_the_loss_falls_and_is_that_of_the_scores():
    made, model = compacted(), MODEL()
    # Scores of what was fitted, and of what was trained, by decoding token by token.
    before = score_continuation(model, made, TOKENS[:, CONTEXT:])
    trained = cartridge(model, made, TOKENS[:, CONTEXT:], lengths=LENGTHS, steps=30, learning_rate=3e-2)
    after = score_continuation(model, trained.prefilled, TOKENS[:, CONTEXT:])
    counted = (np.arange(NEW) >= 1) & (np.arange(NEW) < LENGTHS[:, None])
    assert trained.losses.shape == (31,)
    np.testing.assert_allclose(trained.losses[0], -before[counted].mean(), rtol=1e-4)
    np.testing.assert_allclose(trained.losses[-1], -after[counted].mean(), rtol=1e-4)
    assert trained.losses[-1] < 0.7 * trained.losses[0]
    # The first logits are the context's; what it was made of is unchanged, and so are positions and empty slots.
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    np.testing.assert_array_equal(score_continuation(model, made, TOKENS[:, CONTEXT:]), before)
    for old, new in zip(made.state.layers, trained.prefilled.state.layers, strict=True):
        np.testing.assert_array_equal(new.position, old.position)
        empty = np.asarray(old.position) < 0
        assert not np.asarray(new.stats["log_weight"])[empty].any()
        for name in ("key", "value"):
            changed = np.any(np.asarray(getattr(new, name)) != np.asarray(getattr(old, name)), axis=3)
            assert changed[~empty].all() and not changed[empty].any()


def test_an_optimizer_of_ones_own():
    """Without steps and at a rate of 0, nothing changes."""
    made = compacted()
    for trained in (
        cartridge(MODEL(), made, TOKENS[:, CONTEXT:], steps=0),
        cartridge(MODEL(), made, TOKENS[:, CONTEXT:], steps=2, optimizer=optax.sgd(0.0)),
    ):
        assert (trained.losses == trained.losses[0]).all()
        jax.tree.map(np.testing.assert_array_equal, trained.prefilled.state, made.state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "tokens", "options", "match"),
    [
        (policies.snapkv(6, window=2), TOKENS[:, CONTEXT:], {}, "no weights to train; prefill with"),
        (
            policies.after_prefill(policies.matched(6), then=policies.h2o(6)),
            TOKENS[:, CONTEXT:],
            {},
            "coded, evicted or chosen while decoding",
        ),
        (None, TOKENS[:1, CONTEXT:], {}, "tokens has 1 rows, but the cache has 2"),
        (None, TOKENS[:, CONTEXT : CONTEXT + 1], {}, "predicts none"),
        (None, random_tokens(2, 340, seed=4)[:, :150], {}, "more are requested, but the cache has"),
        (None, TOKENS[:, CONTEXT:], {"steps": -1}, "steps must be a whole number"),
    ],
)
def test_refused_with_the_reason(policy, tokens, options, match):
    with pytest.raises(InputError, match=match):
        cartridge(MODEL(), compacted(policy), tokens, **options)
