"""Budgets of layers from measurement: weights against whole attention matrices, and how slots are divided."""

import fractions

import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies
from kvjax.errors import InputError
from tests import reference
from tests.analysis.dense import full
from tests.tiny import random_tokens, tiny

LENGTHS = np.array([45, 22])
TOKENS = random_tokens(2, 45, seed=5)


def matrices(layers=3):
    """[H, T, T] float64 of each layer and row, [layer][row], rows of their own lengths."""
    runs = [full(tiny(layers=layers), TOKENS[row, :length]) for row, length in enumerate(LENGTHS)]
    return [[run.probability[layer] for run in runs] for layer in range(layers)]


def expected_density():
    w = [np.mean([np.var(p.sum(axis=1), axis=1).mean() for p in rows]) for rows in matrices()]
    return np.exp(-np.array(w) / np.mean(w))


def expected_entropy(share):
    found = []
    for rows in matrices():
        counts = []
        for p in rows:
            held = np.cumsum(-np.sort(-p, axis=-1), axis=-1)
            assert np.abs(held - share).min() > 1e-6, "a near tie: choose another share"
            counts.append(np.mean((held < share).sum(axis=-1) + 1))
        found.append(np.mean(counts))
    return np.array(found)


def expected_slots(weights, budget, least):
    """Exact arithmetic; layers that get `least` are found one at a time, the smallest weight first."""
    exact = [fractions.Fraction(float(each)) for each in weights]
    low, total = set(), budget * len(exact)
    while True:
        others = [i for i in range(len(exact)) if i not in low]
        rest, room = sum(exact[i] for i in others), total - least * len(low)
        parts = {i: exact[i] * room / rest for i in others}
        worst = min(others, key=lambda i: (parts[i], i))
        if parts[worst] >= least:
            break
        low.add(worst)
    slots = [least if i in low else parts[i].__floor__() for i in range(len(exact))]
    left = sorted(others, key=lambda i: (slots[i] - parts[i], i))[: total - sum(slots)]
    return tuple(slots[i] + (i in left) for i in range(len(exact)))


def test_weights_against_whole_attention_matrices():
    model = tiny(layers=3).model
    got = analysis.density_weights(model, TOKENS, lengths=LENGTHS)
    np.testing.assert_allclose(got, expected_density(), rtol=1e-5)
    assert np.ptp(got) > 0.05
    got = analysis.entropy_weights(model, TOKENS, lengths=LENGTHS, share=0.87)
    np.testing.assert_allclose(got, expected_entropy(0.87), rtol=1e-6)
    assert np.ptp(got) > 0.05


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", ["density", "entropy"])
def test_the_slots_of_a_rule(rule):
    model = tiny(layers=3).model
    weights, least = (expected_density(), 32) if rule == "density" else (expected_entropy(0.87), 51)
    got = analysis.budgets(
        model, TOKENS, 101, rule=rule, lengths=LENGTHS, **({"share": 0.87} if rule == "entropy" else {})
    )
    assert got == expected_slots(weights, 101, least) and sum(got) == 303 and len(set(got)) > 1
    run = kvjax.log_likelihood(model, random_tokens(1, 150), policies.h2o(got), prompt_length=130)
    live = [np.sum(np.asarray(layer.position) >= 0, axis=2) for (layer,) in run.state.layers]
    assert tuple(int(each.min()) for each in live) == tuple(int(each.max()) for each in live) == got


def test_the_heads_of_a_replay():
    """Against the replay of the reference, token by token, of rows of their own lengths."""
    own, options = tiny(layers=3), {"instruction": (5, 6), "later": (7,), "chunk": 20, "sinks": 2}
    policy = reference.policies.kvzip(45, **options)
    run = reference.reference_run(own.params, own.config, TOKENS, policy, 45, lengths=LENGTHS)
    expected = [[[head["replayed"].mean() for head in row] for row in layer] for layer in run.stats]
    expected = np.array(expected).mean(axis=1)
    got = analysis.replay_scores(own.model, TOKENS, lengths=LENGTHS, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert np.abs(np.diff(np.sort(expected, axis=None))).min() > 1e-5
    # Three of six heads, and no more.
    for share in (0.5, 0.66):
        table = analysis.budgets(own.model, TOKENS, share, rule="replay", lengths=LENGTHS, **options)
        np.testing.assert_array_equal(table, expected >= np.sort(expected, axis=None)[3])
    policies.duo_attention(table, sinks=2, recent=8)


def test_slots_are_divided_by_largest_remainder():
    rng = np.random.default_rng(0)
    for _ in range(300):
        weights = rng.lognormal(0, 1.5, rng.integers(1, 40))
        budget, least = int(rng.integers(32, 300)), int(rng.integers(0, 33))
        got = analysis.divided(weights, budget, least=least)
        assert got == expected_slots(weights, budget, least)
        assert sum(got) == budget * len(weights) and min(got) >= least
        # No layer of a larger weight has fewer slots.
        assert (np.diff(np.array(got)[np.argsort(weights)]) >= 0).all()
    # Equal remainders: the lower layer.
    assert analysis.divided([0.1, 0.2, 0.2, 0.1], 50) == (33, 67, 67, 33)
    assert analysis.divided([2, 1, 1, 2, 1, 1], 40, least=0) == (60, 30, 30, 60, 30, 30)
    assert analysis.divided([2.1, 1, 0.9], 33, least=0) == (52, 25, 22)
    assert analysis.divided([1, 1, 6, 1], 33) == (32, 32, 36, 32)
    assert analysis.divided([1, 1, 1, 3], 43, least=0) == (29, 29, 28, 86)
    # One layer, or no room beyond the least.
    assert analysis.divided([0.3], 77) == (77,)
    assert analysis.divided([1e-300, 1, 1e300], 32) == (32, 32, 32)


def test_text_that_says_nothing_divides_evenly():
    """Every token of a text of one token receives the same attention."""
    model = tiny(layers=3).model
    assert analysis.budgets(model, [[5]], 40) == analysis.budgets(model, [[5]], 40, rule="entropy") == (40, 40, 40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: analysis.budgets(model, TOKENS, 31), "budget must be a whole number of at least 32; got 31"),
        (lambda model: analysis.budgets(model, TOKENS, 0.2), "budget must be a whole number"),
        (lambda model: analysis.budgets(model, TOKENS, 64, rule="flat"), "rule='flat' is not valid; use 'density'"),
        (lambda model: analysis.budgets(model, TOKENS, 64, share=0.5), "rule 'density' has no option 'share'"),
        (lambda model: analysis.budgets(model, TOKENS, 0.5, rule="gates"), "rule 'gates' needs answers="),
        (lambda model: analysis.budgets(model, TOKENS, 64, rule="gates"), "budget must be a number from 0 to 1"),
        (lambda model: analysis.budgets(model, TOKENS, 64, rule="replay"), "budget must be a number from 0 to 1"),
        (lambda model: analysis.budgets(model, TOKENS, 0.5, rule="replay", plus=True), "has no option 'plus'"),
        (lambda model: analysis.budgets(model, TOKENS, 64, rule="entropy", share=0), "share must be a number above 0"),
        (lambda model: analysis.divided([1.0, 0.0], 64), "one positive number for each layer"),
        (lambda model: analysis.divided([], 64), "one positive number for each layer"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(InputError, match=message):
        make(tiny().model)
