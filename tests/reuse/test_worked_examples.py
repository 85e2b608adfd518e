"""Blending, Cache-Craft and SparF compute what the worked cases say."""

import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax import contexts, reuse, selection, storage
from kvjax.reuse.context_scores import context_score
from kvjax.reuse.store import best_of, least_of, use_score

IDS = slice(None, None, 8)  # of logits, those that the cases have


@pytest.fixture(scope="module")
def stories(shared_data):
    return kvjax.load(shared_data / "data" / "models" / "stories260K-hf")


def cases(shared_data, kind):
    arrays = np.load(shared_data / "examples" / "reuse_cases.npz")
    for number, case in enumerate(json.loads(bytes(arrays["cases"]))):
        if case["kind"] == kind:
            given = {name: arrays[f"{number}_in_{name}"] for name in case["inputs"]}
            yield case["arguments"], case["expect"], given, {
                name: arrays[f"{number}_{name}"] for name in case["outputs"]
            }  # fmt: skip


def divided(tokens, lengths):
    return np.split(tokens, np.cumsum(lengths)[:-1])


def prefix_of(model, given):
    return reuse.compute(model, given["prefix"]) if len(given["prefix"]) else None


def assert_logits(model, context, question, make, expected):
    """The logits of the whole question, and of each of its tokens when they follow one by one."""
    np.testing.assert_allclose(np.asarray(context.logits)[0, IDS], expected[-1], atol=1e-4)
    context = make(question[:1])
    for number, logits in enumerate(expected):
        if number:
            context = contexts.extend(model, context, question[number : number + 1], block=1)
        np.testing.assert_allclose(np.asarray(context.logits)[0, IDS], logits, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(9))
def test_blend(stories, shared_data, number):
    found = [*cases(shared_data, "blend")]
    assert len(found) == 9
    arguments, expect, given, expected = found[number]
    prefix = prefix_of(stories, given)
    caches = [reuse.compute(stories, each, prefix) for each in divided(given["chunks"], arguments["lengths"])]
    options = {name: arguments[name] for name in ("ratio", "check", "deviation", "first")}
    made = reuse.blend(stories, caches, given["suffix"], **options)
    np.testing.assert_array_equal(made.active, expected["active"].astype(bool))
    assert made.share == pytest.approx(expect["share"])
    assert_logits(
        stories, made.context, given["suffix"],
        lambda question: reuse.blend(stories, caches, question, **options).context, expected["logits"],
    )  # fmt: skip
    far = reuse.distances(stories, made)
    np.testing.assert_allclose(far.key, expected["key_distance"], atol=2e-5)
    np.testing.assert_allclose(far.value, expected["value_distance"], atol=2e-5)
    np.testing.assert_allclose(far.attention, expected["attention_distance"], atol=2e-5)
    np.testing.assert_allclose(far.rank_correlation, expected["spearman"], atol=1e-5)
    assert far.agrees == expect["agree"]


def test_a_chunk_that_depended_on_no_other_lacks_nothing():
    """Where windows hide all chunks before it, their attention is 0."""
    options = {"length": 4, "old": ["a", "b"], "lengths": {"a": 3, "b": 5, "c": 2}, "alpha": 1.0}
    for new in (["c"], ["b", "a"]):
        found = context_score(np.zeros((2, 3)), np.ones(3), new=new, **options)
        assert found.beta == 1.0 and found.cfo == 0.0


def test_what_a_variant_lacks(shared_data):
    count = 0
    for arguments, expect, given, _ in cases(shared_data, "craft_numbers"):
        found = context_score(
            given["inter"],
            given["intra"],
            **{name: arguments[name] for name in ("length", "old", "new", "lengths", "alpha")},
        )
        assert found._asdict() == pytest.approx({name: expect[name] for name in found._fields})
        assert found.count(arguments["length"]) == expect["recomputed"]
        count += 1
    assert count == 6


