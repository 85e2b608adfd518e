"""The common properties of all selections: values, tables, errors, refusals."""

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
    Alisa,
    Allowed,
    Codebook,
    Hindsight,
    InfiniGen,
    Local,
    Optimal,
    Pages,
    Quest,
    ReadAll,
    ReKV,
    ShadowKV,
    SparF,
    TokenSelect,
    a2ats,
    accepts,
    alisa,
    by_name,
    everything,
    infinigen,
    lserve,
    optimal,
    quest,
    rekv,
    retrieval,
    shadowkv,
    sparf,
    tokenselect,
)
from kvjax.storage import int8
from kvjax.storage.base import Storage
from tests import examples

NAMES = {**vars(package), "Slots": Slots, "Fraction": Fraction, "Given": Given, "PerLayer": PerLayer}
VARIANTS = (Allowed(8), Allowed(0.2, 3), Hindsight((4, 0.5)), Local(8, 0))
ALL = (*(examples.chosen(name) for name in SELECTIONS), *VARIANTS, *(each.traced() for each in VARIANTS))


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
        assert function.__name__ == name and examples.chosen(name).name == name
        assert accepts(name) >= set(examples.SELECTIONS[name]) and ("Args:" in function.__doc__) == bool(accepts(name))


def test_budgets_are_data():
    """Selections with other numbers of the same kind are one program."""
    assert Allowed(8).traced() == Allowed(0.3).traced() != Hindsight(8).traced()
    assert Local(9, 4).traced() != Local(9).traced()
    assert optimal(4).traced() == optimal(4) and quest(8, 64).budget is None
    assert quest(16, 512) == quest(page=16, budget=520) == Quest(page=16, pages=31)
    assert infinigen(3) == infinigen(3.0) == InfiniGen(3) != infinigen(3, cap=1)
    assert sparf(2, 3) == SparF(2, 3) and rekv(4, 9, sinks=5) == ReKV(page=4, pages=2, sinks=2, recent=3, first_layer=0)
    assert shadowkv(5, 4, 12) == ShadowKV(5, 4, 3) and retrieval(budget=64).first and not quest(budget=64).first
    assert lserve(8, 4, 1, 64) != quest(8, 64)


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
    # A choice that stands reads the pages that were opened meanwhile.
    assert [lserve(4, 2, every, 16).most for every in (1, 2, 4, 5, 6)] == [12, 16, 16, 16, 20]
    assert retrieval(8, 64, every=9).width(1000) == 8 * (7 + 1) + 8
    # The new token is one of TokenSelect's recent ones, and not of InfiniGen's.
    assert (tokenselect(6, 2, 3).most, tokenselect(6, 2, 3).width(1000)) == (6, 11)
    assert (infinigen(cap=9, sinks=1, recent=2).most, infinigen(cap=9, sinks=1, recent=2).width(1000)) == (9, 13)
    assert (infinigen(cap=0.2).most, infinigen(cap=0.2).width(1000), infinigen(cap=1.0).width(1000)) == (
        None,
        201,
        None,
    )
    assert (alisa(9).ends, alisa(9).most, alisa(9).width(10), alisa(9).width(9)) == ((0, 3), 5, 9, None)
    assert (a2ats(6, sinks=2, recent=3).ends, a2ats(6, sinks=2, recent=3).width(1000)) == ((2, 2), 11)
    # The new token is ranked with the others, and may be in another array; the mean of a window is not known.
    assert (sparf(3, 8).ends, sparf(3, 8).most, sparf(3, 8).width(10), sparf(3, 8).width(9)) == ((0, 0), 8, 9, None)
    assert not sparf(3, 8).dense(0) and sparf(3, 8).dense(0, window=100) and sparf(3, 8, first_layer=2).dense(1)
    # What is always read of ReKV's pages is beside what a question chooses.
    assert (rekv(4, 9, sinks=5, recent=4).most, rekv(4, 9, sinks=5, recent=4).width(1000)) == (8, 20)
    assert rekv(4, 4, recent=4).width(8) is None and not rekv(4, 4).dense(0)
    assert shadowkv(5, 4, 12).most == 12 and shadowkv(5, 4, 12).width(1000) is None
    assert shadowkv(5, 4, 12, local=1, outliers=2).bound(2, 30).width(1000) == 12 + 4 * 4 + 30
    # A window that a choice covers makes a layer dense; InfiniGen is so in the first layers, whatever is chosen.
    assert infinigen(cap=9).dense(1) and not infinigen(cap=9).dense(2) and infinigen(cap=9).dense(2, window=9)
    assert not infinigen(cap=0.9).dense(2, window=9) and not tokenselect(4).dense(0) and lserve(budget=64).dense(1)


