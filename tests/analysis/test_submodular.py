"""Greedy heavy hitters against the optimum."""

import itertools

import numpy as np
import pytest

from kvjax.analysis import submodular
from kvjax.errors import InputError
from tests.analysis.dense import full
from tests.tiny import random_tokens, tiny


def instances():
    """Causal attention matrices [10, 10]: random ones, and a model's."""
    rng = np.random.default_rng(0)
    for concentration in (0.1, 1.0):
        yield np.tril(rng.dirichlet(np.full(10, concentration), 10))
    run = full(tiny(), random_tokens(1, 10, seed=1)[0])
    yield from run.probability[:, 0]


def test_values():
    attention = np.array([[1.0, 3.0, 0.0], [0.0, 0.0, 8.0]])
    assert submodular.value(attention, (0, 1)) == 4
    assert submodular.value(attention, (1, 2), "sqrt") == pytest.approx((2 - 1) + (3 - 1))
    assert submodular.value(attention, (0, 2), "log") == pytest.approx(np.log(2) + np.log(9))
    assert submodular.greedy(attention, 2) == (2, 1)
    assert submodular.brute_force(attention, 2) == (1, 2)


@pytest.mark.parametrize("concave", submodular.CONCAVE)
def test_monotone_and_submodular(concave):
    """A token never lowers f, and never adds more to a larger set."""
    attention = next(instances())[:, :6]

    def gain(chosen, token):
        one = submodular.value(attention, (*chosen, token), concave)
        return one - submodular.value(attention, chosen, concave)

    for large in itertools.chain.from_iterable(itertools.combinations(range(6), n) for n in range(6)):
        for token in set(range(6)) - set(large):
            assert gain(large, token) >= 0
            for small in itertools.chain.from_iterable(itertools.combinations(large, n) for n in range(len(large))):
                assert gain(small, token) >= gain(large, token) - 1e-12
    assert submodular.value(attention, (), concave) == 0


@pytest.mark.parametrize("concave", submodular.CONCAVE)
def test_greedy_keeps_its_bound(concave):
    for attention in instances():
        for size in (1, 3, 5):
            result = submodular.compare(attention, size, concave)
            assert submodular.BOUND <= result.ratio <= 1 + 1e-12
            # For accumulated mass alone the greedy set is the top k, whatever h is; for h(x) = x always.
            total = attention.sum(axis=0, keepdims=True)
            assert submodular.compare(total, size, concave).ratio == pytest.approx(1)
            if concave == "mass":
                assert set(submodular.greedy(attention, size)) == set(np.argsort(-total[0])[:size])


def test_greedy_is_not_always_optimal():
    # Token 0 is the best single token, and adds little to 1 and 2, which are the best pair.
    attention = np.array([[2.1, 8.0, 0.0], [2.1, 0.0, 8.0]])
    assert submodular.greedy(attention, 2, "log")[0] == 0
    assert submodular.brute_force(attention, 2, "log") == (1, 2)
    assert submodular.BOUND < submodular.compare(attention, 2, "log").ratio < 0.9


def test_a_function_that_is_not_concave_breaks_the_bound(monkeypatch):
    """The assertion can fail."""
    monkeypatch.setitem(submodular.CONCAVE, "square", np.square)
    attention = np.array([[1.1, 0.0, 0.0], [0.0, 1.0, 1.0]])
    with pytest.raises(AssertionError, match=r"greedy reached 0\.55"):
        submodular.compare(attention, 2, "square")


@pytest.mark.parametrize("concave", submodular.CONCAVE)
def test_a_stream_brings_in_one_token_a_step(concave):
    for attention in instances():
        sets = submodular.stream(attention, 4, concave)
        for i, (before, after) in enumerate(zip([(), *sets], sets, strict=False)):
            assert set(after) <= {*before, i} and len(after) == min(i + 1, 4)
            # It is never better than the optimum at that step.
            best = submodular.brute_force(attention[: i + 1, : i + 1], len(after), concave)
            own = submodular.value(attention[: i + 1], after, concave)
            assert own <= submodular.value(attention[: i + 1], best, concave) + 1e-12


@pytest.mark.parametrize("concave", submodular.CONCAVE)
def test_a_stream_has_no_bound(concave):
    """An evicted token may become the heaviest: with more queries the set is further from the optimum."""
    ratios = []
    for tokens in (10, 40):
        attention = np.zeros((tokens, tokens))
        attention[:2, 0] = attention[2:, 1] = 1  # token 1 is evicted at step 1, and all later queries attend to it
        held = submodular.stream(attention, 1, concave)[-1]
        best = submodular.brute_force(attention, 1, concave)
        assert (held, best) == ((0,), (1,))
        ratios.append(submodular.value(attention, held, concave) / submodular.value(attention, best, concave))
    assert ratios[1] < ratios[0] < submodular.BOUND


def test_what_cannot_work_is_refused():
    attention = np.tril(np.ones((30, 30)))
    with pytest.raises(InputError, match="can be chosen in 155,117,520 ways"):
        submodular.brute_force(attention, 15)
    with pytest.raises(InputError, match="unknown concave function 'cube'; known: mass, sqrt, log"):
        submodular.value(attention, (0,), "cube")
    for size in (0, 31, 2.0, True):
        with pytest.raises(InputError, match="from 1 to the 30 tokens"):
            submodular.greedy(attention, size)
    for bad in (-attention, np.ones(3), attention * np.nan):
        with pytest.raises(InputError, match="nowhere negative"):
            submodular.greedy(bad, 1)
    with pytest.raises(InputError, match="lower triangular"):
        submodular.stream(attention.T, 3)
