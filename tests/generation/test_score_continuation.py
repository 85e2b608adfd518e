"""Continuations of prompts that were prefilled have the scores of whole texts; see `score_continuation`."""

import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.errors import InputError, NonFiniteError
from kvjax.generation import decoding
from kvjax.generation.generate import decode
from kvjax.generation.likelihood import score_continuation
from kvjax.generation.prefill import prefill
from tests.tiny import assert_same_state, random_tokens, spoiled, tiny

PROMPT, NEW = 20, 7
TOKENS = random_tokens(3, PROMPT + NEW)
SPECS = {
    "full": kvjax.CacheSpec(policies.full()),
    "h2o": kvjax.CacheSpec(policies.h2o(9)),
    "snapkv": kvjax.CacheSpec(policies.snapkv(9, window=4)),
    "h2o in codes": kvjax.CacheSpec(policies.h2o(9), storage.int8()),
    "quest": kvjax.CacheSpec(policies.full(), selection=selection.quest(4, 8)),
}


def prefilled(spec, new=NEW, model=None):
    return prefill(model or tiny().model, TOKENS[:, :PROMPT], spec, max_new_tokens=new)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_scores_are_those_of_the_whole_text(name):
    spec = SPECS[name]
    whole = kvjax.log_likelihood(tiny().model, TOKENS, spec, prompt_length=PROMPT, implementation="auto")
    got = score_continuation(tiny().model, prefilled(spec), TOKENS[:, PROMPT:])
    np.testing.assert_allclose(got, np.asarray(whole.logprobs)[:, PROMPT - 1 :], atol=1e-5)


def test_the_cache_can_still_be_decoded():
    made = prefilled(SPECS["h2o"])
    score_continuation(tiny().model, made, TOKENS[:, PROMPT:])
    for row in range(3):
        assert_same_state(made.state, prefilled(SPECS["h2o"]).state, row)
    assert decode(tiny().model, made, max_new_tokens=NEW).tokens.shape == (3, NEW)


def test_generation_runs_the_same_programs():
    made = prefilled(SPECS["h2o"])
    score_continuation(tiny().model, made, TOKENS[:, PROMPT:])
    before = decoding.first_token._cache_size(), decoding.decode_steps._cache_size()
    generated = decode(tiny().model, made, max_new_tokens=NEW)
    assert (decoding.first_token._cache_size(), decoding.decode_steps._cache_size()) == before
    scored = score_continuation(tiny().model, prefilled(SPECS["h2o"]), generated.tokens)
    np.testing.assert_array_equal(scored, generated.logprobs)


def test_a_text_longer_than_a_call_of_the_loop():
    new = decoding.CHUNK + 9
    tokens = random_tokens(2, PROMPT + new)
    spec = kvjax.CacheSpec(policies.h2o(9))
    whole = kvjax.log_likelihood(tiny().model, tokens, spec, prompt_length=PROMPT, implementation="auto")
    made = prefill(tiny().model, tokens[:, :PROMPT], spec, max_new_tokens=new)
    got = score_continuation(tiny().model, made, tokens[:, PROMPT:])
    np.testing.assert_allclose(got, np.asarray(whole.logprobs)[:, PROMPT - 1 :], atol=1e-5)


def test_one_token_is_scored_by_the_prompt_alone():
    got = score_continuation(tiny().model, prefilled(SPECS["full"], new=1), TOKENS[:, PROMPT : PROMPT + 1])
    more = score_continuation(tiny().model, prefilled(SPECS["full"]), TOKENS[:, PROMPT:])
    assert got.shape == (3, 1)
    np.testing.assert_allclose(got, more[:, :1], atol=1e-6)


def test_a_continuation_that_is_too_long():
    made = prefill(
        tiny().model, TOKENS[:, :PROMPT], policies.full(), max_new_tokens=3, limits=kvjax.Limits(PROMPT, 3)
    )  # fmt: skip
    with pytest.raises(InputError, match="20 tokens are cached and 7 more are requested, but the cache has 22 slots"):
        score_continuation(tiny().model, made, TOKENS[:, PROMPT:])
    with pytest.raises(InputError, match="tokens has 2 rows, but 3 prompts were prefilled"):
        score_continuation(tiny().model, made, TOKENS[:2, PROMPT:])
    with pytest.raises(InputError, match="outside the model's vocabulary"):
        score_continuation(tiny().model, made, np.full((3, 2), 64))


def test_a_score_that_is_not_finite():
    tokens = TOKENS.copy()
    tokens[tokens == 63] = 1
    model = spoiled(tiny().model, 63)
    tokens[1, PROMPT + 2] = 63
    made = prefill(model, tokens[:, :PROMPT], policies.full(), max_new_tokens=NEW)
    with pytest.raises(NonFiniteError, match="1") as raised:
        score_continuation(model, made, tokens[:, PROMPT:])
    assert np.isfinite(raised.value.result[[0, 2]]).all()
