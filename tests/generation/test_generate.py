"""`generate` and `log_likelihood` beyond what the conformance table says of every policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import Limits
from kvjax.errors import InputError, KvjaxError, PolicyError
from kvjax.generation import generate as loop
from kvjax.generation import likelihood
from kvjax.generation.prefill import prefill
from kvjax.generation.sampling import Greedy, Sample
from kvjax.numerics.statistics import MASS
from kvjax.policies import Importance, evict, protect_newest
from tests.tiny import assert_same_state, kept, random_tokens, tiny

PROMPTS = random_tokens(3, 24)
LENGTHS = np.array([24, 10, 17])
NEW = 12
H2O = policies.h2o(budget=0.5)


def generate(policy=H2O, **options):
    return kvjax.generate(
        tiny(layers=1).model, PROMPTS, policy, **({"max_new_tokens": NEW, "lengths": LENGTHS} | options)
    )


@pytest.fixture(scope="module")
def plain() -> kvjax.Generation:
    return generate()


def test_a_stop_token_ends_its_row_and_leaves_its_cache(plain):
    stop = int(plain.tokens[1, 4])
    ends = [list(row).index(stop) + 1 if stop in row else NEW for row in plain.tokens]
    got = generate(stop=(stop, 63))
    assert ends[1] <= 5 and max(ends) == NEW, "the case has a row that stops and one that goes on"
    np.testing.assert_array_equal(got.lengths, ends)
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(got.tokens[row, :end], plain.tokens[row, :end])
        np.testing.assert_allclose(got.logprobs[row, :end], plain.logprobs[row, :end], atol=1e-6)
        assert (got.tokens[row, end:] == loop.PAD).all() and not got.logprobs[row, end:].any()
        assert int(got.state.length[row]) == LENGTHS[row] + end - 1, "the last token is never fed"
    shorter = generate(max_new_tokens=ends[1])
    assert_same_state(got.state, shorter.state, 1)


def test_a_result_is_printed_in_one_screen(plain):
    state = plain.state
    printed = repr(plain)
    assert len(printed) < 2_000 and repr(state) in printed and "\n" not in repr(state)
    slots = state.layers[0].position.shape[2]
    assert f"rows: {len(plain.tokens)}, slots per KV head: {slots:,}, keys and values: " in repr(state)
    described = jax.tree.map(lambda leaf: leaf.dtype, state)
    assert repr(described) == f"KVState({len(state.layers)} layers)"


def test_stopping_at_the_first_token_and_everywhere(plain):
    stops = tuple(int(t) for t in plain.tokens[:, 0])
    got = generate(stop=stops)
    np.testing.assert_array_equal(got.lengths, 1)
    np.testing.assert_array_equal(got.state.length, LENGTHS)


def test_streaming_gets_every_token(plain):
    seen = []
    stop = int(plain.tokens[1, 4])
    got = generate(stop=(stop,), stream=lambda ids: seen.append(np.array(ids)))
    assert all(ids.shape == (3,) for ids in seen)
    np.testing.assert_array_equal(np.stack(seen, axis=1), got.tokens)
    np.testing.assert_array_equal(got.tokens, generate(stop=(stop,)).tokens)


def test_rows_end_when_a_function_says_so(plain):
    """Here after five tokens, which is seen after the first call of the loop; the last row goes on."""
    seen = []

    def until(ids):
        seen.append(ids.shape)
        return np.array([ids.shape[1] >= 5, ids.shape[1] >= 5, False])

    got = generate(until=until)
    assert seen == [(3, 1), (3, 1 + loop.UNTIL_EVERY)]
    np.testing.assert_array_equal(got.lengths, [1 + loop.UNTIL_EVERY] * 2 + [NEW])
    for row, end in enumerate(got.lengths):
        np.testing.assert_array_equal(got.tokens[row, :end], plain.tokens[row, :end])
    everywhere = generate(until=lambda ids: np.ones(3, bool))
    np.testing.assert_array_equal(everywhere.lengths, 1)


def test_a_high_repetition_penalty_repeats_nothing():
    """No token of a prompt and none twice, as 64 tokens are more than any row has; of a batch as of a row alone."""
    got = generate(sampler=Greedy(repetition_penalty=1e6))
    for row, length in enumerate(LENGTHS):
        assert len({*PROMPTS[row, :length], *got.tokens[row]}) == len({*PROMPTS[row, :length]}) + NEW
    # Log-probabilities are the model's own.
    assert (got.logprobs > -20).all()


def test_more_tokens_than_one_call_of_the_loop(plain):
    new = 2 * loop.CHUNK + 5
    got = generate(max_new_tokens=new)
    np.testing.assert_array_equal(got.tokens[:, :NEW], plain.tokens)
    assert (got.tokens >= 0).all() and got.logprobs.all()
    np.testing.assert_array_equal(got.state.length, LENGTHS + new - 1)
    streamed = []
    generate(max_new_tokens=new, stream=lambda ids: streamed.append(np.array(ids)))
    np.testing.assert_array_equal(np.stack(streamed, axis=1), got.tokens)


def test_one_new_token_feeds_nothing(plain):
    got = generate(max_new_tokens=1)
    np.testing.assert_array_equal(got.tokens, plain.tokens[:, :1])
    np.testing.assert_array_equal(got.state.length, LENGTHS)


def test_sampled_rows_do_not_depend_on_their_neighbours_and_keys_survive():
    key = jax.random.key(7)
    sampler = Sample(temperature=1.5, top_k=20)
    first = generate(sampler=sampler, key=key)
    again = generate(sampler=sampler, key=key)  # the caller's key was not donated
    np.testing.assert_array_equal(first.tokens, again.tokens)
    other = PROMPTS.copy()
    other[0] = (other[0] + 5) % 64
    changed = kvjax.generate(
        tiny(layers=1).model, other, H2O, max_new_tokens=NEW, lengths=LENGTHS, sampler=sampler, key=key
    )  # fmt: skip
    np.testing.assert_array_equal(first.tokens[1:], changed.tokens[1:])
    assert (first.tokens[0] != changed.tokens[0]).any()
    assert (generate(sampler=sampler, key=jax.random.key(8)).tokens != first.tokens).any()
    scores = np.asarray(first.logprobs)
    assert (scores < 0).all()


def test_equal_prompts_are_sampled_differently():
    same = np.repeat(PROMPTS[:1], 3, axis=0)
    got = kvjax.generate(
        tiny(layers=1).model, same, H2O, max_new_tokens=NEW, sampler=Sample(2.0), key=jax.random.key(0)
    )
    assert len({tuple(row) for row in got.tokens}) == 3


def test_log_likelihood_of_one_token_and_of_all_prompt():
    one = kvjax.log_likelihood(tiny(layers=1).model, [[5]], H2O, prompt_length=1)
    assert one.logprobs.shape == (1, 0) and kept(one.state, 0) == [[[0], [0]]]
    full = policies.full()
    tokens = PROMPTS[:1, :12]
    whole, stepped = (kvjax.log_likelihood(tiny(layers=1).model, tokens, full, prompt_length=n) for n in (12, 1))
    np.testing.assert_allclose(whole.logprobs, stepped.logprobs, atol=1e-5)
    longer_than_the_row = kvjax.log_likelihood(tiny(layers=1).model, tokens, full, prompt_length=99)
    np.testing.assert_array_equal(whole.logprobs, longer_than_the_row.logprobs)


# --- policies that users write ---


def test_a_policy_made_of_an_importance_and_a_scope():
    """Evicts keys of large norm first, as in the README: needs no attention."""
    small_keys = Importance(frozenset(), lambda stats, view: -jnp.linalg.norm(view.key, axis=-1))
    mine = evict(importance=small_keys, scope=protect_newest(2), budget=6, name="small_keys")
    got = generate(mine)
    for row, n in enumerate(LENGTHS):
        for heads in kept(got.state, row):
            for live in heads:
                assert len(live) == 6 and set(live) >= {n + NEW - 3, n + NEW - 2}


def test_statistics_may_be_named_in_a_plain_set():
    """DESIGN.md declares ``needs={"mass", "mass_sq"}``: a set must do wherever a frozenset does."""
    by_mass = evict(importance=Importance({"mass"}, lambda stats, view: stats["mass"]), budget=6)
    assert by_mass.needs == frozenset({MASS})


class Heaviest(policies.Evict):
    """`h2o(recent=3)` written by hand, as a policy that ranks by itself."""

    def priority(self, stats, view):
        return jnp.where(view.recent(3), jnp.inf, stats["mass"])


def test_a_policy_from_scratch():
    mine = Heaviest(importance=policies.mass, budget=6)
    got, expected = generate(mine), generate(policies.h2o(budget=6, recent=3))
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    for row in range(3):
        assert kept(got.state, row) == kept(expected.state, row)


def test_a_new_token_starts_with_statistics_of_zero():
    """POLICIES.md: step 1 starts them at 0, step 3 updates live slots only.

    With room to spare (budget 20), the slots that tokens come to were empty while earlier blocks were observed.
    """
    counting = evict(importance=Importance({"count"}, lambda stats, view: stats["count"]), budget=20)
    got = generate(counting)
    for layer in got.state.layers:
        position, count = np.asarray(layer.position), np.asarray(layer.stats["count"])
        for row, n in enumerate(LENGTHS):
            newest = n + NEW - 2
            live = position[row] >= 0
            np.testing.assert_array_equal(count[row][live], (newest - position[row] + 1)[live])
            assert not count[row][~live].any()


def test_a_priority_of_nan_does_not_exceed_the_limit():
    """Scores that overflow are the policy's fault, but no policy can hold more than its limit or lose new tokens."""
    nan = evict(importance=Importance(set(), lambda stats, view: jnp.full(view.position.shape, jnp.nan)), budget=6)
    got = generate(nan)
    for row in range(3):
        assert all(len(live) == 6 for heads in kept(got.state, row) for live in heads)


