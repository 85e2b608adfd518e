"""The problems that every implementation of attention solves, against float64: one list for all of them.

An implementation inherits `DecodeCases` and `PrefillCases`. Its module has a fixture `machine`, which makes kernels run
and yields the error that is allowed of float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention
from kvjax.attention import Problem
from kvjax.numerics.statistics import ABOVE, COUNT, LAST, MASS, MASS_SQ, decayed, latest, prompt_tail, recent_above

EVERY = frozenset({MASS, MASS_SQ, COUNT, ABOVE, LAST, decayed(0.9), prompt_tail(9), recent_above(20), latest(3)})
WIDE = EVERY | {recent_above(130)}  # of more words than one pass sums


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem.

    Attributes:
      real: the number of real queries of each row.
      before: the number of older slots, of which half are live; without any, a block of several queries is causal.
      split: whether the slots go to several programs of a GPU.
    """

    real: tuple[int, ...]
    kv_heads: int
    group: int
    n: int
    before: int
    dim: int
    dtype: type = jnp.bfloat16
    window: int | None = None
    exempt: bool = False
    log_weight: bool = False
    group_reduce: str = "mean"
    needs: frozenset = EVERY
    split: bool = False

    def __str__(self):
        return "-".join(str(getattr(x, "__name__", x)) for x in dataclasses.astuple(self)[:7]) + "-split" * self.split

    @property
    def shapes(self):
        """The shapes of the arguments of attention, with exempt and log_weight if the case has them."""
        pairs, size = (len(self.real), self.kv_heads), self.before + self.n
        array, cache = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((*pairs, size, self.dim), self.dtype)
        known = {
            "query_position": array((len(self.real), self.n), jnp.int32),
            "key_position": array((*pairs, size), jnp.int32),
        }
        known |= {"exempt": array((*pairs, size), jnp.bool_)} if self.exempt else {}
        known |= {"log_weight": array((*pairs, size), jnp.float32)} if self.log_weight else {}
        heads = self.kv_heads * self.group
        return (array((len(self.real), heads, self.n, self.dim), self.dtype), cache, cache), known

    def arrays(self):
        """The same with values; live slots are in any order, unless the block is causal."""
        rng = np.random.default_rng(self.n + self.before)
        shapes, known = self.shapes
        slots, before = known["key_position"].shape, self.before
        at = np.where(np.arange(self.n) < np.array(self.real)[:, None], before + np.arange(self.n), -1)
        position = np.broadcast_to(at[:, None], (*slots[:2], self.n)).copy()
        if before:
            position = np.full(slots, -1)
            for row, head in np.ndindex(*slots[:2]):
                live = [*rng.choice(before, before // 2, replace=False), *at[row, : self.real[row]]]
                position[row, head, rng.permutation(slots[2])[: len(live)]] = live
        values = {
            "query_position": jnp.asarray(at, jnp.int32),
            "key_position": jnp.asarray(position, jnp.int32),
            "exempt": jnp.asarray(rng.random(slots) < 0.2),
            "log_weight": jnp.asarray(3 * rng.random(slots), jnp.float32),
        }
        inputs = tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in shapes)
        return inputs, {name: x for name, x in values.items() if name in known}

    def problem(self, inputs, known) -> Problem:
        return attention.problem(
            *inputs, **known, window=self.window, needs=self.needs, group_reduce=self.group_reduce,
            causal=self.before == 0 and self.n > 1,
        )  # fmt: skip

    def given(self) -> Problem:
        """The problem of `arrays`, made by one program, not by dozens of operations that are compiled one by one."""
        return jax.jit(self.problem)(*self.arrays())

    def check(self, implementation, error):
        problem = self.given()
        # A new program each time: one that was traced for another machine is not used again.
        got = jax.jit(lambda problem: attention.attend_and_reduce(problem, implementation))(problem)
        attended, columns = got
        if jax.default_backend() == "gpu":
            # Tensor cores truncate sums, of which a logit of 256 features has twice as many as one of 128.
            error *= max(self.dim / 128, 1)
        assert_golden(attended.output, columns, problem, error if self.dtype == jnp.float32 else 0.02)
        padding = np.moveaxis(np.asarray(attended.output), 3, 1)[np.asarray(problem.query_position) < 0]
        assert not padding.any(), "the output of padding is 0"

    def lowered_for_cuda(self) -> str:
        def run(inputs, known):
            return attention.attend_and_reduce(self.problem(inputs, known), "pallas_gpu")

        return jax.jit(run).trace(*self.shapes).lower(lowering_platforms=("cuda",)).as_text()


DECODE = [
    Case((1, 0), 2, 4, 1, 135, 64),
    Case((1,), 1, 8, 1, 327, 128, group_reduce="max", split=True),
    Case((1, 1), 1, 1, 1, 36, 80, jnp.float32, window=20),
    Case((1, 0, 1), 1, 3, 1, 149, 96, window=50, exempt=True),
    Case((1,), 1, 71, 1, 199, 64, log_weight=True, split=True),
    Case((1,), 1, 2, 1, 99, 256, jnp.float32, log_weight=True, group_reduce="max"),
    Case((1,), 2, 7, 1, 79, 256),
    Case((1, 1), 2, 2, 1, 299, 64, jnp.float32, split=True),
    Case((1,), 1, 1, 1, 0, 64, jnp.float32),
]
PREFILL = [
    Case((40, 23), 1, 8, 40, 0, 64),
    Case((150,), 1, 3, 150, 0, 128, window=60, group_reduce="max", needs=WIDE),
    Case((136,), 1, 1, 136, 0, 80, jnp.float32),
    Case((21, 9, 0), 1, 3, 21, 180, 96, jnp.float32, 60, True, True, "max"),
    Case((10,), 2, 2, 16, 184, 256, window=50, log_weight=True),
    Case((70,), 1, 2, 70, 0, 256, jnp.float32, window=20, exempt=True, needs=frozenset({LAST, MASS})),
    Case((133,), 1, 2, 140, 31, 64, jnp.float32, window=50),
    Case((290, 120), 1, 2, 290, 0, 64, jnp.float32),
]


class DecodeCases:
    """One query per head. A subclass has its implementation, and may cut the slots into smaller tiles."""

    implementation: str

    def small_tiles(self, monkeypatch, case):
        pass

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("case", DECODE, ids=str)
    def test_it_is_that_of_float64(self, machine, monkeypatch, case):
        self.small_tiles(monkeypatch, case)
        case.check(self.implementation, machine)

    def test_without_statistics_there_are_none(self, machine):
        dataclasses.replace(DECODE[0], needs=frozenset()).check(self.implementation, machine)


class PrefillCases:
    """A block of queries."""

    implementation: str

    def small_tiles(self, monkeypatch, case):
        pass

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("case", PREFILL, ids=str)
    def test_it_is_that_of_float64(self, machine, monkeypatch, case):
        self.small_tiles(monkeypatch, case)
        case.check(self.implementation, machine)

    def test_without_statistics_there_are_none(self, machine):
        dataclasses.replace(PREFILL[0], needs=frozenset()).check(self.implementation, machine)

    def test_a_tie_with_the_uniform_share_is_above_it(self, machine):
        case = Case((24,), 1, 1, 24, 0, 64, jnp.float32, needs=frozenset({ABOVE}))
        (query, key, value), known = case.arrays()
        key = np.broadcast_to(np.asarray(key)[:, :, :1], key.shape)
        problem = jax.jit(case.problem)((query, key, value), known)
        _, columns = jax.jit(lambda problem: attention.attend_and_reduce(problem, self.implementation))(problem)
        np.testing.assert_array_equal(columns["above"], np.arange(24, 0, -1)[None, None])


def golden(problem: Problem):
    """In float64, with every matrix there is.

    Returns:
      The output [B, K, G, n, D], the probabilities [B, K, G, n, S], and which slots each query sees, [B, K, n, S].
    """
    query, key, value = (np.asarray(x).astype(np.float64) for x in (problem.query, problem.key, problem.value))
    at = np.asarray(problem.query_position)[:, None, :, None]
    slot = np.asarray(problem.key_position)[:, :, None]
    seen = (slot >= 0) & (slot <= at)
    near = np.ones_like(seen)
    if problem.window is not None:
        near &= slot > at - problem.window
    if problem.band is not None:
        near &= slot > at - np.asarray(problem.band).reshape(-1, 1, 1, 1)
    seen &= near if problem.exempt is None else near | np.asarray(problem.exempt)[:, :, None]
    logits = np.einsum("bkgtd,bksd->bkgts", query, key) * problem.scale
    if problem.log_weight is not None:
        logits += np.asarray(problem.log_weight, np.float64)[:, :, None, None]
    weight = np.exp(np.where(seen[:, :, None], logits, -np.inf))
    probability = weight / np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)
    return np.einsum("bkgts,bksd->bkgtd", probability, value), probability, seen


