"""Speculation: its text is that of plain generation, whatever drafts it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies, selection, storage
from kvjax.errors import InputError, NonFiniteError, PolicyError
from kvjax.policies.traits import observing
from kvjax.speculation import level, own, seen, speculate
from kvjax.speculation.rounds import run_rounds
from kvjax.speculation.target import Target
from tests.tiny import VOCAB, assert_same_state, kept, random_tokens, spoiled, tiny

TOKENS = random_tokens(3, 24, seed=3)
LENGTHS = np.array([24, 17, 20])
NEW = 20
SAMPLE = kvjax.Sample(0.7, top_p=0.9)
WINDOW = policies.window(8, sinks=1)
CODES = kvjax.CacheSpec(policies.h2o(8), storage.int8())
DRAFTS = {
    "an own cache that evicts, in codes": own(CODES),
    "chunks, for which the slots of a policy draft": [
        selection.retrieval(4, 16),
        level(seen(policies.h2o(8)), gamma=2),
    ],
}
NEVER = (64, 65)  # stop tokens beyond the vocabulary: programs are compiled for the number of stop tokens


def model():
    return tiny(layers=1).model


def plain(sampler=SAMPLE, stop=NEVER, **options):
    return kvjax.generate(
        model(), TOKENS, policies.full(), lengths=LENGTHS, max_new_tokens=NEW, sampler=sampler, stop=stop, **options
    )  # fmt: skip


def drafted(draft, sampler=SAMPLE, gamma=3, stop=NEVER, target=None, **options):
    return speculate(
        target or model(), TOKENS, lengths=LENGTHS, max_new_tokens=NEW, draft=draft, gamma=gamma, sampler=sampler,
        stop=stop, **options,
    )  # fmt: skip


def assert_same(made, expected):
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    np.testing.assert_array_equal(made.lengths, expected.lengths)
    np.testing.assert_allclose(made.logprobs, expected.logprobs, atol=1e-4)


def assert_counts(made, gamma):
    """Every token but those of the last rounds is an accepted draft or the one after them."""
    counts = made.drafts.levels[0]
    number = np.where(made.drafts.by_round >= 0, made.drafts.by_round + 1, 0).sum(axis=1)
    assert np.all((number == made.lengths) | (number == made.lengths + 1))
    assert np.all(counts.accepted <= counts.drafted) and counts.drafted.shape == (3, gamma)
    np.testing.assert_array_equal(counts.rounds, (made.drafts.by_round >= 0).sum(axis=1))
    # A draft is accepted only if all before it are.
    assert np.all(np.diff(counts.accepted, axis=1) <= 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DRAFTS)
def test_the_text_is_that_of_plain_generation(name):
    """Sampled; rows accept different numbers."""
    made, expected = drafted(DRAFTS[name]), plain()
    assert_same(made, expected)
    assert_counts(made, 3)
    assert len({*made.drafts.rounds.tolist()}) > 1 and 0 < made.drafts.acceptance < 1
    assert [kept(made.state, row) for row in range(3)] == [kept(expected.state, row) for row in range(3)]


@pytest.mark.sampled(0)
def test_refused_tokens_leave_no_trace_in_the_statistics_of_slots(monkeypatch):
    """The statistics are those of a full cache that observes, fed with the same tokens one by one."""
    monkeypatch.setattr(Target, "plain_state", lambda target, state: state)
    made = drafted(DRAFTS["chunks, for which the slots of a policy draft"])
    expected = kvjax.generate(
        model(), TOKENS, observing(policies.h2o(8)), lengths=LENGTHS, max_new_tokens=NEW, sampler=SAMPLE
    )  # fmt: skip
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    assert made.state.layers[0][0].stats
    for row in range(3):
        assert_same_state(made.state, expected.state, row, atol=1e-4)


def test_tokens_verified_one_by_one_are_those_of_generate_to_the_bit():
    expected = plain()
    made = drafted(own(policies.h2o(8)), verify="scan")
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    np.testing.assert_array_equal(made.logprobs, expected.logprobs)
    for got, leaf in zip(jax.tree.leaves(made.state), jax.tree.leaves(expected.state), strict=True):
        np.testing.assert_array_equal(got, leaf)


@pytest.mark.sampled(0)
def test_a_cache_in_host_memory():
    """Pages of it draft; their part is on the device."""
    options = kvjax.CacheOptions(storage=storage.dense(memory="host"))
    made = drafted(selection.quest(4, 12, first_layer=0), options=options)
    assert_same(made, plain())
    assert_counts(made, 3)
    assert 0 < made.drafts.acceptance < 1
    with pytest.raises(PolicyError, match="host memory"):
        drafted(seen(policies.h2o(8)), options=options)


def test_a_full_cache_accepts_all_of_its_own_drafts_in_one_trace():
    before = run_rounds.jitted._cache_size()
    made = drafted(own(policies.full()))
    assert made.drafts.acceptance == 1
    np.testing.assert_array_equal(made.drafts.rounds, -(-NEW // 4) * np.ones(3))
    # Whatever is accepted, and however many tokens are asked for.
    speculate(
        model(), TOKENS, lengths=LENGTHS, max_new_tokens=9, draft=own(policies.full()), gamma=3, sampler=SAMPLE,
        key=jax.random.key(7), stop=NEVER,
    )  # fmt: skip
    assert run_rounds.jitted._cache_size() == before + 1


def test_generate_takes_drafts():
    made = plain(speculate=level(policies.full(), gamma=3))
    assert_same(made, plain())
    assert made.drafts.levels[0].drafted.shape == (3, 3)
    for options, match in (({"until": lambda ids: ids[:, -1] == 0}, "until"), ({"record": True}, "record")):
        with pytest.raises(InputError, match=match):
            plain(speculate=own(WINDOW), **options)
    with pytest.raises(PolicyError, match="is not full"):
        kvjax.generate(model(), TOKENS, policies.h2o(8), max_new_tokens=2, speculate=own(WINDOW))


def test_stop_tokens_and_drafts_beyond_them():
    """γ tokens that are drafted past a stop leave no trace; nor do rows that have ended."""
    whole = plain()
    stop = [int(whole.tokens[0, 6]), int(whole.tokens[2, 3])]
    expected = plain(stop=stop)
    made = drafted(own(policies.full()), stop=stop)
    assert_same(made, expected)
    assert len({*made.lengths.tolist()}) > 1 and made.lengths.min() < NEW
    assert [kept(made.state, row) for row in range(3)] == [kept(expected.state, row) for row in range(3)]
    # A row of n tokens, all accepted, has n - ⌈n / 4⌉ accepted drafts, but for a last token that was drafted.
    rounds_ = -(-made.lengths // 4)
    accepted = made.lengths - rounds_ + (made.lengths % 4 != 0)
    np.testing.assert_array_equal(made.drafts.levels[0].accepted.sum(axis=1), accepted)


def test_another_model_drafts():
    """Greedy, a window of positions."""
    made = drafted(policies.window(8), kvjax.Greedy(), draft_model=tiny(layers=1, seed=4).model)
    assert_same(made, plain(kvjax.Greedy()))
    assert made.drafts.acceptance < 1


@pytest.mark.sampled(0)
def test_the_ratio_rule_has_the_distribution_of_the_target():
    """Two levels, 256 rows of each of two prompts, beside as many of plain sampling.

    The sum of (a - b)² / (a + b) over counts a and b of n pairs of tokens has a mean of n and a standard error of
    √(2 n) at most. The bound is 4 errors; a total variation of 0.2 between both sides is noticed.
    """
    count, sampler = 256, kvjax.Sample(0.7, top_k=3)
    chain = [own(policies.window(6, sinks=1)), level(policies.window(4, sinks=0), gamma=1)]
    prompts, lengths = np.repeat(TOKENS[:2], count, axis=0), np.repeat(LENGTHS[:2], count)
    request = np.arange(2 * count)
    options = {"lengths": lengths, "max_new_tokens": 3, "sampler": sampler}
    drafting = {"draft": chain, "gamma": 2, "accept": "ratio", "key": jax.random.key(3)}
    made = speculate(model(), prompts, requests=request, **drafting, **options)
    expected = kvjax.generate(model(), prompts, policies.full(), key=jax.random.key(4), **options)
    assert 0.05 < made.drafts.acceptance < 0.999 and made.drafts.levels[0].drafted.shape == (2 * count, 2)
    one, two = (np.zeros((2, VOCAB, VOCAB)) for _ in range(2))
    for each, counts in ((made, one), (expected, two)):
        np.add.at(counts, (request // count, each.tokens[:, 0], each.tokens[:, 1]), 1)
    cells = one + two > 0
    distance = np.sum((one - two)[cells] ** 2 / (one + two)[cells])
    assert distance <= cells.sum() + 4 * np.sqrt(2 * cells.sum())
    # Rows do not depend on each other, nor on how many drafts their neighbours accept.
    options["lengths"] = lengths[::-1]
    turned = speculate(model(), prompts[::-1], requests=request[::-1], **drafting, **options)
    np.testing.assert_array_equal(turned.tokens[::-1], made.tokens)


def test_logits_that_are_not_finite_end_a_row():
    broken = spoiled(model(), token=int(plain(kvjax.Greedy()).tokens[1, 2]))
    with pytest.raises(NonFiniteError) as one:
        kvjax.generate(broken, TOKENS, policies.full(), lengths=LENGTHS, max_new_tokens=NEW, stop=NEVER)
    with pytest.raises(NonFiniteError) as two:
        drafted(own(WINDOW), kvjax.Greedy(), gamma=8, target=broken)
    assert one.value.rows == two.value.rows
    np.testing.assert_array_equal(one.value.result.tokens, two.value.result.tokens)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gamma": 0}, "gamma"),
        ({"draft": None}, "draft is missing"),
        ({"draft": []}, "no level"),
        ({"accept": "always"}, "accept"),
        ({"verify": "loop"}, "verify"),
        ({"draft": seen(policies.full())}, "keeps every token"),
        ({"draft": seen(policies.streaming_llm(8))}, "rotates keys"),
        ({"draft": seen(policies.morphkv(40))}, "more than the statistics"),
        ({"draft": selection.everything()}, "reads everything"),
        ({"draft": selection.infinigen()}, "numbers of each slot|attention"),
        ({"draft": [seen(WINDOW), seen(WINDOW)]}, "only one level"),
        ({"draft": 8}, "not valid"),
        ({"sampler": kvjax.Sample(repetition_penalty=1.2)}, "repetition penalty"),
        ({"sampler": lambda logits, keys: jnp.argmax(logits, axis=1).astype(jnp.int32), "accept": "ratio"}, "filter"),
        ({"options": kvjax.CacheOptions(storage=storage.int8())}, "encodes tokens"),
        ({"options": kvjax.CacheOptions(selection=selection.quest(4, 12))}, "give it as draft"),
        ({"draft": seen(WINDOW), "draft_model": tiny(layers=1, seed=4).model}, "another model cannot"),
        ({"draft_model": dataclasses.replace(
            tiny(layers=1).model, config=dataclasses.replace(tiny().model.config, vocab_size=65))}, "vocabulary"),
    ],
)  # fmt: skip
def test_refusals(options, match):
    with pytest.raises((InputError, PolicyError), match=match):
        speculate(model(), TOKENS, **{"max_new_tokens": 4, "draft": own(WINDOW), **options})


@pytest.fixture(scope="module")
def stories(shared_data):
    return kvjax.load(shared_data / "data" / "models" / "stories260K-hf")


def worked(shared_data, kind):
    arrays = np.load(shared_data / "examples" / "reuse_cases.npz")
    for number, case in enumerate(json.loads(bytes(arrays["cases"]))):
        if case["kind"] == kind:
            given = {name: arrays[f"{number}_in_{name}"] for name in case["inputs"]}
            yield case, given, {name: arrays[f"{number}_{name}"] for name in case["outputs"]}


@pytest.mark.sampled(0)
def test_worked_rounds_of_own_caches(stories, shared_data):
    for case, given, expected in worked(shared_data, "speculate_own"):
        about = case["arguments"]
        policy = policies.by_name(**about["draft"])
        made = speculate(
            stories, given["prompt"], max_new_tokens=about["count"], draft=own(policy), gamma=about["gamma"]
        )
        np.testing.assert_array_equal(made.tokens[0], expected["tokens"])
        np.testing.assert_array_equal(made.drafts.by_round[0], expected["accepted"])
        np.testing.assert_array_equal(made.drafts.levels[0].by_place, expected["by_place"])
        assert made.drafts.rounds[0] == case["expect"]["rounds"] and made.drafts.drafted == case["expect"]["drafted"]


def test_worked_acceptance(stories, shared_data):
    for case, given, expected in worked(shared_data, "acceptance"):
        about = case["arguments"]
        made = analysis.acceptance(
            stories, given["tokens"], policies.by_name(**about["draft"]), prompt_length=about["prompt_length"]
        )
        np.testing.assert_array_equal(made.agree[0], expected["agree"])
        np.testing.assert_allclose(made.overlap[0], expected["overlap"], atol=2e-5)
        np.testing.assert_allclose(made.kl[0], expected["kl"], atol=2e-5)


@pytest.mark.sampled(0)
def test_acceptance_predicts_the_rounds_of_an_own_cache():
    """Greedy: a round accepts drafts up to the first token where the most probable one of both differs.

    γ is more than some rows are due at the end.
    """
    made = drafted(own(WINDOW), kvjax.Greedy(), gamma=8)
    assert_same(made, plain(kvjax.Greedy()))
    assert_counts(made, 8)
    texts = [np.concatenate([row[:n], new]) for row, n, new in zip(TOKENS, LENGTHS, made.tokens, strict=True)]
    found = analysis.acceptance(model(), texts, WINDOW, prompt_length=LENGTHS)
    for row, agree in enumerate(found.agree):
        at, rounds_ = 0, []
        while at < NEW:
            places = agree[at : at + 8]
            number = len(places) if places.all() else int(np.argmin(places))
            rounds_.append(number)
            at += number + 1
        np.testing.assert_array_equal(made.drafts.by_round[row, : len(rounds_)], rounds_)
    with pytest.raises(InputError, match="in each round"):
        analysis.acceptance(model(), texts, seen(WINDOW), prompt_length=LENGTHS)