def test_one_slot_is_not_all_of_them():
    """Equal selections are one program, in which both would read one slot, or both all."""
    assert infinigen(cap=1) != infinigen(cap=1.0)


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
        (lambda: Quest(page=8, pages=1), "pages must be a whole number of at least 2"),
        (lambda: Quest(page=0, pages=2), "page must be"),
        (lambda: everything(3), r"everything\(\): too many positional arguments; it accepts no arguments"),
        (
            lambda: by_name("quests", page=3),
            r"unknown selection 'quests'; did you mean 'quest'\? known selections: a2ats, .*, quest",
        ),
        *(
            (lambda alpha=alpha: infinigen(alpha), "^selection infinigen: alpha must be a number of at least 0")
            for alpha in (-1, -1e-9, float("nan"), "4", True, None)
        ),
        *(
            (lambda ratio=ratio: infinigen(ratio=ratio), r"ratio must be a number in \(0, 1\]; got")
            for ratio in (0, 0.0, -0.1, 1.5, float("nan"), True, "0.3")
        ),
        *(
            (lambda cap=cap: infinigen(cap=cap), r"cap must be a number in \(0, 1\]; got")
            for cap in (0.0, -0.5, 1.01, float("inf"), True, None)
        ),
        *((lambda cap=cap: infinigen(cap=cap), "cap must be a whole number of at least 1") for cap in (0, -3)),
        (lambda: infinigen(first_layer=0), "first_layer must be a whole number of at least 1; got 0"),
        (lambda: InfiniGen(4.0, first_layer=0), "first_layer must be a whole number of at least 1; got 0"),
        (lambda: infinigen(columns="key"), "^selection infinigen: columns='key' is not valid; use 'sum', 'query' or"),
        (lambda: infinigen(sinks=-1), "sinks must be"),
        (lambda: infinigen(recent=1.5), "recent must be"),
        (lambda: infinigen(alfa=4), "it accepts alpha, ratio, cap, first_layer"),
        (lambda: lserve(64, 24, budget=640), "^selection lserve: sub=24 does not divide page=64"),
        (lambda: lserve(8, 16, budget=64), "sub=16 does not divide page=8"),
        (lambda: lserve(8, 0, budget=64), "sub must be a whole number of at least 1"),
        (lambda: lserve(8, 4, 0, budget=64), "every must be a whole number of at least 1"),
        (lambda: lserve(), "^selection lserve: budget must be a whole number of at least 1; got None"),
        (lambda: retrieval(), "^selection retrieval: budget must be a whole number of at least 1; got None"),
        (lambda: retrieval(0, 64), "must be a whole number of at least 1"),
        (lambda: retrieval(8, 64, every=0), "every must be"),
        (lambda: tokenselect(0), "^selection tokenselect: k must be a whole number of at least 1; got 0"),
        (lambda: tokenselect(4, -1), "sinks must be"),
        (lambda: alisa(1), "^selection alisa: budget must be a whole number of at least 2; got 1"),
        (lambda: alisa(8, queries=0), "^selection alisa: queries must be a whole number of at least 1; got 0"),
        (lambda: a2ats(0), "^selection a2ats: k must be a whole number of at least 1; got 0"),
        (lambda: a2ats(4, codes=0), "codes must be"),
        (lambda: rekv(4), "^selection rekv: budget must be a whole number of at least 1; got None"),
        (lambda: rekv(4, 3), "^selection rekv: budget=3 is less than a page of 4 tokens; raise it, or lower page"),
        (lambda: rekv(0, 4), "page must be"),
        (lambda: rekv(4, 8, sinks=-1), "sinks must be"),
        (lambda: rekv(4, 8, recent=0), "recent must be a whole number of at least 1"),
        (lambda: rekv(4, 8, question=0), "question must be a whole number of at least 1"),
        (lambda: rekv(4, 8, in_prompt=1), "in_prompt=1 is not valid; use True or False"),
        (lambda: rekv(4, 8, query_block=8), "query_block=8 needs in_prompt=True"),
        (lambda: rekv(4, 8, in_prompt=True, query_block=6), "query_block=6 is not a multiple of the page of 4"),
        (lambda: ReKV(page=4, pages=1, every=2), "first and every are not used"),
        (
            lambda: ReKV(page=4, pages=1, prompt=package.QueryBlocks(size=4, sinks=0, recent=1, pages=2)),
            "choose 2 pages, but a question chooses; use pages=0",
        ),
        (lambda: sparf(0, 4), "^selection sparf: r must be a whole number of at least 1; got 0"),
        (lambda: sparf(4, 0), "^selection sparf: k must be a whole number of at least 1; got 0"),
        (lambda: sparf(4), "missing a required argument: 'k'; it accepts r, k, first_layer"),
        (lambda: sparf(4, 4, first_layer=-1), "first_layer must be"),
        (lambda: tokenselect(4, recent=0), "recent must be a whole number of at least 1"),
        (lambda: tokenselect(4, reuse=1.5), "reuse must be a number from -1 to 1; got 1.5"),
        (lambda: tokenselect(), "missing a required argument: 'k'"),
        (lambda: shadowkv(0, budget=64), "^selection shadowkv: rank must be a whole number of at least 1; got 0"),
        (lambda: shadowkv(8, 8, 60), "^selection shadowkv: chunk=8 does not divide budget=60; give a multiple of it"),
        (lambda: shadowkv(8, 8, 4), "chunk=8 does not divide budget=4"),
        (lambda: shadowkv(8, 0, 4), "chunk must be"),
        (lambda: shadowkv(8), "budget must be a whole number of at least 1; got None"),
        (lambda: shadowkv(8, budget=8, local=-1), "local must be"),
        (lambda: shadowkv(8, budget=8, outliers=-1), "outliers must be"),
        (lambda: ShadowKV(8, 8, 0), "chunks must be"),
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
ALIGNED = {
    "window": policies.window(8), "fifo": policies.fifo(8), "tova": policies.tova(8),
}  # fmt: skip
PAGED = {
    "h2o by pages": policies.by_page(policies.h2o(64), page=8),
    "then by pages": policies.after_prefill(
        policies.snapkv(budget=64), then=policies.by_page(policies.roco(64), page=8)
    ),
    "some layers by pages": policies.from_layer(policies.by_page(policies.fifo(64), page=8), first=2),
}
FREES = {
    "h2o by other pages": policies.by_page(policies.h2o(64), page=16),
    "counter": policies.counter(64),
    "lru": policies.lru(64),
    "counter in some layers": policies.from_layer(policies.counter(64), first=2),
    "tova of single heads": policies.tova(8, share_heads=False),
    "h2o": policies.h2o(8),
    "after": policies.after_prefill(policies.snapkv(budget=64), then=policies.h2o(8)),
    "split": policies.split_heads([[1, 0]], policies.h2o(8), policies.window(8)),
}
MERGES = {"d2o": policies.h2o(8, merge=policies.d2o())}