# --- what users get wrong ---


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.0},
        {"max_new_tokens": True},
        {"prefill_block": 0},
        {"prefill_block": 2.5},
        {"lengths": [24, 0, 17]},
        {"stop": ["."]},
        {"stop": 2.5},
    ],
)
def test_bad_settings_are_refused(options):
    with pytest.raises(InputError):
        generate(**options)


@pytest.mark.parametrize("policy", ["h2o", policies.h2o, None])
def test_something_that_is_no_policy_is_refused(policy):
    with pytest.raises(PolicyError, match="policies"):
        generate(policy)


@pytest.mark.parametrize("prompt_length", [0, -1, 2.5, True, "4", [4, 4], [[4], [4], [4]]])
def test_bad_prompt_lengths_are_refused(prompt_length):
    with pytest.raises(KvjaxError):
        kvjax.log_likelihood(tiny(layers=1).model, PROMPTS, H2O, prompt_length=prompt_length)


@pytest.mark.parametrize("options", [{"sampler": "greedy"}, {"sampler": Greedy}, {"sampler": Sample(), "key": 3}])
def test_what_cannot_sample_is_refused(options):
    with pytest.raises(InputError, match=r"sampler|key"):
        generate(H2O, **options)


@pytest.mark.sampled(0)
def test_ranks_and_not_the_text_stretch_rope():
    """RoPE whose frequencies follow the length: in a cache of 13 slots a text of 60 tokens is short."""
    model = tiny(layers=1).model
    policy, tokens = policies.streaming_llm(budget=12), random_tokens(2, 60, seed=6)
    stretched = dataclasses.replace(model.config.rope, scaling="dynamic", factor=4.0, original_max_positions=32)
    stretched = dataclasses.replace(model, config=dataclasses.replace(model.config, rope=stretched))
    plain, ranked, whole = (
        kvjax.log_likelihood(each, tokens, p, prompt_length=9).logprobs
        for each, p in ((model, policy), (stretched, policy), (stretched, policies.full(positions="cache")))
    )
    np.testing.assert_allclose(ranked, plain, atol=1e-5)
    full = kvjax.log_likelihood(model, tokens, policies.full(positions="cache"), prompt_length=9).logprobs
    assert np.abs(whole - full)[:, 40:].max() > 1e-2


