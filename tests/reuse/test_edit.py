"""Edits do what the worked cases say, equal recomputation where nothing follows, and undo each other."""

import numpy as np
import pytest

from kvjax import contexts, policies, reuse, selection, storage
from kvjax.cache.layer_stack import arranged_state
from kvjax.errors import InputError
from kvjax.reuse import editing
from tests.reuse.test_worked_examples import IDS, cases, stories  # noqa: F401, a fixture
from tests.tiny import random_tokens, tiny

TEXT = random_tokens(1, 24, seed=9)[0]
NEW = random_tokens(1, 4, seed=11)[0]


@pytest.fixture(scope="module")
def model():
    """A model of four layers, so that recomputation after layer 1 matters."""
    return tiny(layers=4).model


def slots_of(model, context, layer, head):
    """Positions, keys and values of a head, ascending by position."""
    own = arranged_state(context.state, ()).layers[layer][0]
    position = np.asarray(own.position)[0, head]
    order = np.argsort(np.where(position < 0, 1 << 30, position))[: int((position >= 0).sum())]
    return position[order], np.asarray(own.key)[0, head][order], np.asarray(own.value)[0, head][order]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(9))
def test_worked_cases(stories, shared_data, number):  # noqa: F811
    found = [*cases(shared_data, "edit")]
    assert len(found) == 9
    arguments, _, given, expected = found[number]
    policy = policies.by_name(**(arguments["policy"] or {"name": "full"}), positions=arguments["positions"])
    context = contexts.prefill(stories, given["tokens"], policy)
    sizes = [size for *_, size in arguments["edits"]]
    new = np.split(given["new"], np.cumsum(sizes)[:-1])
    edits = [(start, stop, own) for (start, stop, _), own in zip(arguments["edits"], new, strict=True)]
    made = reuse.edit(stories, context, *edits, repair=arguments["repair"])
    np.testing.assert_allclose(np.asarray(made.logits)[0, IDS], expected["logits"], atol=1e-4)
    for place, head in enumerate((0, 3)):
        position, key, value = slots_of(stories, made, 4, head)
        np.testing.assert_array_equal(position, expected["position"])
        np.testing.assert_allclose(key, expected["key"][place], atol=1e-4)
        np.testing.assert_allclose(value, expected["value"][place], atol=1e-4)
    if len(edits) == 1:
        # The logits of each new token: those after the last one, where there are no others.
        (start, stop, own), tokens = edits[0], given["tokens"]
        for count, logits in enumerate(expected["block_logits"], 1):
            text = np.concatenate([tokens[:start], own[:count], tokens[stop:]]).astype(np.int32)
            partly = editing._edited(stories, context, start, stop, own[:count], text)
            np.testing.assert_allclose(np.asarray(partly.logits)[0, IDS], logits, atol=1e-4)


def leaves_of(context):
    """The slots of a context of one row by layer and head, ascending by position."""
    return [
        slots_of(None, context, layer, head)
        for layer in range(len(context.layout.decode))
        for head in range(2)
    ]  # fmt: skip


@pytest.mark.sampled(0)
def test_an_edit_at_the_end_is_recomputation(model):
    for policy in (policies.full(), policies.window(12, sinks=2)):
        context = contexts.prefill(model, TEXT[:20], policy, room=64)
        made = reuse.edit(model, context, (16, 20, NEW))
        assert [int(each) for each in made.text[0]] == [*TEXT[:16], *NEW]
        if context.layout.keeps_all:
            distance = reuse.distances(model, made)
            assert distance.agrees and max(distance.key.max(), distance.value.max()) < 1e-5
            plain = contexts.prefill(model, np.concatenate([TEXT[:16], NEW]), policy, room=64)
            np.testing.assert_allclose(made.logits, plain.logits, atol=1e-4)
            for got, expected in zip(leaves_of(made), leaves_of(plain), strict=True):
                for one, two in zip(got, expected, strict=True):
                    np.testing.assert_allclose(one, two, atol=1e-4)
        else:
            # 2 sinks and the newest: those at 8 and 9 were evicted before, and 16 to 19 are new.
            assert [*made.kept(0)[0][0]] == [0, 1, *range(10, 20)]


def test_what_an_edit_does_not_move_it_does_not_change(model):
    """Positions, values in layer 0, and keys there within the rounding of an angle, are those of recomputation."""
    context = contexts.prefill(model, TEXT, policies.full(), room=64)
    made = reuse.edit(model, context, (5, 9, NEW[:2]), (12, 12, NEW[2:]))
    text = np.concatenate([TEXT[:5], NEW[:2], TEXT[9:12], NEW[2:], TEXT[12:]])
    np.testing.assert_array_equal(made.text[0], text)
    plain = contexts.prefill(model, text, policies.full(), room=64)
    for head in range(2):
        position, key, value = slots_of(model, made, 0, head)
        expected = slots_of(model, plain, 0, head)
        np.testing.assert_array_equal(position, expected[0])
        np.testing.assert_allclose(value, expected[2], atol=1e-6)
        norm = np.linalg.norm(key, axis=1)
        assert (np.linalg.norm(key - expected[1], axis=1) <= (2e-6 + 2.0**-22 * position) * norm).all()
    distance = reuse.distances(model, made)
    assert distance.key[0] < 1e-5 and distance.value[0] < 1e-6 and (distance.value[1:] > 1e-3).all()
    assert distance.attention.size == distance.rank_correlation.size == 0
    # It goes on, and the context that was edited is unchanged.
    assert contexts.decode(model, made, max_new_tokens=4).tokens.shape == (1, 4)
    np.testing.assert_array_equal(context.text[0], TEXT)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [policies.full(positions="cache"), policies.h2o(30, positions="cache")])
