"""Comparisons: intervals and tests against what is known in closed form, and verdicts by the rule."""

import itertools

import numpy as np
import pytest

from experiments.papers.statistics import paired_bootstrap, sign_test
from experiments.papers.verdict import Claim, Judgement, Table, Verdict, conclude


def test_interval_is_that_of_the_mean():
    gap = np.random.default_rng(0).normal(0.3, 1.0, 400)
    other = np.random.default_rng(1).normal(size=400) * 100  # pairs: what both share does not count
    found = paired_bootstrap("a against b", other + gap, other, seed=0)
    error = 1.96 * gap.std() / 20
    assert found.difference == pytest.approx(gap.mean())
    assert found.low == pytest.approx(gap.mean() - error, abs=0.01)
    assert found.high == pytest.approx(gap.mean() + error, abs=0.01)
    assert found.higher and not found.lower and found.result == "higher"


def test_bootstrap_is_seeded_by_its_text():
    one, other = np.random.default_rng(2).normal(size=(2, 40))
    first, again = (paired_bootstrap("a", one, other, seed=3) for _ in range(2))
    assert first == again
    assert (first.low, first.high) != (paired_bootstrap("b", one, other, seed=3).low, first.high)
    assert (first.low, first.high) != (paired_bootstrap("a", one, other, seed=4).low, first.high)


def test_equal_rows_do_not_differ():
    found = paired_bootstrap("a", np.arange(40.0), np.arange(40.0), seed=0)
    assert (found.low, found.high) == (0.0, 0.0) and found.result == "no difference" and found.enough
    assert not paired_bootstrap("a", np.arange(31.0), np.zeros(31), seed=0).enough


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (6, 0), (1, 5), (4, 4), (9, 2)])
def test_sign_test_counts_all_outcomes(wins, losses):
    one = np.array([True] * wins + [False] * losses + [True, False] * 5)
    other = np.array([False] * wins + [True] * losses + [True, False] * 5)
    found = sign_test("a against b", one, other)
    # Every outcome of the prompts that differ is as probable, and those at least as uneven count.
    outcomes = [abs(2 * sum(each) - wins - losses) for each in itertools.product((0, 1), repeat=wins + losses)]
    assert found.p == pytest.approx(np.mean([each >= abs(wins - losses) for each in outcomes]))
    assert found.differs == (found.p < 0.05) and not found.enough
    assert sign_test("a", [True] * 128, [False] * 128).higher


def judged(confirm, contradict, rows=32):
    made = paired_bootstrap("a against b", np.zeros(rows), np.ones(rows), seed=0)
    claims = ([Claim(str(i), holds) for i, holds in enumerate(side)] for side in (confirm, contradict))
    return Judgement([Table("", [])], *claims, comparisons=[made])


@pytest.mark.parametrize(
    ("confirm", "contradict", "expected"),
    [
        ([True, True], [False], Verdict.CONFIRM),
        ([True, False], [False, True], Verdict.CONTRADICT),
        ([True, False], [False], Verdict.INCONCLUSIVE),
        ([True], [True], Verdict.INCONCLUSIVE),
        ([], [False], Verdict.INCONCLUSIVE),
        ([], [True], Verdict.CONTRADICT),
        ([], [], Verdict.NOTHING),
    ],
)
def test_verdict_by_the_rule(confirm, contradict, expected):
    found, reason = conclude(judged(confirm, contradict), trial=False)
    assert found is expected and reason


def test_few_rows_decide_nothing():
    assert conclude(judged([True], []), trial=False)[0] is Verdict.CONFIRM
    for judgement, trial in ((judged([True], []), True), (judged([True], [], rows=31), False)):
        found, reason = conclude(judgement, trial=trial)
        assert found is Verdict.INCONCLUSIVE and "would say CONFIRM" in reason
    assert "would say" not in conclude(judged([False], []), trial=True)[1]
