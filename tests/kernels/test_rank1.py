"""A policy's own code, traced for one head and evaluated on a line of its slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.rank1 import on_lines
from kvjax.numerics.statistics import MASS
from tests.kernels.traces import TRACED, every_primitive, policy, trace_of

SLOTS = 40


def arguments(statistics, budget):
    """Statistics, positions, columns, newest and budget of a head; with ties, as of slots that were never attended."""
    rng = np.random.default_rng(budget)
    position = np.where(np.arange(SLOTS) < 27, rng.permutation(60)[:SLOTS], -1)
    numbers = [jnp.asarray(np.maximum(rng.normal(size=SLOTS), 0.0), jnp.float32) for _ in range(8)]
    stats = {s.name: numbers.pop() for s in statistics}
    columns = {transform: numbers.pop() for transform in {s.transform for s in statistics}}
    return stats, jnp.asarray(position, jnp.int32), columns, jnp.int32(60), jnp.int32(budget)


def both(observe_and_evict, given):
    """The results on a line, and on an array of one head."""
    as_head = jax.tree.map(lambda x: x[None, None] if x.ndim else x[None], given)
    # As programs: each operation by itself would be one.
    run = jax.jit(lambda given, as_head: (on_lines(observe_and_evict, SLOTS)(*given), observe_and_evict(*as_head)))
    got, expected = run(given, as_head)
    return got, jax.tree.map(lambda x: np.asarray(x)[0, 0], expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("budget", [12, 26])
@pytest.mark.parametrize("name", [name for name, traced in TRACED.items() if traced])
def test_a_line_settles_as_a_head_does(name, budget):
    own = policy(name, budget)
    got, expected = both(trace_of(own), given := arguments(own.needs, budget))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    live = (np.asarray(given[1]) >= 0).sum()
    assert name == "full" or budget > 20 or (got[1] >= 0).sum() < live, "a slot was evicted"


def test_every_primitive_on_a_line_is_that_of_a_head():
    got, expected = both(every_primitive, arguments((MASS,), 12))
    jax.tree.map(np.testing.assert_array_equal, got[1], expected[1])
    np.testing.assert_allclose(got[0]["mass"], expected[0]["mass"], rtol=1e-6)


def test_what_has_no_form_on_lines_says_so():
    with pytest.raises(NotImplementedError, match="sort has no form on the slots of one head"):
        on_lines(jnp.sort, SLOTS)(jnp.zeros(SLOTS))