def test_an_insertion_and_its_deletion_leave_no_trace(model, policy):
    """To the bit, but for the last token, which was fed again; statistics are those of the queries between."""
    context = contexts.prefill(model, TEXT, policy, room=64)
    made = reuse.edit(model, reuse.edit(model, context, (8, 8, NEW)), (8, 12, ()))
    for got, expected in zip(leaves_of(made), leaves_of(context), strict=True):
        for one, two in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one[:-1], two[:-1])
    np.testing.assert_allclose(made.logits, context.logits, atol=1e-4)


def test_slots_are_evicted_after_each_edit(model):
    context = contexts.prefill(model, TEXT, policies.h2o(10), room=64)
    made = reuse.edit(model, context, (22, 22, NEW), (23, 24, NEW[:1]))
    for layer in range(2):
        for head in made.kept(layer)[0]:
            assert len(head) == 10 and head[-1] == 27


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["tova", "h2o_decay", "h2o"])
def test_later_tokens_keep_their_statistics(model, name):
    """No query of an edit sees them, so that none counts for them, whatever a statistic does with a query."""
    context = contexts.prefill(model, TEXT, policies.by_name(name, budget=40), room=64)
    made = reuse.edit(model, context, (10, 12, NEW))
    for one, two in zip(arranged_state(context.state, ()).layers, arranged_state(made.state, ()).layers, strict=True):
        before, after = (np.asarray(each[0].position)[0, 0] for each in (one, two))
        slots = [(int(np.argmax(before == at)), int(np.argmax(after == at + 2))) for at in range(12, 23)]
        for statistic, own in one[0].stats.items():
            assert np.abs(np.asarray(own)[0, 0][[old for old, _ in slots]]).max() > 0
            for old, new in slots:
                np.testing.assert_array_equal(
                    np.asarray(two[0].stats[statistic])[0, :, new], np.asarray(own)[0, :, old]
                )


def test_keys_are_rotated_there_and_back(model):
    context = contexts.prefill(model, TEXT, policies.full(), room=64)
    there = reuse.edit(model, context, (3, 3, random_tokens(1, 31, seed=1)[0]))
    back = reuse.edit(model, there, (3, 34, ()))
    for (_, one, _), (_, two, _) in zip(leaves_of(back), leaves_of(context), strict=True):
        assert (np.linalg.norm((one - two)[:-1], axis=1) <= 2e-6 * np.linalg.norm(two[:-1], axis=1)).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_repair(model, positions):
    context = contexts.prefill(model, TEXT, policies.full(positions=positions), room=64)
    text = np.concatenate([TEXT[:4], NEW, TEXT[7:]])
    plain = contexts.prefill(model, text, policies.full(positions=positions), room=64)
    far = {}
    for repair in (None, 0.0, 0.5, 1.0):
        made = reuse.edit(model, context, (4, 7, NEW), repair=repair)
        far[repair] = float(np.abs(np.asarray(made.logits) - np.asarray(plain.logits)).max())
        np.testing.assert_array_equal(made.text[0], text)
    assert far[1.0] < 1e-4 < min(far[None], far[0.0], far[0.5])


REFUSED = [
    (policies.full(), {}, [], "at least one edit"),
    (policies.full(), {}, [(5, 4, [1])], "ascending positions from 0 to 24"),
    (policies.full(), {}, [(5, 7, [1]), (6, 8, [1])], "ascending positions from 7 to 24"),
    (policies.full(), {}, [(20, 25, [1])], "ascending positions from 0 to 24"),
    (policies.full(), {}, [(0, 24, [])], "leave no token"),
    (policies.full(), {}, [(0, 1, [99])], "vocabulary"),
    (policies.full(), {}, [5], "an edit is"),
    (policies.full(), {"storage": storage.int8()}, [(0, 1, [1])], "rotated to their positions"),
    (policies.full(), {"storage": storage.kivi(group=4, residual=4)}, [(0, 1, [1])], "one by one"),
    (policies.full(), {"selection": selection.quest(page=4, budget=8, first_layer=0)}, [(0, 1, [1])], "index"),
    (policies.rkv(8), {}, [(0, 1, [1])], "remembers queries"),
]


@pytest.mark.parametrize(("policy", "options", "edits", "match"), REFUSED)
def test_what_is_refused(model, policy, options, edits, match):
    context = contexts.prefill(model, TEXT, policy, **options)
    with pytest.raises(InputError, match=match):
        reuse.edit(model, context, *edits)


def test_repair_and_rows_that_are_refused(model):
    two = contexts.prefill(model, TEXT.reshape(2, 12), policies.full())
    with pytest.raises(InputError, match="one row"):
        reuse.edit(model, two, (0, 1, [1]))
    with pytest.raises(InputError, match="repair takes one edit of a full cache"):
        reuse.edit(model, contexts.prefill(model, TEXT, policies.window(8)), (20, 21, [1]), repair=0.2)
    with pytest.raises(InputError, match="repair must be"):
        reuse.edit(model, contexts.prefill(model, TEXT, policies.full()), (2, 3, [1]), repair=2)
