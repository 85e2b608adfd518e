"""Recipes of RoCo's and InfiniGen's entries against the dense reference, and what can be checked by hand."""

import dataclasses

import numpy as np
import pytest

import kvjax
from experiments.config import ModelConfig
from experiments.papers.parts import Lab
from experiments.papers.recipes import caches, continuation, facts, fullref, guess, lm, speculation, streams, versus
from experiments.papers.settings import FAST, TEXTS, Settings
from kvjax import policies
from kvjax.errors import InputError
from tests import reference
from tests.analysis.dense import dense, full, top
from tests.tiny import random_tokens, tiny

pytestmark = pytest.mark.thorough

ROWS, PROMPT, NEW = 2, 24, 8
SCALE = dataclasses.replace(FAST, rows=ROWS, prompt=PROMPT, new=NEW, length=32, look_rows=ROWS, references=ROWS)
KINDS = ("AAS", "MAS", "AQAS", "LTAS")


class TinyLab(Lab):
    """Measures a random model on random tokens."""

    layers = 2

    def model(self, name="main"):
        return tiny(layers=self.layers).model

    def rows(self, part, text, rows, length):
        return random_tokens(rows, length, seed=1 + (text == speculation.SAMPLE))


@pytest.fixture
def lab(tmp_path):
    for file in TEXTS.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("text")
    return TinyLab(Settings(ModelConfig(shape="tiny"), tmp_path, 0, SCALE), tmp_path / "parts")


def scores(m, seen, kind):
    """The importance of the columns of m [t + 1, t + 1] at its last query, of all queries so far."""
    found = np.full(m.shape[1], -np.inf)
    for j in np.flatnonzero(seen[-1]):
        rows = [i for i in range(j, len(m)) if seen[i, j]]
        terms = m[rows, j]
        above = [m[i, j] >= 1 / seen[i].sum() for i in rows]
        found[j] = {"AAS": terms.sum(), "MAS": terms.mean(), "AQAS": sum(above), "LTAS": m[-1, j]}[kind]
    return found


@pytest.mark.sampled(0)
def test_similarity_of_rows_and_of_top_tokens(lab):
    own, slots, lab.layers = tiny(layers=1), 8, 1
    part = versus.Jaccard(
        caches=(("heavy_only", slots),) * 4, kinds=KINDS, text="book", rows=ROWS, prompt=PROMPT, new=NEW
    )
    found = lab.get(part)["jaccard"]
    near = lab.get(versus.cosine(lab.settings, [("heavy_only", slots)], text="book", rows=ROWS, prompt=PROMPT, new=NEW))
    expected = np.zeros((len(KINDS), ROWS, 2, NEW))
    cosine = np.zeros((ROWS, 4, NEW))
    for row, text in enumerate(random_tokens(ROWS, PROMPT + NEW, seed=1)):
        runs = full(own, text), dense(own, text, reference.policies.h2o(slots, recent=0), PROMPT)
        for head, step in np.ndindex(2, NEW):
            t = PROMPT + step
            for which, kind in enumerate(KINDS):
                sets = []
                for run in runs:
                    m = run.probability[0, 2 * head : 2 * head + 2, : t + 1, : t + 1].mean(axis=0)
                    seen = run.seen[0, head, : t + 1, : t + 1]
                    sets.append(top(scores(m, seen, kind), seen[t], slots))
                expected[which, row, head, step] = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
            for query in (2 * head, 2 * head + 1):
                p, q = (run.probability[0, query, t] for run in runs)
                cosine[row, query, step] = p @ q / np.sqrt((p @ p) * (q @ q))
    np.testing.assert_allclose(found[:, 0], expected.mean(axis=(1, 2)), atol=1e-5)
    np.testing.assert_allclose(near["cosine"][0, 0], cosine.mean(axis=(0, 1)), atol=1e-5)
    assert 0.2 < found.mean() < 0.9


def test_important_keys(lab):
    part = dataclasses.replace(streams.important(lab.settings), alphas=(0.3, 1.0))
    found = lab.get(part)
    texts = random_tokens(ROWS, part.length, seed=1)
    # [B, L, H, T, T]
    every = np.stack([full(tiny(), text).probability for text in texts])
    relative = every / every.max(axis=-1, keepdims=True)
    for alpha, count in zip(part.alphas, found["count"], strict=True):
        np.testing.assert_allclose(count, (relative > np.exp(-alpha)).sum(axis=-1).mean(axis=(0, 2)), atol=1e-5)
    np.testing.assert_allclose(found["first"], every[..., 0].mean(axis=(0, 2, 3)), atol=1e-5)


