"""The most probable entries against a sort in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.numerics.nucleus import most_probable


def expected(logits: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    order = np.argsort(-logits, kind="stable")
    kept = np.zeros(len(logits), bool)
    kept[order[:top_k]] = True
    if top_p is not None:
        weights = np.exp(np.where(kept, logits.astype(np.float64) - logits.max(), -np.inf))
        before = np.cumsum(weights[order]) - weights[order]
        kept[order[before / weights.sum() >= top_p]] = False
    return kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "spread"), [(1, 3.0), (5, 0.1), (64, 3.0), (1000, 0.1), (1000, 3.0)])
def test_it_is_a_sort(size, spread):
    rng = np.random.default_rng(size)
    logits = (spread * rng.normal(size=(3, size))).astype(np.float32)
    logits[1] = -np.abs(logits[1])
    logits[2, : size // 2] = -np.inf
    run = jax.jit(most_probable)
    for top_k in (None, 1, 3, size + 7):
        for top_p in (None, 1e-6, 0.3, 0.9):
            made = most_probable(jnp.asarray(logits), top_k, top_p)
            whole = [expected(row, top_k, top_p) for row in logits]
            np.testing.assert_array_equal(made, whole, err_msg=f"{top_k} {top_p}")
            # As settings of rows.
            rows = run(
                jnp.asarray(logits), jnp.full((3, 1), 2**31 - 1 if top_k is None else top_k, jnp.int32),
                jnp.full((3, 1), np.inf if top_p is None else top_p, jnp.float32),
            )  # fmt: skip
            np.testing.assert_array_equal(rows, whole, err_msg=f"{top_k} {top_p} as data")


def test_of_equal_entries_the_first_are_marked():
    logits = jnp.asarray([[0.0, 1.0, 1.0, 1.0, 1.0, -0.0]])
    assert most_probable(logits, 2, None).tolist() == [[False, True, True, False, False, False]]
    # Four have 0.2 ... of 1 each, of e / (4 e + 2).
    share = float(np.e / (4 * np.e + 2))
    for count in (1, 2, 3, 4):
        found = most_probable(logits, None, (count - 0.5) * share).tolist()
        assert found == [[False] + [i < count for i in range(4)] + [False]]
    assert most_probable(logits, 5, 0.99999).tolist() == [[True, True, True, True, True, False]]
    assert most_probable(logits, None, 1.0).tolist() == [[True] * 6]
