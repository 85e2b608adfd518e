"""What every selection keeps: values, tables, errors, refusals."""

import pickle

import jax
import jax.numpy as jnp
import pytest

from kvjax import policies
from kvjax import selection as package
from kvjax.errors import PolicyError, SelectionError
from kvjax.policies.budget import Fraction, Given, PerLayer, Slots
from kvjax.selection import (
    SELECTIONS,
    Allowed,
    Hindsight,
    Local,
    Optimal,
    Quest,
    ReadAll,
    accepts,
    by_name,
    everything,
    optimal,
    quest,
)
from kvjax.storage import int8
from kvjax.storage.base import Storage

NAMES = {**vars(package), "Slots": Slots, "Fraction": Fraction, "Given": Given, "PerLayer": PerLayer}
ARGUMENTS = {
    "everything": {}, "optimal": {"n": 5}, "quest": {"page": 8, "budget": 64}, "infinigen": {"alpha": 3, "cap": 9},
    "lserve": {"page": 8, "sub": 4, "budget": 64}, "retrieval": {"budget": 64}, "tokenselect": {"k": 6},
    "shadowkv": {"budget": 64},
}  # fmt: skip
VARIANTS = (Allowed(8), Allowed(0.2, 3), Hindsight((4, 0.5)), Local(8, 0))
ALL = (*(by_name(name, **ARGUMENTS[name]) for name in SELECTIONS), *VARIANTS, *(each.traced() for each in VARIANTS))


@pytest.mark.parametrize("selection", ALL, ids=repr)
def test_values(selection):
    assert eval(repr(selection), NAMES) == selection
    assert pickle.loads(pickle.dumps(selection)) == selection
    assert hash(pickle.loads(pickle.dumps(selection))) == hash(selection)
    assert isinstance(selection.name, str)
    with pytest.raises(AttributeError):
        selection.first_layer = 3


def test_the_table_names_its_factories():
    for name, function in SELECTIONS.items():
        assert function.__name__ == name and by_name(name, **ARGUMENTS[name]).name == name
        assert accepts(name) >= set(ARGUMENTS[name]) and ("Args:" in function.__doc__) == bool(accepts(name))


def test_budgets_are_data():
    """Selections with other numbers of the same kind are one program."""
    assert Allowed(8).traced() == Allowed(0.3).traced() != Hindsight(8).traced()
    assert Local(9, 4).traced() != Local(9).traced()
    assert optimal(4).traced() == optimal(4) and quest(8, 64).budget is None
    assert quest(16, 512) == quest(page=16, budget=520) == Quest(16, 31)


