"""Logits that are NaN or infinite end their row with an error; the other rows have the results that they have alone."""

import dataclasses
import functools
import pickle

import numpy as np
import pytest

import kvjax
import tests.tiny
from kvjax import policies, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import KvjaxError, NonFiniteError
from kvjax.generation import generate as loop
from kvjax.generation.decoding import decode_steps
from kvjax.numerics.finite import PAD
from kvjax.serve import Request, Runner
from tests.tiny import random_tokens, tiny, untied

BAD = 63  # the token whose embedding is infinite
NEW = 12
LIMITS = Limits(prompt=24, new_tokens=NEW)
SPECS = {
    "h2o": CacheSpec(policies.h2o(8)),
    "full": CacheSpec(policies.full()),
    "int4": CacheSpec(policies.h2o(8), storage.int4()),
}


@functools.cache
def good():
    return untied(tiny().model)


@functools.cache
def spoiled(token=BAD):
    return tests.tiny.spoiled(good(), token)


def prompts():
    """Rows of 16 tokens, none of which is `BAD`."""
    return np.minimum(random_tokens(4, 16, seed=3), BAD - 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "block"), [("h2o", None), ("h2o", 8), ("full", None), ("int4", 8)])
def test_a_prompt_of_nan_ends_its_row_alone(name, block):
    clean, given = prompts(), prompts()
    given[[1, 3], [5, 15]] = BAD
    options = {"max_new_tokens": NEW, "prefill_block": block, "limits": LIMITS}
    expected = kvjax.generate(good(), clean, SPECS[name], **options)
    with pytest.raises(NonFiniteError, match=r"not finite in 2 of 4 rows \(row 1, 3\)") as raised:
        kvjax.generate(spoiled(), given, SPECS[name], **options)
    result = raised.value.result
    assert raised.value.rows == (1, 3) and isinstance(raised.value, KvjaxError)
    assert result.lengths.tolist() == [NEW, 0, NEW, 0]
    assert np.all(result.tokens[[1, 3]] == PAD) and not result.logprobs[[1, 3]].any()
    for row in (0, 2):
        np.testing.assert_array_equal(result.tokens[row], expected.tokens[row])
        np.testing.assert_array_equal(result.logprobs[row], expected.logprobs[row])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "block"), [("h2o", None), ("h2o", 8), ("full", None), ("int4", 8)])
def test_padding_that_overflows_changes_nothing(name, block):
    """Prompts are padded with token 0, and rows that are shorter than others with what stands there."""
    given, lengths = np.maximum(prompts(), 1), [16, 9, 3, 12]
    options = {"max_new_tokens": 3, "lengths": lengths, "prefill_block": block, "limits": LIMITS}
    expected = kvjax.generate(good(), given, SPECS[name], **options)
    given[1, 9:] = 0
    result = kvjax.generate(spoiled(0), given, SPECS[name], **options)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.logprobs, expected.logprobs)


@functools.cache
def late():
    """Prompts, a token that row 0 alone generates, not before its third and not last, and what follows without it."""
    for seed in range(100):
        given = np.minimum(random_tokens(3, 16, seed=seed), BAD - 1)
        made = kvjax.generate(good(), given, SPECS["h2o"], max_new_tokens=NEW, limits=LIMITS)
        others = {*given.ravel().tolist(), *made.tokens[1:].ravel().tolist()}
        for at in range(2, NEW - 1):
            token = int(made.tokens[0, at])
            if token not in others and token not in made.tokens[0, :at]:
                return given, token, at, made
    raise AssertionError("no seed has such a token")


def test_a_row_that_becomes_nan_has_the_tokens_before():
    given, token, at, expected = late()
    seen = []
    for stream in (None, lambda tokens: seen.append(tokens.copy())):
        with pytest.raises(NonFiniteError) as raised:
            kvjax.generate(
                spoiled(token), given, SPECS["h2o"], max_new_tokens=NEW, limits=LIMITS, stream=stream
            )  # fmt: skip
        result = raised.value.result
        # The token itself was chosen among finite logits; those after it are not.
        assert raised.value.rows == (0,) and result.lengths.tolist() == [at + 1, NEW, NEW]
        np.testing.assert_array_equal(result.tokens[0], [*expected.tokens[0, : at + 1], *[PAD] * (NEW - at - 1)])
        for row in (1, 2):
            np.testing.assert_array_equal(result.tokens[row], expected.tokens[row])
            np.testing.assert_array_equal(result.logprobs[row], expected.logprobs[row])
    np.testing.assert_array_equal(np.stack(seen, axis=1), result.tokens)


