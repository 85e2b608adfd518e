"""Selections choice for choice against the reference, on ragged rows that decode from the ends of their prompts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.selection import (
    Allowed,
    InfiniGen,
    LServe,
    MeanKeys,
    Quest,
    ShadowKV,
    SparF,
    TokenSelect,
    a2ats,
    alisa,
    grouped_logits,
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
from kvjax.selection.choose import softmax
from tests.reference import selection as reference
from tests.reference.step import rotate
from tests.selection.driver import (
    DIM,
    HEADS,
    LENGTHS,
    PROMPTS,
    SCALE,
    THETA,
    assert_same,
    built,
    orthogonal,
    run,
    texts,
    watched,
)

#: In all cases with a window, all tokens of which a selection of few would choose few. Grouped heads are below, with
#: the new token behind the slots.
CASES = (("mha", None), ("mqa", 14))


def expected(make, window=None, kept=None):
    """The reference of a selection, for every row an object of its own: `make()`."""

    def of(row, layer):
        return reference.run_layer(layer, PROMPTS[row], make(), SCALE, kept and kept[row], window=window)

    return of


def turned(keys, position):
    return rotate(keys, position, THETA)


#: name -> (the library's, the reference's for a window)
LOOKS = {
    "optimal": (optimal(6), lambda window=None: reference.EachHead(reference.optimal(6, SCALE, window))),
    "quest": (quest(4, 13), lambda window=None: reference.quest(4, 13, SCALE, window)),
    "lserve": (lserve(4, 2, 3, 13), lambda window=None: reference.lserve(4, 2, 3, 13, SCALE, window)),
    "lserve, long choices": (
        lserve(4, 1, 6, 12), lambda window=None: reference.lserve(4, 1, 6, 12, SCALE, window),
    ),
    "retrieval": (retrieval(3, 13), lambda window=None: reference.retrieval(3, 13, SCALE, window=window)),
    "retrieval, long choices": (
        retrieval(4, 12, every=5), lambda window=None: reference.retrieval(4, 12, SCALE, 5, window),
    ),
    "tokenselect": (
        tokenselect(5, 2, 4, reuse=None), lambda window=None: reference.TokenSelect(SCALE, 5, 2, 4, window=window),
    ),
    "tokenselect, unscaled": (
        tokenselect(5, 0, 1, reuse=None, scaled=False),
        lambda window=None: reference.TokenSelect(SCALE, 5, 0, 1, scaled=False, window=window),
    ),
    "tokenselect, reused": (
        tokenselect(5, 1, 3, reuse=0.1),
        lambda window=None: reference.TokenSelect(SCALE, 5, 1, 3, reuse=0.1, window=window),
    ),
    "infinigen": (infinigen(1.0, ratio=0.3, cap=0.4), lambda window=None: guess(window, cap=0.4)),
    "infinigen, few": (
        infinigen(3, ratio=0.5, cap=4, columns="query", sinks=2, recent=3),
        lambda window=None: guess(window, alpha=3, ratio=0.5, cap=4, columns="query", sinks=2, recent=3),
    ),
    "infinigen, union": (
        infinigen(1.5, ratio=0.25, cap=1.0, columns="union", recent=1),
        lambda window=None: guess(window, alpha=1.5, ratio=0.25, cap=1.0, columns="union", recent=1),
    ),
    "infinigen, one": (infinigen(0, cap=1.0), lambda window=None: guess(window, alpha=0, cap=1.0)),
    "alisa": (alisa(9, queries=3), lambda window=None: reference.Alisa(9, 3, window)),
    "alisa, one query": (alisa(6, queries=1), lambda window=None: reference.Alisa(6, 1, window)),
    "a2ats": (
        a2ats(5, codes=4, sinks=1, recent=3),
        lambda window=None: reference.Codebook(SCALE, 5, 4, sinks=1, recent=3, window=window),
    ),
    "a2ats, more codes than tokens": (
        a2ats(4, codes=40, rounds=2), lambda window=None: reference.Codebook(SCALE, 4, 40, 2, window=window),
    ),
    "sparf": (sparf(3, 6), lambda: reference.SparF(SCALE, 3, 6)),
    "sparf, one slot": (sparf(1, 1), lambda: reference.SparF(SCALE, 1, 1)),
    "sparf, every channel": (sparf(DIM + 1, 5), lambda: reference.SparF(SCALE, DIM, 5)),
    "rekv": (
        rekv(2, 4, sinks=2, recent=4, question=3), lambda window=None: asked(2, 2, 1, 2, 3, window),
    ),
    "rekv, all of a prompt": (rekv(3, 3, recent=1), lambda window=None: asked(3, 1, 0, 1, None, window)),
    "rekv, more than a prompt": (rekv(2, 2, recent=2, question=99), lambda window=None: asked(2, 1, 0, 1, 99, window)),
}  # fmt: skip


def guess(window=None, *, alpha=1.0, **more):
    return reference.InfiniGen(SCALE, alpha, window=window, **more)


def asked(page, pages, sinks, recent, question, window=None):
    return reference.ReKV(lambda x, at: rotate(x, -at, THETA), page, pages, sinks, recent, question, window)


def shadow(rank, chunk, budget, local, outliers):
    return reference.ShadowKV(SCALE, turned, rank, chunk, budget, local, outliers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "window"), CASES)
@pytest.mark.parametrize("name", LOOKS)
def test_every_choice_is_the_reference(name, heads, window):
    made, make = LOOKS[name]
    if made.dense(made.first_layer, window):
        window = None  # layers with one read everything
    batch = texts(heads, seed=SEEDS.get((name, heads), 1))
    make = make if window is None else functools.partial(make, window)
    assert_same(run(made, batch, window=window), batch, expected(make, window))


#: Where a choice of the first is too near.
SEEDS = {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("numbers", "heads"),
    [
        *(((5, 2, 4, 1, 1), heads) for heads in HEADS),
        ((100, 3, 6, 0, 0), "mha"), ((3, 4, 8, 1, 2), "gqa"), ((2, 2, 2, 0, 1), "mqa"),
    ],
    ids=str,
)  # fmt: skip
def test_shadowkv(numbers, heads):
    """Keys that are restored differ from those that were written: outputs are compared too."""
    rank, chunk, budget, local, outliers = numbers
    batch = texts(heads, seed=21)
    made = shadowkv(rank, chunk, budget, local=local, outliers=outliers)
    assert_same(run(made, batch), batch, expected(lambda: shadow(*numbers)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in LOOKS if not LOOKS[name][0].in_prompt])
def test_the_new_token_behind_the_slots(name):
    """As where slots are held in a code. A short page's is that of the slot that it will be written to."""
    made, make = LOOKS[name]
    batch = texts("gqa", seed=10)
    assert_same(run(made, batch, apart=True), batch, expected(make))


