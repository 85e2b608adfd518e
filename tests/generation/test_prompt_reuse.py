"""`kvjax.reuse_prompts`: a prompt that went through the model under one cache is not run again under another one."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies, products
from kvjax.cache.layer_stack import stacked_runs
from kvjax.cache.spec import CacheSpec
from kvjax.errors import ConfigError
from kvjax.generation import prompt_reuse, prompt_store
from kvjax.generation.prompt_store import Entry, PromptStore
from kvjax.models.decoder import Decoder
from kvjax.models.skew import find_skew, skewed
from kvjax.products import native
from tests import examples
from tests.tiny import random_tokens, tiny

TOKENS, LENGTHS = random_tokens(2, 26), [26, 17]
ROOM = 1 << 24
#: What a prompt that is reused may lack: nothing, ranks, each kind of statistics and of memories of queries, merges,
#: heads and layers that differ, parameters, scores that are written in the pass, and the prompt's own replay.
POLICIES = (
    "full", "streaming_llm", "h2o", "scissorhands", "tova", "roco", "lazy", "ems", "snapkv", "pyramidkv", "rkv",
    "expected_attention", "matched", "compactor", "triattention", "learned", "kvzip",
)  # fmt: skip
COMBINED = ("adakv", "after_prefill", "critical", "phases", "split_heads", "split_layers")
#: One storage of slots; and those that share something, or lie otherwise.
STORAGES = ("int4", "think", "kivi", "gear", "zipcache", "minicache")

SPECS = {
    **{name: CacheSpec(examples.policy(name)) for name in POLICIES},
    **{name: CacheSpec((examples.combined() | examples.planned())[name]) for name in COMBINED},
    **{f"full {name}": CacheSpec(policies.full(), storage=examples.held(name)) for name in STORAGES},
    "h2o mikv": CacheSpec(examples.policy("h2o"), storage=examples.held("mikv")),
    **{
        name: CacheSpec(policies.full(), selection=examples.chosen(name))
        for name in ("optimal", "lserve", "infinigen", "tokenselect", "shadowkv", "a2ats")
    },
}


def run(model, spec, **options):
    return kvjax.generate(model, TOKENS, spec, max_new_tokens=5, lengths=LENGTHS, **options)


def assert_alike(one, other):
    """Equal tokens and slots; numbers may be rounded otherwise by another program."""
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    assert jax.tree.structure(one.state) == jax.tree.structure(other.state)
    for number in range(len(one.state.layers)):
        for mine, theirs in zip(one.kept(number), other.kept(number), strict=True):
            for own, expected in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(own, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_every_cache_is_that_of_a_prompt_of_its_own(name):
    model, spec = tiny().model, SPECS[name]
    expected = run(model, spec)
    with kvjax.reuse_prompts(ROOM) as store:
        run(model, policies.full())
        assert_alike(run(model, spec), expected)
    early = [group for groups in expected.layout.prompt for group in groups]
    again = expected.layout.replay is not None or any(group.writes or not group.selection.reads_all for group in early)
    assert store.hits == (not again)


@pytest.mark.sampled(0)
def test_layers_as_a_loop():
    if reason := native.load(native.INDEXED_PRODUCT):
        pytest.skip(reason)
    before = products.setting()
    products.use("native")
    try:
        model = tiny(layers=4).model
        # Runs of layers: all layers, of codes too, and two runs where the first two layers keep everything.
        for name, runs in (("h2o", 1), ("from_layer", 2), ("full int4", 1)):
            spec = CacheSpec(policies.from_layer(policies.h2o(0.5), first=2)) if name == "from_layer" else SPECS[name]
            expected = run(model, spec)
            with kvjax.reuse_prompts(ROOM) as store:
                run(model, policies.full())
                made = run(model, spec)
            assert store.hits == 1
            assert len(stacked_runs(made.state.layers)) == runs
            assert_alike(made, expected)
    finally:
        products.use(before)


@pytest.mark.sampled(0)
def test_scores_and_choices():
    model = tiny().model

    def measured(policy):
        scored = kvjax.log_likelihood(model, TOKENS, policy, prompt_length=12, lengths=LENGTHS)
        asked = kvjax.score_choices(model, TOKENS, [[[1, 2], [3]], [[4]]], policy, lengths=LENGTHS)
        return np.asarray(scored.logprobs), [each.total for own in asked for each in own]

    expected = measured(policies.h2o(0.5))
    with kvjax.reuse_prompts(ROOM) as store:
        measured(policies.window(0.5))
        scores, choices = measured(policies.h2o(0.5))
    assert (store.hits, store.misses) == (2, 2)
    np.testing.assert_allclose(scores, expected[0], atol=2e-5)
    np.testing.assert_allclose(choices, expected[1], atol=2e-5)


def test_log_probabilities_are_added_to_prompts_that_were_not_scored():
    model = tiny().model
    limits = kvjax.Limits(prompt=12, new_tokens=14)
    with kvjax.reuse_prompts(ROOM) as store:
        kvjax.generate(model, TOKENS[:, :12], policies.full(), max_new_tokens=14, limits=limits)
        scored = kvjax.log_likelihood(model, TOKENS, policies.full(), prompt_length=12, limits=limits)
    assert store.hits == 1
    expected = kvjax.log_likelihood(model, TOKENS, policies.full(), prompt_length=12)
    np.testing.assert_allclose(scored.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.parametrize("place", [12, 20])
def test_equal_prompts_that_go_on_otherwise(place):
    """The token after a prompt is scored with the prompt, and is no part of it."""
    model, limits = tiny().model, kvjax.Limits(prompt=12, new_tokens=14)
    other = TOKENS.copy()
    other[:, place] = (other[:, place] + 1) % model.config.vocab_size

    def scored(tokens):
        made = kvjax.log_likelihood(model, tokens, policies.h2o(0.5), prompt_length=12, limits=limits)
        return np.asarray(made.logprobs)

    expected = [scored(TOKENS), scored(other), scored(TOKENS)]
    with kvjax.reuse_prompts(ROOM) as store:
        made = [scored(TOKENS), scored(other), scored(TOKENS)]
    assert (store.hits, store.misses) == (2, 1)
    for own, wanted in zip(made, expected, strict=True):
        np.testing.assert_allclose(own, wanted, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("other", ["tokens", "lengths", "weights", "config", "precision"])
def test_other_prompts_are_not_taken_for_these(other):
    tokens, lengths, model, precision = TOKENS, LENGTHS, tiny().model, None
    with kvjax.reuse_prompts(ROOM) as store:
        run(model, policies.full())
        if other == "tokens":
            tokens = (TOKENS + 1) % model.config.vocab_size
        if other == "lengths":
            lengths = [26, 16]
        if other == "weights":
            model = tiny(seed=1).model
        if other == "config":
            model = dataclasses.replace(model, config=dataclasses.replace(model.config, attention_soft_cap=0.1))
        if other == "precision":
            precision = "highest"
        with jax.default_matmul_precision(precision):
            made = kvjax.generate(model, tokens, policies.full(), max_new_tokens=5, lengths=lengths)
        assert (store.hits, store.misses) == (0, 2)
        with prompt_store.suspended():
            expected = kvjax.generate(model, tokens, policies.full(), max_new_tokens=5, lengths=lengths)
        assert (store.hits, store.misses) == (0, 2)
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    np.testing.assert_allclose(made.logprobs, expected.logprobs, atol=2e-5)


def test_a_rope_that_depends_on_what_is_to_come_and_arrays_of_numpy_are_not_shared():
    model = tiny().model
    dynamic = dataclasses.replace(model.config.rope, scaling="dynamic", factor=2.0, original_max_positions=16)
    config = dataclasses.replace(model.config, rope=dynamic)
    with kvjax.reuse_prompts(ROOM) as store:
        made = run(dataclasses.replace(model, config=config), policies.h2o(0.5))
        run(dataclasses.replace(model, params=jax.tree.map(np.asarray, model.params)), policies.h2o(0.5))
    assert (store.hits, store.misses) == (0, 0)
    np.testing.assert_array_equal(made.tokens, run(dataclasses.replace(model, config=config), policies.h2o(0.5)).tokens)


@pytest.mark.sampled(0)
def test_a_skew_and_a_calibration_are_those_of_the_second_model():
    """They are parameters of the cache: prompts are shared between models that differ in nothing else."""
    model = tiny().model
    other = skewed(model, find_skew(model, TOKENS), fold=False)
    spec = CacheSpec(policies.full(), selection=kvjax.selection.infinigen(4.0, ratio=0.25, cap=6, first_layer=1))
    expected = run(other, spec, record=True)
    with kvjax.reuse_prompts(ROOM) as store:
        plain = run(model, spec, record=True)
        made = run(other, spec, record=True)
    assert store.hits == 1
    np.testing.assert_array_equal(made.record.positions, expected.record.positions)
    assert not np.array_equal(plain.record.positions, expected.record.positions)


@pytest.mark.sampled(0)
def test_init_makes_parameters_alone():
    config = tiny().model.config
    assert set(Decoder(config).init(jax.random.key(0), TOKENS[:1])) == {"params"}


@pytest.mark.sampled(0)
def test_prompts_in_blocks_and_gradients_are_not_shared():
    model = tiny().model
    with kvjax.reuse_prompts(ROOM) as store:
        blocks = run(model, policies.h2o(0.5), prefill_block=8)

        def loss(params):
            own = dataclasses.replace(model, params=params)
            return kvjax.log_likelihood(own, TOKENS, policies.full(), prompt_length=26).logprobs.mean()

        jax.grad(loss)(model.params)
    assert (store.hits, store.misses) == (0, 0)
    np.testing.assert_array_equal(blocks.tokens, run(model, policies.h2o(0.5), prefill_block=8).tokens)


def test_the_store_has_a_bound():
    model = tiny().model
    config, (rows, width) = model.config, TOKENS.shape
    limits = kvjax.Limits(prompt=width, new_tokens=1, shortest=width)
    vectors = config.num_layers * (config.num_heads + 2 * config.num_kv_heads)
    # Queries, keys, values, hidden states and log-probabilities.
    of_a_batch = rows * width * 4 * (vectors * config.head_dim + config.embed_size + 1)

    def generate(seed):
        tokens = random_tokens(rows, width, seed)
        kvjax.generate(model, tokens, policies.full(), max_new_tokens=1, limits=limits)

    with kvjax.reuse_prompts(of_a_batch - 1) as store:
        generate(0)
        assert store.misses == store.nbytes == 0, "a batch that has no room is not shared"
    with kvjax.reuse_prompts(5 * of_a_batch // 2) as store:
        held = []
        for seed in (0, 1, 2, 0, 2):
            generate(seed)
            held.append(store.nbytes)
    assert held == [of_a_batch, *[2 * of_a_batch] * 4]
    assert (store.hits, store.misses) == (1, 4), "the oldest of three batches was dropped"
    assert store.nbytes == 0, "nothing is kept after the context"
    assert "1 hits, 4 misses" in repr(store)
    for wrong in (0, None, "4GB"):
        with pytest.raises(ConfigError, match="max_bytes must be a number from 1 to"), kvjax.reuse_prompts(wrong):
            pass


@pytest.mark.parametrize(
    ("names", "hits"),
    [
        ("abcdeabcdeabcde", "000000111101111"),  # in turns: all but one are kept
        ("abcdeabcdefgfg", "00000011110011"),  # until others come
        ("aabbccddeeaabbccddee", "01010101010101010101"),  # one after the other, and again
        ("ABABA", "00000"),  # large ones do not wait for each other
        ("aAaA", "0001"),
    ],
)
def test_which_prompts_are_kept(names, hits):
    """Four have room, or a large one alone."""
    store = PromptStore(8)
    found = ""
    for name in names:
        nbytes = 8 if name.isupper() else 2
        entry = store.find(name)
        if entry is None and store.make_room(name, nbytes):
            store.add(name, Entry(None, (), nbytes))
        found += "01"[entry is not None]
        assert store.nbytes <= store.max_bytes
    assert found == hits


def test_prompts_without_room_have_the_same_results():
    model, width = tiny().model, TOKENS.shape[1]
    batches = [random_tokens(2, width + 1, seed) for seed in range(5)]
    limits = kvjax.Limits(prompt=width, new_tokens=1, shortest=width)

    def score(tokens):
        return kvjax.log_likelihood(model, tokens, policies.h2o(0.5), prompt_length=width, limits=limits).logprobs

    with kvjax.reuse_prompts(4 * prompt_reuse.nbytes_of(model, 2, width)) as store:
        scored = [[score(tokens) for tokens in batches] for _ in range(2)]
    assert (store.hits, store.misses) == (4, 6), "one of five has no room"
    for one, other in zip(*scored, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_prompt_is_not_computed_again(monkeypatch):
    """The program of the second cache multiplies by no weight but those of the output head."""
    model = tiny().model
    with kvjax.reuse_prompts(ROOM):
        run(model, policies.full())
        made = {}
        original = prompt_reuse.keep_steps

        def kept(*arguments, **options):
            made["text"] = original.lower(*arguments, **options).as_text()
            return original(*arguments, **options)

        monkeypatch.setattr(prompt_reuse, "keep_steps", kept)
        run(model, policies.h2o(0.5))
    assert made["text"].count("stablehlo.dot_general") <= 2 * model.config.num_layers + 1
