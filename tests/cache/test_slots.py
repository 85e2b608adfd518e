"""The slots themselves: appending into holes, choosing victims, moving survivors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache, policies
from kvjax.cache import Group, LayerKV, slots
from kvjax.cache.empty import empty
from kvjax.cache.state import EMPTY, Layer, exact_store
from kvjax.cache.step import evict
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.numerics.statistics import MASS

DIM = 2


def layer(*heads: list[int]) -> LayerKV:
    """One row; a slot at position p has key p, value 100 + p and statistic p / 10; empty ones hold rubbish."""
    position = jnp.array([heads], jnp.int32)
    rubbish = jnp.where(position >= 0, position, -77).astype(jnp.float32)
    key = jnp.broadcast_to(rubbish[..., None], (*position.shape, DIM))
    stats = {"mass": jnp.where(position >= 0, rubbish / 10, 0.0)}
    return LayerKV(position=position, stores=(exact_store(key, key + 100),), stats=stats, index={}, dim=DIM)


def append(into: LayerKV, *positions: int) -> LayerKV:
    new = jnp.array([positions], jnp.int32)
    key = jnp.broadcast_to(new[:, None, :, None].astype(jnp.float32), (1, into.position.shape[1], len(positions), DIM))
    return slots.append(into, key, key + 100, new)


def check(got: LayerKV, *heads: list[int], zero: tuple[int, ...] = ()) -> None:
    """Where every position is, and that its key, value and statistic came along (0 for those of `zero`)."""
    assert got.position.tolist() == [list(heads)]
    live = np.asarray(got.position) >= 0
    position = np.asarray(got.position)[live]
    np.testing.assert_array_equal(got.key[live], np.repeat(position[:, None], DIM, 1))
    np.testing.assert_array_equal(got.value[live], np.repeat(position[:, None], DIM, 1) + 100)
    expected = np.where(np.isin(position, zero), 0, position / np.float32(10))
    np.testing.assert_allclose(got.stats["mass"][live], expected, rtol=1e-6)
    np.testing.assert_array_equal(got.stats["mass"][~live], 0)


def test_one_token_goes_into_the_first_hole_of_each_head():
    got = append(layer([0, -1, 2, -1], [-1, 0, 1, 2]), 3)
    check(got, [0, 3, 2, -1], [3, 0, 1, 2], zero=(3,))


def test_a_block_fills_holes_in_order_and_padding_goes_nowhere():
    before = layer([5, -1, 2, -1, -1], [-1, -1, 2, 4, 5])
    check(append(before, 6, 7), [5, 6, 2, 7, -1], [6, 7, 2, 4, 5], zero=(6, 7))
    check(append(before, 6, -1), [5, 6, 2, -1, -1], [6, -1, 2, 4, 5], zero=(6,))
    check(append(before, -1, -1), [5, -1, 2, -1, -1], [-1, -1, 2, 4, 5])
    check(append(before, -1), [5, -1, 2, -1, -1], [-1, -1, 2, 4, 5])


def test_padding_of_a_block_wider_than_the_holes_overwrites_nothing():
    check(append(layer([5, -1, 2]), 6, -1, -1), [5, 6, 2], zero=(6,))
    check(append(layer([5, 4, 2]), -1, -1), [5, 4, 2])
    check(append(layer([5, 4, 2]), -1), [5, 4, 2])


def test_a_row_of_padding_is_unchanged_beside_one_that_is_not():
    one = layer([0, -1, 2])
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    key = jnp.full((2, 1, 1, DIM), 3.0)
    got = slots.append(two, key, key, jnp.array([[3], [-1]], jnp.int32))
    assert got.position.tolist() == [[[0, 3, 2]], [[0, -1, 2]]]
    np.testing.assert_array_equal(got.key[1], two.key[1])


INF = np.inf
VICTIMS = [
    # position, priority, budget, victims
    ([3, 0, 2, 1], [5, 1, 7, 3], 3, [0]),
    ([3, 0, 2, 1], [1, 1, 1, 1], 3, [0]),
    ([3, 4, 2, 9], [1, 5, 1, 1], 3, [2]),
    ([3, -1, 2, 1], [5, -9, 7, 6], 2, [3]),
    ([3, -1, 2, 1], [5, -9, 7, 6], 3, []),
    ([-1, -1, -1, -1], [0, 0, 0, 0], 1, []),
    ([3, 0, 2, 1], [INF, INF, INF, 1e30], 3, [1]),
    ([3, 0, 2, 1], [INF, INF, -INF, 1], 3, [2]),
    ([3, 0, 2, -1], [-INF, -INF, -INF, -INF], 2, [0]),
    ([3, 0, 2, 1], [0.0, -0.0, 0.0, -0.0], 3, [0]),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("choose", [evict.one_victim, evict.all_victims])
@pytest.mark.parametrize(("position", "priority", "budget", "victims"), VICTIMS)
def test_victims(choose, position, priority, budget, victims):
    """The lowest goes, of equals the older; +inf stays while anything else is there; empty slots never count."""
    arrays = jnp.array([[position]], jnp.int32), jnp.array([[priority]], jnp.float32)
    got = choose(arrays[1], arrays[0], jnp.array([[[budget]]], jnp.int32))
    assert sorted(np.asarray(arrays[0])[np.asarray(got)].tolist()) == victims


PAGES = [
    # position, priority, budget in slots, victims; pages of two slots
    ([4, 5, 0, 1, 2, 3], [1, 1, 5, 1, 2, 3], 4, [2, 3]),
    ([4, -1, 0, 1, 2, 3], [0, 9, 5, 1, 2, 3], 4, [2, 3]),  # the newest stays, though it is worth least
    ([4, -1, 0, 1, 2, 3], [0, 9, 3, 1, 2, 3], 4, [0, 1]),  # of equal pages the older
    ([4, -1, 0, 1, 2, 3], [0, 9, INF, 1, 2, INF], 4, [0, 1]),  # all are protected: the oldest
    ([4, -1, 0, 1, 2, 3], [0, 9, 1, INF, 2, 3], 4, [2, 3]),
    ([4, -1, 0, 1, 2, 3], [0, 9, 5, 1, 2, 3], 5, [2, 3]),  # whole pages: five slots are four
    ([4, -1, 0, 1, 2, 3], [0, 9, 5, 1, 2, 3], 6, []),
    ([4, 5, 0, 1, 2, 3, 6], [1, 1, 5, 1, 2, 3, 0], 4, [2, 3, 4, 5]),
    ([4, 5, 0, 1, -1, -1], [-INF, -INF, -INF, -INF, 0, 0], 2, [0, 1]),
    ([-1] * 6, [0] * 6, 2, []),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("position", "priority", "budget", "gone"), PAGES)
def test_victims_by_pages(position, priority, budget, gone):
    arrays = jnp.array([[position]], jnp.int32), jnp.array([[priority]], jnp.float32)
    got = evict.page_victims(arrays[1], arrays[0], jnp.array([[[budget // 2]]], jnp.int32), 2)
    assert sorted(np.asarray(arrays[0])[np.asarray(got)].tolist()) == gone


def test_tokens_go_to_the_newest_page_and_then_to_a_free_one():
    """Pages of three slots: the second is begun, the first was freed."""
    position = jnp.array([[[-1, -1, -1, 7, -1, -1, 4, 5, 6]]], jnp.int32)
    assert slots.free_slots(position, 1, 3).tolist() == [[[4]]]
    assert slots.free_slots(position, 6, 3).tolist() == [[[4, 5, 0, 1, 2, 9]]]
    full = jnp.array([[[-1, -1, -1, 7, 8, 9, 4, 5, 6]]], jnp.int32)
    assert slots.free_slots(full, 1, 3).tolist() == [[[0]]]
    assert slots.free_slots(jnp.maximum(full, 0), 1, 3).tolist() == [[[9]]]
    before = layer([-1, -1, -1, 7, -1, -1, 4, 5, 6])
    new = jnp.array([[8, 9, 10]], jnp.int32)
    key = jnp.broadcast_to(new[:, None, :, None].astype(jnp.float32), (1, 1, 3, DIM))
    check(slots.append(before, key, key + 100, new, 3), [10, -1, -1, 7, 8, 9, 4, 5, 6], zero=(8, 9, 10))
    one = slots.append(before, key[:, :, :1], key[:, :, :1] + 100, new[:, :1], 3)
    check(one, [-1, -1, -1, 7, 8, -1, 4, 5, 6], zero=(8,))


def test_many_victims_with_a_budget_a_row():
    position = jnp.array([[[4, 2, 0, 3, 1, -1]], [[0, 1, 2, 3, -1, -1]], [[-1] * 6]], jnp.int32)
    priority = jnp.array([[[1, 1, 1, 9, INF, 8]], [[1, 2, 3, 4, 5, 6]], [[0] * 6]], jnp.float32)
    got = evict.all_victims(priority, position, jnp.array([2, 4, 1], jnp.int32)[:, None, None])
    assert [sorted(p[v].tolist()) for p, v in zip(np.asarray(position), np.asarray(got), strict=True)] == [
        [0, 2, 4],
        [],
        [],
    ]


def test_both_ways_to_choose_agree():
    rng = np.random.default_rng(0)
    position = jnp.asarray(np.stack([rng.permutation(12) for _ in range(600)]).reshape(100, 6, 12), jnp.int32)
    priority = jnp.asarray(rng.integers(0, 4, position.shape), jnp.float32)
    budget = jnp.full((100, 1, 1), 11, jnp.int32)
    one, many = (choose(priority, position, budget) for choose in (evict.one_victim, evict.all_victims))
    np.testing.assert_array_equal(one, many)


def test_forgetting_clears_the_statistics_of_empty_slots():
    position = jnp.array([[[7, -1, 0], [-1, -1, 5]]], jnp.int32)
    stats = {"mass": jnp.ones((1, 2, 3)), "history": jnp.ones((1, 2, 3, 2))}
    got = slots.forget(stats, position)
    np.testing.assert_array_equal(got["mass"], position >= 0)
    np.testing.assert_array_equal(got["history"][..., 1], position >= 0)


@pytest.mark.parametrize("capacity", [2, 3, 4, 7])
def test_resizing_moves_the_live_slots_oldest_first(capacity):
    after = Group(slots=(capacity,), needs=frozenset({MASS}), decoding=True)
    got = convert(layer([7, -1, 3, -1], [-1, 2, -1, 0]), Group(), after, Prompt(jnp.array([8], jnp.int32)))
    pad = [EMPTY] * (capacity - 2)
    check(got, [3, 7, *pad], [0, 2, *pad])


def test_ranks_are_places_among_the_live():
    keys = jnp.array([[[9, -1, 2, 5], [4, 9, -1, -1]]], jnp.int32)
    query, key = slots.ranks(jnp.array([[5, 9]], jnp.int32), keys, in_order=False)
    assert query.tolist() == [[[1, 2], [1, 1]]]
    live = np.asarray(keys) >= 0
    assert np.asarray(key)[live].tolist() == [2, 0, 1, 0, 1]


def test_an_empty_layer_and_its_bytes():
    group = Group(policy=policies.h2o(budget=4), slots=(5,), needs=frozenset({MASS}))
    got = empty(group, 2, 3, 8, jnp.bfloat16)
    assert got.key.shape == got.value.shape == (2, 3, 5, 8) and got.key.dtype == jnp.bfloat16
    assert (got.position == EMPTY).all() and got.stats["mass"].dtype == jnp.float32
    assert cache.live_slots(got).tolist() == [[0] * 3] * 2
    row = jnp.zeros((2,), jnp.int32)
    state = cache.KVState((Layer((got,)), Layer((got,))), row, row, row, ((row,), (row,)))
    assert cache.nbytes(state) == 2 * 2 * (2 * 3 * 5 * 8) * 2
    assert cache.nbytes(state, statistics=True) == cache.nbytes(state) + 2 * (2 * 3 * 5) * 8


def test_a_layer_answers_for_its_only_group_of_heads():
    one = layer([0, -1], [1, 0])
    assert Layer((one,)).position is one.position
    with pytest.raises(AttributeError, match="a layer of 2 groups of heads has no 'position'"):
        _ = Layer((one, one)).position
    assert jax.tree.structure(jax.tree.map(lambda x: x, Layer((one,)))) == jax.tree.structure(Layer((one,)))


@pytest.mark.parametrize("page", [1, 5])
def test_free_slots_are_those_of_a_sort(page):
    """Those of pages that are neither empty nor full first, then the others, ascending."""
    rng = np.random.default_rng(0)
    for size, share in ((7, 0.5), (64, 0.9), (130, 0.0), (130, 1.0), (130, 0.4)):
        position = np.where(rng.random((2, 3, size)) < share, rng.integers(0, 900, (2, 3, size)), -1).astype(np.int32)
        live = position >= 0
        pages = np.pad(live, ((0, 0), (0, 0), (0, -size % page))).reshape(2, 3, -1, page)
        begun = np.repeat(pages.any(axis=3), page, axis=2)[:, :, :size] & (page > 1)
        order = np.argsort(np.where(live, 2, np.where(begun, 0, 1)), axis=2, kind="stable")
        for count in (2, size, size + 3):
            expected = np.full((2, 3, count), size)
            free = np.minimum((~live).sum(axis=2), count)
            for index in np.ndindex(2, 3):
                expected[index][: free[index]] = order[index][: free[index]]
            found = slots.free_slots(jnp.asarray(position), count, page)
            np.testing.assert_array_equal(found, expected, err_msg=f"{size} slots, {share} live, {count} wanted")
