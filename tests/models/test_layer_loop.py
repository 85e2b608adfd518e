"""Layers as a loop, against the same layers unrolled: equal to the bit, for what is kept and how it is held."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, cache, policies, products
from kvjax.analysis import scan
from kvjax.cache.layer_stack import LayerRun, Layers, arranged_state, common_runs, stacked_runs
from kvjax.cache.spec import CacheSpec
from kvjax.checkpoint import orbax
from kvjax.generation import decoding
from kvjax.generation.prefill import prefill
from kvjax.generation.sampling import Greedy
from kvjax.models import layer_loop
from kvjax.models.decoder import Decoder
from kvjax.products import libraries, native, used_slots
from tests import examples
from tests.tiny import in_stacks, random_tokens, tiny

LAYERS = 4  # of which two runs have two each
TOKENS, LENGTHS = random_tokens(2, 30), [30, 19]

SPECS = {
    "full": CacheSpec(policies.full()),
    "h2o": CacheSpec(examples.policy("h2o")),
    "snapkv": CacheSpec(examples.policy("snapkv")),
    "int4": CacheSpec(examples.policy("h2o"), storage=examples.held("int4")),
    "int8": CacheSpec(policies.full(), storage=examples.held("int8")),
    "fp8": CacheSpec(examples.policy("h2o"), storage=examples.held("fp8")),
    "fp16": CacheSpec(policies.full(), storage=examples.held("fp16")),
    "h2o, fp16": CacheSpec(examples.policy("h2o"), storage=examples.held("fp16")),
    "kivi": CacheSpec(policies.full(), storage=examples.held("kivi")),
    "think": CacheSpec(policies.full(), storage=examples.held("think")),
    "heads differ, int4": CacheSpec(
        policies.split_heads(((True, False),) * LAYERS, policies.h2o(0.5), policies.tova(0.5)),
        storage=examples.held("int4"),
    ),
    "memory of queries": CacheSpec(policies.rkv(8, every=3, window=2)),
    "gate": CacheSpec(policies.learned(8, recent=2, threshold=-1.0)),
    "norm of outputs": CacheSpec(policies.critical(policies.h2o(8))),
    "offsets of layers": CacheSpec(policies.ladder(14, span=2, sinks=1, every=3)),
    "replay": CacheSpec(policies.critical(policies.kvzip(8, chunk=12, plus=True))),
    "quest": CacheSpec(policies.full(), selection=examples.chosen("quest")),
    "infinigen": CacheSpec(policies.full(), selection=examples.chosen("infinigen")),
    "layers differ": CacheSpec(policies.from_layer(policies.h2o(0.5), first=2)),
}
#: Compared with kvjax's own products; others of these tests run the rest as a loop.
OWN = (
    "full", "int4", "heads differ, int4", "memory of queries", "gate", "norm of outputs", "offsets of layers",
    "layers differ",
)  # fmt: skip
#: Compared with XLA's products, and what is kept otherwise than by the first.
OF_XLA = ("h2o", "kivi", "think", "replay", "infinigen", "layers differ")


@pytest.fixture(autouse=True)
def _own_products():
    if reason := native.load(native.INDEXED_PRODUCT):
        pytest.skip(reason)
    before = products.setting()
    products.use("native")
    yield
    products.use(before)


def unrolled(function):
    """Runs a function with all layers unrolled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(layer_loop.VARIABLE, layer_loop.OFF)
        return function()


def assert_equal(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert len(one.state.layers) == len(other.state.layers) == LAYERS
    jax.tree.map(np.testing.assert_array_equal, tuple(one.state.layers), tuple(other.state.layers))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OWN)
def test_a_loop_generates_what_layers_do(name):
    model = tiny(layers=LAYERS).model

    def run():
        return kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=6, lengths=LENGTHS)

    looped = run()
    # In the last one, the first two layers keep everything.
    runs = (LayerRun(0, 2), LayerRun(2, LAYERS)) if name == "layers differ" else (LayerRun(0, LAYERS),)
    assert looped.layout.runs == runs
    assert_equal(looped, unrolled(run))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", OF_XLA)
def test_weights_in_stacks_on_any_platform(name):
    """Without kvjax's own products, as on GPUs: XLA's products with slices of stacks."""
    model = tiny(layers=LAYERS).model
    products.use("fixed")

    def run(model):
        return kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=6, lengths=LENGTHS)

    expected = run(model)
    assert expected.layout.runs == ()
    looped = run(in_stacks(model))
    # The first layer has no hint.
    some = {"infinigen": (LayerRun(1, LAYERS),), "layers differ": (LayerRun(0, 2), LayerRun(2, LAYERS))}
    assert looped.layout.runs == some.get(name, (LayerRun(0, LAYERS),))
    np.testing.assert_array_equal(looped.tokens, expected.tokens)
    np.testing.assert_allclose(looped.logprobs, expected.logprobs, atol=2e-5)
    for number in range(LAYERS):
        for mine, theirs in zip(looped.kept(number), expected.kept(number), strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_prompts_in_blocks(name):
    model = tiny(layers=LAYERS).model

    def run():
        return kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=4, lengths=LENGTHS, prefill_block=8)

    assert_equal(run(), unrolled(run))


