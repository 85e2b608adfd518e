"""The score of a step of training is `log_likelihood`'s, and so is its gradient, which is the difference quotient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import InputError
from kvjax.generation import score_function as module
from kvjax.generation.score_function import score_function
from kvjax.storage import Codec, Storage, int8
from tests.tiny import random_tokens
from tests.tiny import tiny as tiny_of

tiny = functools.partial(tiny_of, layers=1)
TOKENS = random_tokens(2, 40, seed=4)
BITS = Codec(
    lambda dim, dtype: {"codes": ((dim,), jnp.uint32)},
    lambda x, side, dtype: {"codes": jax.lax.bitcast_convert_type(x, jnp.uint32)},
    lambda parts, side, dim: jax.lax.bitcast_convert_type(parts["codes"], jnp.float32),
)  # loses nothing, and an integer has no gradient


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "prompt", "block"),
    [
        (CacheSpec(policies.window(budget=9), int8()), 40, 8),
        (CacheSpec(policies.snapkv(budget=12, window=4), selection=selection.quest(page=2, budget=6)), 20, None),
        pytest.param(
            CacheSpec(policies.h2o(budget=12), Storage(key=BITS, value=BITS, residual=5)),
            24,
            8,
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["window, int8, blocks", "snapkv, quest, one shot", "h2o, codes, then token by token"],
)
def test_it_is_log_likelihood_and_so_is_its_gradient(spec, prompt, block, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 6)  # several, the last of which is not full
    model = tiny().model
    found = score_function(model, spec, rows=2, prompt_length=prompt, length=40, prefill_block=block)
    limits = Limits(prompt, max(40 - prompt, 1), shortest=prompt)

    def expected(params):
        own = dataclasses.replace(model, params=params)
        return kvjax.log_likelihood(
            own, TOKENS, spec, prompt_length=prompt, prefill_block=block, limits=limits
        ).logprobs

    def mean(score):
        return jax.jit(jax.value_and_grad(lambda params: jnp.mean(score(params)[:, 7:]), has_aux=False))

    one = mean(lambda params: found.score(params, jnp.asarray(TOKENS)))(model.params)
    two = mean(expected)(model.params)
    for own, other in zip(*map(jax.tree.leaves, (one, two)), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-6, rtol=1e-4)


@pytest.mark.sampled(0)
def test_its_gradient_is_the_difference_quotient_under_codes():
    model = tiny().model
    spec = CacheSpec(policies.h2o(budget=12), Storage(key=BITS, value=BITS))
    found = score_function(model, spec, rows=2, prompt_length=40, length=40, prefill_block=8)
    score = jax.jit(jax.value_and_grad(lambda params: jnp.mean(found.score(params, jnp.asarray(TOKENS)))))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    direction = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) * jnp.std(x), model.params)

    def moved(by):
        return float(score(jax.tree.map(lambda x, d: x + jnp.float32(by) * d, model.params, direction))[0])

    # Small enough for no slot that is evicted to be another one; many, since float32 rounds.
    quotient = np.mean([(moved(step) - moved(-step)) / (2 * step) for step in np.linspace(1e-4, 3e-4, 6)])
    gradient = score(model.params)[1]
    slope = sum(float(jnp.sum(g * d)) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    assert abs(quotient) > 1e-3
    assert slope == pytest.approx(quotient, rel=0.02, abs=1.5e-3)


def test_sizes_that_are_none():
    with pytest.raises(InputError, match="prompt_length=41 must be from 1 to the 40 tokens of a row"):
        score_function(tiny().model, policies.full(), rows=2, prompt_length=41, length=40)