@pytest.mark.parametrize("then", [policies.window(budget=10), policies.h2o(budget=10)], ids=lambda p: p.name)
def test_a_row_that_has_ended_keeps_its_slots_when_decoding_has_fewer(then):
    """Another row's token is no step of this one: it holds what its prompt left it, as it does alone."""
    model = tiny(layers=1).model
    policy = policies.after_prefill(policies.snapkv(budget=14, window=4), then=then)
    tokens, lengths = random_tokens(2, 30), np.array([20, 30])
    both = kvjax.log_likelihood(model, tokens, policy, prompt_length=20, lengths=lengths)
    alone = kvjax.log_likelihood(model, tokens[:1, :20], policy, prompt_length=20)
    assert [len(head) for head in kept(both.state, 0)[0]] == [14, 14]
    assert kept(both.state, 0) == kept(alone.state, 0)
    assert [len(head) for head in kept(both.state, 1)[0]] == [10, 10]


# --- frequencies that depend on a length ---


def stretched(scaling: str) -> kvjax.Model:
    """RoPE of a model that was trained on 32 tokens, stretched."""
    model = tiny(layers=1).model
    half = model.config.head_dim // 2
    more = {"factor": 4.0} if scaling == "dynamic" else {
        "short_factor": (1.0,) * half, "long_factor": tuple(1.5 + i for i in range(half)), "attention_factor": 1.1,
    }  # fmt: skip
    rope = dataclasses.replace(model.config.rope, scaling=scaling, original_max_positions=32, **more)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, rope=rope))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_blocks_and_one_shot_have_the_frequencies_of_the_whole_row(scaling):
    """POLICIES.md: prompt, or prompt and the tokens to come; each row's own."""
    model, tokens, ends = stretched(scaling), random_tokens(2, 60, seed=6), np.array([60, 28])

    def score(rows=slice(None), **options):
        return kvjax.log_likelihood(model, tokens[rows], policies.full(), lengths=ends[rows], **options).logprobs

    whole = score(prompt_length=ends)
    for options in ({"prompt_length": ends, "prefill_block": 8}, {"prompt_length": 20}, {"prompt_length": 1}):
        np.testing.assert_allclose(score(**options), whole, atol=2e-5)
    np.testing.assert_allclose(score(slice(1, 2), prompt_length=28)[0], whole[1, :27], atol=2e-5)
    plain = kvjax.log_likelihood(
        tiny(layers=1).model, tokens, policies.full(), prompt_length=ends, lengths=ends
    ).logprobs
    assert np.abs(whole - plain)[0].max() > 1e-2, "the long row is stretched"


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_a_generation_that_crosses_the_trained_length_has_one_set_of_frequencies(scaling):
    """Keys and queries agree from the first token on: what is generated scores as the same text does at once."""
    model, prompt = stretched(scaling), random_tokens(1, 26, seed=7)
    made = kvjax.generate(model, prompt, policies.full(), max_new_tokens=16)
    text = np.concatenate([prompt, made.tokens], axis=1)[:, :-1]
    scored = kvjax.log_likelihood(model, text, policies.full(), prompt_length=text.shape[1]).logprobs
    np.testing.assert_allclose(made.logprobs[0, :-1], scored[0, 25:], atol=2e-5)


def test_texts_within_the_limits_share_a_scoring_program():
    limits, before = Limits(20, 600), likelihood.score_steps._cache_size()
    for length in (100, 300, 600):
        kvjax.log_likelihood(tiny(layers=1).model, random_tokens(1, length), H2O, prompt_length=20, limits=limits)
    assert likelihood.score_steps._cache_size() == before + 1


def test_more_tokens_than_there_is_room_for_are_refused():
    limits = Limits(24, 8)
    begun = prefill(tiny(layers=1).model, PROMPTS, policies.full(), max_new_tokens=8, lengths=LENGTHS, limits=limits)
    with pytest.raises(InputError, match="24 tokens are cached and 9 more are requested, but the cache has 31 slots"):
        loop.decode(tiny(layers=1).model, begun, max_new_tokens=9)
    assert loop.decode(tiny(layers=1).model, begun, max_new_tokens=8).tokens.shape == (3, 8)