def test_widths():
    assert everything().reads_all and not optimal(1).reads_all
    assert (optimal(7).most, optimal(7).width(100), optimal(7).width(8)) == (7, 8, None)
    assert (quest(16, 64).most, quest(16, 64).width(65), quest(16, 64).width(64)) == (48, 64, None)
    assert quest(16, 5).pages == 2 and Allowed(8).width(1000) is None
    # Layers: before the first, and with windows that a choice covers.
    made = quest(16, 64)
    assert [made.dense(layer) for layer in range(4)] == [True, True, False, False]
    assert made.dense(2, window=48) and not made.dense(2, window=49) and everything().dense(9)
    assert not Allowed(8).dense(0, window=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimal(0), "selection optimal: n must be a whole number of at least 1; got 0"),
        (lambda: optimal(2.5), "n must be"),
        (lambda: optimal(), r"optimal\(\): missing a required argument: 'n'; it accepts n, first_layer"),
        (lambda: optimal(3, first_layer=-1), "first_layer must be"),
        (lambda: Optimal(0), "n must be"),
        (lambda: quest(0, 8), "page must be"),
        (lambda: quest(8), "selection quest: budget must be a whole number of at least 1; got None"),
        (lambda: quest(8, 0), "budget must be"),
        (lambda: quest(8, 64, first_layer=None), "first_layer must be"),
        (lambda: Quest(8, 1), "pages must be a whole number of at least 2"),
        (lambda: everything(3), r"everything\(\): too many positional arguments; it accepts no arguments"),
        (lambda: by_name("quests", page=3), "unknown selection 'quests'; known selections: everything, optimal, quest"),
        (lambda: by_name("quest", pages=3), "it accepts page, budget, first_layer"),
        (lambda: accepts("x"), "unknown selection"),
        (lambda: Allowed(0), r"selection h2o\[masked\]: budget 0 is out of range"),
        (lambda: Allowed(None), r"selection h2o\[masked\]: budget=None hides nothing"),
        (lambda: Hindsight(8, 9), "recent=9 is more than its budget of 8 slots; raise the budget to at least 9"),
        (lambda: Local((9, 3), 4), "recent=4 is more than its budget of 3"),
        (lambda: Local(8, -1), "recent must be"),
        (lambda: Allowed(0.5, 9).check_slots(8), "recent=9 is more"),
        (lambda: Allowed((8, 0)), r"selection h2o\[masked\]: budget 0 is out of range"),
        (lambda: Local([]), r"selection h2o\[local\]: budget \(\) is not a sequence with one budget per layer"),
        (lambda: optimal(4).refuses(policies.Policy()), "cannot be combined with a selection"),
    ],
)
def test_errors(make, message):
    with pytest.raises(SelectionError, match=message) as caught:
        make()
    assert isinstance(caught.value, PolicyError) and "\n" not in str(caught.value)


KEEPS = {
    "full": policies.full(),
    "snapkv": policies.snapkv(budget=64),
    "duo": policies.duo_attention([[1, 0]], sinks=1, recent=4),
    "turned": policies.split_heads([[1, 0]], policies.h2o(8), policies.full()),
}
FREES = {
    "h2o": policies.h2o(8),
    "after": policies.after_prefill(policies.snapkv(budget=64), then=policies.h2o(8)),
    "split": policies.split_heads([[1, 0]], policies.h2o(8), policies.window(8)),
}
MERGES = {"d2o": policies.h2o(8, merge=policies.d2o())}


@pytest.mark.parametrize("name", [*KEEPS, *FREES, *MERGES])
def test_policies(name):
    policy = (KEEPS | FREES | MERGES)[name]
    assert everything().refuses(policy) is None
    assert bool(quest(8, 64).refuses(policy)) == (name not in KEEPS)
    assert bool(optimal(8).refuses(policy)) == (name in MERGES)
    for variant in VARIANTS:
        assert bool(variant.refuses(policy)) == (name != "full")


@pytest.mark.parametrize("selection", ALL, ids=repr)
def test_positions_and_storages(selection):
    coded = int8()
    delayed = Storage(key=coded.key, value=coded.value, residual=8)
    pages = isinstance(selection, Quest)
    assert selection.refuses(policies.full(), coded) is None
    assert bool(selection.refuses(policies.full(), coded, positions="cache")) == pages
    assert bool(selection.refuses(policies.full(), delayed)) == pages


def test_reasons_say_what_would_be_valid():
    assert "use full() or a prompt compressor" in quest(8, 64).refuses(policies.h2o(8))
    assert "use positions='original'" in quest(8, 64).refuses(policies.full(), positions="cache")
    assert "use a policy without merge" in optimal(8).refuses(MERGES["d2o"])
    assert "use full()" in Allowed(8).refuses(FREES["after"])


@pytest.mark.parametrize("selection", ALL, ids=repr)
def test_indices_are_by_row_and_head(selection):
    index = jax.eval_shape(lambda: selection.init((3, 2, 40), 8, jnp.bfloat16))
    assert all(leaf.shape[:2] == (3, 2) for leaf in jax.tree.leaves(index))
    assert selection.needs == frozenset() or {each.name for each in selection.needs} == {"mass"}
    assert isinstance(selection, ReadAll) == selection.reads_all
