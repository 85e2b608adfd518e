"""Questions that are fed to copies of one cache: each is answered as if the context had been processed for it alone."""

import warnings

import numpy as np
import pytest

from kvjax import policies
from kvjax.cache.planning.limits import Limits
from kvjax.cache.state import live_slots
from kvjax.contexts import extend
from kvjax.errors import InputError
from kvjax.generation.generate import decode, generate
from kvjax.generation.likelihood import log_likelihood
from kvjax.generation.prefill import prefill
from kvjax.lm_eval.runner import Runner
from tests.contexts.test_choices import AT_ONCE, CONTEXTS, LENGTHS, SPECS
from tests.tiny import assert_same_state, kept, tiny

QUESTIONS = [[5, 9, 2, 40, 1, 8], [7], [3, 30]]
ROWS = [2, 0, 2]


def begun(name, new_tokens=12):
    return prefill(tiny(layers=1).model, CONTEXTS, SPECS[name], max_new_tokens=new_tokens, lengths=LENGTHS)


def padded():
    ids, lengths = np.zeros((3, 6), np.int32), np.array([len(each) for each in QUESTIONS])
    for row, each in zip(ids, QUESTIONS, strict=True):
        row[: len(each)] = each
    return ids, lengths


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["full", "h2o-int8-host", "phases"])
def test_a_copy_is_the_cache_of_a_text_that_goes_on(name):
    model, spec = tiny(layers=1).model, SPECS[name]
    ids, lengths = padded()
    first = begun(name)
    made = extend(model, first, ids, lengths=lengths, rows=ROWS, block=1)
    for place, (row, question) in enumerate(zip(ROWS, QUESTIONS, strict=True)):
        text = [*CONTEXTS[row, : LENGTHS[row]], *question]
        expected = log_likelihood(model, text, spec, prompt_length=int(LENGTHS[row])).state
        assert kept(made.state, place) == kept(expected, 0)
        if spec.storage.exact:
            assert_same_state(made.state, expected, place, 0, atol=2e-5)
    # The cache of the contexts is as it was, and can be extended again.
    again = extend(model, first, ids, lengths=lengths, rows=ROWS, block=1)
    np.testing.assert_array_equal(again.logits, made.logits)
    if name in AT_ONCE:
        # Nothing is evicted or encoded: the answers are those to contexts and questions in one prompt.
        answers = decode(model, made, max_new_tokens=5).tokens
        whole = [[*CONTEXTS[row, : LENGTHS[row]], *each] for row, each in zip(ROWS, QUESTIONS, strict=True)]
        for text, answer in zip(whole, answers, strict=True):
            np.testing.assert_array_equal(generate(model, text, spec, max_new_tokens=5).tokens[0], answer)


@pytest.mark.sampled(0)
def test_many_questions_about_contexts_of_any_lengths():
    """In the order they are asked, as many at a time as there are rows."""
    model = tiny(layers=1).model
    runner = Runner(model, SPECS["full"], rows=2, max_length=40)
    contexts = [CONTEXTS[row, : LENGTHS[row]].tolist() for row in range(3)]
    questions = [[QUESTIONS[0], QUESTIONS[1], QUESTIONS[2]], [], [QUESTIONS[1]]]
    seen = {}
    found = runner.answers(contexts, questions, new_tokens=5, done=lambda *each: seen.update({each[:2]: each[2]}))
    assert [len(own) for own in found] == [3, 0, 1]
    for row, own in enumerate(found):
        for number, answer in enumerate(own):
            text = [*contexts[row], *questions[row][number]]
            np.testing.assert_array_equal(generate(model, text, SPECS["full"], max_new_tokens=5).tokens[0], answer)
            np.testing.assert_array_equal(seen[row, number], answer)
    stop = int(found[0][0][1])
    stopped = runner.answers(contexts[:1], questions[:1], new_tokens=5, stop=[stop])[0][0]
    assert list(stopped) == list(found[0][0])[: list(found[0][0]).index(stop) + 1]


def test_a_context_and_a_question_fill_the_trained_positions():
    """Nothing beyond them is asked for: no warning, which texts beyond them cause."""
    model = tiny(layers=1).model
    most = model.config.max_positions
    runner = Runner(model, SPECS["full"], rows=2, max_length=most)
    contexts = [(CONTEXTS[0].tolist() * most)[: most + 5], CONTEXTS[1, :9].tolist()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (long,), (short,) = runner.answers(contexts, [[QUESTIONS[2]], [QUESTIONS[0]]], new_tokens=3)
    text = [*contexts[0][-(most - 3 - 2) :], *QUESTIONS[2]]
    np.testing.assert_array_equal(generate(model, text, SPECS["full"], max_new_tokens=3).tokens[0], long)
    assert len(short) == 3


def test_what_cannot_be_asked():
    model, (ids, lengths) = tiny(layers=1).model, padded()
    with pytest.raises(InputError, match="rows must be 3 whole numbers from 0 to 2"):
        extend(model, begun("full"), ids, lengths=lengths, rows=[0, 1, 3])
    # What a compressor leaves of a prompt may be short, but nothing is evicted afterwards.
    limits = Limits(prompt=CONTEXTS.shape[1], new_tokens=4, shortest=int(LENGTHS.min()))
    made = prefill(model, CONTEXTS, policies.snapkv(8, window=4), max_new_tokens=4, lengths=LENGTHS, limits=limits)
    with pytest.raises(InputError, match="8 tokens are cached and 5 more are requested, but the cache has 11 slots"):
        decode(model, made, max_new_tokens=5)
    later = decode(model, made, max_new_tokens=4).state
    assert (live_slots(later.layers[0][0]) == 11).all()
    runner = Runner(model, SPECS["full"], max_length=8)
    with pytest.raises(InputError, match="a question has 6 tokens and 2 are to be generated, but max_length is 8"):
        runner.answers([[1, 2]], [[QUESTIONS[0]]], new_tokens=2)
    with pytest.raises(InputError, match="at least one of each"):
        runner.answers([[1, 2]], [[[]]], new_tokens=2)
