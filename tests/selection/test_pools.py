"""Selections beside eviction: one layer against the float64 reference, pool limits, pages that are evicted whole.

The layer is not the first, so that InfiniGen looks ahead; its guess is the query itself.
"""

import functools
import itertools
import math

import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from kvjax.policies import TextFraction
from tests import layers
from tests.laws import CLEAR
from tests.reference import policies as reference
from tests.reference import replay
from tests.reference import selection as looks

DIM, THETA, STEPS = 8, 10_000.0, 14
SCALE = DIM**-0.5
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
PROMPTS = np.array([13, 6, 9])


@functools.cache
def case(heads: str = "gqa", seed: int = 0, block: int | None = None) -> layers.Case:
    streams = layers.random_streams([10 * seed + row for row in range(3)], 13 + STEPS, heads=HEADS[heads], dim=DIM)
    streams = streams._replace(query=2 * streams.query)
    return layers.Case(streams, PROMPTS, PROMPTS + STEPS, block, Rope(dim=DIM, theta=THETA), layer=1)


def guess(**more):
    return looks.InfiniGen(SCALE, **more)


#: name -> ours, and what makes the reference's
LOOKS = {
    "infinigen": (
        selection.infinigen(1.5, ratio=0.5, cap=0.4, first_layer=1), lambda: guess(alpha=1.5, ratio=0.5, cap=0.4),
    ),
    "infinigen with ends": (
        selection.infinigen(1.5, ratio=0.5, cap=3, first_layer=1, sinks=1, recent=2, columns="union"),
        lambda: guess(alpha=1.5, ratio=0.5, cap=3, sinks=1, recent=2, columns="union"),
    ),
    "optimal": (selection.optimal(3), lambda: looks.EachHead(looks.optimal(3, SCALE))),
    "tokenselect": (selection.tokenselect(2, 1, 2, reuse=0.0), lambda: looks.TokenSelect(SCALE, 2, 1, 2, 0.0)),
    "quest": (selection.quest(2, 6, first_layer=0), lambda: looks.quest(2, 6, SCALE)),
    "lserve": (selection.lserve(2, 1, 3, 6, first_layer=0), lambda: looks.lserve(2, 1, 3, 6, SCALE)),
    "retrieval": (selection.retrieval(2, 6, every=2), lambda: looks.retrieval(2, 6, SCALE, 2)),
}  # fmt: skip
ENDS = {"sinks": 1, "recent": 4}  # what `infinigen with ends` always reads, and half of a budget of 9


def of(package, name, **arguments):
    return package.by_name(name, **arguments)


def paged(package, name, page=2, **arguments):
    return package.COMBINATORS["by_page"](of(package, name, **arguments), page=page)


#: (look, policy of a package, heads, block of the prompt)
CASES = {
    "fifo": ("infinigen", lambda p: of(p, "fifo", budget=8), "gqa", None),
    "lru": ("infinigen", lambda p: of(p, "lru", budget=8), "gqa", None),
    "lru in blocks": ("infinigen", lambda p: of(p, "lru", budget=7), "mha", 4),
    "counter": ("infinigen", lambda p: of(p, "counter", budget=8), "gqa", None),
    "counter in blocks": ("infinigen", lambda p: of(p, "counter", budget=7), "mqa", 4),
    "counter that saturates": ("infinigen", lambda p: of(p, "counter", budget=9, saturate=3), "mha", None),
    "counter of optimal": ("optimal", lambda p: of(p, "counter", budget=9, recent=2, saturate=None), "gqa", None),
    "counter beside ends": (
        "infinigen with ends", lambda p: of(p, "counter", budget=9, **(ENDS if p is reference else {})), "gqa", None,
    ),
    "lru beside ends": (
        "infinigen with ends", lambda p: of(p, "lru", budget=9, **(ENDS if p is reference else {})), "mqa", 4,
    ),
    "h2o": ("infinigen", lambda p: of(p, "h2o", budget=8, recent=2), "gqa", None),
    "a compressor": (
        "infinigen",
        lambda p: p.COMBINATORS["after_prefill"](of(p, "knorm", budget=0.7), then=of(p, "counter", budget=8)),
        "gqa", None,
    ),
    "votes in a window": ("tokenselect", lambda p: of(p, "window", budget=8, sinks=1), "gqa", None),
    "votes and tova": ("tokenselect", lambda p: of(p, "tova", budget=9), "mha", 4),
    "pages by mass": ("quest", lambda p: paged(p, "h2o", budget=10, recent=1), "gqa", None),
    "pages by fetches in blocks": ("quest", lambda p: paged(p, "counter", budget=11, recent=1), "mqa", 4),
    "pages that stand": ("lserve", lambda p: paged(p, "lru", budget=10, recent=1), "gqa", None),
    "means of pages": ("retrieval", lambda p: paged(p, "counter", budget=10, recent=1), "gqa", 3),
    "a compressor and pages": (
        "quest",
        lambda p: p.COMBINATORS["after_prefill"](of(p, "knorm", budget=0.7), then=paged(p, "h2o", budget=10)),
        "gqa", None,
    ),
}  # fmt: skip
#: Where a choice of the first is too near.
SEEDS: dict[str, int] = {}


