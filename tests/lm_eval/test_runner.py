"""Requests of any lengths through few programs: what lm_eval's adapter runs, without lm_eval."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.cache import CacheSpec
from kvjax.cache.planning.limits import half_steps
from kvjax.contexts.choices import ChoiceScore
from kvjax.contexts.feed import score_copies
from kvjax.errors import ConfigError, InputError, PolicyError
from kvjax.generation.continuations import FEW_FED
from kvjax.generation.prefill import prefill_steps
from kvjax.lm_eval import beginnings, options
from kvjax.lm_eval import runner as runner_module
from kvjax.lm_eval.runner import Pair, Runner
from tests.tiny import VOCAB, spoiled, tiny, untied

FULL = CacheSpec(policies.full())
H2O = CacheSpec(policies.h2o(policies.Fraction(0.5, min_slots=6)), storage.int8())


def runner(spec=FULL, **settings) -> Runner:
    return Runner(tiny(layers=1).model, spec, **{"rows": 4, "max_length": 40} | settings)


def ids(rng, least, most) -> list[int]:
    return [int(each) for each in rng.integers(0, VOCAB, rng.integers(least, most + 1))]


def alone(spec, pair: Pair, max_length=40) -> np.ndarray:
    """The log-probabilities of a continuation, after as much of its context as fits."""
    text = [*pair.context, *pair.continuation][-(max_length + 1) :]
    start = len(text) - len(pair.continuation)
    scored = kvjax.log_likelihood(tiny(layers=1).model, text, spec, prompt_length=start)
    return np.asarray(scored.logprobs)[0, start - 1 :]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [FULL, H2O], ids=["full", "h2o-int8"])
def test_scores_in_the_order_of_the_requests(spec):
    rng = np.random.default_rng(0)
    contexts = [ids(rng, 1, 30) for _ in range(5)] + [ids(rng, 45, 50)]
    # Choices of a context need not follow each other; the last context does not fit.
    pairs = [Pair(contexts[i], ids(rng, 1, 8)) for i in (0, 1, 2, 0, 5, 3, 4, 1, 0)]
    seen = {}
    got = runner(spec).scores(pairs, lambda index, answer: seen.update({index: answer}))
    assert seen == dict(enumerate(got))
    for pair, (score, _) in zip(pairs, got, strict=True):
        assert score == pytest.approx(float(alone(spec, pair).sum()), abs=1e-4)


def test_contexts_are_grouped_by_what_they_begin_with():
    """By the longest beginning of four contexts or more, each of which has a token of its own."""
    start, other = tuple(range(100)), tuple(range(200, 280))
    ends = [(number, *range(number)) for number in range(5)]
    contexts = [start + other + end for end in ends]
    contexts += [start + end for end in ends]
    contexts += [start[:40] + end for end in ends]  # too short a beginning
    contexts += [other + end for end in ends[:3]]  # too few contexts
    assert beginnings.groups(contexts) == [
        (start + other, [0, 1, 2, 3, 4]),
        (start, [5, 6, 7, 8, 9]),
        ((), list(range(10, 18))),
    ]
    # The shortest context is a part of the others.
    assert beginnings.groups([start, *[start + end for end in ends]])[0] == (start[:-1], list(range(6)))
    assert beginnings.groups([]) == [((), [])]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("spec", [FULL, H2O], ids=["full", "h2o-int8"])
def test_a_beginning_that_contexts_share_is_processed_once(spec, monkeypatch):
    rng, shared = np.random.default_rng(6), {"rows": 4, "max_length": 120}
    start = ids(rng, 70, 70)
    contexts = [start + ids(rng, 1, 20) for _ in range(6)] + [ids(rng, 1, 30) for _ in range(2)]
    pairs = [Pair(context, ids(rng, 1, 8)) for context in contexts for _ in range(2)]
    fed = []
    plain = runner_module.run_prompts
    monkeypatch.setattr(
        runner_module,
        "run_prompts",
        lambda model, tokens, *more, **own: fed.append(tokens) or plain(model, tokens, *more, **own),
    )
    got = runner(spec, **shared).scores(pairs)
    for pair, (score, _) in zip(pairs, got, strict=True):
        assert score == pytest.approx(float(alone(spec, pair, 120).sum()), abs=1e-4)
    greedy, sampled, penalised = {}, {"sampler": kvjax.Sample()}, {"sampler": kvjax.Sample(repetition_penalty=1.2)}
    for given in (greedy, sampled | {"key": jax.random.key(1)}, penalised):
        texts = runner(spec, **shared).texts(contexts, new_tokens=5, **given)
        for number, context in enumerate(contexts):
            own = kvjax.generate(tiny(layers=1).model, context, spec, max_new_tokens=5, requests=[number], **given)
            np.testing.assert_array_equal(texts[number], own.tokens[0])
    # What a cache that changes keeps of a context depends on where its prompt ends. A penalty counts all tokens.
    assert len(fed) == (3 if spec == FULL else 0)
    for tokens in fed:
        np.testing.assert_array_equal(tokens[0], start)


def test_windows_do_not_depend_on_their_prompt_if_the_cache_does_not_change():
    rng = np.random.default_rng(1)
    windows = [Pair(ids(rng, 1, 20), ids(rng, 1, 20)) for _ in range(6)]
    got = runner().windows(windows)
    np.testing.assert_allclose(got, [alone(FULL, each).sum() for each in windows], atol=1e-4)


@pytest.mark.sampled(0)
def test_windows_under_a_cache_that_changes():
    """The first half is the prompt, and the rest is fed one token at a time."""
    rng = np.random.default_rng(2)
    windows = [Pair(ids(rng, 1, 3), ids(rng, 12, 24)) for _ in range(3)]
    got = runner(H2O).windows(windows)
    for pair, score in zip(windows, got, strict=True):
        text = [*pair.context, *pair.continuation]
        scored = kvjax.log_likelihood(tiny(layers=1).model, text, H2O, prompt_length=len(text) // 2)
        expected = np.asarray(scored.logprobs)[0, len(pair.context) - 1 :].sum()
        assert score == pytest.approx(float(expected), abs=1e-4)
        assert score != pytest.approx(float(alone(FULL, pair).sum()), abs=1e-3)


def test_texts():
    rng = np.random.default_rng(3)
    contexts = [ids(rng, 1, 20) for _ in range(5)] + [ids(rng, 33, 36)]
    model = tiny(layers=1).model
    expected = [kvjax.generate(model, context[-30:], FULL, max_new_tokens=10).tokens[0] for context in contexts]
    got = runner().texts(contexts, new_tokens=10)
    np.testing.assert_array_equal(got, expected)
    # Ends at a token, or a few tokens after a function has seen the end.
    stop = int(expected[0][2])
    stopped = runner().texts(contexts, new_tokens=10, stop=[stop])
    assert [int(row[-1]) == stop or len(row) == 10 for row in stopped] == [True] * 6
    assert len(stopped[0]) == list(expected[0]).index(stop) + 1
    assert [len(row) for row in runner().texts(contexts, new_tokens=10, ended=lambda row: len(row) >= 1)] == [1] * 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [policies.full(), policies.h2o(0.5, recent=2)])
def test_rows_that_are_padding_fail_in_nothing(policy):
    """Not in token 0, of which the model makes NaN, nor for a budget of which a row of one token leaves too little."""
    contexts, questions = [[5, 9, 7, 8], [6, 11, 3, 2], [4, 3, 9, 1]], [[[1]], [[2], [3, 4]], []]
    plain, bad = (Runner(model, CacheSpec(policy), rows=4, max_length=32) for model in (
        untied(tiny().model), spoiled(tiny().model, 0)
    ))  # fmt: skip
    for one, other in zip(plain.texts(contexts, new_tokens=3), bad.texts(contexts, new_tokens=3), strict=True):
        np.testing.assert_array_equal(one, other)
    answers = [runner.answers(contexts, questions, new_tokens=3) for runner in (plain, bad)]
    np.testing.assert_array_equal(np.stack(answers[0][1]), np.stack(answers[1][1]))


@pytest.mark.sampled(0)
def test_a_thousand_lengths_run_a_few_programs():
    """A program for each bucket of contexts, here 16 and 20 tokens, and of choices, which feed 0 or 8 tokens."""
    rng = np.random.default_rng(4)
    pairs = [Pair(ids(rng, 1, 20), ids(rng, 1, 9)) for _ in range(1_000)]
    jax.clear_caches()
    runner(rows=32).scores(pairs)
    assert prefill_steps._cache_size() == 2
    assert score_copies._cache_size() <= 2 * 2


@pytest.mark.parametrize(("context", "choice"), [((8, 120), (1, 30)), ((8, 40), (8, 200))])
def test_padding_is_saved_where_most_tokens_are(context, choice, monkeypatch):
    """At most a quarter of the tokens that are fed for long contexts, or for long choices, is padding."""
    rng = np.random.default_rng(5)
    pairs = []
    for _ in range(64):
        asked = ids(rng, *context)
        pairs += [Pair(asked, first := ids(rng, *choice)), Pair(asked, first[::-1])]
    fed = 0

    def counted(model, tokens, asked, spec, *, limits, **settings):
        nonlocal fed
        rows, lengths = len(tokens), sorted((len(each) for own in asked for each in own), reverse=True)
        longest = [lengths[start] - 1 for start in range(0, len(lengths), rows)]
        fed += rows * (limits.prompt + sum(half_steps(each, FEW_FED) for each in longest if each))
        return [[ChoiceScore(np.zeros(len(each)), False) for each in own] for own in asked]

    monkeypatch.setattr("kvjax.lm_eval.runner.score_choices", counted)
    runner(rows=8, max_length=256).scores(pairs)
    contexts = {tuple(pair.context) for pair in pairs}
    real = sum(map(len, contexts)) + sum(len(pair.continuation) - 1 for pair in pairs)
    assert 0.75 * fed < real < fed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: runner().scores([Pair([], [1])]), "0 tokens of context"),
        (lambda: runner().scores([Pair([1], [])]), "0 to score"),
        (lambda: runner().scores([Pair([1], [1] * 41)]), "max_length=40"),
        (lambda: runner().texts([[1]], new_tokens=40), "lower max_gen_toks"),
        (lambda: runner().texts([[]], new_tokens=4), "has no token"),
    ],
)
def test_requests_that_cannot_be_run(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_arguments_are_split_where_lm_eval_means_it():
    text = (
        "path=a/b, policy=after_prefill(snapkv(window=16), then=roco),budget=0.2,storage=int8,dtype='x,y',flag=True,n=4"
    )
    assert options.parsed(text) == {
        "path": "a/b", "policy": "after_prefill(snapkv(window=16), then=roco)", "budget": 0.2, "storage": "int8",
        "dtype": "x,y", "flag": True, "n": 4,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="key=value"):
        options.parsed("path=a,policy")


def test_specs_of_arguments():
    made = options.spec("after_prefill(snapkv(window=16), then=roco)", 0.2, "int8", least_slots=24)
    budget = policies.Fraction(0.2, min_slots=24)
    assert made == CacheSpec(
        policies.after_prefill(policies.snapkv(budget, window=16), then=policies.roco(budget)), storage.int8()
    )
    assert options.spec("h2o", 64) == CacheSpec(policies.h2o(64))
    assert options.spec("full") == FULL
    assert options.spec(policies.h2o(9)) == CacheSpec(policies.h2o(9))
    with pytest.raises(ConfigError, match="its own"):
        options.spec(policies.h2o(9), 0.2)
    with pytest.raises(PolicyError, match="budget"):
        options.spec("h2o")


def test_batch_sizes():
    assert [options.rows(each) for each in (None, "8", 4, "auto", "auto:4")] == [1, 8, 4, 16, 16]
    for wrong in ("0", "many", -1):
        with pytest.raises(ConfigError, match="batch_size"):
            options.rows(wrong)


def test_scores_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="parity needs torch")
    pytest.importorskip("transformers", reason="parity needs transformers")
    from kvjax.checkpoint.locate import PRETRAINED
    from tests.models import hf_models

    model = kvjax.load("kvjax-tiny")
    peer = hf_models.reload(PRETRAINED / "kvjax-tiny")
    texts = [("The ship left the harbour", [" at dawn.", " with a small crew."]), ("It was", [" the", " a cold day"])]
    pairs = []
    for context, endings in texts:
        own = model.tokenizer.encode(context)
        pairs += [Pair(own, model.tokenizer.encode(context + each)[len(own) :]) for each in endings]
    with torch.no_grad():
        for pair, (score, greedy) in zip(pairs, Runner(model, FULL, rows=2).scores(pairs), strict=True):
            tokens = np.array([[*pair.context, *pair.continuation]])
            logprobs = hf_models.log_probabilities(peer, tokens)[0, len(pair.context) - 1 : -1]
            assert score == pytest.approx(float(logprobs[range(len(logprobs)), pair.continuation].sum()), abs=1e-3)
            assert greedy == bool((logprobs.argmax(1) == pair.continuation).all())