@pytest.mark.sampled(0)
def test_scores_and_choices():
    model = tiny(layers=LAYERS).model

    def run():
        scored = kvjax.log_likelihood(model, TOKENS, SPECS["h2o"], prompt_length=12, lengths=LENGTHS)
        asked = kvjax.score_choices(model, TOKENS, [[[1, 2], [3]], [[4]]], SPECS["h2o"], lengths=LENGTHS)
        return np.asarray(scored.logprobs), [[each.total for each in own] for own in asked]

    (scores, choices), (expected, others) = run(), unrolled(run)
    np.testing.assert_array_equal(scores, expected)
    assert choices == others


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["quest", "infinigen", "layers differ"])
def test_records_are_those_of_unrolled_layers(name):
    model = tiny(layers=LAYERS).model

    def run():
        made = kvjax.generate(model, TOKENS, SPECS[name], max_new_tokens=6, lengths=LENGTHS, record=True)
        scored = kvjax.log_likelihood(model, TOKENS, SPECS[name], prompt_length=12, lengths=LENGTHS, record=True)
        return made, scored

    (made, scored), (expected, other) = run(), unrolled(run)
    assert_equal(made, expected)
    for record, one in ((made.record, expected.record), (scored.record, other.record)):
        for field in record._fields:
            np.testing.assert_array_equal(getattr(record, field), getattr(one, field), field)


def _analyses(model):
    """Measures of the full cache, and of caches whose layers run as other loops than the full cache's."""
    own = {"prompt_length": 12, "lengths": LENGTHS}
    yield "mass", analysis.accumulated_attention(model, TOKENS, lengths=LENGTHS)
    yield "inputs", analysis.input_cosine(model, TOKENS, lengths=LENGTHS)
    yield "h2o", analysis.attention_cosine(model, TOKENS, SPECS["h2o"], **own)
    yield "layers differ", analysis.attention_cosine(model, TOKENS, SPECS["layers differ"], **own)
    yield "infinigen", analysis.selected(model, TOKENS, SPECS["infinigen"], **own)


@pytest.mark.sampled(0)
def test_analyses_are_those_of_unrolled_layers():
    model = tiny(layers=LAYERS).model

    def run():
        return dict(_analyses(model))

    compiled = scan.scan_tiles._cache_size()
    looped, expected = run(), unrolled(run)
    assert scan.scan_tiles._cache_size() == compiled + 4, "two analyses, as a loop and unrolled"
    for name, one in looped.items():
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(expected[name]), strict=True)
        for mine, theirs in leaves:
            np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6, err_msg=name)


def test_runs_that_states_have_in_common():
    assert common_runs([(LayerRun(0, 5),), (LayerRun(0, 5),)], 5) == (LayerRun(0, 5),)
    assert common_runs([(LayerRun(0, 5),), (LayerRun(1, 5),)], 5) == (LayerRun(1, 5),)
    assert common_runs([(LayerRun(0, 5),), (LayerRun(0, 2), LayerRun(2, 5))], 5) == (LayerRun(0, 2), LayerRun(2, 5))
    assert common_runs([(LayerRun(0, 5),), ()], 5) == ()


def test_a_state_in_stacks_is_saved_and_restored(tmp_path):
    model = tiny(layers=LAYERS).model
    state = prefill(model, TOKENS, SPECS["h2o"], max_new_tokens=4).state
    assert isinstance(state.layers, Layers)
    orbax.save_state(tmp_path / "state", state)
    restored = orbax.restore_state(tmp_path / "state", state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    single = orbax.restore_state(tmp_path / "state")
    assert stacked_runs(single.layers) == ()
    jax.tree.map(np.testing.assert_array_equal, single, arranged_state(state, ()))


@pytest.mark.sampled(0)
def test_a_state_in_stacks_is_read_like_any_other():
    model = tiny(layers=LAYERS).model

    def run():
        return kvjax.generate(model, TOKENS, SPECS["h2o"], max_new_tokens=4)

    looped, other = run(), unrolled(run)
    assert repr(looped.state) == repr(other.state)
    assert cache.nbytes(looped.state, statistics=True) == cache.nbytes(other.state, statistics=True)
    assert looped.state.layers[-1].key.shape == other.state.layers[-1].key.shape
    assert len(looped.state.layers[1:]) == LAYERS - 1
    with pytest.raises(IndexError):
        looped.state.layers[LAYERS]


@pytest.mark.parametrize("width", [30, 100])
def test_quantised_weights_run_as_a_loop(width):
    """By codes for few rows; for many, the codes of a layer are copied and decoded."""
    model = kvjax.quantize_weights(tiny(layers=LAYERS).model, 4, group=8)

    def run():
        return kvjax.generate(model, random_tokens(2, width), SPECS["h2o"], max_new_tokens=4)

    looped = run()
    assert looped.layout.runs == (LayerRun(0, LAYERS),)
    assert_equal(looped, unrolled(run))


def test_quantised_weights_that_are_converted_are_unrolled():
    own = tiny(layers=LAYERS)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), own.params)
    model = kvjax.quantize_weights(kvjax.Model(own.model.config, params), 4, group=8)
    assert prefill(model, TOKENS, SPECS["h2o"], max_new_tokens=4).layout.runs == ()


