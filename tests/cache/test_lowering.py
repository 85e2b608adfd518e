"""How many slots rows keep and layers allocate."""

import numpy as np
import pytest

from kvjax import policies
from kvjax.allocation import allocate
from kvjax.errors import PolicyError

PROMPTS = np.array([100, 7, 40])


def test_rows_have_their_own_fractions():
    got = allocate(policies.h2o(budget=0.29), PROMPTS, 150, 2)
    for row in got.budget:
        np.testing.assert_array_equal(row, [29, 2, 11])
        assert row.dtype == np.int32
    assert got.capacity == (30, 30)


def test_layers_have_their_own_budgets():
    got = allocate(policies.h2o(budget=(4, 0.5)), PROMPTS, 150, 2, block=16)
    np.testing.assert_array_equal(got.budget, [[4, 4, 4], [50, 3, 20]])
    assert got.capacity == (5, 51) and got.block_capacity == (20, 66)


@pytest.mark.parametrize(
    ("budget", "total", "capacity"), [(149, 150, 150), (150, 150, 150), (10_000, 150, 150), (148, 150, 149)]
)
def test_no_layer_holds_more_than_there_will_be(budget, total, capacity):
    got = allocate(policies.local_only(budget=budget), PROMPTS, total, 1, block=64)
    assert got.capacity == (capacity,) and got.block_capacity == (150,)


def test_everything():
    assert allocate(policies.full(), PROMPTS, 150, 3, block=8) == ((), (), (150,) * 3, (150,) * 3)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (policies.h2o(budget=(4, 4)), "2 budgets were given for a model of 3 layers"),
        (policies.window(budget=0.3), "protects 4 slots, more than its budget of 2"),
        (policies.h2o(budget=(0.9, 0.9, 0.05), recent=5), "protects 5 slots, more than its budget of 1"),
    ],
)
def test_refused_when_the_lengths_are_known(policy, match):
    with pytest.raises(PolicyError, match=match):
        allocate(policy, PROMPTS, 150, 3)


def test_half_of_a_single_slot_protects_nothing():
    np.testing.assert_array_equal(allocate(policies.h2o(budget=0.5), np.array([1]), 5, 1).budget, [[1]])
