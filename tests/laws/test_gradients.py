"""Gradients of a score through the cache: right under every policy, and in the memory of a few blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import CacheSpec, Limits
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prefill_steps, prepare
from kvjax.models.decoder import Decoder
from kvjax.models.parameters import random_parameters
from kvjax.storage import Codec, Storage, fp8, int4
from tests.tiny import random_tokens
from tests.tiny import tiny as tiny_of

# Of one layer: each further one takes as long to compile, and its gradient is made as the first one's is.
tiny = functools.partial(tiny_of, layers=1)
TOKENS = random_tokens(2, 40, seed=4)
LENGTHS = np.array([40, 33])


def score(params, policy, **options):
    """Mean log-probability, as a function of the parameters."""
    model = dataclasses.replace(tiny().model, params=params)
    options = {"prompt_length": LENGTHS, "lengths": LENGTHS} | options
    return jnp.mean(kvjax.log_likelihood(model, TOKENS, policy, **options).logprobs)


def gradient(policy, **options):
    return jax.jit(jax.grad(lambda params: score(params, policy, **options)))(tiny().model.params)


#: Who stays has no gradient: one of each kind of statistics, and what reads keys or values.
POLICIES = [
    policies.h2o(budget=12), policies.value_norm(policies.h2o_decay(budget=12)),
    policies.snapkv(budget=12, window=4), policies.keydiff(budget=12), policies.streaming_llm(budget=9),
    policies.ems(budget=12, threshold=0.1), policies.h2o(budget=12, merge=policies.anchors()),
    policies.h2o(budget=12, every=4, merge=policies.lococo()),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda policy: policy.name if policy.merge is None else f"{policy.name}-merge"
)
def test_along_any_direction_it_is_the_difference_quotient(policy):
    params = tiny().model.params
    found = gradient(policy, prefill_block=8)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    direction = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) * jnp.std(x), params)
    steps = np.linspace(1e-4, 3e-4, 6)  # small enough for no decision to be another one; many, since float32 rounds

    def moved(by):
        return score(jax.tree.map(lambda x, d: x + jnp.float32(by) * d, params, direction), policy, prefill_block=8)

    quotient = np.mean([(float(moved(step)) - float(moved(-step))) / (2 * step) for step in steps])
    slope = sum(float(jnp.sum(g * d)) for g, d in zip(*map(jax.tree.leaves, (found, direction)), strict=True))
    assert abs(quotient) > 1e-3
    assert slope == pytest.approx(quotient, rel=0.02, abs=1.5e-3)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", policies.MERGES)
def test_what_is_merged_has_a_gradient(name):
    """CaM's shares are of attention that was counted, and constants; where nothing goes there is nothing to divide."""
    found = gradient(policies.h2o(budget=6, merge=policies.MERGES[name]()), prompt_length=np.array([4, 4]))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(found))
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(found)) > 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{"prefill_block": 8}, {}, {"prompt_length": np.array([20, 12]), "prefill_block": 8}],
    ids=["blocks", "one shot", "then token by token"],
)  # fmt: skip
def test_with_room_for_everything_it_is_the_plain_models(options):
    def plain(params):
        logits, _ = Decoder(tiny().model.config).apply({"params": params}, jnp.asarray(TOKENS))
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        chosen = jnp.take_along_axis(logprobs, jnp.asarray(TOKENS)[:, 1:, None], axis=2)[..., 0]
        return jnp.mean(jnp.where(np.arange(1, 40) < LENGTHS[:, None], chosen, 0.0))

    expected = jax.jit(jax.grad(plain))(tiny().model.params)
    found = gradient(policies.h2o(budget=40), **options)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-6, rtol=1e-4)


@pytest.mark.sampled(0)
def test_a_smaller_budget_has_another_gradient():
    one, two = (gradient(policies.h2o(budget=b), prefill_block=8) for b in (40, 8))
    assert max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True)) > 1e-3


def _bits(dim, dtype):
    return {"codes": ((dim,), jnp.uint32)}


def _to_bits(x, side, dtype):
    return {"codes": jax.lax.bitcast_convert_type(x, jnp.uint32)}


def _from_bits(parts, side, dim):
    return jax.lax.bitcast_convert_type(parts["codes"], jnp.float32)


WAYS = {"blocks": {"prefill_block": 8}, "then token by token": {"prompt_length": np.array([20, 12])}}


@functools.cache
def without_codes(policy, way):
    """The gradient that several storages are compared with: one program for all."""
    return gradient(policy, **WAYS[way])


BITS = Codec(_bits, _to_bits, _from_bits)  # loses nothing, and an integer has no gradient


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "residual"),
    [(policies.h2o(budget=12), 5), (policies.snapkv(budget=12, window=4), 0)],
    ids=["h2o", "snapkv"],
)
def test_it_passes_straight_through_codes(policy, residual):
    storage = Storage(key=BITS, value=BITS, residual=residual)
    for way, options in WAYS.items():
        expected, found = without_codes(policy, way), gradient(policy, storage=storage, **options)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, two, atol=2e-6, rtol=1e-4)


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.parametrize(("storage", "near"), [(int4(residual=5), 0.25), (fp8(), 0.15)], ids=str)
def test_a_score_through_codes_and_its_gradient(storage, near):
    policy, way = policies.h2o(budget=16), "then token by token"
    options = WAYS[way]
    params = tiny().model.params
    value, found = jax.jit(jax.value_and_grad(lambda params: score(params, policy, storage=storage, **options)))(params)
    assert float(value) == pytest.approx(float(score(params, policy, storage=storage, **options)), abs=1e-6)
    exact = without_codes(policy, way)
    off = jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (found, exact)), strict=True)))
    assert 0 < off < near * jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(exact)))


@pytest.mark.sampled(0)
def test_memory_is_that_of_a_few_blocks():
    """4,096 tokens in blocks of 256 under a budget of 512: what is held of a block is its cache."""
    config = dataclasses.replace(tiny().model.config, max_positions=8192)
    shapes = jax.eval_shape(lambda: random_parameters(config, jax.random.key(0)))
    policy = policies.h2o(budget=512)

    def temporaries(tokens: int) -> int:
        lengths = np.array([tokens])
        prepared = prepare(
            dataclasses.replace(tiny().model, config=config), CacheSpec(policy), lengths, lengths, width=tokens,
            options=CacheOptions(prefill_block=256, implementation="xla", limits=Limits(tokens, 1)),
        )  # fmt: skip

        def loss(params, ids):
            row = jnp.full((1,), tokens, jnp.int32)
            budgets = jax.tree.map(lambda _: jnp.full((1,), 512, jnp.int32), prepared.budgets)
            _, logprobs, _ = prefill_steps(
                params, ids, row, row, budgets.prompt, budgets.decode, config=config, layout=prepared.layout, score=True
            )
            return jnp.mean(logprobs)

        ids = jax.ShapeDtypeStruct((1, tokens + 1), jnp.int32)
        return jax.jit(jax.grad(loss)).lower(shapes, ids).compile().memory_analysis().temp_size_in_bytes

    one, all_of_them = temporaries(1024), temporaries(4096)
    cache = config.num_layers * config.num_kv_heads * 768 * (2 * config.head_dim + 2) * 4
    assert all_of_them - one < 2.5 * (4096 - 1024) // 256 * cache
    assert all_of_them < 4 * one
