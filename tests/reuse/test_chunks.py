"""Chunks that are recomputed whole are a prefill, under every cache that takes them; and stores of chunks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import contexts, policies, reuse, selection, storage
from kvjax.errors import InputError
from kvjax.reuse import last_block
from tests.examples import policy
from tests.tiny import random_tokens, tiny

PARTS = np.split(random_tokens(1, 38, seed=5)[0], [3, 12, 21, 34])
PREFIX, *CHUNKS, QUESTION = PARTS
TEXT = np.concatenate(PARTS)
#: Policies that need nothing of the queries of chunks, with 4 tokens of a question.
TAKE = {
    "full": policies.full(),
    "window": policies.window(12),
    "streaming_llm": policies.streaming_llm(12, sinks=2),
    "random": policies.random(12),
    "knorm": policies.knorm(12),
    "keydiff": policies.keydiff(12),
    "snapkv": policies.snapkv(12, window=4),
    "pyramidkv": policies.pyramidkv(12, window=4),
    "adakv": policies.adakv(policies.snapkv(12, window=4)),
    "tova": policies.tova(12),
    "two kinds of heads": policies.split_heads([[1, 0], [0, 1]] * 2, policies.full(), policies.window(8)),
}


@pytest.fixture(scope="module")
def model():
    """A model of four layers, so that recomputation after layer 1 matters."""
    return tiny(layers=4).model


@pytest.fixture(scope="module")
def caches(model):
    prefix = reuse.compute(model, PREFIX)
    return [reuse.compute(model, each, prefix) for each in CHUNKS]


def assert_close(one, two):
    np.testing.assert_allclose(one.logits, two.logits, atol=1e-4)
    for layer in range(len(one.layout.decode)):
        for got, expected in zip(one.kept(layer)[0], two.kept(layer)[0], strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TAKE)
def test_all_recomputed_is_a_prefill(model, caches, name):
    made = reuse.blend(model, caches, QUESTION, TAKE[name], ratio=1.0, room=64)
    plain = contexts.prefill(model, TEXT, TAKE[name], room=64)
    assert_close(made.context, plain)
    assert made.share == pytest.approx(1 - len(PREFIX) / len(TEXT))
    none = reuse.blend(model, caches, QUESTION, TAKE[name], ratio=0.0, room=64).context
    assert np.abs(np.asarray(none.logits) - np.asarray(plain.logits)).max() > 1e-3
    # And goes on like it.
    answers = [contexts.decode(model, each, max_new_tokens=6) for each in (made.context, plain)]
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    assert_close(answers[0].context, answers[1].context)


def test_one_chunk_is_a_prefill_at_any_share(model, caches):
    plain = contexts.prefill(model, np.concatenate([PREFIX, CHUNKS[0], QUESTION]), policies.full(), room=64)
    for options in ({"ratio": 0.0}, {"ratio": 0.4, "deviation": "both"}, {"check": None}, {"check": None, "first": 2}):
        made = reuse.blend(model, caches[:1], QUESTION, room=64, **options)
        assert_close(made.context, plain)
        np.testing.assert_allclose(reuse.distances(model, made).key, 0, atol=1e-5)


def test_more_tokens_come_nearer_to_a_prefill():
    deep, far = tiny(layers=4).model, {}
    own = [reuse.compute(deep, each, reuse.compute(deep, PREFIX)) for each in CHUNKS]
    for ratio in (0.0, 0.3, 1.0):
        made = reuse.blend(deep, own, QUESTION, ratio=ratio)
        far[ratio] = reuse.distances(deep, made)
        # Layers up to the check have the keys and values of a prefill.
        np.testing.assert_allclose(far[ratio].value[:2], 0, atol=1e-5)
    assert far[1.0].attention.max() < 1e-4 < far[0.0].attention.max()


def test_gradual_shares(caches):
    deep = tiny(layers=4).model
    prefix = reuse.compute(deep, PREFIX)
    own = [reuse.compute(deep, each, prefix) for each in CHUNKS]
    made = reuse.blend(deep, own, QUESTION, ratio=(0.6, 0.4, 0.1))
    chunked = made.active[:, len(PREFIX) : -len(QUESTION)]
    assert list(chunked.sum(axis=1)) == [31, 18, 12, 3]
    assert all((late <= early).all() for early, late in itertools.pairwise(chunked))
    far = reuse.distances(deep, made)
    assert far.rank_correlation.shape == (2,) and (np.diff(far.value[1:]) > 0).any()


@pytest.mark.parametrize("part", [0.4, 1.0])
def test_tokens_that_the_question_chooses(model, caches, part):
    made = reuse.blend(model, caches, QUESTION, ratio=0.35, by_question=part)
    # Without recomputation, under the policy whose heads vote.
    count = int(0.35 * sum(map(len, CHUNKS)))
    voting = policies.snapkv(count + len(QUESTION), window=len(QUESTION))
    kept = reuse.blend(model, caches, QUESTION, voting, check=None).context.kept
    votes = np.bincount([place for layer in range(4) for head in kept(layer)[0] for place in head])
    votes = votes[len(PREFIX) : -len(QUESTION)]
    most = sorted(range(len(votes)), key=lambda place: (votes[place], place))[-int(part * count) :]
    chunked = made.active[:, len(PREFIX) : -len(QUESTION)]
    assert chunked[:, most].all()
    assert chunked[-1].sum() == count
    # All tokens go through the layers before deviations are known, if there is something left to choose by them.
    assert chunked[0].sum() == (chunked.shape[1] if part < 1 else count)
    # The whole question is the same as a prefill, whoever chooses.
    assert_close(
        reuse.blend(model, caches, QUESTION, ratio=1.0, by_question=part, room=64).context,
        contexts.prefill(model, TEXT, policies.full(), room=64),
    )


def test_a_share_of_no_token_asks_no_question(model, caches):
    for ratio in (0.0, 0.01):
        made = reuse.blend(model, caches, QUESTION, ratio=ratio, by_question=0.5)
        plain = reuse.blend(model, caches, QUESTION, ratio=ratio)
        np.testing.assert_array_equal(made.active, plain.active)
        np.testing.assert_array_equal(made.context.logits, plain.context.logits)


def test_texts_of_other_lengths_share_the_programs_of_votes(model):
    text, sizes = random_tokens(1, 64, seed=7)[0], []
    # Slots are rounded up, here to the same number.
    for length in (33, 38, 41, 42):
        own = [reuse.compute(model, text[start : start + length // 2]) for start in (0, length // 2)]
        reuse.blend(model, own, QUESTION, ratio=0.3, by_question=0.5)
        sizes.append(last_block._last_block._cache_size())
    assert sizes[1:] == sizes[:1] * 3


def test_a_chunk_in_its_old_context_needs_no_repair(model):
    prefix = reuse.compute(model, PREFIX)
    store = reuse.ChunkStore(model, prefix=prefix, max_bytes=1 << 24)
    store.add(reuse.compute_variants(model, CHUNKS, prefix))
    made = reuse.craft(store, CHUNKS, QUESTION)
    assert [score.cfo for score in made.scores] == [0.0] * 3
    assert not made.blended.active[:, : -len(QUESTION)].any()
    assert_close(made.blended.context, contexts.prefill(model, TEXT, policies.full()))
    # Where everything is recomputed, it does not matter which variants there are.
    other = reuse.craft(store, CHUNKS[::-1], QUESTION, alpha=1e6)
    whole = np.concatenate([PREFIX, *CHUNKS[::-1], QUESTION])
    recomputed = [score.cfo for score in other.scores]
    assert recomputed[1:] == [1.0, 1.0]
    assert_close(other.blended.context, contexts.prefill(model, whole, policies.full()))


def test_alpha_is_the_smallest_that_reaches_a_target(model):
    prefix = reuse.compute(model, PREFIX)
    store = reuse.ChunkStore(model, prefix=prefix, max_bytes=1 << 24)
    store.add(reuse.compute_variants(model, CHUNKS, prefix))
    requests = [(CHUNKS[::-1], QUESTION), (CHUNKS[1:], QUESTION)]
    uses = {chunk: [*own.scores] for chunk, own in store._chunks.items()}
    alphas = (3.0, 0.0, 0.5, 1.0, 1e6)
    made = reuse.calibrate_alpha(store, requests, target=0.9999, alphas=alphas)
    assert made.alpha in alphas and list(made.alphas) == sorted(alphas)[: len(made.alphas)]
    means = made.quality.mean(axis=1)
    assert (means[:-1] < 0.9999).all() and means[-1] >= 0.9999
    # Qualities and shares are those of contexts that `craft` returns.
    for alpha, quality, share in zip(made.alphas, made.quality, made.share, strict=True):
        for own, (chunks, question) in enumerate(requests):
            context = reuse.craft(store.copy(), chunks, question, alpha=alpha).blended
            assert quality[own] == pytest.approx(1 - reuse.distances(model, context).value.mean(), abs=1e-6)
            chunked = context.active[:, len(PREFIX) : -len(QUESTION)]
            assert share[own] == pytest.approx(chunked.mean())
    assert (made.share[0] == 0).all() and (np.diff(made.share, axis=0) >= 0).all()
    assert {chunk: own.scores for chunk, own in store._chunks.items()} == uses  # trials are no uses
    # A quality function is called with the number of each request.
    right = {0.0: (1, 0), 0.5: (1, 1), 1.0: (0, 0), 3.0: (1, 1)}
    answers, numbers = iter([each for pair in right.values() for each in pair]), []
    chosen = reuse.calibrate_alpha(
        store, requests, target=1.0, quality=lambda number, _: numbers.append(number) or next(answers),
        alphas=list(right),
    )  # fmt: skip
    assert numbers == [0, 1, 0, 1]
    assert chosen.alpha == 0.5 and chosen.quality.tolist() == [[1, 0], [1, 1]]
    assert reuse.smallest_alpha(right, 1.0) == 0.5 and reuse.smallest_alpha(right, 0.5) == 0.0
    assert reuse.smallest_alpha({1.0: [0, 1]}, 0.6) is None
    for options, match in (
        ({"target": 1.0, "alphas": (0.0,)}, "no factor reaches a mean quality of 1; the means are 0: "),
        ({"target": 1.5}, "cannot be reached: without quality=, no quality is above 1"),
        ({"target": 0.5, "alphas": ()}, "at least one factor"),
        ({"target": 0.5, "alphas": (-1.0,)}, "each factor"),
    ):
        with pytest.raises(InputError, match=match):
            reuse.calibrate_alpha(store, requests, **options)
    with pytest.raises(InputError, match="at least one pair"):
        reuse.calibrate_alpha(store, [], target=0.5)
    with pytest.raises(InputError, match="request 2 must be a pair"):
        reuse.calibrate_alpha(store, [*requests, requests[0][:1]], target=0.5)
    with pytest.raises(InputError, match="must be a ChunkStore"):
        reuse.calibrate_alpha(model, requests, target=0.5)


def test_a_store_has_a_bound_and_variants(model):
    prefix = reuse.compute(model, PREFIX)
    one = reuse.compute(model, CHUNKS[0], prefix).nbytes
    store = reuse.ChunkStore(model, prefix=prefix, max_bytes=3 * one, variants=2)
    first = store.get(CHUNKS[0])
    assert store.get(CHUNKS[0]) is first and len(store) == 1 and store.nbytes == one
    store.get(CHUNKS[1])
    store.get(CHUNKS[0])
    store.get(CHUNKS[2])  # larger than what is left: the one that was used least recently is dropped
    assert len(store) == 2 and store.nbytes <= store.max_bytes and store.get(CHUNKS[0]) is first
    store = reuse.ChunkStore(model, prefix=prefix, max_bytes=1 << 30, variants=2)
    alone, after, last = (
        reuse.compute_variants(model, each, prefix)[-1] for each in (CHUNKS[:1], CHUNKS[1::-1], CHUNKS[::-1])
    )
    store.add([alone, after])
    assert store.choose(CHUNKS[0], [CHUNKS[1]])[0] is after
    store.add([last])
    # The one that was never used is dropped.
    assert store.choose(CHUNKS[0], [])[0] is not alone
    assert store.choose(CHUNKS[0], CHUNKS[:0:-1])[0] is last
    small = reuse.ChunkStore(model, prefix=prefix, max_bytes=1)
    np.testing.assert_array_equal(small.get(CHUNKS[0]).key, first.key)
    assert small.choose(CHUNKS[0], [])[1].cfo == 0 and len(small) == 0


def test_a_blended_context_is_not_stored_as_a_prefix(model, caches):
    made = reuse.blend(model, caches, QUESTION).context
    store = kvjax.PrefixStore(1 << 24)
    with pytest.raises(InputError, match="chunks"):
        store.add(made)
    with pytest.raises(InputError, match="chunks"):
        store.add(contexts.extend(model, made, [[1, 2]]))
    edited = reuse.edit(model, contexts.prefill(model, TEXT, policies.full()), (3, 5, [7]))
    with pytest.raises(InputError, match="edited"):
        store.add(edited)


def test_a_blended_context_is_saved_whole(model, caches, tmp_path):
    made = reuse.blend(model, caches, QUESTION, policies.window(12)).context
    contexts.save(tmp_path / "made", made)
    read = contexts.load(tmp_path / "made", model)
    assert read.boundaries == made.boundaries
    for got, expected in zip(jax.tree.leaves(read.state), jax.tree.leaves(made.state), strict=True):
        np.testing.assert_array_equal(got, expected)


REFUSED = [
    ({"policy": policy("h2o", 8)}, "h2o cannot take over chunks"),
    ({"policy": policies.snapkv(12, window=8)}, "or of more than 4"),
    ({"policy": policies.kvzip(12)}, "replays"),
    ({"policy": policies.full(), "storage": storage.int8()}, "storage int8 cannot hold chunks"),
    ({"policy": policies.full(), "selection": selection.quest(page=4, budget=12, first_layer=0)}, "reads a selection"),
    ({"ratio": 1.5}, "ratio must be"),
    ({"ratio": (0.2, 0.3)}, "must have 3 numbers"),
    ({"check": 0}, "check must be a layer from 1 to 3"),
    ({"check": 4}, "check must be a layer from 1 to 3"),
    ({"prefill_block": 2}, "prefill_block"),
    ({"check": None, "ratio": (0.1,)}, "check=None recomputes nothing"),
    ({"deviation": "query"}, "deviation"),
    ({"first": -1}, "first"),
    ({"by_question": 1.5}, "by_question must be a number from 0 to 1"),
    ({"by_question": 0.5, "ratio": (0.3, 0.2, 0.1)}, "one ratio for all layers"),
    ({"by_question": 0.5, "check": None}, "give by_question=1, or a check"),
    ({"by_question": 1, "check": 99}, "check must be a layer from 1 to 3"),
    ({"room": 10}, "smaller than the text"),
    ({"question": []}, "question|at least one token"),
    ({"chunks": []}, "at least one ChunkCache"),
    ({"chunks": [1]}, "must be a ChunkCache"),
]


@pytest.mark.parametrize(("given", "match"), REFUSED)
def test_what_is_refused(model, caches, given, match):
    arguments = {"chunks": caches, "question": QUESTION} | given
    with pytest.raises(kvjax.KvjaxError, match=match):
        reuse.blend(model, arguments.pop("chunks"), arguments.pop("question"), **arguments)


def test_rising_shares_other_models_and_other_prefixes(model, caches):
    other = tiny(layers=4, seed=5).model
    with pytest.raises(InputError, match="another model"):
        reuse.blend(other, caches, QUESTION)
    with pytest.raises(InputError, match="another model"):
        reuse.distances(other, reuse.blend(model, caches, QUESTION))
    with pytest.raises(InputError, match="must not rise"):
        reuse.blend(model, caches, QUESTION, ratio=(0.1, 0.2, 0.1))
    with pytest.raises(InputError, match="different prefixes"):
        reuse.blend(model, [*caches, reuse.compute(model, CHUNKS[0])], QUESTION)
    with pytest.raises(InputError, match="a prefix cannot have a prefix"):
        reuse.compute(model, CHUNKS[1], caches[0])
    with pytest.raises(InputError, match="a list of ChunkCache"):
        reuse.blend(model, caches[0], QUESTION)
    with pytest.raises(InputError, match="the field blended"):
        reuse.distances(model, None)
    single = tiny(layers=1).model
    with pytest.raises(InputError, match="check=None"):
        reuse.blend(single, [reuse.compute(single, CHUNKS[0])], QUESTION)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_text_are_refused(model, scaling):
    rope = dataclasses.replace(
        model.config.rope, scaling=scaling, factor=2.0, original_max_positions=16, short_factor=(1.0,) * 4,
        long_factor=(2.0,) * 4,
    )  # fmt: skip
    own = dataclasses.replace(model, config=dataclasses.replace(model.config, rope=rope))
    with pytest.raises(InputError, match=f"under {scaling} RoPE"):
        reuse.compute(own, CHUNKS[0])
    with pytest.raises(InputError, match=f"under {scaling} RoPE"):
        reuse.edit(own, contexts.prefill(own, TEXT[:12], policies.full()), (2, 3, [1]))


def test_learned_positions_are_refused(model):
    config = dataclasses.replace(model.config, learned_positions=True, rope=None)
    params = {**model.params, "position_embed": {"table": jnp.zeros((config.max_positions, config.hidden_size))}}
    own = dataclasses.replace(model, config=config, params=params)
    context = contexts.prefill(own, TEXT[:12], policies.full())
    for refused in (
        lambda: reuse.compute(own, CHUNKS[0]), lambda: reuse.edit(own, context, (2, 3, [1])),
        lambda: reuse.distances(own, context),
    ):  # fmt: skip
        with pytest.raises(InputError, match="learned positions"):
            refused()


def test_a_chunk_that_occurs_twice(model):
    """In its old order, nothing is repaired."""
    prefix = reuse.compute(model, PREFIX)
    order = [CHUNKS[0], CHUNKS[1], CHUNKS[0], CHUNKS[2]]
    store = reuse.ChunkStore(model, prefix=prefix, max_bytes=1 << 30)
    store.add(reuse.compute_variants(model, order, prefix))
    assert [score.cfo for score in reuse.craft(store, order, QUESTION).scores] == [0.0] * 4
