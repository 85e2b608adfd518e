"""Rows that follow one text, which is held once, are rows that have copies of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, contexts, policies, reuse, storage, training
from kvjax.cache.groups import Group
from kvjax.cache.shared_prefix import PARAM, LayerPrefix, prefix_bytes
from kvjax.cache.state import Block, nbytes
from kvjax.cache.step.step import step
from kvjax.errors import ConfigError, InputError, PolicyError
from kvjax.models import shapes
from kvjax.numerics.rope import Rope
from kvjax.serve import Request, Runner
from tests.tiny import random_tokens, random_weights, tiny

FULL = policies.full()
TEXT, NEW = random_tokens(1, 37, seed=1), 9
QUESTIONS, LENGTHS = random_tokens(3, 11, seed=2), np.array([11, 4, 8])


def begun(model, spec=FULL, text=TEXT):
    return contexts.prefill(model, text, spec)


def windowed():
    """Sliding windows in one layer, shorter than the text; soft caps."""
    config = dataclasses.replace(
        tiny().model.config, windows=(None, 16), attention_soft_cap=5.0, num_kv_heads=4
    )  # fmt: skip
    return kvjax.Model(config, random_weights(config))


def without_positions():
    return dataclasses.replace(tiny().model, config=dataclasses.replace(tiny().model.config, rope=None))


def copies(model, text=TEXT):
    """The answers of rows that have copies of the text."""
    turn = contexts.extend(model, contexts.rows(begun(model, text=text), [0] * 3), QUESTIONS, lengths=LENGTHS)
    return contexts.decode(model, turn, max_new_tokens=NEW)


def assert_same_answers(got, expected):
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)


MODELS = {
    "tiny": lambda: tiny().model,
    "windows and caps": windowed,
    "one KV head": lambda: tiny("mqa").model,
    "no positions": without_positions,
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("block", [None, 4], ids=["one shot", "blocks"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_answers_are_those_of_copies(make, block):
    model = make()
    reader = contexts.with_prefix(model, begun(model))
    got = kvjax.generate(reader, QUESTIONS, FULL, lengths=LENGTHS, max_new_tokens=NEW, prefill_block=block)
    assert_same_answers(got, copies(model))


def test_layers_that_are_unrolled(monkeypatch):
    monkeypatch.setenv("KVJAX_LAYER_LOOPS", "off")
    model = tiny().model
    reader = contexts.with_prefix(model, begun(model))
    got = kvjax.generate(reader, QUESTIONS, FULL, lengths=LENGTHS, max_new_tokens=NEW)
    assert_same_answers(got, copies(model))


SAMPLERS = {"drawn": kvjax.Sample(temperature=0.9), "penalty": kvjax.Greedy(repetition_penalty=5.0)}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_samples_are_those_of_copies(sampler):
    """Keys depend on the position in the whole text, and penalties on its tokens."""
    model = tiny().model
    reader = contexts.with_prefix(model, begun(model))
    key, options = jax.random.key(3), {"max_new_tokens": NEW, "sampler": sampler}
    turn = contexts.extend(model, contexts.rows(begun(model), [0] * 3), QUESTIONS)
    expected = contexts.decode(model, turn, key=key, **options)
    np.testing.assert_array_equal(kvjax.generate(reader, QUESTIONS, FULL, key=key, **options).tokens, expected.tokens)
    runner = Runner(reader, FULL, rows=2, limits=kvjax.Limits(16, NEW), key=key, sampler=sampler)
    for number, row in enumerate(QUESTIONS):
        runner.submit(Request(tokens=row, max_new_tokens=NEW, number=number))
    for result in runner:
        np.testing.assert_array_equal(result.tokens, expected.tokens[result.id])


def test_scores_are_those_of_the_whole_text():
    model = tiny().model
    reader = contexts.with_prefix(model, begun(model))
    got = kvjax.log_likelihood(reader, QUESTIONS, FULL, prompt_length=5).logprobs
    whole = np.concatenate([np.repeat(TEXT, 3, axis=0), QUESTIONS], axis=1)
    expected = kvjax.log_likelihood(model, whole, FULL, prompt_length=TEXT.shape[1]).logprobs
    np.testing.assert_allclose(got, np.asarray(expected)[:, TEXT.shape[1] :], atol=2e-5)
    # Nor are they those of prompts that are run once for several caches, which know nothing of the text.
    with kvjax.reuse_prompts(10**9):
        again = kvjax.log_likelihood(reader, QUESTIONS, FULL, prompt_length=5).logprobs
    np.testing.assert_array_equal(again, got)


def test_bfloat16():
    model = tiny().model
    half = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    reader = contexts.with_prefix(half, begun(half))
    assert reader.params[PARAM].layers[0].key.dtype == jnp.bfloat16
    got = kvjax.log_likelihood(reader, QUESTIONS, FULL, prompt_length=5).logprobs
    exact = kvjax.log_likelihood(contexts.with_prefix(model, begun(model)), QUESTIONS, FULL, prompt_length=5).logprobs
    np.testing.assert_allclose(got, exact, atol=0.15)


def test_a_runner_and_further_turns():
    model = tiny().model
    reader = contexts.with_prefix(model, begun(model))
    expected = copies(model)
    runner = Runner(reader, FULL, rows=2, limits=kvjax.Limits(16, NEW))
    requests = [Request(tokens=row[:n], max_new_tokens=NEW) for row, n in zip(QUESTIONS, LENGTHS, strict=True)]
    for request in requests:
        runner.submit(request)
    for result in runner:
        np.testing.assert_array_equal(result.tokens, expected.tokens[result.id])
    # The first tokens as a prompt, and the others as a turn.
    first = contexts.prefill(reader, QUESTIONS[:, :3], FULL)
    turn = contexts.extend(reader, first, QUESTIONS[:, 3:], lengths=LENGTHS - 3)
    assert_same_answers(contexts.decode(reader, turn, max_new_tokens=NEW), expected)


def test_the_text_is_held_once_and_the_context_is_unchanged():
    model = tiny().model
    context = begun(model)
    reader = contexts.with_prefix(model, context)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(reader.params[PARAM].layers))
    # 40 slots of keys, values and positions, of 2 layers and 2 heads of 8
    assert held == 2 * 2 * 40 * (2 * 8 + 1) * 4
    assert prefix_bytes(model.config, len(context.text[0]), 4) == 2 * 2 * 40 * 2 * 8 * 4
    before = kvjax.generate(reader, QUESTIONS, FULL, max_new_tokens=NEW)
    contexts.decode(model, context, max_new_tokens=NEW, donate=True)
    np.testing.assert_array_equal(kvjax.generate(reader, QUESTIONS, FULL, max_new_tokens=NEW).tokens, before.tokens)
    assert PARAM not in model.params
    own = nbytes(before.state)
    assert own == nbytes(kvjax.generate(model, QUESTIONS, FULL, max_new_tokens=NEW).state)


def test_texts_of_similar_lengths_share_programs():
    model = tiny().model
    made = [contexts.with_prefix(model, begun(model, text=random_tokens(1, n, seed=n))) for n in (33, 40)]
    assert len({leaf.shape for each in made for leaf in jax.tree.leaves(each.params[PARAM])}) == len(
        {leaf.shape for leaf in jax.tree.leaves(made[0].params[PARAM])}
    )


def test_a_context_that_cannot_be_a_prefix():
    model = tiny().model
    with pytest.raises(InputError, match=r"it has 3 rows; take one by kvjax.contexts.rows"):
        contexts.with_prefix(model, begun(model, text=QUESTIONS))
    with pytest.raises(InputError, match="its cache is h2o"):
        contexts.with_prefix(model, begun(model, policies.h2o(8)))
    with pytest.raises(InputError, match=r"its cache is full . int8"):
        contexts.with_prefix(model, begun(model, kvjax.CacheSpec(FULL, storage.int8())))
    reader = contexts.with_prefix(model, begun(model))
    with pytest.raises(InputError, match="has such a prefix already; extend that text"):
        contexts.with_prefix(reader, begun(reader))
    with pytest.raises(InputError, match="belongs to another model"):
        contexts.with_prefix(reader, begun(model))
    config = dataclasses.replace(shapes.by_name("opt-125m"), num_layers=1, vocab_size=64, windows=())
    learned = kvjax.Model(config, random_weights(config))
    with pytest.raises(InputError, match="the model has learned positions"):
        contexts.with_prefix(learned, begun(learned))
    dynamic = dataclasses.replace(model.config, rope=Rope(dim=8, scaling="dynamic", factor=2.0))
    stretched = dataclasses.replace(model, config=dynamic)
    with pytest.raises(InputError, match="dynamic RoPE"):
        contexts.with_prefix(stretched, begun(stretched))


def test_what_rows_behind_a_prefix_cannot_do(tmp_path):
    model = tiny().model
    reader = contexts.with_prefix(model, begun(model))
    with pytest.raises(PolicyError, match=r"h2o.* cannot be the cache of rows that share a prefix"):
        kvjax.generate(reader, QUESTIONS, policies.h2o(8), max_new_tokens=2)
    with pytest.raises(PolicyError, match=r"int8.* cannot be the cache"):
        Runner(reader, FULL, storage=storage.int8(), rows=2, limits=kvjax.Limits(16, 4))
    with pytest.raises(InputError, match="cannot be saved: its rows follow a shared prefix"):
        contexts.save(tmp_path / "context", begun(reader, text=QUESTIONS))

    chunks = [reuse.compute(model, row) for row in random_tokens(2, 5, seed=5)]
    with pytest.raises(InputError, match="contexts that share positions"):
        contexts.with_prefix(model, reuse.parallel(model, chunks, QUESTIONS[0]))


#: Functions that would read texts without the prefix, or make another model.
REFUSING = {
    "compute": lambda model: reuse.compute(model, QUESTIONS[0]),
    "compute_variants": lambda model: reuse.compute_variants(model, [QUESTIONS[0]]),
    "repair": lambda model: reuse.edit(
        model, begun(model, text=QUESTIONS[:1]), reuse.Edit(3, 5, np.array([1], np.int32)), repair=0.5
    ),
    "fewer_layers": lambda model: reuse.fewer_layers(model, [0]),
    "initial_coprocessor": lambda model: reuse.initial_coprocessor(model, 2),
    "predict": lambda model: reuse.predict(model, reuse.initial_predictor(model, model), QUESTIONS[:1]),
    "speculate": lambda model: kvjax.generate(
        model, QUESTIONS, FULL, max_new_tokens=2, speculate=kvjax.speculation.level(kvjax.selection.retrieval(4, 8))
    ),
    "sparsity": lambda model: analysis.sparsity(model, QUESTIONS),
    "output_error": lambda model: analysis.output_error(model, QUESTIONS, FULL, prompt_length=5),
    "calibrate": lambda model: kvjax.calibrate(model, QUESTIONS, storage.kvquant()),
    "quantize_weights": lambda model: kvjax.quantize_weights(model, 8, None),
    "train_gate": lambda model: training.train_gate(model, None, QUESTIONS, ()),
    "cartridge": lambda model: kvjax.cartridge(model, QUESTIONS[:1], 4),
}


@pytest.mark.parametrize("name", REFUSING)
def test_functions_that_refuse_the_model(name):
    model = tiny().model
    reader = contexts.with_prefix(model, begun(model))
    with pytest.raises(InputError, match=r"cannot take a model from kvjax.contexts.with_prefix"):
        REFUSING[name](reader)


def test_a_model_with_a_prefix_is_not_saved(tmp_path):
    model = tiny().model
    with pytest.raises(InputError, match=r"kvjax.save cannot take a model from kvjax.contexts.with_prefix"):
        kvjax.save(contexts.with_prefix(model, begun(model)), tmp_path / "model")


def test_a_kernel_for_whole_steps_is_refused():
    """As on a TPU, where such a kernel is chosen by default."""
    model = tiny(layers=1).model
    layers = begun(model).state.layers
    row = jnp.ones((1,), jnp.int32)
    block = Block(row[:, None], row, row, None, prefix=LayerPrefix(layers[0][0], row))
    x = jnp.ones((1, 2, 1, 8))
    with pytest.raises(ConfigError, match="do not read a shared prefix; give implementation='xla'"):
        step(layers[0][0], x, x, x, block=block, group=Group(step_implementation="pallas_tpu"))
