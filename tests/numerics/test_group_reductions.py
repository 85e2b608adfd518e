"""Reductions over the query heads of a KV head, in an operation for each head or over an axis."""

import numpy as np
import pytest

from kvjax.numerics.group_reductions import LARGE_GROUP, max_over_group, mean_over_group


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("group", [1, 3, LARGE_GROUP + 1])
def test_heads_are_reduced(group, queries):
    x = np.random.default_rng(group).random((2, 2, group, queries, 5), np.float32)
    np.testing.assert_allclose(mean_over_group(x), x.mean(axis=2, dtype=np.float64), rtol=1e-6)
    np.testing.assert_array_equal(max_over_group(x), x.max(axis=2))
