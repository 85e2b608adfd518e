"""A runner whose rows are drafted for: the tokens of each request are those without drafts, whatever is accepted."""

import functools

import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import InputError, PolicyError
from kvjax.serve import Request, Runner
from kvjax.serve.program import drafts
from kvjax.speculation import level, own, seen
from tests.tiny import VOCAB, tiny

REQUESTS, ROWS, GAMMA = 14, 3, 3
LIMITS = Limits(prompt=24, new_tokens=20)
SAMPLE = kvjax.Sample(0.7, top_p=0.9)
DRAFTS = {
    "a selection": level(selection.retrieval(4, 8), gamma=GAMMA),
    "slots that a policy ranks": level(seen(policies.h2o(policies.Fraction(0.3, min_slots=6))), gamma=GAMMA),
}


@functools.cache
def requests() -> list[Request]:
    """Prompts of 17 to 24 tokens that want 1 to 20; every second one is sampled, and three later ones are urgent."""
    rng = np.random.default_rng(1)
    return [
        Request(
            tokens=rng.integers(4, VOCAB, rng.integers(17, 25), dtype=np.int32),
            max_new_tokens=1 if number == 4 else int(rng.integers(6, 21)),
            stop=rng.integers(4, VOCAB, 8).tolist(), sampler=SAMPLE if number % 2 else kvjax.Greedy(),
            seed=number if number % 4 == 3 else None, priority=int(number in (8, 9, 11)),
        )
        for number in range(REQUESTS)
    ]  # fmt: skip


def runner(**options):
    return Runner(tiny(layers=1).model, policies.full(), rows=ROWS, limits=LIMITS, **options)


def results(made):
    """Results by request: half of them come at first, and the others while these run."""
    waiting, found = iter(requests()), {}
    for _ in range(REQUESTS // 2):
        made.submit(next(waiting))
    while not made.idle:
        for progress in made.step():
            if progress.result is not None:
                found[progress.id] = progress.result
        if (request := next(waiting, None)) is not None:
            made.submit(request)
    assert len(found) == REQUESTS
    return [found[number] for number in range(REQUESTS)]


@functools.cache
def expected():
    plain = runner(swap_bytes=0)
    made = results(plain)
    counts = plain.counts
    assert counts.rounds == counts.drafted == counts.accepted == 0
    assert {result.reason for result in made} == {"stop", "length"}
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_are_those_without_drafts(name):
    # Rows are swapped in one case alone: each costs programs.
    swapping = name == "a selection"
    drafted = runner(speculate=DRAFTS[name], chunk=1, **({} if swapping else {"swap_bytes": 0}))
    for made, plain in zip(results(drafted), expected(), strict=True):
        np.testing.assert_array_equal(made.tokens, plain.tokens)
        np.testing.assert_allclose(made.logprobs, plain.logprobs, atol=1e-5)
        assert made.reason == plain.reason
    counts = drafted.counts
    assert 0 < counts.accepted < counts.drafted <= GAMMA * counts.rounds
    assert (counts.preemptions > 0) == swapping
    # A round makes the accepted drafts and a token more, unless an accepted draft is the last token of its request.
    assert counts.tokens <= counts.rounds + counts.accepted <= counts.tokens + REQUESTS


def test_what_cannot_be_drafted_for_is_refused():
    """Before anything is compiled."""
    chunks = selection.retrieval(4, 8)
    for speculate, match in (
        (own(policies.h2o(8)), "a cache of its own"),
        ([chunks, seen(policies.h2o(8))], "2 levels"),
        (level(chunks, accept="ratio"), "accept='ratio' changes the tokens"),
        (level(chunks, sampler=SAMPLE), "by the sampler of each request"),
        (selection.everything(), "drafts nothing sooner"),
    ):
        with pytest.raises(kvjax.KvjaxError, match=match):
            runner(speculate=speculate)
    for spec, match in (
        (policies.h2o(8), "policy h2o is not full"),
        (CacheSpec(policies.full(), storage.int8()), "encodes tokens"),
        (CacheSpec(policies.full(), selection=selection.quest(4, 8)), "reads blocks whole"),
    ):
        with pytest.raises(PolicyError, match=match):
            Runner(tiny(layers=1).model, spec, rows=ROWS, limits=LIMITS, speculate=chunks)
    drafted = runner(speculate=chunks)
    with pytest.raises(InputError, match="repetition penalty"):
        drafted.submit(Request(tokens=[5], max_new_tokens=2, sampler=kvjax.Greedy(repetition_penalty=1.2)))
    with pytest.raises(InputError, match="cannot continue a prefix"):
        drafted.prefix([5, 6])
    assert "3 drafts in a round by seen(h2o)" in runner(speculate=DRAFTS["slots that a policy ranks"]).explain()


def test_the_text_of_a_flag():
    read = drafts("seen(h2o(budget=8))", 2)
    assert read.draft == seen(policies.h2o(8)) and read.gamma == 2
    assert drafts("retrieval(chunk=4, budget=8)", None).draft == selection.retrieval(4, 8)
    for text, match in (("seen(h3o)", "unknown policy 'h3o'"), ("h2o", "unknown selection 'h2o'")):
        with pytest.raises(kvjax.KvjaxError, match=match):
            drafts(text, None)