@pytest.mark.parametrize("name", [*KEEPS, *ALIGNED, *PAGED, *FREES, *MERGES])
def test_policies(name):
    """Pages need pages, a vote needs heads that hold the same positions, a product needs the whole prompt."""
    policy = (KEEPS | ALIGNED | PAGED | FREES | MERGES)[name]
    assert everything().refuses(policy) is None
    for pages in (quest(8, 64), lserve(8, 4, budget=64), retrieval(8, 64)):
        assert bool(pages.refuses(policy)) == (name not in {*KEEPS, *PAGED})
    assert bool(infinigen().refuses(policy)) == (name in MERGES)
    assert bool(tokenselect(8).refuses(policy)) == (name not in {*KEEPS, *ALIGNED, "some layers by pages"} - {"snapkv"})
    assert bool(shadowkv(budget=8).refuses(policy)) == (name not in set(KEEPS) - {"snapkv"})
    assert bool(rekv(8, 64).refuses(policy)) == (name not in set(KEEPS) - {"snapkv"})
    assert bool(sparf(2, 8).refuses(policy)) == (name not in KEEPS)
    for each in (optimal(8), alisa(8), a2ats(8)):
        assert bool(each.refuses(policy)) == (name in MERGES)
    for variant in VARIANTS:
        assert bool(variant.refuses(policy)) == (name != "full")


