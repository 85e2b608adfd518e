"""Prompts by programs of single layers, against the same prompts by one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies
from kvjax.cache.spec import CacheSpec
from kvjax.generation import layer_calls, prompt_reuse
from kvjax.generation.prefill import prefill
from kvjax.generation.score_function import score_function
from kvjax.models import layer_loop
from kvjax.planning import plan
from kvjax.planning import programs as planning_programs
from tests import examples
from tests.tiny import random_tokens, random_weights, tiny

LAYERS = layer_calls.MIN_LAYERS_PER_KIND  # of one kind
TOKENS, LENGTHS = random_tokens(2, 30), [30, 19]

SPECS = {
    "full, int4": CacheSpec(policies.full(), storage=examples.held("int4")),
    "h2o": CacheSpec(examples.policy("h2o")),
    "snapkv": CacheSpec(examples.policy("snapkv")),
    "infinigen": CacheSpec(policies.full(), selection=examples.chosen("infinigen")),
    "layers differ": CacheSpec(policies.from_layer(policies.h2o(0.5), first=LAYERS)),
}
TWO_KINDS = ("infinigen", "layers differ")


def tiny_model(name="h2o"):
    """A model with as few layers as are called one after the other under a spec."""
    return tiny(layers=2 * LAYERS if name in TWO_KINDS else LAYERS).model


@pytest.fixture(autouse=True)
def _calls(monkeypatch):
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.CALLS)


def by_one_program(function):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(layer_loop.VARIABLE, layer_loop.OFF)
        return function()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_one_program(name):
    model = tiny_model(name)
    layer_calls.call_layer.clear_cache()

    def run():
        return kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=6, lengths=LENGTHS)

    called, expected = run(), by_one_program(run)
    # A program for each kind of layer.
    assert layer_calls.call_layer._cache_size() == len(set(called.layout.prompt)) < 3
    np.testing.assert_array_equal(called.tokens, expected.tokens)
    np.testing.assert_allclose(called.logprobs, expected.logprobs, atol=2e-5)
    for number in range(model.config.num_layers):
        for mine, theirs in zip(called.kept(number), expected.kept(number), strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    assert "layers that are alike share a program" in called.layout.explain()
    assert "share a program" not in expected.layout.explain()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["windows", "experts", "bfloat16"])
def test_other_models(kind):
    base = tiny_model().config
    config = {
        "windows": dataclasses.replace(base, num_layers=2 * LAYERS, windows=(8, None) * LAYERS),
        "experts": dataclasses.replace(base, num_experts=4, experts_per_token=2),
        "bfloat16": base,
    }[kind]
    params = random_weights(config, seed=3)
    if kind == "bfloat16":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    model = kvjax.Model(config, params)

    def run():
        return kvjax.generate(model, TOKENS, policies.h2o(12), max_new_tokens=6, lengths=LENGTHS)

    called, expected = run(), by_one_program(run)
    assert called.layout.calls_layers and not expected.layout.calls_layers
    np.testing.assert_array_equal(called.tokens, expected.tokens)
    np.testing.assert_allclose(called.logprobs, expected.logprobs, atol=2e-5)


def test_scores_are_those_of_one_program():
    model = tiny_model()

    def run():
        return kvjax.log_likelihood(model, TOKENS, SPECS["h2o"], prompt_length=12, lengths=LENGTHS)

    called, expected = run(), by_one_program(run)
    np.testing.assert_allclose(called.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["h2o", "full, int4", "infinigen"])
def test_blocks_are_those_of_one_program(name, monkeypatch):
    monkeypatch.setattr(layer_calls, "MIN_BLOCK", 8)
    model = tiny_model(name)

    def run():
        scored = kvjax.log_likelihood(model, TOKENS, SPECS[name], prompt_length=12, lengths=LENGTHS, prefill_block=8)
        made = kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=6, lengths=LENGTHS, prefill_block=8)
        return scored, made

    (scores, called), (expected_scores, expected) = run(), by_one_program(run)
    assert called.layout.calls_layers and not expected.layout.calls_layers
    np.testing.assert_array_equal(called.tokens, expected.tokens)
    np.testing.assert_allclose(called.logprobs, expected.logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.logprobs, expected_scores.logprobs, atol=2e-5)
    for number in range(model.config.num_layers):
        for mine, theirs in zip(called.kept(number), expected.kept(number), strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["h2o", "full, int4", "layers differ"])
def test_prompts_are_reused(name):
    model = tiny_model(name)
    prompt_reuse._project.clear_cache()

    def run():
        scored = kvjax.log_likelihood(model, TOKENS, SPECS[name], prompt_length=12, lengths=LENGTHS)
        return scored, kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=4, lengths=LENGTHS)

    expected_scores, expected = by_one_program(run)
    with kvjax.reuse_prompts(1 << 24) as store:
        kvjax.log_likelihood(model, TOKENS, policies.full(), prompt_length=12, lengths=LENGTHS)
        kvjax.generate(model, TOKENS, policies.full(), max_new_tokens=4, lengths=LENGTHS)
        scores, made = run()
    assert store.hits == 2 and prompt_reuse._project._cache_size() == 1
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    np.testing.assert_allclose(made.logprobs, expected.logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.logprobs, expected_scores.logprobs, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (SPECS["h2o"], {"prefill_block": 8}),
        (CacheSpec(policies.kvzip(8, chunk=12)), {}),
        # Two layers share a program, which saves little.
        (CacheSpec(policies.from_layer(policies.h2o(0.5), first=2)), {"layers": 4}),
    ],
    ids=["in small blocks", "replayed", "few layers"],
)
def test_other_prompts_are_run_by_one_program(spec, options):
    model = tiny(layers=options.pop("layers", LAYERS)).model
    made = prefill(model, TOKENS, spec, max_new_tokens=4, **options)
    assert not made.layout.calls_layers


def test_a_shared_prefix_is_read_by_one_program():
    model = tiny_model()
    behind = contexts.with_prefix(model, contexts.prefill(model, TOKENS[:1, :8], policies.full()))
    assert not prefill(behind, TOKENS, policies.full(), max_new_tokens=4).layout.calls_layers


@pytest.mark.sampled(0)
def test_gradients_go_through_one_program():
    model = tiny_model()
    score = score_function(model, SPECS["h2o"], rows=2, prompt_length=12, length=20)
    found = jax.grad(lambda params: score.score(params, jnp.asarray(TOKENS[:, :20])).sum())(model.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found["layer_0"]))


def test_a_plan_counts_the_memory_of_its_programs(monkeypatch):
    """A prompt has the activations of one layer at a time."""
    config = dataclasses.replace(tiny_model().config, num_layers=12, windows=())
    made = {}
    compile_prefill = planning_programs.compile_prefill

    def counted(config, lowered, *args):
        for calls in (False, True):
            layout = dataclasses.replace(lowered.layout, calls_layers=calls)
            made[calls], problem = compile_prefill(config, lowered._replace(layout=layout), *args)
            assert not problem
        return made[True], ""

    monkeypatch.setattr("kvjax.planning.make_plan.compile_prefill", counted)
    planned = plan(config, policies.h2o(0.2), batch=4, prompt_length=256, new_tokens=8, prefill=True, decode=False)
    assert planned.prefill_total == made[True].total >= planned.weights + planned.cache + planned.prefill_temporaries
    assert made[True].total == pytest.approx(made[False].total, rel=0.5)