@pytest.mark.sampled(0)
def test_a_skew_changes_no_guess_of_all_columns(lab):
    lab.layers = 3  # of which the last one chooses
    of = lm.lm(lab.settings, speculation.infinigen(ratio=1.0), 1.0)
    plain, skewed = lab.get(of)["logprobs"], lab.get(speculation.with_skew(lab.settings, of))["logprobs"]
    np.testing.assert_allclose(skewed, plain, atol=1e-5)
    recorded = lab.get(speculation.read(lab.settings, ratio=1.0))
    np.testing.assert_allclose(recorded["logprobs"], plain, atol=1e-5)
    # A fifth of 24 to 31 candidates, and the new token.
    chosen = np.mean([t // 5 for t in range(PROMPT, PROMPT + NEW)])
    assert np.isnan(recorded["number"][:2]).all() and recorded["number"][2] == pytest.approx(chosen)
    assert recorded["capped"][2] == 1 and recorded["share"][2] == pytest.approx((chosen + 1) / (PROMPT + NEW / 2 + 0.5))
    found = lab.get(streams.columns(lab.settings))
    for name in ("plain", "skewed"):
        assert np.all(np.diff(found[name]) <= 0)
        np.testing.assert_allclose(found[name].sum(axis=1), 1)
    assert found["skewed"][:, 0].mean() > found["plain"][:, 0].mean() and np.all(found["outlier"] > 1)


def test_guess_by_hand(lab):
    found = lab.get(guess.guess(1))
    np.testing.assert_array_equal(found["columns"], found["expected"])
    left = ~found["chosen"] & ~found["near"]
    assert left.any() and found["chosen"].any() and found["weight"][left].max() < np.exp(-5)
    assert np.all(found["weight"][found["chosen"]] > 0.999 * np.exp(-5))


def test_texts_are_scored_as_they_were_generated(lab):
    part = fullref.greedy(lab.settings, "full", 1.0, new=NEW)
    made = kvjax.generate(
        tiny().model, random_tokens(ROWS, PROMPT, seed=1), policies.full(), max_new_tokens=NEW
    )  # fmt: skip
    np.testing.assert_array_equal(lab.get(part)["tokens"], made.tokens)
    np.testing.assert_allclose(lab.get(continuation.likely(part))["logprobs"], made.logprobs, atol=1e-5)


def test_grid_of_importances_and_scopes():
    for cell, policy in (
        ("by='mean', protect='deviation'", policies.roco(0.5)), ("by='mass', protect='window'", policies.h2o(0.5)),
        ("by='last', protect='nothing'", policies.tova(0.5, share_heads=False)),
        ("by='above', protect='nothing'", policies.scissorhands(0.5, recent=0)),
    ):  # fmt: skip
        made = caches.exact_spec(f"own:ranked({cell})", 0.5).policy
        assert made.importance == policy.importance and made.needs == policy.needs, cell
    assert caches.exact_spec("own:ranked(by='mean', protect='deviation')", 0.5).policy == policies.roco(0.5)


def test_facts_and_quiet_queries():
    tokens = np.array([5, 7, 8, 9, 1, 7, 8])
    np.testing.assert_array_equal(facts.marked(tokens, np.array([7, 8]), 9), [0, 1, 1, 0, 0, 0, 0, 0, 0])
    with pytest.raises(InputError, match="are not in their prompt"):
        facts.marked(tokens, np.array([8, 7]), 9)
    marks = np.arange(10) == 1
    paid = np.array([0, 0, 0.2, 0.001, 0.001, 0.05, 0.001, 0.001, 0.001, 0.3])
    np.testing.assert_array_equal(facts.is_quiet(paid[:7], marks), [0, 1, 1, 0, 1])
    assert facts.longest_quiet(paid, marks) == 3
    assert facts.longest_quiet(np.where(paid > 0.25, 0, paid), marks) == 0, "nobody returns to it"