def test_a_state_in_stacks_is_decoded_where_loops_may_not_run():
    """As under a form of products that does not depend on the machine."""
    model = tiny(layers=LAYERS).model
    prefilled = prefill(model, TOKENS, SPECS["h2o"], max_new_tokens=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvjax.products.choice._Process.setting", "fixed")
        jax.clear_caches()
        text = decode_program(model, prefilled).as_text()
    jax.clear_caches()
    assert stacked_runs(prefilled.state.layers) and "kvjax_indexed" not in text


def test_a_decoder_that_does_not_know_of_loops_takes_a_state_in_stacks():
    model = tiny(layers=LAYERS).model
    prefilled = prefill(model, TOKENS, SPECS["full"], max_new_tokens=4)
    state, token = prefilled.state, np.zeros((2, 1), np.int32)
    block = cache.Block(
        position=state.length[:, None], prompt=state.prompt, total=state.total, budget=state.budget
    )  # fmt: skip
    decoder = Decoder(model.config)
    phase = prefilled.layout.decode
    logits, after = decoder.apply({"params": model.params}, token, state, block, phase)
    single, other = decoder.apply({"params": model.params}, token, arranged_state(state, ()), block, phase)
    np.testing.assert_array_equal(logits, single)
    assert stacked_runs(after.layers) == stacked_runs(state.layers)
    jax.tree.map(np.testing.assert_array_equal, arranged_state(after, ()), other)


@pytest.mark.sampled(0)
def test_a_prompt_has_a_gradient():
    model = tiny(layers=LAYERS).model

    def total(scale):
        params = jax.tree.map(lambda x: x * scale, model.params)
        return jnp.sum(
            prefill(dataclasses.replace(model, params=params), TOKENS, SPECS["h2o"], max_new_tokens=4).logits
        )

    assert np.isfinite(jax.grad(total)(1.0))


@pytest.mark.sampled(0)
def test_64_bits():
    model = tiny(layers=LAYERS).model
    expected = kvjax.generate(model, TOKENS, SPECS["h2o"], max_new_tokens=4).tokens
    with jax.enable_x64(True):
        np.testing.assert_array_equal(kvjax.generate(model, TOKENS, SPECS["h2o"], max_new_tokens=4).tokens, expected)


def decode_program(model, prefilled):
    """The decode loop after a prompt, lowered."""
    ids = np.zeros(2, np.int32)
    stop, key = np.zeros(0, np.int32), jax.random.key(0)
    carry, *_ = decoding.first_token(prefilled.logits, prefilled.state, ids, key, stop, sampler=Greedy())
    return decoding.decode_steps.lower(
        model.params, carry, stop, 3, config=model.config, phase=prefilled.layout.decode, sampler=Greedy()
    )  # fmt: skip


def program(layers: int, name: str) -> str:
    """The optimised text of the decode program."""
    model = tiny(layers=layers).model
    text: str = decode_program(model, prefill(model, TOKENS, SPECS[name], max_new_tokens=4)).compile().as_text()
    return text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["h2o", "int4", "int8", "fp8", "fp16", "h2o, fp16"])
def test_a_program_does_not_grow_with_layers_and_copies_no_stack(name, monkeypatch):
    monkeypatch.setattr(used_slots, "MIN_CACHE", 64)  # more than the new token has, fewer than a cache
    few, many = program(3, name), program(6, name)
    assert few.count(" fusion(") == many.count(" fusion(") > 0
    # No copy of the keys, values, positions or statistics of all layers, [B, L, K, S, ...]
    assert re.findall(r"= \w+\[2,6,2,\d+[\d,]*\]\S* copy\(", many) == []
    if name != "h2o":
        # Keys and values are read in their stacks.
        of_one = {"fp16": native.ATTEND, "h2o, fp16": native.SLOTS}.get(name, native.CODED_VECTORS)
        assert f'"{libraries.INDEXED[of_one].target}"' in many
        assert f'"{of_one}"' not in many
