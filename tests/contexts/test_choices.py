"""Choices that are scored from copies of one cache: each as it is alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.contexts import choices
from kvjax.contexts.feed import score_copies, score_logits
from kvjax.errors import InputError
from kvjax.generation.continuations import takes_blocks
from kvjax.generation.prefill import prefill, prefill_steps
from tests.tiny import VOCAB, assert_same_state, kept, random_tokens, tiny

CONTEXTS = random_tokens(3, 24, seed=11)
LENGTHS = np.array([24, 9, 17])
#: Ragged, of one token, none, and the same twice.
CHOICES = [[[5, 9, 2], [7], [5, 9, 2, 40, 1, 8, 30, 2, 2, 11]], [], [[3, 3], list(range(12))]]

SPECS = {
    "full": CacheSpec(policies.full()),
    "snapkv": CacheSpec(policies.snapkv(8, window=4)),
    "phases": CacheSpec(policies.after_prefill(policies.snapkv(0.5, window=2), then=policies.roco(0.5))),
    "h2o-int8-host": CacheSpec(policies.h2o(10), storage.int8(memory="host")),
    "optimal": CacheSpec(policies.full(), selection=selection.optimal(6)),
    "heads": CacheSpec(policies.split_heads([[True, False]], policies.full(), policies.window(9))),
}
AT_ONCE = {"full", "snapkv"}


#: The row of each choice's context, and the choice.
TEXTS = [(row, choice) for row, own in enumerate(CHOICES) for choice in own]


@functools.cache
def alone(name: str, fed: int) -> kvjax.LogLikelihood:
    """Rows of one context and one choice each, of which all tokens but the last `1 - fed` are fed.

    One program for all of them: what a row gives does not depend on its batch, as `test_conformance` has it.
    """
    ids = np.zeros((len(TEXTS), 36), np.int32)
    prompts = np.array([LENGTHS[row] for row, _ in TEXTS])
    for place, (row, choice) in enumerate(TEXTS):
        ids[place, : prompts[place] + len(choice)] = [*CONTEXTS[row, : prompts[place]], *choice]
    ends = prompts + [len(choice) for _, choice in TEXTS] - (1 - fed)
    return kvjax.log_likelihood(
        tiny(layers=1).model, ids, SPECS[name], prompt_length=prompts, lengths=ends, limits=Limits(24, 12)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_each_choice_is_scored_as_it_is_alone(name):
    found = kvjax.score_choices(tiny(layers=1).model, CONTEXTS, CHOICES, SPECS[name], lengths=LENGTHS)
    assert [len(own) for own in found] == [3, 0, 2]
    logprobs = np.asarray(alone(name, 1).logprobs)
    for place, got in enumerate(each for own in found for each in own):
        row, choice = TEXTS[place]
        expected = logprobs[place, LENGTHS[row] - 1 :][: len(choice)]
        np.testing.assert_allclose(got.logprobs, expected, atol=2e-5)
        assert got.total == pytest.approx(expected.sum(), abs=1e-4)
        assert not got.greedy


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_each_copy_keeps_what_the_choice_alone_keeps(name):
    """The slots, and in them the keys, values and statistics, after all tokens of a choice but its last."""
    model, spec = tiny(layers=1).model, SPECS[name]
    begun = prefill(model, CONTEXTS, spec, max_new_tokens=12, lengths=LENGTHS)
    assert takes_blocks(begun.layout.decode) == (name in AT_ONCE)
    copies = (2, 4, 0)  # of `TEXTS`
    rows, own = zip(*(TEXTS[place] for place in copies), strict=True)
    ends = np.array([len(each) for each in own], np.int32)
    ids = np.zeros((3, 17), np.int32)
    for place, each in enumerate(own):
        ids[place, : len(each)] = each
    plan, width = choices.planned(begun, 17)
    assert width == 17 if name in AT_ONCE else width >= 17
    ids = np.pad(ids, ((0, 0), (0, width - 17)))
    state = score_copies(
        model.params, begun.state, begun.logits, jnp.array(rows), ids, ends, config=model.config, plan=plan
    )[2]
    expected = alone(name, 0).state
    for place, text in enumerate(copies):
        assert kept(state, place) == kept(expected, text)
        if spec.storage.exact:
            assert_same_state(state, expected, place, text, atol=2e-5)


def test_a_greedy_choice_is_recognised():
    model = tiny(layers=1).model
    made = kvjax.generate(model, CONTEXTS, policies.full(), max_new_tokens=6, lengths=LENGTHS)
    best = [[int(t) for t in row] for row in made.tokens]
    asked = [[row, row[:1], [*row[:5], (row[5] + 1) % VOCAB], [(row[0] + 1) % VOCAB, *row[1:]]] for row in best]
    for spec in (policies.full(), CacheSpec(policies.full(), storage.int8(residual=64))):
        found = kvjax.score_choices(model, CONTEXTS, asked, spec, lengths=LENGTHS)
        assert [[each.greedy for each in own] for own in found] == [[True, True, False, False]] * 3
        np.testing.assert_allclose([own[0].logprobs for own in found], made.logprobs, atol=2e-5)


def test_of_equal_logits_the_lowest_id_is_greedy():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    assert [bool(score_logits(logits, jnp.array([t]))[1][0]) for t in range(4)] == [False, True, False, False]


@pytest.mark.sampled(0)
def test_many_lengths_compile_few_programs():
    """1,000 choices: one program for prompts and one for each bucket of choices."""
    model, spec, limits = tiny(layers=1).model, policies.full(), Limits(prompt=32, new_tokens=32)
    rng = np.random.default_rng(3)
    jax.clear_caches()
    for _ in range(25):
        lengths = rng.integers(1, 33, 8)
        asked = [[rng.integers(0, VOCAB, rng.integers(1, 33)) for _ in range(5)] for _ in lengths]
        kvjax.score_choices(model, random_tokens(8, 32), asked, spec, lengths=lengths, limits=limits)
    assert prefill_steps._cache_size() == 1
    # Of 1, 9, 13, 17, 25 and 33 tokens.
    assert score_copies._cache_size() <= 6


def test_choices_that_cannot_be_scored():
    model = tiny(layers=1).model
    for asked, message in (
        ([[[1]]], "choices must be 3 lists"),
        ([[[1], []], [], []], "at least one token"),
        ([[[0.5]], [], []], "float64"),
        ([[[VOCAB]], [], []], "outside the model's vocabulary"),
    ):
        with pytest.raises(InputError, match=message):
            kvjax.score_choices(model, CONTEXTS, asked, policies.full(), lengths=LENGTHS)
