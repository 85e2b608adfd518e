"""Contexts are values: turns, answers, copies and joined rows, with the equalities that they promise."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, contexts, generation, policies, selection, storage
from kvjax.contexts import batches
from kvjax.errors import InputError
from kvjax.generation.context import Span
from kvjax.policies.merge import Anchors
from tests.examples import POLICIES, policy
from tests.tiny import assert_same_state, kept, random_tokens, tiny

TOKENS = random_tokens(3, 24, seed=3)
LENGTHS = np.array([24, 17, 20])
FIRST, BLOCK, ROOM = 8, 4, 40
#: Policies that evict while decoding, with what their turns depend on.
EVICTING = {
    "statistics": policy("h2o", 8),
    "pages": policies.by_page(policies.h2o(8), page=2),
    "memory of queries": policy("morphkv", 8),
    "merge": policies.h2o(8, merge=policies.d2o()),
    "several at once": policies.h2o(8, every=3),
    "places by rank": policies.streaming_llm(8, sinks=1),
    "heads": policies.split_heads([[True, False]], policies.full(), policies.window(8)),
    "codes": kvjax.CacheSpec(policies.roco(8, guard=2), storage.int8(residual=3)),
}
#: Every other policy that evicts while decoding; pools need a selection, and local_only takes a turn token by token.
EVICTING |= {
    name: made
    for name, made in (
        (name, policy(name, 8)) for name in POLICIES if name not in ("fifo", "lru", "counter", "local_only")
    )
    if isinstance(made, policies.Evict) and made.budget is not None and made.when == "step" and name != "h2o"
}


def model():
    return tiny(layers=1).model


def begun(spec=None, **options):
    return contexts.prefill(model(), TOKENS, spec or policies.h2o(8), lengths=LENGTHS, room=ROOM, **options)


def assert_equal(one, two):
    for got, expected in zip(jax.tree.leaves((one.state, one.logits)), jax.tree.leaves((two.state, two.logits)),
                             strict=True):  # fmt: skip
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert one.boundaries == two.boundaries


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EVICTING)
def test_a_turn_is_a_prompt_that_is_cut_at_the_same_boundaries(name):
    """Ragged: the second row's last block has one token, and its first turn is as long as the others'."""
    spec = EVICTING[name]
    limits = kvjax.Limits(prompt=24, new_tokens=16)
    whole = begun(spec, prefill_block=BLOCK, limits=limits)
    first = np.where(np.arange(24) < FIRST, TOKENS, 0)
    context = contexts.prefill(
        model(), first, spec, lengths=[FIRST] * 3, room=24, prefill_block=BLOCK, limits=limits
    )  # fmt: skip
    made = contexts.extend(model(), context, TOKENS[:, FIRST:], lengths=LENGTHS - FIRST, block=BLOCK)
    np.testing.assert_allclose(made.logits, whole.logits, atol=1e-4)
    np.testing.assert_array_equal(made.tokens, whole.tokens)
    assert made.boundaries == whole.boundaries == ((Span(24, 4),), (Span(17, 4),), (Span(20, 4),))
    for row in range(3):
        assert kept(made.state, row) == kept(whole.state, row)
        if name != "codes":
            assert_same_state(made.state, whole.state, row, atol=2e-5)


def test_a_full_cache_does_not_depend_on_how_a_text_is_cut():
    """Nor on the size of its arrays, which grow."""
    long = random_tokens(1, 400, seed=5)[0]
    whole = contexts.prefill(model(), long, policies.full())
    made = contexts.prefill(model(), long[:30], policies.full(), room=40)
    slots = made.layout.groups[0].capacity
    for start, stop, block in ((30, 31, None), (31, 37, 1), (37, 200, 64), (200, 400, None)):
        made = contexts.extend(model(), made, long[start:stop], block=block)
    assert slots < 400 <= made.layout.groups[0].capacity and made.layout.groups[0].capacity % 256 == 0
    np.testing.assert_allclose(made.logits, whole.logits, atol=1e-4)
    assert_same_state(made.state, whole.state, 0, atol=1e-4)
    np.testing.assert_array_equal(made.text[0], long)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [policies.full(), policies.h2o(8), policies.snapkv(8, window=4)], ids=lambda p: p.name)
def test_an_answer_in_two_parts_is_the_answer(spec):
    """Greedy and sampled; and it is that of `generate`, to the bit."""
    sampler, key = kvjax.Sample(top_p=0.9), jax.random.key(1)
    options = {"sampler": sampler, "key": key}
    whole = kvjax.generate(model(), TOKENS, spec, lengths=LENGTHS, max_new_tokens=12, **options)
    context = begun(spec)
    first = contexts.decode(model(), context, max_new_tokens=5, **options)
    np.testing.assert_array_equal(first.logprobs, whole.logprobs[:, :5])
    places = [own.unsafe_buffer_pointer() for own in jax.tree.leaves(first.state.layers)]
    second = contexts.decode(model(), first.context, max_new_tokens=7, donate=True, **options)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), whole.tokens)
    # The cache that was donated is the one that is returned: nothing was copied.
    assert [own.unsafe_buffer_pointer() for own in jax.tree.leaves(second.state.layers)] == places
    np.testing.assert_array_equal(second.context.text[1], [*TOKENS[1, :17], *whole.tokens[1]])
    own = "append" if spec.name == "snapkv" else "prompt"
    assert second.context.boundaries[1] == (Span(17, 17), Span(29, 1, own))
    # The context was not overwritten.
    assert_equal(context, begun(spec))
    # The last token has been fed, whether or not a row has ended before the others.
    stop = [int(whole.tokens[1, 2])]
    ended = contexts.decode(model(), context, max_new_tokens=5, stop=stop, **options).context
    answers = [row[length:] for row, length in zip(ended.text, LENGTHS, strict=True)]
    alone = contexts.extend(model(), context, answers, block=1)
    assert len(answers[1]) == whole.tokens[1].tolist().index(stop[0]) + 1 < 5
    np.testing.assert_allclose(ended.logits, alone.logits, atol=1e-4)


def test_copies_and_joined_rows_are_the_rows(monkeypatch):
    context = begun()
    assert_equal(contexts.rows(context, [0, 1, 2]), context)
    fork = contexts.rows(context, [1, 1])
    turns = [contexts.extend(model(), each, TOKENS[:2, :3]) for each in (fork, contexts.rows(fork, [1, 0]))]
    assert_equal(*turns)
    # Forks with equal keys are sampled alike, wherever their rows are; a row with a key is the row alone.
    keys, options = jax.random.split(jax.random.key(7), 2), {"max_new_tokens": 6, "sampler": kvjax.Sample()}
    three = contexts.rows(context, [1, 1, 1])
    drawn = contexts.decode(model(), three, key=keys[np.array([0, 1, 0])], **options).tokens
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert (drawn[0] != drawn[1]).any()
    alone = contexts.decode(model(), contexts.rows(context, [1]), key=keys[1], **options).tokens
    np.testing.assert_array_equal(drawn[1], alone[0])
    with pytest.raises(InputError, match=r"key must be a random key, as from jax.random.key\(0\), or 3, one per row"):
        contexts.decode(model(), three, key=keys, **options)
    assert_equal(contexts.rows(contexts.join(fork, context), [2, 3, 4]), context)
    # Rows in larger arrays go on as in their own.
    full = begun(policies.full())
    larger = contexts.extend(model(), contexts.rows(full, [2]), random_tokens(1, 500))
    with monkeypatch.context() as patched:
        # Without padding, joined rows are not copied again.
        patched.setattr(batches, "copy_rows", None)
        joined = contexts.join(full, larger)
    assert joined.layout.groups == larger.layout.groups
    for row in range(3):
        assert_same_state(joined.state, full.state, row)
    # A row without a token is as it was.
    some = contexts.extend(model(), context, [np.array([], int), np.array([1, 2]), [3]])
    assert_same_state(some.state, context.state, 0)
    np.testing.assert_array_equal(some.logits[0], context.logits[0])
    assert [len(row) for row in some.text] == [24, 19, 21] and some.boundaries[0] == context.boundaries[0]


def test_calibrated_contexts_are_joined():
    """Each prefill makes arrays of the calibration; and the context's own is used, whatever model is given."""
    spec = policies.qfilters(8)
    made = [kvjax.calibrate(model(), random_tokens(2, 32, seed=seed), spec) for seed in (5, 6)]
    first, second, other = (begun(spec, calibration=each) for each in (made[0], *made))
    assert_equal(contexts.rows(contexts.join(first, second), [3, 4, 5]), first)
    with pytest.raises(InputError, match="differ in the calibration"):
        contexts.join(first, other)
    answers = [contexts.decode(each, first, max_new_tokens=3) for each in (model(), other.made.model)]
    np.testing.assert_array_equal(answers[0].logprobs, answers[1].logprobs)


