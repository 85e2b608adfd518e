"""Policies are values: equal by their fields, hashable, picklable, and made again by evaluating their `repr`."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.selection.h2o
from kvjax import policies
from kvjax.errors import PolicyError
from kvjax.policies import MERGES, POLICIES, Evict, Policy, accepts
from kvjax.policies.keys import rounded
from tests import examples

NAMES = vars(policies) | vars(kvjax.selection.h2o)
NAN = float("nan")


BUDGETED = [name for name in POLICIES if "budget" in accepts(name)]
VALUES: dict[str, object] = {
    **{name: examples.policy(name, 8) for name in POLICIES},
    **{f"{name} of a fraction": examples.policy(name, 0.5) for name in BUDGETED},
    **{f"{name} per layer": examples.policy(name, (8, 0.5)) for name in BUDGETED if name != "pyramidkv"},
    **examples.combined(8),
    **examples.planned(8),
    **{f"h2o[{variant}]": policies.h2o(9, variant=variant) for variant in ("ring", "masked", "global", "local")},
    **{name: make() for name, make in MERGES.items()},
    **{f"h2o with {name}": policies.h2o(8, merge=make()) for name, make in MERGES.items()},
    "counter that never saturates": policies.counter(8, saturate=None),
    "lru with sinks": policies.lru(8, recent=2, sinks=1),
    "a fraction, but some slots": policies.h2o(policies.Fraction(0.5, min_slots=8)),
    "a fraction of the text": policies.fifo(policies.TextFraction(0.5)),
    "pages of some layers": policies.from_layer(policies.by_page(policies.h2o(8), page=4), first=2),
    "tova of single heads": policies.tova(8, share_heads=False),
    "scissorhands of a history": policies.scissorhands(8, history=20),
    "h2o of numpy arguments": policies.h2o_decay(np.int64(8), recent=np.int32(3), gamma=np.float64(0.9)),
    "a union of scopes": policies.evict(
        importance=policies.mass, scope=policies.Best(policies.roco(0.5), 0.25) | policies.protect_first(1), budget=0.5
    ),
    "the largest values": policies.evict(importance=policies.mass, scope=policies.LargestValues(2), budget=8),
    "the prompt": policies.phases(policies.full(), policies.random(8)).decode,
    "critical after the prompt": policies.phases(policies.full(), policies.critical(policies.h2o(8))).decode,
    "nested": policies.with_heavy_hitters(policies.value_norm(policies.h2o(0.5, recent=1)), fraction=0.5),
}


def test_a_value_that_another_version_pickled_is_refused():
    """`Fraction.min_slots` was once `least`: a default in its place would be another budget."""
    old = policies.Fraction(0.2, min_slots=8)
    state = dict(vars(old))
    state["least"] = state.pop("min_slots")
    with pytest.raises(PolicyError, match=r"Fraction .* has fraction, least and lacks min_slots"):
        old.__setstate__(state)


@pytest.mark.parametrize("name", VALUES)
def test_made_again_from_its_repr_and_from_its_pickle(name):
    value = VALUES[name]
    for again in (eval(repr(value), dict(NAMES)), pickle.loads(pickle.dumps(value))):
        assert again == value
        assert hash(again) == hash(value)
        assert repr(again) == repr(value)


@pytest.mark.parametrize("name", [name for name, value in VALUES.items() if isinstance(value, Policy)])
def test_the_name_is_not_part_of_what_is_compared(name):
    value = VALUES[name]
    renamed = dataclasses.replace(value, name="renamed")
    assert renamed == value
    assert hash(renamed) == hash(value)
    assert renamed.name == "renamed"
    assert value.name != "renamed"


@pytest.mark.parametrize("name", VALUES)
def test_no_two_are_equal(name):
    same = [other for other, value in VALUES.items() if value == VALUES[name]]
    assert same == [name]


@pytest.mark.parametrize("name", [name for name in BUDGETED if not accepts(name) & {"window", "sinks", "block"}])
def test_one_slot_is_not_the_whole_prompt(name):
    make = lambda budget: examples.policy(name, budget)  # noqa: E731
    assert make(1) != make(1.0)
    assert make((1, 8)) != make((1.0, 8))


@pytest.mark.parametrize("name", BUDGETED)
def test_numpy_budgets_are_python_ones(name):
    assert examples.policy(name, np.int32(8)) == examples.policy(name, 8)
    assert examples.policy(name, np.float32(0.5)) == examples.policy(name, np.array(0.5)) == examples.policy(name, 0.5)
    if name != "pyramidkv":
        assert (
            examples.policy(name, np.array([8, 9]))
            == examples.policy(name, [8, np.int64(9)])
            == examples.policy(name, (8, 9))
        )


@pytest.mark.parametrize("name", ["with_heavy_hitters", "value_norm", "adakv", *BUDGETED])
def test_a_program_depends_on_no_number_of_slots(name):
    made = [examples.combined(budget).get(name) or examples.policy(name, budget) for budget in (8, 9, 0.5)]
    traced = [each.traced() for each in made]
    assert traced[0] == traced[1] == traced[2]
    assert len(set(map(hash, traced))) == 1
    assert made[0] != made[1]
    assert "count=8" not in repr(traced[0])


def test_budgets_by_hand_are_those_of_numbers():
    assert policies.Slots(np.int32(8)) == policies.h2o(8).budget
    assert policies.Fraction(np.float32(0.5)) == policies.Fraction(0.5)
    assert policies.PerLayer([8, 0.5]) == policies.h2o((8, 0.5)).budget
    assert policies.Pyramid(8, 2, 20) == policies.pyramidkv(8, window=2).budget
    for budget in (8, 0.5):
        traced = policies.adakv(examples.policy("snapkv", budget)).traced()
        assert traced.budget == policies.Shared(policies.Given(), 0.2)


def test_a_head_table_is_a_value():
    tables = (examples.HALF, [[1, 0], [0, 1]], np.eye(2, dtype=bool), jnp.eye(2, dtype=int))
    split = [policies.split_heads(table, policies.h2o(8), policies.window(8)) for table in tables]
    assert len(set(split)) == 1
    assert split[0].heads == examples.HALF
    assert split[0].members(True) == ((0,), (1,))
    assert split[0].members(False) == ((1,), (0,))


def test_what_a_combination_needs_and_reads():
    both = policies.after_prefill(examples.policy("snapkv", 8), then=policies.h2o(8))
    assert {s.name for s in both.needs} == {"tail[2]", "mass"}
    assert both.budget == policies.Slots(8)
    assert policies.value_norm(policies.knorm(8)).reads == {"key", "value"}
    assert policies.with_heavy_hitters(policies.value_norm(policies.h2o(8, recent=1))).reads == {"value"}
    assert policies.keydiff(8).reads == {"key"}
    assert policies.roco(8).reads == frozenset()


def test_a_union_of_scopes():
    first, newest, varying = (
        policies.protect_first(2),
        policies.protect_newest(8),
        policies.protect_varying(12, guard=10),
    )
    both = first | newest | varying
    assert both == policies.protect_any(first, newest, policies.unprotected, first | varying)
    assert both.needs == {"mass", "mass_sq", "count"}
    # The ten newest are protected twice; two of the varying ones and the first may be others.
    assert (both.newest(64), both.count(64)) == (10, 2 + 10 + 2)
    assert policies.protect_any(newest, policies.unprotected) == newest
    assert policies.unprotected | policies.unprotected == policies.unprotected
    assert (policies.protect_newest() | first).count(64) == 34
    with pytest.raises(PolicyError, match="protects 14 slots, more than its budget of 13"):
        policies.evict(importance=policies.mass, scope=both, budget=13)


class Misspelt(policies.Importance):
    needs = frozenset()
    reads = frozenset({"keys"})


BUDGETS_BY_HAND = (
    lambda: policies.Slots(0),
    lambda: policies.Slots(True),
    lambda: policies.Slots(2.5),
    lambda: policies.Slots(2**31),
    lambda: policies.Fraction(7),
    lambda: policies.Fraction(0),
    lambda: policies.Fraction(NAN),
    lambda: policies.Fraction(0.5, min_slots=0),
    lambda: policies.Fraction("0.5"),
    lambda: policies.TextFraction(1.5),
    lambda: policies.TextFraction(0),
    lambda: policies.TextFraction(8),
    lambda: policies.FromLayer(None, 2),
    lambda: policies.FromLayer(policies.FromLayer(8, 1), 2),
    lambda: policies.fifo(0),
    lambda: policies.counter(-3),
    lambda: policies.lru(policies.TextFraction(True)),
    lambda: policies.PerLayer(()),
    lambda: policies.PerLayer(8),
    lambda: policies.PerLayer((8, (8, 8))),
    lambda: policies.h2o([]),
    lambda: policies.Pyramid("8", 2, 20),
    lambda: policies.h2o(policies.Given()),
    lambda: policies.evict(importance=policies.mass, budget=policies.Given()),
    lambda: policies.compress(importance=policies.mass, budget=policies.Shared(policies.Given(), 0.2)),
)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: policies.Pyramid(8, 0, 20), "window must be a whole number of at least 1; got 0"),
        (lambda: policies.Pyramid(8, 2, 0.5), "beta must be a whole number of at least 1; got 0.5"),
        (lambda: policies.Shared(policies.Slots(8), 2), "safeguard must be a number from 0 to 1; got 2"),
        (lambda: policies.Shared(policies.Slots(8), 0.2, 0.9), "max_share must be a number from 1 to 1000; got 0.9"),
        (lambda: policies.Shared(None, 0.2), "average=None cannot be shared by heads; give slots or a fraction"),
        (lambda: policies.Shared(policies.Shared(8, 0.2), 0.2), "cannot be shared by heads"),
        (lambda: policies.value_norm(examples.combined(8)["after_prefill"]), "its phases have policies of their own"),
        (
            lambda: policies.after_prefill(examples.combined(8)["after_prefill"], then=policies.h2o(8)),
            "combined already",
        ),
        (lambda: policies.after_prefill(examples.planned(8)["razor_attention"], then=policies.h2o(8)), "at every step"),
        (lambda: policies.after_prefill(policies.knorm(8), then=policies.h2o(8, variant="local")), "hides slots"),
        (lambda: policies.split_heads(examples.HALF, policies.h2o(8), "window"), "'window' is not a policy"),
        (
            lambda: policies.split_heads(examples.HALF, examples.combined(8)["after_prefill"], policies.full()),
            "step by step",
        ),
        (lambda: policies.adakv(examples.combined(8)["adakv"]), "combined already"),
        (lambda: policies.FromLayer(8, -1), "first must be a whole number of at least 0; got -1"),
        (
            lambda: policies.from_layer(policies.full(), first=1),
            r"from_layer\(full\): give a single policy that evicts",
        ),
        (lambda: policies.from_layer("h2o", first=1), r"from_layer\('h2o'\): give a single policy that evicts"),
        (
            lambda: policies.from_layer(examples.combined(8)["after_prefill"], first=1),
            "give a single policy that evicts",
        ),
        (lambda: policies.from_layer(examples.combined(8)["from_layer"], first=2), "cannot be limited to some layers"),
        (lambda: policies.by_page(policies.full(), page=4), r"by_page\(full\): give a single policy that evicts"),
        (lambda: policies.by_page(policies.h2o(8), page=0), "page must be a whole number of at least 1"),
        (lambda: policies.by_page(policies.h2o(8), page=5), "less than two pages of 5; raise the budget"),
        (lambda: policies.by_page(policies.h2o(8, merge=policies.d2o()), page=2), "without a merge"),
        (lambda: policies.by_page(examples.policy("snapkv", 8), page=2), "evicted at every step"),
        (lambda: policies.counter(8, saturate=0), "saturate must be a whole number of at least 1"),
        (lambda: policies.counter(8, recent=9), "protects 9 slots, more than its budget of 8|at least 9"),
        (lambda: policies.lru(8, sinks=5), "at least 9|protects 9"),
        (lambda: policies.lru(8, sinks=-1), "sinks must be"),
        (lambda: policies.pyramidkv(8, window=8), "^policy pyramidkv: window=8 needs a larger budget than 8"),
        (
            lambda: policies.pyramidkv(8, window=2, beta=0),
            "^policy pyramidkv: beta must be a whole number",
        ),
        (lambda: policies.h2o(None, variant="masked"), "^policy h2o: budget=None is not valid with variant='masked'"),
        (lambda: policies.h2o(8, variant="local", merge=policies.d2o()), r"^policy h2o: merge=D2O\(beta=0.7\) is not"),
        (lambda: policies.h2o(8, variant=1), "^policy h2o: variant=1 is not valid; use 'drop', .*'global' or 'local'"),
        (lambda: policies.d2o(betta=1), "it accepts beta"),
        (lambda: policies.anchors(3), "it accepts no arguments"),
        (lambda: policies.WithSelection(3, 4), "keep=3 does not keep every token; give full"),
        (lambda: policies.WithSelection(policies.h2o(8), kvjax.selection.optimal(4)), "does not keep every token"),
        (lambda: policies.WithSelection(policies.full(), 4), "selection=4 is not a selection; give one such as"),
        (lambda: policies.Best(3, 0.5), "policy=3 is not a policy of `evict`"),
        (lambda: policies.Best(policies.h2o(8), 2), "fraction must be a number from 0 to 1; got 2"),
        (lambda: policies.TimesValueNorm(3), "importance=3 is not an Importance"),
        (lambda: policies.TimesValueNorm(policies.keep), r"importance=Keep\(\) only orders the slots"),
        (lambda: policies.Importance(needs=set(), score=3), "Importance: score=3 must be a function"),
        (lambda: policies.Importance(needs=3, score=len), "Importance: needs=3 is not a set of statistics"),
        (lambda: policies.Importance(needs=set(), score=len, reads=3), "reads=3 is not valid; give a set"),
        (lambda: policies.evict(importance=policies.Importance(needs={3}, score=len), budget=8), "unknown statistic 3"),
        (lambda: policies.Importance(needs=set(), score=len, reads="key"), "reads='key' is not valid; give a set"),
        (lambda: policies.protect_any(), "Union: give at least one scope"),
        (lambda: policies.protect_any(policies.protect_first(2), [3]), r"Union: \[3\] is not a Scope"),
        (lambda: policies.ring | policies.protect_first(2), "cannot be part of a union"),
        (lambda: policies.Scope(needs=set(), protected=3, count=len), "Scope: protected=3 must be a function"),
        (lambda: policies.Scope(needs=set(), protected=len, count=3), "Scope: count=3 must be a function"),
        (
            lambda: policies.evict(importance=Misspelt(), budget=8),
            "policy evict: importance: reads=.*keys.* not",
        ),
        *((make, "budget") for make in BUDGETS_BY_HAND),
    ],
)
def test_refused_with_the_reason(make, match):
    with pytest.raises(PolicyError, match=match) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_importance_of_functions_is_a_value_too():
    one, two = (policies.Importance(needs={"mass"}, score=jnp.sin) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one.reads == {"key", "value"}
    assert isinstance(policies.evict(importance=one, budget=8), Evict)


def test_norms_are_rounded_to_twelve_bits():
    """To the nearest, and from halfway to the even neighbour, as NumPy's `rint` of a 12-bit significand."""
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F000000, 4096, np.uint32)
    halfway = (bits & np.uint32(0xFFFFF000)) | np.uint32(0x800)
    powers = np.uint32(0x3F800000) + np.array([-1, 0, 1], np.int32).astype(np.uint32)  # carries into the exponent
    x = np.concatenate([bits, halfway, powers]).view(np.float32)
    significand, exponent = np.frexp(x.astype(np.float64))
    expected = np.ldexp(np.rint(significand * 2**12), exponent - 12)
    np.testing.assert_array_equal(np.asarray(jax.jit(rounded)(x), np.float64), expected)
    np.testing.assert_array_equal(rounded(jnp.array([0.0, jnp.inf])), [0.0, np.inf])


def test_short_prompts_keep_the_least_number_of_slots():
    budget = policies.Fraction(0.2, min_slots=8)
    assert [budget.slots(n, 2) for n in (1, 44, 45, 100)] == [(8, 8), (8, 8), (9, 9), (20, 20)]
    assert budget.value == policies.Fraction(0.2).value == 0.2
