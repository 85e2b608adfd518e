"""The `count` largest against a stable sort, where it is hard: ties, infinities, two zeros, empty slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.order import largest

SIZE = 60


def expected(value: np.ndarray, position: np.ndarray, count: int) -> np.ndarray:
    """One row by sorting: value, then position; the live ones from the top."""
    live = np.flatnonzero(position >= 0)
    order = live[np.lexsort((position[live], value[live]))]
    chosen = np.zeros(value.size, bool)
    chosen[order[max(order.size - count, 0) :] if count > 0 else []] = True
    return chosen


def rows(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and positions [8, SIZE]."""
    rng = np.random.default_rng(3)
    value = {
        "normal": lambda: rng.normal(size=(8, SIZE)),
        "huge and tiny": lambda: rng.normal(size=(8, SIZE)) * 10.0 ** rng.integers(-30, 30, (8, SIZE)),
        "ties": lambda: rng.integers(-2, 3, (8, SIZE)).astype(float),
        "all equal": lambda: np.full((8, SIZE), -1.5),
        "zeros of both signs": lambda: rng.choice([0.0, -0.0, 1.0, -1.0], (8, SIZE)),
        "infinities": lambda: rng.choice([np.inf, -np.inf, 0.5, 2.0], (8, SIZE)),
    }[kind]()
    position = np.stack([rng.permutation(SIZE * 3)[:SIZE] for _ in range(8)])
    position[rng.random(position.shape) < 0.3] = -1
    position[0] = -1  # nobody
    return value.astype(np.float32), position.astype(np.int32)


@pytest.mark.parametrize("kind", ["normal", "huge and tiny", "ties", "all equal", "zeros of both signs", "infinities"])
@pytest.mark.parametrize("plain", [False, True], ids=["jit", "eager"])
def test_as_a_stable_sort(kind, plain):
    value, position = rows(kind)
    for count in (0, 1, 7, SIZE, SIZE + 5, np.arange(8)[:, None] * 4):
        with jax.disable_jit(plain):
            got = np.asarray(jax.jit(largest)(value, position, jnp.asarray(count, jnp.int32)))
        for row in range(8):
            each = int(np.broadcast_to(count, (8, 1))[row, 0])
            np.testing.assert_array_equal(got[row], expected(value[row] + 0.0, position[row], each), f"{kind} {each}")


def test_below_nothing_is_nothing():
    assert not np.asarray(largest(jnp.ones(4), jnp.arange(4, dtype=jnp.int32), -3)).any()
