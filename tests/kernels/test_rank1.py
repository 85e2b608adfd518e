"""A policy's own code, traced for one head and done again on a line of its slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import fused
from kvjax.kernels.lines import on_lines
from tests.kernels.steps import FUSED, build

SLOTS = 40


@pytest.mark.parametrize("budget", [12, 26])
@pytest.mark.parametrize("name", FUSED)
def test_a_line_settles_as_a_head_does(name, budget):
    policy = build(name, budget)
    settle = functools.partial(fused.settle, policy, 0, None)
    rng = np.random.default_rng(budget)
    position = np.where(np.arange(SLOTS) < 27, rng.permutation(60)[:SLOTS], -1)
    # Ties, as of slots that were never attended
    numbers = [jnp.asarray(np.maximum(rng.normal(size=SLOTS), 0.0), jnp.float32) for _ in range(8)]
    stats = {s.name: numbers.pop() for s in policy.needs}
    columns = {transform: numbers.pop() for transform in {s.transform for s in policy.needs}}
    arguments = stats, jnp.asarray(position, jnp.int32), columns, jnp.int32(60), jnp.int32(budget)

    got = on_lines(settle, SLOTS)(*arguments)
    as_head = jax.tree.map(lambda x: x[None, None] if x.ndim else x[None], arguments)
    expected = jax.tree.map(lambda x: x[0, 0], settle(*as_head))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert budget > 20 or (got[1] >= 0).sum() < 27, "somebody went"


def test_what_has_no_form_on_lines_says_so():
    with pytest.raises(NotImplementedError, match="sort has no form on the slots of one head"):
        on_lines(jnp.sort, SLOTS)(jnp.zeros(SLOTS))