def test_shadowkv_with_the_new_token_behind_the_slots():
    batch = texts("gqa", seed=10)
    made = shadowkv(5, 2, 4, local=1, outliers=1)
    assert_same(run(made, batch, apart=True), batch, expected(lambda: shadow(5, 2, 4, 1, 1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("columns", ["sum", "query", "union"])
@pytest.mark.parametrize("heads", ["gqa", "mqa"])
def test_infinigen_with_a_skew(heads, columns):
    """A rotation of the columns of each KV head decides which columns are chosen; prompts go in in blocks."""
    batch = texts(heads, seed=22)._replace(skew=orthogonal(HEADS[heads][0]))
    made = infinigen(1.0, ratio=0.3, cap=0.5, columns=columns)
    found = run(made, batch, block=5)
    assert_same(found, batch, expected(lambda: guess(cap=0.5, columns=columns, skew=batch.skew)))
    plain = run(made, batch._replace(skew=None), block=5)
    assert (plain.chosen != found.chosen).any(), "this skew changes what a few columns choose"


@pytest.mark.parametrize("columns", ["sum", "query", "union"])
def test_which_columns(columns):
    """Columns follow the row's own prompt, not padding or blocks; of equal columns the lower is chosen."""
    batch = texts("gqa", seed=23)
    key, query = batch.key.copy(), batch.query.copy()
    key[..., 5], query[..., 5] = key[..., 2], query[..., 2]  # an exact tie of two columns
    batch = batch._replace(key=key, query=query)
    made = infinigen(1.0, ratio=0.3, columns=columns)
    for block in (None, 5):
        sums = watched(made, batch, block)
        position = np.where(np.arange(16) < np.array(PROMPTS)[:, None, None], np.arange(16), -1).astype(np.int32)
        held = np.broadcast_to(position, (3, 2, 16)), batch.key[:, :, :16]
        index = built(made, *held, np.array(PROMPTS), sums)
        for row in range(3):
            look, layer = guess(columns=columns), batch.layer(row)
            look.begin(layer.query[: PROMPTS[row]], layer.key[: PROMPTS[row]], layer.plain[: PROMPTS[row]])
            for head in range(2):
                found = np.asarray(index["columns"])[row, head]
                assert found[found < DIM].tolist() == look.columns[head]
                assert (5 in look.columns[head]) <= (2 in look.columns[head])


@pytest.mark.parametrize(
    ("ratio", "count"), [(0.3, 3), (0.25, 2), (0.1, 1), (1.0, 8), (0.125, 1), (0.126, 2), (0.7, 6)]
)
def test_the_number_of_columns(ratio, count):
    """⌈ratio · D⌉, against float noise."""
    index = jax.eval_shape(lambda: infinigen(ratio=ratio).init((1, 1, 4), DIM, jnp.float32))
    assert index["columns"].shape[-1] == count
    twice = jax.eval_shape(lambda: infinigen(ratio=ratio, columns="union").init((1, 1, 4), DIM, jnp.float32))
    assert twice["columns"].shape[-1] == min(2 * count, DIM)


def test_caps_are_counted_on_the_host():
    """⌊cap · T⌋ against float noise, no less than one where there is a candidate, no more than there are."""
    assert infinigen(cap=0.29)._caps(100)[100] == 29 and infinigen(cap=0.1)._caps(30)[30] == 3
    assert infinigen(cap=0.2)._caps(4).tolist() == [0, 1, 1, 1, 1]
    assert infinigen(cap=3)._caps(5).tolist() == [0, 1, 2, 3, 3, 3]
    assert infinigen(cap=1.0)._caps(4).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("heads", ["gqa", "mqa"])
def test_the_number_of_slots_is_one_for_a_row(heads):
    """All KV heads of a row choose as many; query heads of a group want different ones, and each counts."""
    batch = texts(heads, seed=24)
    found = run(infinigen(1.0, cap=1.0), batch)
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        number = found.chosen[row, :, start:length].sum(axis=-1)
        assert (number == number[0]).all() and number.min() >= 1
        look = guess(cap=1.0)
        reference.run_layer(batch.layer(row), start, look, SCALE)
        assert look.counts == number.T.ravel().tolist()


def test_an_alpha_of_zero_chooses_one_slot():
    """The favourite itself is not above a threshold of 0."""
    found = run(infinigen(0, cap=1.0), texts("gqa", seed=25))
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        assert (found.chosen[row, :, start:length].sum(axis=-1) == 1).all()


def test_where_all_is_always_read_nothing_is_chosen():
    found = run(infinigen(math.inf, cap=1.0, sinks=20, recent=20), texts("gqa", seed=25))
    assert not found.chosen.any()
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        assert (found.read[row, :, start:length].sum(axis=-1) == np.arange(start, length) + 1).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("selection", ["optimal", "quest", "lserve", "retrieval", "tokenselect", "infinigen"])
def test_of_equal_slots_the_newer(selection):
    """Few different keys: probabilities, guesses and bounds of many slots and pages are equal."""
    batch = texts("gqa", seed=3, vocabulary=3)
    made, make = {
        "optimal": (optimal(5), lambda: reference.EachHead(reference.optimal(5, SCALE))),
        "quest": (quest(2, 7), lambda: reference.quest(2, 7, SCALE)),
        "lserve": (lserve(2, 1, 2, 7), lambda: reference.lserve(2, 1, 2, 7, SCALE)),
        "retrieval": (retrieval(2, 7), lambda: reference.retrieval(2, 7, SCALE)),
        "tokenselect": (tokenselect(5, 1, 1, reuse=None), lambda: reference.TokenSelect(SCALE, 5, 1, 1)),
        "infinigen": (infinigen(0.4, ratio=0.5, cap=5), lambda: guess(alpha=0.4, ratio=0.5, cap=5)),
    }[selection]
    assert_same(run(made, batch), batch, expected(make))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["quest", "lserve", "retrieval", "infinigen", "a2ats", "sparf"])
def test_what_a_compressor_left(name):
    """The i-th survivor of a head is in page i // page, whatever its position; heads have lost different tokens."""
    batch = texts("gqa", seed=4)
    rng = np.random.default_rng(0)
    kept = [[rng.choice(n, max(1, 2 * n // 3), replace=False) for _ in range(2)] for n in PROMPTS]
    made, make = LOOKS[name]
    assert_same(run(made, batch, kept=kept), batch, expected(make, kept=kept))


def test_a_query_that_is_like_the_one_before_chooses_nothing():
    """Each row by itself: with reuse=-1 the first choice of a row stands for ever."""
    batch = texts("gqa", seed=26)
    found = run(tokenselect(3, 1, 2, reuse=-1.0), batch)
    look = functools.partial(reference.TokenSelect, SCALE, 3, 1, 2, -1.0)
    assert_same(found, batch, expected(look))
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        own = look()
        reference.run_layer(batch.layer(row), start, own, SCALE)
        assert own.chose == 1
        last = found.chosen[row, :, length - 1]
        first = max(start, 6)  # with more than 3 candidates: beside a sink, the newest and the new token
        assert (found.chosen[row, :, first:length] == last[:, None]).all() and (last.sum(axis=-1) == 3).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "recent", "block"), [("gqa", 3, 8), ("mqa", 0, None), ("mha", None, 8)])
def test_masked(heads, recent, block):
    batch, budgets = texts(heads, seed=5), (9, 12, 10)
    found = run(Allowed(9, recent), batch, budget=budgets, block=block)

    def of(row, query, key, value):
        b = budgets[row]
        return reference.masked(query, key, value, PROMPTS[row], b, b // 2 if recent is None else recent, SCALE, block)

    assert (found.chosen & ~found.read).sum() == 0
    # What is chosen and what is always read is one set in the reference.
    without = found._replace(chosen=np.zeros_like(found.chosen))
    assert_same(without, batch, each_head(batch, of), start=(0, 0, 0))


def each_head(batch, of):
    return lambda row, layer: [of(row, *batch.head(row, head)) for head in range(batch.key.shape[1])]


EVERY = {
    **{name: made for name, (made, _) in LOOKS.items()}, "masked": Allowed(9, 3),
    "shadowkv": shadowkv(5, 2, 4, local=1, outliers=1),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVERY)
def test_a_row_alone_is_the_row_in_a_batch(name):
    batch, selection = texts("gqa", seed=6), EVERY[name]
    together = run(selection, batch, budget=(9, 9, 9), block=8)
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        alone = run(selection, batch.row(row), budget=(9,), block=8, capacity=50)
        for one, many in zip(alone, together, strict=True):
            if one.dtype == bool:
                np.testing.assert_array_equal(one[0, :, start:length], many[row, :, start:length])
            else:
                np.testing.assert_allclose(one[0, :, :, start:length], many[row, :, :, start:length], atol=2e-6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in EVERY if name != "masked"])
def test_counts(name):
    """Chosen slots are candidates, at most `most` are chosen or `width` read, and all where there are few."""
    selection = EVERY[name]
    found = run(selection, texts("gqa", seed=7))
    width = selection.bound(2, 36).width(10_000)
    width = 10_000 if width is None else width
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        chosen, read = (x[row, :, prompt:length] for x in (found.chosen, found.read))
        new = np.eye(max(LENGTHS), dtype=bool)[None, prompt:length]
        past = np.tril(np.ones((max(LENGTHS), max(LENGTHS)), bool), -1)[prompt:length]
        if selection.name == "sparf":  # ranks the new token with the others
            assert (read == chosen).all() and not (chosen & ~(past | new)).any()
            few = np.minimum(selection.k, np.arange(prompt, length) + 1)
            np.testing.assert_array_equal(read.sum(axis=-1), np.broadcast_to(few, read.shape[:2]))
            continue
        assert not (chosen & ~past).any() and (read & new).any(axis=-1).all() and not (chosen & ~read).any()
        number = chosen.sum(axis=-1)
        assert number.max() <= (selection.most or 10_000) and read.sum(axis=-1).max() <= width
        if name in ("optimal", "quest", "tokenselect", "alisa", "a2ats"):
            beside = read.sum(axis=-1) - number
            candidates = np.arange(prompt, length) + 1 - beside
            np.testing.assert_array_equal(number, np.minimum(selection.most, candidates))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "selection",
    [
        optimal(36), quest(4, 40), lserve(4, 2, 3, 40), retrieval(4, 40), retrieval(4, 40, every=9),
        tokenselect(36, 2, 3), tokenselect(1, 36, 1), infinigen(math.inf, cap=1.0), infinigen(math.inf, cap=36),
        infinigen(0, recent=36), shadowkv(3, 2, 36, local=0, outliers=0), shadowkv(3, 2, 2, local=36),
        alisa(37), a2ats(36, codes=3), a2ats(1, codes=3, recent=37), sparf(2, 37),
        shadowkv(3, 2, 2, local=0, outliers=18),
    ],
    ids=repr,
)  # fmt: skip
def test_full_width_reads_everything(selection):
    found = run(selection, texts("gqa", seed=8))
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        assert (found.read[row, :, start:length] == np.tril(np.ones((max(LENGTHS),) * 2, bool))[start:length]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", HEADS)
def test_full_rank_restores_the_keys(heads):
    """rank = K · D, or as many as the prompt has tokens: only the choice is an error."""
    batch = texts(heads, seed=8)
    for rank in (HEADS[heads][0] * DIM, 1000):
        found = run(shadowkv(rank, 2, 36, local=0, outliers=0), batch)
        for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            for head in range(HEADS[heads][0]):
                query, key, value = batch.head(row, head)
                for at in range(start, length):
                    dense = reference.attend(query[at], key[: at + 1], SCALE) @ value[: at + 1]
                    np.testing.assert_allclose(found.output[row, head, :, at], dense, atol=3e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", HEADS)
def test_with_every_column_the_skew_changes_no_choice(heads):
    batch = texts(heads, seed=27)
    made = infinigen(1.0, ratio=1.0, cap=0.5)
    plain, turned_columns = run(made, batch), run(made, batch._replace(skew=orthogonal(HEADS[heads][0])))
    np.testing.assert_array_equal(plain.chosen, turned_columns.chosen)
    assert_same(plain, batch, expected(lambda: guess(ratio=1.0, cap=0.5)))


def test_the_order_and_the_signs_of_columns_change_no_choice():
    batch, skew = texts("gqa", seed=28), orthogonal(2)
    rng = np.random.default_rng(0)
    order, signs = rng.permutation(DIM), rng.choice([-1.0, 1.0], DIM).astype(np.float32)
    made = infinigen(1.0, cap=0.5)
    found = [run(made, batch._replace(skew=each)) for each in (skew, skew[..., order] * signs)]
    np.testing.assert_array_equal(found[0].chosen, found[1].chosen)


@pytest.mark.parametrize("sub", [None, 1])
def test_bounds_of_a_page(sub):
    """Each is at least every logit of its page, and no larger than the formula; after decoding as after building."""
    rng = np.random.default_rng(9)
    key = rng.normal(size=(2, 2, 22, DIM)).astype(np.float32)
    query = rng.normal(size=(2, 2, 3, DIM)).astype(np.float32)
    made = quest(5, 15) if sub is None else lserve(5, sub, 1, 15)
    position = np.broadcast_to(np.arange(22, dtype=np.int32), (2, 2, 22))
    whole = built(made, position, key)
    written = built(made, np.where(position < 7, position, -1), key)
    write = jax.jit(made.write)
    for slot in range(7, 22):
        new, slots = key[:, :, slot : slot + 1], np.full((2, 2), slot, np.int32)
        written = write(written, new, slots, np.array([True, slot % 2 == 0]))
        written = write(written, new, slots, np.array([False, slot % 2 == 1]))
    np.testing.assert_array_equal(whole["reach"], written["reach"])
    bounds = np.asarray(jax.jit(made.bounds)(whole, query, SCALE))
    logits = SCALE * np.einsum("bkgd,bksd->bkgs", query, key)
    for page in range(5):
        own = slice(5 * page, 5 * page + 5)
        for row, head in np.ndindex(2, 2):
            formula = reference.bound(SCALE, sub)(query[row, head], key[row, head, own])
            np.testing.assert_allclose(bounds[row, head, :, page], formula, rtol=1e-5, atol=1e-6)
        assert (bounds[..., page] >= logits[..., own].max(axis=-1) - 1e-6).all()


def test_bounds_in_bfloat16_are_exact():
    """The numbers of a page's summary are a key's own numbers."""
    key = jax.random.normal(jax.random.key(0), (1, 1, 8, DIM), jnp.bfloat16)
    made = quest(4, 12)
    reach = built(made, np.arange(8, dtype=np.int32)[None, None], key)["reach"]
    assert reach.dtype == jnp.bfloat16 and reach.shape == (1, 1, 2, 1, 2 * DIM)
    pages = np.asarray(key.astype(jnp.float32)).reshape(2, 4, DIM)
    exact = np.concatenate([pages.max(axis=1), -pages.min(axis=1)], axis=-1)
    np.testing.assert_array_equal(np.asarray(reach.astype(jnp.float32))[0, 0, :, 0], exact)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeverJoins(Quest):
    """A page is what its first token is."""

    def write(self, index, key, slot, active):
        only = super().write(index, key, slot, active)
        opens = (slot % self.page == 0)[..., None, None, None]
        return {name: jnp.where(opens, only[name], index[name]) for name in index}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Older(Quest):
    """The older of two equal pages is read."""

    def choose(self, index, query, view):
        flipped = jnp.where(view.live, 1000 - view.position, -1)
        return super().choose(index, query, view._replace(position=flipped, newest=jnp.full_like(view.newest, 1000)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgets(LServe):
    """A page that is opened while a choice stands is not read once it is not the newest (the authors' code)."""

    def write(self, index, key, slot, active):
        return super().write(index, key, slot, active) | {"stands": index["stands"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksTheFirst(MeanKeys):
    """The oldest page has to be ranked like any other."""

    first: bool = False


@dataclasses.dataclass(frozen=True)
class EachQueryHead(InfiniGen):
    """Every query head of a group chooses for itself."""

    def chosen(self, index, query, view):
        marks = [super(EachQueryHead, self).chosen(index, query[:, :, g : g + 1], view) for g in range(query.shape[2])]
        return functools.reduce(jnp.logical_or, marks)


@dataclasses.dataclass(frozen=True)
class Weak(InfiniGen):
    """The threshold is not strict."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "alpha", self.alpha + 1e-6)


@dataclasses.dataclass(frozen=True)
class Votes(TokenSelect):
    """Each KV head for itself."""

    def choose(self, index, query, view):
        heads = [
            super(Votes, self).choose(index, *(x[:, k : k + 1] for x in (query,)), _of_head(view, k))[0]
            for k in range(query.shape[1])
        ]
        return jnp.concatenate(heads, axis=1), index


def _of_head(view, k):
    return view._replace(**{name: getattr(view, name)[:, k : k + 1] for name in ("position", "key", "slot")})


@dataclasses.dataclass(frozen=True)
class Blunt(SparF):
    """Logits of few channels are as they are."""

    def approximate(self, query, view):
        few = jnp.where(self.columns(query)[:, :, None], query, 0)
        return softmax(grouped_logits(few, view.key, view.scale), view.visible[:, :, None])


@dataclasses.dataclass(frozen=True)
class Late(SparF):
    """The mean is that of the tokens before."""

    def mix(self, index, output, view):
        before = jax.lax.optimization_barrier(index["value_sum"]) * (1 - 1 / index["number"])[..., None]
        return super().mix(index | {"value_sum": before}, output, view)


@dataclasses.dataclass(frozen=True)
class ReadsNew(SparF):
    """The new token is read, whatever its rank."""

    def always(self, index, view):
        return view.new


@dataclasses.dataclass(frozen=True)
class Written(ShadowKV):
    """Keys of chosen chunks are read, not restored."""

    def restore(self, index, position):
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unrotated(ShadowKV):
    """The low-rank product is of rotated keys."""

    def build(self, index, sums, held):
        return super().build(index, sums, held._replace(unrotate=lambda key: key))


@dataclasses.dataclass(frozen=True)
class Wider(Allowed):
    """The token to come is not counted among the newest."""

    def settle(self, index, columns, view):
        settled = super().settle(index, columns, view)
        return settled | {"allowed": settled["allowed"] | (view.live & view.recent(self.recent))}


NOTICED = "Arrays are not equal|Not equal to tolerance"


@pytest.mark.parametrize("mistake", [NeverJoins, Older])
def test_mistakes_in_pages_are_noticed(mistake):
    batch = texts("gqa", seed=3, vocabulary=3)
    with pytest.raises(AssertionError, match=NOTICED):
        assert_same(run(mistake(page=2, pages=2), batch), batch, expected(lambda: reference.quest(2, 7, SCALE)))


def mistakes():
    standing, mean = LOOKS["lserve, long choices"][1], LOOKS["retrieval"][1]
    votes, product = (lambda: reference.TokenSelect(SCALE, 5, 2, 4)), (lambda: shadow(3, 2, 4, 1, 1))
    return {
        "pages that open are forgotten": (Forgets(page=4, pages=2, sub=1, every=6), standing),
        "the first page is ranked": (RanksTheFirst(page=3, pages=3), mean),
        "every query head chooses": (EachQueryHead(1.0, 0.3, 0.4), lambda: guess(cap=0.4)),
        "a vote of each head": (Votes(5, 2, 4, None), votes),
        "no temperature": (Blunt(3, 6), LOOKS["sparf"][1]),
        "the newest value is left out": (Late(3, 6), LOOKS["sparf"][1]),
        "the new token is always read": (ReadsNew(3, 6), LOOKS["sparf"][1]),
        "keys are not restored": (Written(3, 2, 2, 1, 1), product),
        "a product of rotated keys": (Unrotated(3, 2, 2, 1, 1), product),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mistake", mistakes())
def test_mistakes_are_noticed(mistake):
    made, make = mistakes()[mistake]
    batch = texts("gqa", seed=1)
    with pytest.raises(AssertionError, match=NOTICED):
        assert_same(run(made, batch), batch, expected(make))


def test_a_threshold_that_is_not_strict_is_noticed():
    """With few different keys, logits are exactly alpha from the largest."""
    batch = texts("gqa", seed=3, vocabulary=3)
    with pytest.raises(AssertionError, match=NOTICED):
        assert_same(run(Weak(0.5, 0.5, 1.0), batch), batch, expected(lambda: guess(alpha=0.5, ratio=0.5, cap=1.0)))


def test_a_choice_that_is_too_near_fails_loudly():
    """A tenth of a millionth between two slots decides nothing: another seed is demanded."""
    batch = texts("gqa", seed=1)
    layer = batch.layer(0)

    def near(row, layer):
        return [text._replace(gap=1e-7) for text in expected(LOOKS["optimal"][1])(row, layer)]

    assert expected(LOOKS["optimal"][1])(0, layer)[0].gap > 1e-5
    with pytest.raises(AssertionError, match=r"too near .* another seed"):
        assert_same(run(optimal(6), batch), batch, near)


def test_a_mistake_in_what_is_allowed_is_noticed():
    batch = texts("gqa", seed=5)
    found = run(Wider(9, 3), batch, budget=(9, 9, 9), block=8)

    def of(row, query, key, value):
        return reference.masked(query, key, value, PROMPTS[row], 9, 3, SCALE, 8)

    without = found._replace(chosen=np.zeros_like(found.chosen))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same(without, batch, each_head(batch, of), start=(0, 0, 0))