@pytest.mark.parametrize("selection", ALL, ids=repr)
def test_positions_and_storages(selection):
    coded = int8()
    delayed = Storage(key=coded.key, value=coded.value, residual=8)
    pages = isinstance(selection, Pages)
    rotated = isinstance(selection, (Pages, InfiniGen, TokenSelect, ShadowKV, Codebook)) and selection.rotated
    assert selection.refuses(policies.full(), coded) is None
    assert bool(selection.refuses(policies.full(), coded, positions="cache")) == rotated
    assert bool(selection.refuses(policies.full(), delayed)) >= pages


def test_chunks_need_one_store():
    """Tokens change their slots when they leave the newest."""
    assert shadowkv(budget=64).refuses(policies.full(), Storage(key=int8().key, value=int8().value, residual=8))


def test_reasons_say_what_would_be_valid():
    assert "use full(), a prompt compressor such as snapkv, or by_page(policy, page=8)" in quest(8, 64).refuses(
        policies.h2o(8)
    )
    assert "evicts pages of another size while decoding" in quest(8, 64).refuses(FREES["h2o by other pages"])
    for each in (quest(8, 64), infinigen(), tokenselect(4), shadowkv(budget=8)):
        assert "use positions='original'" in each.refuses(policies.full(), positions="cache")
    assert "use full(), a window, or tova()" in tokenselect(4).refuses(policies.h2o(8))
    assert "needs every token of the prompt, and the policy snapkv evicts; use full()" in shadowkv(budget=8).refuses(
        KEEPS["snapkv"]
    )
    assert "use a policy without merge" in optimal(8).refuses(MERGES["d2o"])
    assert "the policy h2o evicts while decoding" in sparf(2, 8).refuses(policies.h2o(8))
    assert "pages are counted from the first token" in rekv(2, 8).refuses(policies.window(8))
    assert "under the policy snapkv each head holds its own tokens; use full()" in rekv(2, 8).refuses(KEEPS["snapkv"])
    assert "use full()" in Allowed(8).refuses(FREES["after"])


@pytest.mark.parametrize("selection", ALL, ids=repr)
def test_indices_are_by_row_and_head(selection):
    index = jax.eval_shape(lambda: selection.init((3, 2, 40), 8, jnp.bfloat16))
    shared = {"left"}  # one for all heads
    assert all(leaf.shape[:2] == (3, 1 if name in shared else 2) for name, leaf in index.items())
    assert selection.per_slot <= set(index) and all(index[name].shape[2] == 40 for name in selection.per_slot)
    needs = {"last", "tail[1]", "tail[2]", "tail[3]"} if isinstance(selection, Alisa) else {"mass"}
    assert selection.needs == frozenset() or {each.name for each in selection.needs} == needs
    assert isinstance(selection, ReadAll) == selection.reads_all
