"""Greedy selection of heavy hitters against the optimum (H2O, arXiv:2306.14048, section 4, appendix D).

The value of a set S of tokens is f(S) = sum over queries i of h(sum over s in S of a[i, s]), with h concave,
non-decreasing and h(0) = 0: a concave function of the attention mass that falls on S. Such an f is monotone and
submodular (a token adds no more to a larger set than to a smaller one), so that with f({}) = 0 greedy selection of k
tokens reaches at least (1 - 1/e) of the value of the best k tokens (Nemhauser, Wolsey and Fisher, 1978). With a single
row of accumulated mass, or with h(x) = x, the greedy set is the top k, which is optimal: H2O's own score.

The bound need not hold for a cache: Algorithm 1 of H2O adds at most one token per step (|S_i \\ S_{i-1}| <= 1), the
newest, and never brings back a token that it has evicted, while the best set of k tokens may change freely. The paper's
Theorem 4.4 has slack for that, (1 - alpha)(1 - 1/e) max f - beta, and does not say that alpha and beta are small:
`stream` can end arbitrarily far below the optimum (tests/analysis/test_submodular.py has a case).

Plain NumPy in float64, for small instances.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.errors import InputError
from kvjax.summary import one_line

BOUND = 1 - 1 / math.e  # of greedy selection, for a monotone submodular f with f({}) = 0
MAX_SETS = 1_000_000  # that `brute_force` tries

#: h of the paper's examples, shifted so that h(0) = 0, as the bound requires.
CONCAVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mass": lambda x: x,
    "sqrt": lambda x: np.sqrt(1 + x) - 1,
    "log": np.log1p,
}


def value(attention: np.ndarray, chosen: Sequence[int], concave: str = "mass") -> float:
    """f of a set of tokens.

    Args:
      attention: [Q, T] non-negative; rows are queries (or one row: accumulated mass), columns tokens.
      chosen: distinct columns.
      concave: h, a name in `CONCAVE`.

    Raises:
      InputError: attention that is not [Q, T] and non-negative, or an unknown h.
    """
    return _value(_attention(attention), chosen, _concave(concave))


def greedy(attention: np.ndarray, size: int, concave: str = "mass") -> tuple[int, ...]:
    """Chooses tokens one by one: the one that increases f most, the older of equal ones.

    The value of the set is at least `BOUND` times that of `brute_force`.

    Args:
      attention: see `value`.
      size: the number of tokens, from 1 to T.
      concave: see `value`.

    Returns:
      `size` columns in order of choice.

    Raises:
      InputError: as `value`, or a size that is not a whole number from 1 to T.
    """
    attention, h = _attention(attention), _concave(concave)
    _check_size(size, attention.shape[1])
    chosen: tuple[int, ...] = ()
    for _ in range(size):
        others = [token for token in range(attention.shape[1]) if token not in chosen]
        # max keeps the first of equals
        chosen += (max(others, key=lambda token: _value(attention, (*chosen, token), h)),)
    return chosen


def brute_force(attention: np.ndarray, size: int, concave: str = "mass") -> tuple[int, ...]:
    """Finds the best `size` columns, ascending, by trying every set.

    Args:
      attention: see `value`.
      size: see `greedy`.
      concave: see `value`.

    Raises:
      InputError: as `greedy`, or more than a million sets.
    """
    attention, h = _attention(attention), _concave(concave)
    tokens = attention.shape[1]
    _check_size(size, tokens)
    if math.comb(tokens, size) > MAX_SETS:
        raise InputError(
            f"{size} of {tokens} tokens can be chosen in {math.comb(tokens, size):,} ways, and all are tried; give an "
            f"instance of at most {MAX_SETS:,}."
        )
    return max(itertools.combinations(range(tokens), size), key=lambda chosen: _value(attention, chosen, h))


def stream(attention: np.ndarray, size: int, concave: str = "mass") -> list[tuple[int, ...]]:
    """H2O's Algorithm 1: the set after every step, in which token i joins and, over budget, one token is evicted.

    After query i the token is evicted without which f over the queries so far is largest; of equal ones the older. No
    bound holds for the tokens that remain: see the module's docstring.

    Args:
      attention: [T, T] lower triangular, row i of query i over tokens 0 to i.
      size: the budget.
      concave: see `value`.

    Returns:
      T tuples of ascending columns; the i-th is S_i, |S_i| <= size and |S_i \\ S_{i-1}| <= 1.

    Raises:
      InputError: as `greedy`, or attention that is not lower triangular.
    """
    attention, h = _attention(attention), _concave(concave)
    if attention.shape[0] != attention.shape[1] or np.any(np.triu(attention, 1)):
        raise InputError(f"attention must be causal: lower triangular [T, T]; got shape {attention.shape}.")
    _check_size(size, attention.shape[1])
    steps: list[tuple[int, ...]] = []
    held: tuple[int, ...] = ()
    for i in range(len(attention)):
        held = (*held, i)
        if len(held) > size:
            left = [tuple(token for token in held if token != victim) for victim in held]
            held = max(left, key=lambda chosen: _value(attention[: i + 1], chosen, h))
        steps.append(held)
    return steps


class Comparison(NamedTuple):
    """The result of `compare`.

    Attributes:
      greedy: f of the greedy set.
      optimum: f of the best set.
      ratio: `greedy` / `optimum`; 1 where both are 0.
    """

    greedy: float
    optimum: float
    ratio: float

    def __repr__(self) -> str:
        return one_line(self)


def compare(attention: np.ndarray, size: int, concave: str = "mass") -> Comparison:
    """Compares greedy selection with the brute-force optimum.

    Args:
      attention: see `value`.
      size: see `greedy`.
      concave: see `value`.

    Raises:
      InputError: as `brute_force`.
      AssertionError: a ratio below 1 - 1/e, which is impossible for the functions of `CONCAVE`.
    """
    best = value(attention, brute_force(attention, size, concave), concave)
    found = value(attention, greedy(attention, size, concave), concave)
    ratio = found / best if best > 0 else 1.0
    assert ratio >= BOUND - 1e-12, f"greedy reached {ratio:.4f} of the optimum, below {BOUND:.4f}"
    return Comparison(found, best, ratio)


def _value(attention: np.ndarray, chosen: Sequence[int], h: Callable[[np.ndarray], np.ndarray]) -> float:
    return float(np.sum(h(np.sum(attention[:, list(chosen)], axis=1))))


def _attention(attention: np.ndarray) -> np.ndarray:
    array = np.asarray(attention, np.float64)
    if array.ndim != 2 or not array.size or not np.all(array >= 0):
        raise InputError(f"attention must be [queries, tokens] and nowhere negative; got shape {array.shape}.")
    return array


def _concave(name: str) -> Callable[[np.ndarray], np.ndarray]:
    if name not in CONCAVE:
        raise InputError(f"unknown concave function {name!r}; known: {', '.join(CONCAVE)}.")
    return CONCAVE[name]


def _check_size(size: int, tokens: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= tokens:
        raise InputError(f"size must be a whole number from 1 to the {tokens} tokens; got {size!r}.")