def test_a_ring_and_selections_take_tokens_one_by_one():
    reads_some = kvjax.CacheSpec(policies.full(), selection=kvjax.selection.optimal(6))
    for spec in (policies.h2o(9, variant="ring"), reads_some):
        context = begun(spec)
        turns = [contexts.extend(model(), context, TOKENS[:, :3], block=block) for block in (None, 1)]
        assert_equal(*turns)
        assert turns[0].boundaries[0] == (Span(24, 24), Span(27, 1))


def test_what_cannot_be_continued():
    context = begun()
    with pytest.raises(InputError, match="room=9 is smaller than the longest prompt, which has 24 tokens"):
        contexts.prefill(model(), TOKENS, policies.h2o(8), room=9)
    with pytest.raises(InputError, match="indices must be whole numbers from 0 to 2"):
        contexts.rows(context, [3])
    with pytest.raises(InputError, match="differ in the policy, Evict"):
        contexts.join(context, begun(policies.h2o(9)))
    with pytest.raises(InputError, match="differ in the model"):
        contexts.join(context, contexts.prefill(tiny(seed=1, layers=1).model, TOKENS, policies.h2o(8)))
    with pytest.raises(InputError, match=r"the context has 3 rows, and tokens have 1; give rows="):
        contexts.extend(model(), context, TOKENS[0])
    scaled = dataclasses.replace(model().config.rope, scaling="dynamic", factor=2.0, original_max_positions=16)
    dynamic = dataclasses.replace(model(), config=dataclasses.replace(model().config, rope=scaled))
    seen = []
    with pytest.raises(InputError, match=r"34 tokens do not fit: under dynamic RoPE"):
        contexts.decode(
            dynamic, contexts.prefill(dynamic, TOKENS, policies.h2o(8), room=33), max_new_tokens=10, stream=seen.append
        )
    assert not seen
    with pytest.raises(InputError, match="block must be"):
        contexts.extend(model(), context, TOKENS[:, :3], block=0)