def reduced(statistic, term, weight):
    """The sum over queries of terms [B, K, n, S] with weights [B, n] or [B, n, words], or the maximum."""
    if statistic.accumulate == "max":
        return np.max(term * np.asarray(weight)[:, None, :, None], axis=2)
    return np.einsum("bkts,bt...->bks...", term, weight, optimize=True)


def assert_golden(output, columns, problem: Problem, atol: float) -> None:
    """Compares an output [B, K, G, n, D] and columns with float64; `atol` is of the output."""
    expected, probability, seen = golden(problem)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected, atol=atol)
    assert set(columns) == {statistic.name for statistic in (*problem.statistics, *problem.counts)}
    newest = problem.query_position.max(axis=1, keepdims=True)
    age = jnp.where(problem.query_position >= 0, newest - problem.query_position, -1)
    for statistic in problem.counts:
        counted = reduced(statistic, seen, statistic.query_weights(age, age))
        np.testing.assert_allclose(columns[statistic.name], counted, rtol=1e-5, atol=1e-6)
    m = probability.mean(axis=2) if problem.group_reduce == "mean" else probability.max(axis=2)
    count = seen.sum(axis=-1, keepdims=True)
    for statistic, weight in zip(problem.statistics, problem.weights, strict=True):
        column = columns[statistic.name]
        assert column.dtype == jnp.float32
        sums = functools.partial(reduced, statistic)
        if statistic.transform != "above":
            term = m if statistic.transform == "identity" else m**2
            error = max(atol, 2e-6) if atol < 1e-3 else 2e-6
            np.testing.assert_allclose(column, sums(term, weight), rtol=1e-5, atol=error, err_msg=statistic.name)
            continue
        # As close to the uniform share as this, float32 may decide either way; not of a single slot.
        high = sums(seen & (m * count >= 1 - 1e-5), weight)
        low = sums(seen & ((m * count >= 1 + 1e-5) | (count == 1)), weight)
        assert np.mean(low != high) < 0.02
        assert not seen.any() or np.any(high > 0)
        assert np.all((low <= column) & (column <= high)), statistic.name