@functools.cache
def ran(name: str) -> layers.Run:
    look, policy, heads, block = CASES[name]
    spec = CacheSpec(policy(policies), selection=LOOKS[look][0])
    return layers.run(spec, case(heads, SEEDS.get(name, 0), block))


def expected(name: str) -> list[replay.Row]:
    look, policy, heads, block = CASES[name]
    given = case(heads, SEEDS.get(name, 0), block)
    prompt = tuple(given.streams)
    decode = tuple(
        np.stack([x[row, :, n : n + STEPS] for row, n in enumerate(PROMPTS)]) for x in given.streams
    )  # fmt: skip
    exact = replay.Storage(replay.exact, replay.exact, None)
    return replay.replay(
        exact, prompt, decode, PROMPTS, policy(reference), theta=THETA, look=LOOKS[look][1], block=block
    )


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_the_reference(name):
    """Returns the reads of each query, the slots that stay, and how often and when each was fetched."""
    run, rows = ran(name), expected(name)
    assert min(row.gap for row in rows) > CLEAR, "a choice is too near; another seed"
    for row, (n, own) in enumerate(zip(PROMPTS, rows, strict=True)):
        np.testing.assert_allclose(run.output[row, :, n : n + STEPS], own.output, atol=1e-4, err_msg=f"{row=}")
        for head, slots in enumerate(own.heads):
            assert run.live(-1, row, head) == slots.head.position.tolist(), f"{row=} {head=}"
            position = np.asarray(run.layers.position)[-1, row, head]
            order = np.argsort(position)[np.sum(position < 0) :]
            for statistic in ("fetched", "last_fetched"):
                if statistic in slots.head.stats:
                    (found,) = (x for key, x in run.layers.stats.items() if key.split("[")[0] == statistic)
                    np.testing.assert_array_equal(found[-1, row, head, order], slots.head.stats[statistic], statistic)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_limits_and_what_may_be_chosen(name):
    """Distinct live slots within the limit; what is gone does not come back; what is chosen was live and is read."""
    run = ran(name)
    _, policy, heads, _ = CASES[name]
    made = policy(policies)
    phased = isinstance(made, policies.Phases)
    decode = made.decode if phased else made
    page = decode.page
    limit = decode.budget.slots(13, 1)[0] // page * page
    for row, head in itertools.product(range(3), range(HEADS[heads][1])):
        before = set(run.live(0, row, head))
        for step in range(STEPS):
            newest = PROMPTS[row] + step
            live, positions = run.live(step + 1, row, head), run.position[step + 1, row, head]
            assert len(set(live)) == len(live) == (positions >= 0).sum()
            assert set(live) <= before | {newest} and newest in live, "what is gone does not come back"
            held = len(before) + 1
            if held <= limit:
                assert len(live) == held
            elif page == 1:
                assert len(live) == limit
            else:
                assert limit - page < len(live) <= limit
            read = run.read[0][step, row, head]
            chosen = read[run.chosen[0][step, row, head]]
            assert set(chosen) <= before, "the new token is no candidate"
            assert len(set(read[read >= 0])) == (read >= 0).sum() and set(read[read >= 0]) <= before | {newest}
            before = set(live)
    assert phased or run.layers.position.shape[-1] == limit + page


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in CASES if "pages" in name])
def test_bounds_hold_after_pages_were_evicted(name):
    """The summary of each page is that of its live keys: of no key that is gone."""
    run = ran(name)
    look, _, heads, _ = CASES[name]
    index, stored = run.layers.index, run.layers
    for step, row, head in itertools.product((0, 5, STEPS), range(3), range(HEADS[heads][1])):
        position, keys = stored.position[step, row, head], stored.stores[0]["key"]["exact"][step, row, head]
        for start in range(0, len(position), 2):
            own = keys[start : start + 2][position[start : start + 2] >= 0]
            if not len(own):
                continue
            if look == "retrieval":
                np.testing.assert_allclose(index["sum"][step, row, head, start // 2], own.sum(axis=0), atol=1e-5)
                assert index["live"][step, row, head, start // 2] == len(own)
                continue
            reach = index["reach"][step, row, head, start // 2].max(axis=0)
            np.testing.assert_allclose(reach[:DIM], own.max(axis=0), atol=1e-6)
            np.testing.assert_allclose(-reach[DIM:], own.min(axis=0), atol=1e-6)
            query = np.random.default_rng(step).normal(size=(5, DIM))
            bound = np.maximum(query * reach[:DIM], -query * reach[DIM:]).sum(axis=1)
            assert (bound >= (query @ own.T).max(axis=1) - 1e-5).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("policy", "heads"),
    [("full", "mha"), ("lru", "gqa"), ("pages", "mqa")],
)
def test_a_pool_with_room_for_everything_is_the_full_cache(policy, heads):
    """Also with everything read of it."""
    room = 13 + STEPS
    kept = {
        "full": policies.full(), "lru": policies.lru(room),
        "pages": policies.by_page(policies.counter(room + 1), page=2),
    }[policy]  # fmt: skip
    reads = (
        [selection.quest(2, room + 1, first_layer=0)] if policy == "pages"
        else [selection.infinigen(math.inf, cap=1.0, first_layer=1), selection.optimal(room)]
    )  # fmt: skip
    full = layers.run(policies.full(), case(heads)).output
    for look in reads:
        np.testing.assert_allclose(layers.run(CacheSpec(kept, selection=look), case(heads)).output, full, atol=1e-5)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["lru beside ends", "pages that stand", "votes and tova"])
def test_a_row_alone_is_the_row_in_a_batch(name):
    run = ran(name)
    look, policy, heads, block = CASES[name]
    spec = CacheSpec(policy(policies), selection=LOOKS[look][0])
    alone = layers.run(spec, case(heads, 0, block).alone(1))
    np.testing.assert_allclose(alone.output[0], run.output[1], atol=1e-5)
    for step, head in itertools.product(range(STEPS + 1), range(HEADS[heads][1])):
        assert alone.live(step, 0, head) == run.live(step, 1, head)


def test_a_limit_by_the_whole_text():
    """⌊f · N⌋ of each row's prompt and the tokens to come, against float noise."""
    got = layers.lowered(CacheSpec(policies.counter(TextFraction(0.3))), case())
    assert got.budgets.decode[1][0].tolist() == [math.floor(0.3 * (n + STEPS) + 1e-9) for n in PROMPTS]
    run = layers.run(CacheSpec(policies.counter(TextFraction(0.3)), selection=LOOKS["infinigen"][0]), case())
    for row, limit in enumerate(got.budgets.decode[1][0]):
        assert len(run.live(-1, row, 0)) == limit


def test_first_layers_hold_everything():
    spec = CacheSpec(policies.from_layer(policies.counter(8), first=1), selection=LOOKS["infinigen"][0])
    layout = layers.lowered(spec, case()).layout
    dense, limited = (groups[0] for groups in layout.decode)
    assert (dense.capacity, limited.capacity) == (13 + STEPS, 9)
    assert dense.policy.budget is None and dense.selection.reads_all and not dense.needs
    assert {s.of_selection for s in limited.needs} == {True} and limited.selection.ahead


def test_a_layer_that_reads_everything_evicts_the_oldest():
    """Nothing is fetched there, so that the pool is a queue."""
    fifo = layers.run(policies.fifo(8), case())
    for made in (policies.lru(8), policies.counter(8)):
        found = layers.run(made, case())
        for step, row, head in itertools.product(range(STEPS + 1), range(3), range(2)):
            assert found.live(step, row, head) == fifo.live(step, row, head)


LOOK = selection.infinigen(first_layer=1, sinks=3, recent=2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CacheSpec(policies.counter(5), selection=LOOK), "always reads 5 slots, and the budget has 5|protects"),
        (CacheSpec(policies.lru(4), selection=LOOK), "always reads 5 slots|protects"),
        (CacheSpec(policies.fifo(5), selection=LOOK), "always reads 5 slots, and the budget has 5; raise the budget"),
        (CacheSpec(policies.window(8), selection=selection.tokenselect(2, 4, 5)), "always reads 8 slots"),
        (CacheSpec(policies.by_page(policies.counter(0.3), page=4), selection=selection.optimal(2)), "two pages of 4"),
        (CacheSpec(policies.h2o(8), selection=LOOKS["quest"][0]), "evicts single ones"),
        (CacheSpec(policies.counter(8), selection=LOOKS["lserve"][0]), "evicts single ones"),
        (CacheSpec(policies.by_page(policies.h2o(9), page=3), selection=LOOKS["quest"][0]), "evicts .*pages"),
        (CacheSpec(policies.h2o(8), selection=LOOKS["tokenselect"][0]), "each head holds its own"),
        (CacheSpec(policies.counter(8), selection=LOOKS["tokenselect"][0]), "each head holds its own"),
        (CacheSpec(policies.snapkv(8, window=2), selection=LOOKS["tokenselect"][0]), "each head holds its own"),
        (CacheSpec(policies.adakv(policies.snapkv(8, window=2)), selection=LOOKS["tokenselect"][0]), "its own"),
        *(
            (CacheSpec(policy, selection=selection.shadowkv(4, 2, 4)), "needs every token of the prompt")
            for policy in (
                policies.window(8), policies.snapkv(8, window=2), policies.fifo(40),
                policies.by_page(policies.fifo(8), page=2),
            )
        ),
        *(
            (CacheSpec(policies.window(8, merge=policies.d2o()), selection=look), "merges evicted pairs")
            for look in (LOOKS["infinigen"][0], LOOKS["optimal"][0], LOOKS["tokenselect"][0])
        ),
        *(
            (CacheSpec(policies.full(), selection=look, positions="cache"), "rotates keys again")
            for look in (
                LOOKS["infinigen"][0], LOOKS["quest"][0], LOOKS["lserve"][0], LOOKS["retrieval"][0],
                LOOKS["tokenselect"][0], selection.shadowkv(4, 2, 4),
            )
        ),
    ],
    ids=lambda x: x.name if isinstance(x, CacheSpec) else "",
)  # fmt: skip
def test_refused_with_the_reason(spec, message):
    with pytest.raises(PolicyError, match=message) as caught:
        layers.lowered(spec, case())
    assert "\n" not in str(caught.value)


