"""Building policies: what is refused, what is the same, what a budget comes to."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies
from kvjax.errors import PolicyError
from kvjax.policies import POLICIES, Fraction, PerLayer, Slots, accepts, by_name
from kvjax.policies.budget import as_budget
from tests import examples, layers
from tests.conftest import ROOT

# SnapKV's window and PyramidKV's layers have rules of their own; see test_compositions.
BUDGETED = [name for name in POLICIES if "budget" in accepts(name) and "window" not in accepts(name)]
NAN = float("nan")


#: With a budget of one slot, where that is possible.
SMALL = {
    "sinks": 0, "stride": 3, "block": 1, "columns": 0,
}  # fmt: skip


def example(name: str, budget):
    return examples.policy(name, budget, **{key: SMALL[key] for key in accepts(name) & set(SMALL)})


@pytest.mark.sampled(176)
@pytest.mark.parametrize(
    "budget",
    [
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        NAN,
        float("inf"),
        True,
        "8",
        2**31,
        {"a": 1},
        (4, 0),
        (4, 2.0),
        (4, "x"),
        (4, True),
        (4, None),
    ],
)
@pytest.mark.parametrize("name", BUDGETED)
def test_budgets_that_make_no_sense(name, budget):
    with pytest.raises(PolicyError, match="budget"):
        example(name, budget)


@pytest.mark.parametrize("budget", [1, 1.0, 1e-9, (4, 8), [4, 0.5], np.int64(4), np.float32(0.25)])
@pytest.mark.parametrize("name", BUDGETED)
def test_budgets_that_make_sense(name, budget):
    assert example(name, budget).name == name


def test_an_array_of_budgets_is_a_tuple_of_them():
    assert policies.h2o(budget=np.array([4, 8])) == policies.h2o(budget=(4, 8))
    assert policies.h2o(budget=np.array([4, 8])).budget == PerLayer((Slots(4), Slots(8)))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: policies.window(budget=3, sinks=4), "at least 4"),
        (lambda: policies.window(budget=3), "protects 4"),
        (lambda: policies.h2o(budget=8, recent=9), "at least 9"),
        (lambda: policies.h2o(budget=(9, 8), recent=9), "budget of 8"),
        (lambda: policies.window(budget=8, sinks=-1), "sinks"),
        (lambda: policies.window(budget=8, sinks=2.0), "sinks"),
        (lambda: policies.h2o(budget=8, recent=-1), "recent"),
        (lambda: policies.h2o(budget=8, recent=True), "recent"),
        (lambda: policies.h2o(budget=8, positions="rank"), "'original' or 'cache'"),
        (lambda: policies.h2o(budget=8, group_reduce="sum"), "'mean' or 'max'"),
        (lambda: policies.h2o(budgt=8), "it accepts budget, recent"),
        (lambda: policies.h2o(), "budget"),
        (lambda: by_name("h3o", budget=8), "full, gkv, h2o, .*, window"),
        (lambda: accepts("h3o"), "fixed, full, gkv, h2o"),
        (lambda: by_name("full", budget=8), "accepts positions"),
        (
            lambda: policies.evict(importance=policies.Importance(needs={"mess"}, score=policies.mass.score), budget=8),
            "mess.*mass",
        ),
    ],
)
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(PolicyError, match=match) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: policies.window(budget=4, sinks=4),
        lambda: policies.h2o(budget=8, recent=8),
        lambda: policies.h2o(budget=1),
        lambda: policies.h2o(budget=0.1, recent=9),  # refused when the lengths are known
    ],
)
def test_legal_to_the_last_slot(build):
    build()


@pytest.mark.parametrize("name", BUDGETED)
def test_equal_arguments_are_one_policy(name):
    for one, two in ((8, np.int32(8)), ((8, 0.5), [8, 0.5])):
        assert example(name, one) == example(name, two)
        assert hash(example(name, one)) == hash(example(name, two))
    assert example(name, 8) != example(name, 9)


ONE_LAYER = layers.Case(layers.random_streams([0, 1], 24), prompts=np.array([20, 9]), ends=np.array([24, 13]))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", BUDGETED)
def test_equal_policies_are_traced_once(name):
    """Groups are static arguments: one that is not equal would compile everything again."""
    traced = []

    @jax.jit(static_argnames="group")
    def program(x, *, group):
        traced.append(group)
        return x

    # A fraction, or another number of slots whose arrays are as long, is not another program either.
    for budget, case in ((8, ONE_LAYER), (np.int32(8), ONE_LAYER), (0.4, ONE_LAYER), (8, ONE_LAYER.rows(1, 0))):
        layout = layers.lowered(example(name, budget), case).layout
        for (group,) in (*layout.prompt, *layout.decode):
            program(jnp.zeros(()), group=group)
    assert len(traced) == 2, "one while the prompt goes in, one for decoding"
    (other,) = layers.lowered(example(name, 9), ONE_LAYER).layout.decode[0]
    assert other.slots != traced[1].slots
    assert other.policy == traced[1].policy


@pytest.mark.parametrize(("slot", "fraction"), [(1, 1.0), ((1, 1), (1.0, 1.0)), ((4, 1), (4, 1.0))])
@pytest.mark.parametrize("name", BUDGETED)
def test_one_slot_is_not_the_whole_prompt(name, slot, fraction):
    def expected(budget):
        if isinstance(budget, tuple):
            return PerLayer(tuple(map(expected, budget)))
        return Slots(budget) if isinstance(budget, int) else Fraction(budget)

    for first, second in ((slot, fraction), (fraction, slot)):
        assert [example(name, budget).budget for budget in (first, second)] == [expected(first), expected(second)]
        assert example(name, first) != example(name, second)


def test_named_ones_are_made_of_the_others():
    h2o, heavy = policies.h2o(budget=8, recent=0), policies.heavy_only(budget=8)
    assert (heavy.needs, heavy.protects(8)) == (h2o.needs, 0)
    streaming, ranked = policies.streaming_llm(budget=8), policies.window(budget=8, positions="cache")
    assert (streaming.positions, streaming.protects(8), streaming.importance) == ("cache", 4, ranked.importance)
    assert not policies.local_only(budget=8).needs and not policies.full().needs
    assert policies.h2o(budget=9).protects(9) == 4 and policies.full().budget is None


@pytest.mark.parametrize(
    ("budget", "prompt", "expected"),
    [(5, 3, 5), (1, 100, 1), (1.0, 100, 100), (0.29, 100, 29), (0.1, 19, 1), (0.01, 5, 1), (0.3, 10, 3), (1 / 3, 9, 3)],
)
def test_a_budget_in_slots(budget, prompt, expected):
    assert as_budget(budget).slots(prompt, 2) == (expected, expected)


def test_a_page_names_them_all():
    named = set(re.findall(r"\w+", (ROOT / "docs" / "policies.md").read_text()))
    for table in (POLICIES, policies.COMBINATORS, policies.HEAD_PLANS, policies.MERGES):
        assert set(table) <= named