def test_kept_contexts_are_those_of_a_prompt_that_is_cut(monkeypatch):
    """Budgets are those of the whole prompt, and a shorter row is kept whole."""
    spec = policies.h2o(policies.Fraction(0.5, min_slots=4))
    whole = begun(spec, keep=(8, 20))
    first, second = whole.snapshots
    assert [len(row) for row in first.text] == [8] * 3 and [len(row) for row in second.text] == [20, 17, 20]
    assert [each.boundaries[0][-1] for each in (first, second, whole)] == [Span(8, 8), Span(20, 12), Span(24, 4)]
    assert first.boundaries[1][-1] == Span(8, 8) and whole.boundaries[1] == (Span(8, 8), Span(17, 9))
    np.testing.assert_array_equal(first.state.budget[0][0], whole.state.budget[0][0])
    again = contexts.extend(model(), contexts.extend(model(), first, TOKENS[:, 8:20], lengths=LENGTHS.clip(max=20) - 8),
                            [TOKENS[0, 20:].tolist(), [], []])  # fmt: skip
    assert_equal(again, whole._replace(snapshots=()))
    # Rows hold no more than their budgets: half of 24, 17 and 20.
    assert [len(row[0]) for row in whole.kept(0)] == [12, 8, 10]
    # A prompt that cannot be cut is refused before the model runs.
    monkeypatch.setattr(generation.prefill, "run_prompts", None)
    with pytest.raises(InputError, match="snapkv compresses whole prompts; leave out keep"):
        begun(policies.snapkv(8, window=4), keep=(8,))
    pages = selection.quest(2, 8, first_layer=0, in_prompt=True, sinks=2, recent=2, query_block=4)
    with pytest.raises(InputError, match=r"quest reads pages of whole prompts .*; leave out keep"):
        begun(CacheSpec(policies.full(), selection=pages), keep=(8,))
    with pytest.raises(InputError, match="keep must be ascending numbers of tokens from 1 to 23"):
        begun(keep=(8, 24))


def test_a_rewound_context_is_that_of_the_shorter_prompt():
    context = contexts.extend(model(), begun(policies.full()), TOKENS[:, :6])
    left = np.array([21, 9, 25])
    made = contexts.rewind(model(), context, left)
    texts = [row[:n] for row, n in zip(context.text, left, strict=True)]
    short = contexts.prefill(model(), texts, policies.full())
    np.testing.assert_allclose(made.logits, short.logits, atol=1e-4)
    assert [own.tolist() for own in made.text] == [own.tolist() for own in texts]
    assert made.boundaries == ((Span(21, 21),), (Span(9, 9),), (Span(20, 20), Span(25, 5)))
    answers = [contexts.decode(model(), each, max_new_tokens=4) for each in (made, short)]
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    for spec in (policies.h2o(8), kvjax.CacheSpec(policies.full(), storage.int8())):
        with pytest.raises(InputError, match=r"cannot be rewound: .*keep="):
            contexts.rewind(model(), begun(spec), 5)
    with pytest.raises(InputError, match="length must be from 1 to 23 for row 1; got 24"):
        contexts.rewind(model(), context, 24)


