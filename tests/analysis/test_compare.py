"""Measures of a policy against the reference's whole attention matrices, its own and the full cache's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, cache, policies
from kvjax.analysis import compare, rows
from kvjax.errors import InputError, PolicyError
from kvjax.models.decoder import parameter_shapes
from tests import reference
from tests.analysis.dense import Dense, dense, full, top
from tests.tiny import random_tokens, tiny

PROMPTS, LENGTHS = np.array([20, 12]), np.array([44, 27])
TOKENS = random_tokens(2, 44, seed=3)
# No token twice in a prompt: equal tokens have equal key norms in layer 0, and rounding would settle such ties.
TOKENS[:, :20] = [np.random.default_rng(row).permutation(64)[:20] for row in range(2)]
OPTIMIZED = {"xla_backend_optimization_level": "3", "xla_llvm_disable_expensive_passes": "False"}

# What each policy needs beside a budget, small enough for these texts.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "strided": {"stride": 3, "local": 2},
    "fixed": {"block": 4, "columns": 1},
    "roco": {"guard": 2},
    "snapkv": {"window": 3, "kernel": 3},
    "pyramidkv": {"window": 3, "kernel": 3, "beta": 3},
    "random": {"seed": 1},
}
COMPARED = {
    "h2o": {"budget": 8},
    "h2o-masked": {"name": "h2o", "budget": 14, "variant": "masked", "recent": 8},
    "h2o-cache": {"name": "h2o", "budget": 0.5, "positions": "cache"},
    "tova": {"budget": 7},
    "snapkv": {"budget": 8, **ARGUMENTS["snapkv"]},
}


def build(name: str, package: Any) -> Any:
    """A policy of the library's package, or of the reference's."""
    arguments = COMPARED[name] if name in COMPARED else {"budget": 8} | ARGUMENTS.get(name, {})
    if name == "full":
        arguments = {}
    return package.by_name(**({"name": name} | arguments))


@functools.cache
def runs(heads: str, name: str) -> list[tuple[Dense, Dense]]:
    """Of each row: the full cache's attention and the policy's."""
    own = tiny(heads)
    texts = [TOKENS[row, : LENGTHS[row]] for row in range(2)]
    policy = build(name, reference.policies)
    pairs = [(full(own, text), dense(own, text, policy, int(PROMPTS[row]))) for row, text in enumerate(texts)]
    assert min(run.gap for _, run in pairs) > 1e-6, "a choice of the reference is a near-tie: use another seed"
    return pairs


def queries(got: np.ndarray) -> Any:
    """(layer, row, head, t) of every measured query; whatever is not one must be NaN."""
    at = np.arange(got.shape[-1])
    measured = (at >= PROMPTS[:, None]) & (at < LENGTHS[:, None])
    np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(~measured[:, None], got.shape))
    return np.argwhere(~np.isnan(got))


CASES = [("gqa", name) for name in COMPARED] + [("mha", "h2o"), ("mqa", "h2o-cache")]


@pytest.mark.parametrize(("heads", "name"), CASES)
def test_attention_cosine_and_miss_rate(heads, name):
    arguments = {"prompt_length": PROMPTS, "lengths": LENGTHS}
    own, policy = tiny(heads), build(name, policies)
    cosine = analysis.attention_cosine(own.model, TOKENS, policy, **arguments)
    missed = analysis.miss_rate(own.model, TOKENS, policy, top=6, **arguments)
    group = own.config.num_heads // own.config.num_kv_heads
    for layer, row, head, t in queries(cosine):
        one, two = runs(heads, name)[row]
        p, q = one.probability[layer, head, t], two.probability[layer, head, t]
        expected = p @ q / np.sqrt((p @ p) * (q @ q))
        np.testing.assert_allclose(cosine[layer, row, head, t], expected, atol=2e-5)
        seen = two.seen[layer, head // group, t]
        np.testing.assert_allclose(missed.mass[layer, row, head, t], p[~seen].sum(), atol=1e-5)
        heavy = top(p, one.seen[layer, head // group, t], 6)
        gone = sum(not seen[j] for j in heavy) / len(heavy)
        np.testing.assert_allclose(missed.tokens[layer, row, head, t], gone, atol=1e-6)
    assert np.nanmin(cosine) < 0.98 and np.nanmax(missed.tokens) > 0


@pytest.mark.parametrize("importance", ["mass", "mean"])
@pytest.mark.parametrize(("heads", "name"), CASES)
def test_jaccard(heads, name, importance):
    own = tiny(heads)
    got = analysis.jaccard(
        own.model, TOKENS, build(name, policies), prompt_length=PROMPTS, lengths=LENGTHS, top=5, importance=importance
    )
    group = own.config.num_heads // own.config.num_kv_heads
    for layer, row, head, t in queries(got):
        sets = []
        for run in runs(heads, name)[row]:
            m = run.probability[layer, head * group : (head + 1) * group, : t + 1].mean(axis=0)
            seen = run.seen[layer, head, : t + 1]
            score = np.full(m.shape[1], -np.inf)
            for j in np.flatnonzero(seen[t]):
                # Since the token was last brought back; one that is hidden is forgotten.
                since = max([i + 1 for i in range(j, t) if not seen[i, j]], default=j)
                terms = m[since : t + 1, j]
                score[j] = terms.sum() if importance == "mass" else terms.mean()
            sets.append(top(score, seen[t], 5))
        assert got[layer, row, head, t] == pytest.approx(len(sets[0] & sets[1]) / len(sets[0] | sets[1]))
    assert np.nanmin(got) < 0.9


@pytest.mark.parametrize("name", [*policies.POLICIES, "h2o-masked"])
def test_retained(name):
    policy = build(name, policies)
    own = tiny()
    got = analysis.retained(own.model, TOKENS, policy, prompt_length=PROMPTS, lengths=LENGTHS)
    scored = kvjax.log_likelihood(own.model, TOKENS, policy, prompt_length=PROMPTS, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert (got.last_seen[:, row, :, length:] == -1).all()
        for layer, state in enumerate(scored.state.layers):
            for head in range(own.config.num_kv_heads):
                last = got.last_seen[layer, row, head, :length]
                # Random priorities are the library's own; all others are the reference's too.
                if name != "random":
                    seen = runs("gqa", name)[row][1].seen[layer, head]
                    np.testing.assert_array_equal(last, [max(np.flatnonzero(seen[:, j])) for j in range(length)])
                held = np.asarray(state.position)[row, head]
                if policy.mask is None:
                    assert (last[held[held >= 0]] == length - 1).all()
    assert (got.last_seen[:, 0, :, :44] == 43).all() == (name == "full")


def test_a_policy_with_room_for_everything_misses_nothing():
    arguments = {"prompt_length": PROMPTS, "lengths": LENGTHS}
    for name in ("h2o", "tova"):
        policy = policies.by_name(name, budget=44)
        cosine = analysis.attention_cosine(tiny().model, TOKENS, policy, **arguments)
        np.testing.assert_allclose(cosine[~np.isnan(cosine)], 1, atol=1e-5)
        missed = analysis.miss_rate(tiny().model, TOKENS, policy, top=6, **arguments)
        assert np.nanmax(missed.tokens) == np.nanmax(missed.mass) == 0
        assert np.nanmin(analysis.jaccard(tiny().model, TOKENS, policy, top=5, **arguments)) == 1


def test_memory_is_linear():
    config, policy = tiny().model.config, policies.h2o(budget=256)

    def temporary(width):
        ints = jax.ShapeDtypeStruct((1,), jnp.int32)

        def state(policy, slots):
            layer = cache.empty(policy, 1, config.num_kv_heads, slots, config.head_dim, jnp.float32)
            return cache.KVState((layer,) * config.num_layers, jnp.zeros((1,), jnp.int32))

        both = (compare.COUNTING, policy)
        states = jax.eval_shape(lambda: (state(both[0], width), state(both[1], 257)))
        line = jax.ShapeDtypeStruct((1, config.num_kv_heads, 1, width), jnp.float32)
        args = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), bool))
        lowered = rows.scan_steps.lower(
            parameter_shapes(config), states, (((line, line),) * 2,) * config.num_layers,
            jax.ShapeDtypeStruct((1, width), jnp.int32), ints, ((), (ints,) * config.num_layers), args, config=config,
            policies=both, step=compare._similarity, steps=width - 128,
        )  # fmt: skip
        return lowered.compile(OPTIMIZED).memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 4.5 * temporary(4096)


def test_what_cannot_work_is_refused():
    model, policy = tiny().model, policies.h2o(budget=8)
    with pytest.raises(InputError, match="leaves no query to measure: the longest row has 44 tokens"):
        analysis.retained(model, TOKENS, policy, prompt_length=44)
    with pytest.raises(InputError, match="top must be a whole number of at least 1; got 0"):
        analysis.miss_rate(model, TOKENS, policy, prompt_length=20, top=0)
    with pytest.raises(InputError, match="importance must be 'mass' or 'mean'; got 'last'"):
        analysis.jaccard(model, TOKENS, policy, prompt_length=20, top=5, importance="last")
    with pytest.raises(PolicyError, match="is not a policy"):
        analysis.attention_cosine(model, TOKENS, "h2o", prompt_length=20)
    with pytest.raises(PolicyError, match="score whole texts"):
        analysis.retained(model, TOKENS, policies.h2o(budget=8, variant="global"), prompt_length=20)