def test_which_variant_is_used_and_which_is_dropped(shared_data):
    count = 0
    for arguments, expect, _, expected in cases(shared_data, "craft_store"):
        variants, scores = arguments["variants"], np.zeros(len(arguments["variants"]))
        options = {name: arguments[name] for name in ("length", "lengths", "alpha")}
        for new, cfo, used in zip(arguments["uses"], expected["cfo"], expected["used"], strict=True):
            found = [
                context_score(np.array(own["inter"]), np.array(own["intra"]), old=own["old"], new=new, **options)
                for own in variants
            ]
            np.testing.assert_allclose([each.cfo for each in found], cfo, rtol=1e-6)
            assert best_of(found) == used
            scores[used] += use_score(found[used])
        np.testing.assert_allclose(scores, expected["score"], rtol=1e-6)
        assert least_of(list(scores)) == expect["goes"]
        count += 1
    assert count == 1


def test_craft(stories, shared_data):
    count = 0
    for arguments, expect, given, expected in cases(shared_data, "craft_model"):
        prefix, parts = prefix_of(stories, given), divided(given["chunks"], arguments["lengths"])
        store = reuse.ChunkStore(stories, prefix=prefix, max_bytes=1 << 30)
        for number, old in enumerate(arguments["old"]):
            made = reuse.compute_variants(stories, [parts[i] for i in (*old, number)], prefix)[-1]
            np.testing.assert_allclose(made.inter, expected["inter"][:, number, old].T, atol=2e-5)
            np.testing.assert_allclose(made.intra, expected["intra"][:, number], atol=2e-5)
            start = sum(arguments["lengths"][:number])
            np.testing.assert_allclose(
                made.token_score, expected["token_score"][start : start + len(parts[number])], atol=2e-5
            )
            store.add([made])
        order = arguments["order"]
        after = [parts[i] for i in order]
        made = reuse.craft(store, after, given["suffix"], alpha=arguments["alpha"])
        np.testing.assert_allclose(np.array(made.scores), expected["numbers"][order], atol=2e-5)
        counts = [score.count(len(part)) for score, part in zip(made.scores, after, strict=True)]
        assert counts == list(expected["count"][order])
        assert (made.blended.active == expected["active"].astype(bool)).all()
        assert made.blended.share == pytest.approx(expect["share"])
        assert_logits(
            stories, made.blended.context, given["suffix"],
            lambda question: reuse.craft(store, after, question, alpha=arguments["alpha"]).blended.context,  # noqa: B023
            expected["logits"],
        )  # fmt: skip
        count += 1
    assert count == 2


def test_sparf(shared_data):
    """One query over S tokens, of which the last is the new one: choices, probabilities, and a step of the cache."""
    count = 0
    for arguments, _, given, expected in cases(shared_data, "sparf"):
        made = selection.sparf(arguments["r"], arguments["k"]).bound(len(given["query"]), 1)
        query, key, value = (given[name][None, None] for name in ("query", "key", "value"))
        slots, dim = key.shape[2:]
        position = np.arange(slots, dtype=np.int32)[None, None]
        newest = np.array([slots - 1], np.int32)
        view = selection.SelectView(position, key, newest, newest, newest, newest[:, None], dim**-0.5, 0)

        @jax.jit
        def found(query):
            chosen = made.choose(made.init((1, 1, slots), dim, np.float32), query, view)  # noqa: B023
            return made.columns(query), made.approximate(query, view), *chosen  # noqa: B023

        columns, approximate, marks, index = found(query)
        np.testing.assert_array_equal(np.flatnonzero(columns[0, 0]), np.sort(expected["columns"]))
        np.testing.assert_allclose(approximate[0, 0], expected["approximate"], atol=1e-6)
        np.testing.assert_array_equal(np.flatnonzero(marks[0, 0]), np.sort(expected["chosen"]))
        np.testing.assert_allclose(index["share"][0, 0], expected["alpha"], atol=1e-6)
        prompt, step = slice(0, slots - 1), slice(slots - 1, slots)
        queries = np.repeat(given["query"][None, :, None], slots - 1, axis=2)
        output, _ = storage.replay(
            storage.dense(), (queries, key[:, :, prompt], value[:, :, prompt]),
            (given["query"][None, :, None], key[:, :, step], value[:, :, step]), [slots - 1], selection=made,
        )  # fmt: skip
        np.testing.assert_allclose(output[0, :, 0], expected["out"], atol=1e-6)
        count += 1
    assert count == 2
