"""Selections choice for choice against the reference, on ragged rows that decode from the ends of their prompts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.selection import Allowed, Quest, optimal, quest
from tests.reference import selection as reference
from tests.selection.driver import DIM, LENGTHS, PROMPTS, SCALE, assert_same, built, run, texts


def expected(choose, window=None):
    def of(row, query, key, value):
        return reference.run(query, key, value, PROMPTS[row], choose, SCALE, window=window)

    return of


CASES = (("mha", None), ("gqa", None), ("mqa", 14))


@pytest.mark.parametrize(("heads", "window"), CASES)
def test_optimal(heads, window):
    batch = texts(heads, seed=1)
    assert_same(run(optimal(6), batch, window=window), batch, expected(reference.optimal(6, SCALE, window), window))


@pytest.mark.parametrize(("heads", "window"), CASES)
def test_quest(heads, window):
    batch = texts(heads, seed=2)
    found = run(quest(4, 13), batch, window=window)
    assert_same(found, batch, expected(reference.quest(4, 13, SCALE, window), window))


def test_the_new_token_behind_the_slots():
    """Its page, the last of which is short, is that of the slot that it will be written to."""
    batch = texts("gqa", seed=10)
    for made, choose in ((optimal(6), reference.optimal(6, SCALE)), (quest(4, 13), reference.quest(4, 13, SCALE))):
        assert_same(run(made, batch, apart=True), batch, expected(choose))


@pytest.mark.parametrize("selection", ["optimal", "quest"])
def test_of_equal_slots_the_newer(selection):
    """Few different keys: probabilities and bounds of many slots and pages are equal."""
    batch = texts("gqa", seed=3, vocabulary=3)
    made, choose = {
        "optimal": (optimal(5), reference.optimal(5, SCALE)),
        "quest": (quest(2, 7), reference.quest(2, 7, SCALE)),
    }[selection]
    assert_same(run(made, batch), batch, expected(choose))


def test_pages_of_what_a_compressor_left():
    """The i-th survivor of a head is in page i // page, whatever its position; heads have lost different tokens."""
    batch = texts("gqa", seed=4)
    rng = np.random.default_rng(0)
    kept = [[rng.choice(n, max(1, 2 * n // 3), replace=False) for _ in range(2)] for n in PROMPTS]
    found = run(quest(4, 13), batch, kept=kept)
    choose = reference.quest(4, 13, SCALE)
    for head in range(2):

        def of(row, query, key, value, head=head):
            return reference.run(query, key, value, PROMPTS[row], choose, SCALE, kept[row][head])

        own = slice(head, head + 1)
        arrays = {name: getattr(batch, name)[:, own] for name in ("query", "key", "value")}
        assert_same(type(found)(*(leaf[:, own] for leaf in found)), batch._replace(**arrays), of)


@pytest.mark.parametrize(("heads", "recent", "block"), [("gqa", 3, 8), ("mqa", 0, None), ("mha", None, 8)])
def test_masked(heads, recent, block):
    batch, budgets = texts(heads, seed=5), (9, 12, 10)
    found = run(Allowed(9, recent), batch, budget=budgets, block=block)

    def of(row, query, key, value):
        b = budgets[row]
        return reference.masked(query, key, value, PROMPTS[row], b, b // 2 if recent is None else recent, SCALE, block)

    assert (found.chosen & ~found.read).sum() == 0
    # What is chosen and what is always read is one set in the reference.
    assert_same(found._replace(chosen=np.zeros_like(found.chosen)), batch, of, start=(0, 0, 0))


@pytest.mark.parametrize("selection", [optimal(6), quest(4, 13), Allowed(9, 3)], ids=lambda each: each.name)
def test_a_row_alone_is_the_row_in_a_batch(selection):
    batch = texts("gqa", seed=6)
    together = run(selection, batch, budget=(9, 9, 9), block=8)
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        alone = run(selection, batch.row(row), budget=(9,), block=8, capacity=50)
        for one, many in zip(alone, together, strict=True):
            if one.dtype == bool:
                np.testing.assert_array_equal(one[0, :, start:length], many[row, :, start:length])
            else:
                np.testing.assert_allclose(one[0, :, :, start:length], many[row, :, :, start:length], atol=1e-6)


@pytest.mark.parametrize("selection", [optimal(6), quest(4, 13)], ids=lambda each: each.name)
def test_counts(selection):
    """What is chosen is a candidate; no more than `most` are chosen, or than `width` read; all where there are few."""
    found = run(selection, texts("gqa", seed=7))
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        chosen, read = (x[row, :, prompt:length] for x in (found.chosen, found.read))
        new = np.eye(max(LENGTHS), dtype=bool)[None, prompt:length]
        past = np.tril(np.ones((max(LENGTHS), max(LENGTHS)), bool), -1)[prompt:length]
        assert not (chosen & ~past).any() and (read & new).any(axis=-1).all() and not (chosen & ~read).any()
        number = chosen.sum(axis=-1)
        assert number.max() <= selection.most and read.sum(axis=-1).max() <= selection.width(10_000)
        beside = read.sum(axis=-1) - number
        candidates = np.arange(prompt, length) + 1 - beside
        np.testing.assert_array_equal(number, np.minimum(selection.most, candidates))


@pytest.mark.parametrize("selection", [optimal(36), quest(4, 40)], ids=repr)
def test_full_width_reads_everything(selection):
    found = run(selection, texts("gqa", seed=8))
    for row, (start, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        assert (found.read[row, :, start:length] == np.tril(np.ones((max(LENGTHS),) * 2, bool))[start:length]).all()


def test_bounds_of_a_page():
    """Each is at least every logit of its page, and no larger than the formula; after decoding as after building."""
    rng = np.random.default_rng(9)
    key = rng.normal(size=(2, 2, 22, DIM)).astype(np.float32)
    query = rng.normal(size=(2, 2, 3, DIM)).astype(np.float32)
    made = quest(5, 15)
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
        low, high = key[:, :, own].min(axis=2)[:, :, None], key[:, :, own].max(axis=2)[:, :, None]
        formula = SCALE * np.maximum(query * low, query * high).sum(axis=-1)
        np.testing.assert_allclose(bounds[..., page], formula, rtol=1e-5, atol=1e-6)
        assert (bounds[..., page] >= logits[..., own].max(axis=-1) - 1e-6).all()


def test_bounds_in_bfloat16_are_exact():
    """The numbers of a page's summary are a key's own numbers."""
    key = jax.random.normal(jax.random.key(0), (1, 1, 8, DIM), jnp.bfloat16)
    made = quest(4, 12)
    reach = built(made, np.arange(8, dtype=np.int32)[None, None], key)["reach"]
    assert reach.dtype == jnp.bfloat16 and reach.shape == (1, 1, 2, 2 * DIM)
    pages = np.asarray(key.astype(jnp.float32)).reshape(2, 4, DIM)
    exact = np.concatenate([pages.max(axis=1), -pages.min(axis=1)], axis=-1)
    np.testing.assert_array_equal(np.asarray(reach.astype(jnp.float32))[0, 0], exact)


@dataclasses.dataclass(frozen=True)
class NeverOpens(Quest):
    """A new page starts from what an empty page has."""

    def write(self, index, key, slot, active):
        return super().write(index, key, slot + jnp.where(slot % self.page == 0, 1, 0), active)


@dataclasses.dataclass(frozen=True)
class Older(Quest):
    """Of equal pages the older."""

    def chosen(self, index, query, view):
        flipped = jnp.where(view.live, 1000 - view.position, -1)
        return super().chosen(index, query, view._replace(position=flipped, newest=jnp.full_like(view.newest, 1000)))


@dataclasses.dataclass(frozen=True)
class Wider(Allowed):
    """The token to come is not counted among the newest."""

    def settle(self, index, columns, view):
        settled = super().settle(index, columns, view)
        return settled | {"allowed": settled["allowed"] | (view.live & view.recent(self.recent))}


@pytest.mark.parametrize("mistake", [NeverOpens, Older])
def test_mistakes_in_pages_are_noticed(mistake):
    batch = texts("gqa", seed=3, vocabulary=3)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same(run(mistake(2, 2), batch), batch, expected(reference.quest(2, 7, SCALE)))


def test_a_mistake_in_what_is_allowed_is_noticed():
    batch = texts("gqa", seed=5)
    found = run(Wider(9, 3), batch, budget=(9, 9, 9), block=8)

    def of(row, query, key, value):
        return reference.masked(query, key, value, PROMPTS[row], 9, 3, SCALE, 8)

    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same(found._replace(chosen=np.zeros_like(found.chosen)), batch, of, start=(0, 0, 0))
