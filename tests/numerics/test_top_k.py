"""The `count` largest against a stable sort, where it is hard: ties, infinities, two zeros, empty slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.numerics.top_k import DEPTH, LANES, largest

SIZE = 60
KINDS = ["normal", "huge and tiny", "ties", "all equal", "zeros of both signs", "infinities"]


def expected(value: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """One row by sorting: value, then position; the live ones from the top."""
    live = np.flatnonzero(position >= 0)
    order = live[np.lexsort((position[live], value[live]))]
    chosen = np.zeros(value.size, bool)
    chosen[order[max(order.size - count, 0) :] if count > 0 else []] = True
    return chosen


def rows(kind: str, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """Values and positions [8, size]."""
    rng = np.random.default_rng(3)
    value = {
        "normal": lambda: rng.normal(size=(8, size)),
        "huge and tiny": lambda: rng.normal(size=(8, size)) * 10.0 ** rng.integers(-30, 30, (8, size)),
        "ties": lambda: rng.integers(-2, 3, (8, size)).astype(float),
        "all equal": lambda: np.full((8, size), -1.5),
        "zeros of both signs": lambda: rng.choice([0.0, -0.0, 1.0, -1.0], (8, size)),
        "infinities": lambda: rng.choice([np.inf, -np.inf, 0.5, 2.0], (8, size)),
    }[kind]()
    position = np.stack([rng.permutation(size * 3)[:size] for _ in range(8)])
    position[rng.random(position.shape) < 0.3] = -1
    position[0] = -1  # nobody
    return value.astype(np.float32), position.astype(np.int32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [False, True], ids=["jit", "eager"])
def test_as_a_stable_sort(kind, plain):
    value, position = rows(kind)
    for count in (0, 1, 7, SIZE, SIZE + 5, np.arange(8)[:, None] * 4):
        with jax.disable_jit(plain):
            got = np.asarray(jax.jit(largest)(value, position, jnp.asarray(count, jnp.int32)))
        for row in range(8):
            each = int(np.broadcast_to(count, (8, 1))[row, 0])
            np.testing.assert_array_equal(got[row], expected(value[row] + 0.0, position[row], each), f"{kind} {each}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [LANES * DEPTH - 1, LANES * DEPTH, 5000])
def test_long_rows_are_counted_in_blocks(kind, size):
    value, position = rows(kind, size)
    for count in (1, 700, size):
        run = jax.jit(functools.partial(largest, in_kernels=False))
        got = np.asarray(run(value, position, jnp.asarray(count, jnp.int32)))
        for row in range(8):
            np.testing.assert_array_equal(got[row], expected(value[row] + 0.0, position[row], count))


def test_below_nothing_is_nothing():
    assert not np.asarray(largest(jnp.ones(4), jnp.arange(4, dtype=jnp.int32), -3)).any()