KEEPING = ("infinigen", "quest", "lserve", "retrieval", "tokenselect")


@pytest.mark.parametrize("look", KEEPING)
@pytest.mark.parametrize("variant", ["masked", "global", "local"])
def test_variants_that_hide_slots_take_no_selection(variant, look):
    with pytest.raises(PolicyError, match="has a selection of its own"):
        CacheSpec(policies.h2o(9, variant=variant), selection=LOOKS[look][0])


@pytest.mark.parametrize("look", ["quest", "lserve", "retrieval", "tokenselect"])
def test_the_ring_is_refused(look):
    with pytest.raises(PolicyError):
        layers.lowered(CacheSpec(policies.h2o(9, variant="ring"), selection=LOOKS[look][0]), case())


def test_infinigen_refuses_the_ring():
    with pytest.raises(PolicyError):
        layers.lowered(CacheSpec(policies.h2o(9, variant="ring"), selection=LOOKS["infinigen"][0]), case())


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["counter", "lru in blocks", "votes in a window"])
def test_the_layer_in_codes_chooses_from_exact_keys(name):
    """InfiniGen's columns and the votes are those of the codec law: 8 bits change few outputs by little."""
    look, policy, heads, block = CASES[name]
    if block is not None:
        with pytest.raises(PolicyError, match="summarises exact keys"):
            layers.lowered(CacheSpec(policy(policies), storage.int8(), LOOKS[look][0]), case(heads, 0, block))
        return
    coded = layers.run(CacheSpec(policy(policies), storage.int8(), LOOKS[look][0]), case(heads, 0, block))
    exact = ran(name)
    if look == "infinigen":
        for step, row, head in itertools.product(range(STEPS), range(3), range(HEADS[heads][1])):
            assert coded.live(step, row, head) == exact.live(step, row, head)
            read = [set(run.read[0][step, row, head].tolist()) - {-1} for run in (coded, exact)]
            assert read[0] == read[1], "its columns are of exact keys"
    np.testing.assert_allclose(coded.output, exact.output, atol=0.2)
