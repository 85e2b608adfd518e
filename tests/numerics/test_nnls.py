"""Non-negative least squares against scipy's, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from kvjax.numerics.nnls import nnls

solve = jax.jit(nnls)


def problem(kind: str, seed: int, rows: int = 200, columns: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and a target, float32 exactly."""
    rng = np.random.default_rng(seed)
    matrix = rng.random((rows, columns))
    if kind == "exponentials":
        logits = 2 * rng.normal(size=(rows, 6)) @ rng.normal(size=(6, 5 * columns))
        every = np.exp(logits - logits.max(axis=1, keepdims=True))
        matrix, target = every[:, np.argsort(-every.max(axis=0))[:columns]], every.sum(axis=1)
    else:
        matrix[:, -1] *= 1e-6  # columns of any size
        target = matrix @ np.maximum(rng.normal(size=columns), 0) + 0.1 * rng.normal(size=rows)
    if kind == "alike":
        # Columns that differ by 0.1 %: the normal equations have a condition number of 1e8.
        matrix[:, 1::2] = matrix[:, ::2] * (1 + 1e-3 * rng.normal(size=(rows, columns // 2)))
    return matrix.astype(np.float32).astype(np.float64), target.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", ["random", "exponentials", "alike"])
@pytest.mark.parametrize("start", [True, False])
def test_it_is_the_minimum(kind, start):
    for seed in range(8):
        matrix, target = problem(kind, seed)
        expected, missed = optimize.nnls(matrix, target, maxiter=10_000)
        got = solve(*(jnp.asarray(x, jnp.float32) for x in (matrix, target)), jnp.full(matrix.shape[1], start))
        got = np.asarray(got, np.float64)
        assert (got >= 0).all()
        # Where columns are nearly equal, float32 determines only the sum of their weights; only the error is compared.
        assert np.linalg.norm(matrix @ got - target) <= missed * (1 + (1e-4 if kind == "alike" else 1e-6))
        if kind != "alike":
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5 * expected.max())


def test_columns_of_zeros_and_no_rows_have_no_coefficient():
    matrix, target = problem("random", 0)
    expected, _ = optimize.nnls(matrix, target)
    padded = np.zeros((matrix.shape[0] + 5, matrix.shape[1] + 3), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    got = solve(jnp.asarray(padded), jnp.pad(jnp.asarray(target, jnp.float32), (0, 5)), jnp.ones(padded.shape[1], bool))
    np.testing.assert_allclose(got, np.pad(expected, (0, 3)), rtol=1e-3, atol=1e-5)
    nothing = solve(jnp.zeros((4, 3)), jnp.zeros(4), jnp.ones(3, bool))
    np.testing.assert_array_equal(nothing, 0)