SNAPKV = policies.snapkv(14, window=4, kernel=3)
MERGING = dataclasses.replace(SNAPKV, merge=Anchors(), name="merging")
COMPRESSORS = [SNAPKV, MERGING, policies.adakv(SNAPKV), policies.keydiff(14), policies.knorm(14)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", COMPRESSORS, ids=lambda own: own.name)
def test_a_turn_is_compressed_like_the_last_block_of_a_prompt(spec):
    """As long as nothing has been evicted: the last queries of both are those of the turn."""
    whole = begun(spec, prefill_block=12)
    context = contexts.prefill(model(), TOKENS[:, :12], spec)
    made = contexts.extend(model(), context, TOKENS[:, 12:], lengths=LENGTHS - 12, turns="compress")
    np.testing.assert_allclose(made.logits, whole.logits, atol=1e-4)
    for row in range(3):
        assert kept(made.state, row) == kept(whole.state, row)
        assert sum(map(len, kept(made.state, row)[0])) == 2 * 14
        assert_same_state(made.state, whole.state, row, atol=2e-5)


def test_heads_share_anew_what_a_short_turn_leaves():
    """One token leaves more to share than the window of a prompt, up to all but the other head's token."""
    spec = policies.adakv(policies.snapkv(8, window=4, kernel=3), safeguard=0.0)
    context = begun(spec)
    slots = context.layout.groups[0].capacity
    made = contexts.extend(model(), context, TOKENS[:, :1], turns="compress")
    # w + 2 (b - w) of the prompt, and 1 + 2 (b - 1) of the turn
    assert made.layout.groups[0].capacity == slots + (1 + 2 * 7) - (4 + 2 * 4)
    for row, length in enumerate(LENGTHS):
        heads = kept(made.state, row)[0]
        assert sum(map(len, heads)) == 2 * 8 and all(length in head for head in heads)
        for head, before in zip(heads, kept(context.state, row)[0], strict=True):
            assert {*head} <= {*before, length}


def test_turns_are_compressed_again():
    """Codes too. A turn that is shorter than the window stays whole; a row without a turn does not change."""
    context = begun(kvjax.CacheSpec(policies.snapkv(8, window=4), storage.int8()))
    for _ in range(2):
        before, context = context, contexts.extend(
            model(), context, TOKENS[:, :9], lengths=[9, 2, 0], turns="compress"
        )  # fmt: skip
        for row, (turn, length) in enumerate(zip((9, 2, 0), before.state.length.tolist(), strict=True)):
            for one, two in zip(kept(context.state, row)[0], kept(before.state, row)[0], strict=True):
                own = range(length, length + turn)
                assert len(one) == 8 and set(one) <= {*two, *own} and set(one) >= {*own[-4:]}
    with pytest.raises(InputError, match="turns='compress' cannot be used: h2o does not compress prompts"):
        contexts.extend(model(), begun(), TOKENS[:, :3], turns="compress")
    with pytest.raises(InputError, match=r"compresses a turn as a whole; leave out block"):
        contexts.extend(model(), context, TOKENS[:, :3], block=2, turns="compress")
    # Boundaries say how each turn was fed: an appended one holds other slots.
    assert context.boundaries[0] == (Span(24, 24), Span(33, 9, "compress"), Span(42, 9, "compress"))
    assert contexts.extend(model(), before, TOKENS[:, :9]).boundaries[0][-1] == Span(42, 1, "append")
    with pytest.raises(InputError, match="turns='never' is not valid"):
        contexts.extend(model(), context, TOKENS[:, :3], turns="never")


def test_a_share_follows_the_text_if_it_is_asked_to():
    spec = policies.h2o(policies.Fraction(0.5, min_slots=4))
    context = contexts.prefill(model(), TOKENS[:, :8], spec)
    turn = [TOKENS[0, 8:].tolist(), TOKENS[1, :2].tolist(), []]
    same, larger = (contexts.extend(model(), context, turn, rebudget=each) for each in (False, True))
    assert [len(row[0]) for row in same.kept(0)] == [4, 4, 4]
    assert [len(row[0]) for row in larger.kept(0)] == [12, 5, 4]
    np.testing.assert_array_equal(np.asarray(larger.state.budget[0][0]), [12, 5, 4])
    assert same.boundaries[0][-1] == Span(24, 16) and larger.boundaries[0][-1] == Span(24, 16, rebudget=True)
    # What was evicted does not come back, and what follows keeps to the budget.
    after = contexts.decode(model(), larger, max_new_tokens=3).context
    assert [len(row[0]) for row in after.kept(0)] == [12, 5, 4]
    long = contexts.extend(model(), context, random_tokens(3, 300), rebudget=True)
    assert [len(row[0]) for row in long.kept(0)] == [154] * 3 and long.layout.groups[0].capacity > 154


def test_another_model_is_refused():
    with pytest.raises(InputError, match="belongs to another model"):
        contexts.extend(tiny(seed=1, layers=1).model, begun(), TOKENS[:, :3])