def test_a_row_of_nan_stops_at_once(monkeypatch):
    """Without stop tokens too: no chunk follows the one in which the last row has ended."""
    calls = []

    def counted(*args, **options):
        calls.append(args[3])
        return decode_steps(*args, **options)

    monkeypatch.setattr(loop, "decode_steps", counted)
    given = np.full((2, 8), BAD)
    for sampler in (kvjax.Greedy(), kvjax.Sample(top_k=3, top_p=0.5, temperature=0.7)):
        with pytest.raises(NonFiniteError) as raised:
            kvjax.generate(spoiled(), given, SPECS["h2o"], max_new_tokens=200, sampler=sampler)
        assert raised.value.result.lengths.tolist() == [0, 0]
    assert not calls


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampler", [kvjax.Sample(top_k=1), kvjax.Sample(top_p=1e-6), kvjax.Sample(min_p=0.9)])
def test_what_a_sampler_excludes_is_no_error(sampler):
    made = kvjax.generate(good(), prompts(), SPECS["full"], max_new_tokens=NEW, sampler=sampler, limits=LIMITS)
    assert np.isfinite(made.logprobs).all() and (made.lengths == NEW).all()


def test_a_forced_token_of_probability_zero_is_no_error():
    """Its probability is 0 in float32, its log-probability is finite."""
    model = good()
    sharp = dataclasses.replace(model, params=model.params | {"head": {"kernel": model.params["head"]["kernel"] * 1e4}})
    scored = kvjax.log_likelihood(sharp, prompts(), SPECS["full"], prompt_length=8)
    logprobs = np.asarray(scored.logprobs)
    assert np.isfinite(logprobs).all() and np.exp(logprobs).min() == 0


@pytest.mark.parametrize("prompt", [4, 16])
def test_scores(prompt):
    given = prompts()
    given[2, 10] = BAD
    options = {"prompt_length": prompt, "limits": LIMITS}
    expected = kvjax.log_likelihood(good(), prompts(), SPECS["h2o"], **options)
    with pytest.raises(NonFiniteError, match=r"1 of 4 rows \(row 2\)") as raised:
        kvjax.log_likelihood(spoiled(), given, SPECS["h2o"], **options)
    logprobs = np.asarray(raised.value.result.logprobs)
    np.testing.assert_array_equal(logprobs[[0, 1, 3]], np.asarray(expected.logprobs)[[0, 1, 3]])
    # Entry t is of token t + 1 after token t. In one shot, a token of NaN is in the sums over all tokens of its row.
    assert np.isnan(logprobs[2, 10:]).all() and (prompt == 16 or np.isfinite(logprobs[2, :10]).all())


def test_choices():
    given = prompts()
    given[1, 3] = BAD
    choices = [[[5, 6], [7]]] * 4
    expected = kvjax.score_choices(good(), prompts(), choices, SPECS["h2o"])
    with pytest.raises(NonFiniteError, match=r"1 of 4 contexts \(context 1\)") as raised:
        kvjax.score_choices(spoiled(), given, choices, SPECS["h2o"])
    for row in (0, 2, 3):
        for one, other in zip(raised.value.result[row], expected[row], strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_the_error_is_one_of_values_and_can_be_pickled():
    error = pickle.loads(pickle.dumps(NonFiniteError("what", rows=[1], result=np.zeros(2))))
    assert isinstance(error, ValueError) and str(error) == "what" and error.rows == (1,)


def test_requests():
    """A request of a runner ends, in prompts or later, its row takes the next one, and the others are unchanged."""
    given, token, at, expected = late()
    runner = Runner(spoiled(token), SPECS["h2o"], rows=2, limits=LIMITS, chunk=4)
    good = {runner.submit(Request(tokens=given[row], max_new_tokens=NEW)): row for row in (1, 2)}
    becomes = runner.submit(Request(tokens=given[0], max_new_tokens=NEW))
    is_bad = runner.submit(Request(tokens=[token, 4, 5], max_new_tokens=NEW))
    good |= {runner.submit(Request(tokens=given[row], max_new_tokens=NEW)): row for row in (1, 2)}
    found = {result.id: result for result in runner}
    for number, row in good.items():
        assert found[number].reason == "length" and found[number].error is None
        np.testing.assert_array_equal(found[number].tokens, expected.tokens[row])
    for number, tokens in ((becomes, at + 1), (is_bad, 0)):
        result = found[number]
        assert result.reason == "error" and isinstance(result.error, NonFiniteError)
        assert f"after {tokens} new tokens" in str(result.error)
        assert np.isfinite(result.logprobs).all() and len(result.tokens) == len(result.logprobs) == tokens
    np.testing.assert_array_equal(found[becomes].tokens, expected.tokens[0, : at + 1])
    assert runner.counts.not_finite == 2 and runner.counts.requests == 6 and runner.idle
