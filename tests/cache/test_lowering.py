"""Lowering: how many slots rows keep and layers allocate, what is refused, and what is told of it."""

import dataclasses
import pickle

import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.head_groups import branches_of
from kvjax.cache.planning.limits import half_steps, power_of_two, prompt_bucket, quarter_steps, sizes_for, slots_bucket
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import as_spec
from kvjax.errors import ConfigError, InputError, PolicyError, SelectionError, StorageError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.policies.allocation import Pyramid
from kvjax.policies.budget import Slots
from tests.laws.test_products import all_policies

PROMPTS = np.array([100, 7, 40])


def config(layers: int = 2, kv_heads: int = 2) -> DecoderConfig:
    return DecoderConfig(
        family="llama", vocab_size=64, hidden_size=32, num_layers=layers, num_heads=4, num_kv_heads=kv_heads,
        head_dim=8, mlp_size=64, max_positions=512, rope=Rope(dim=8),
    )  # fmt: skip


def exactly(policy, total: int = 150, layers: int = 2, block: int | None = None, lengths=PROMPTS, **options):
    """Lowered for arrays of exactly the batch's sizes."""
    longest = int(lengths.max())
    limits = Limits(prompt=longest, new_tokens=max(total - longest, 1))
    sizes = sizes_for(lengths, total - longest, width=longest, block=block, limits=limits, last_fed=True)
    spec = policy if isinstance(policy, CacheSpec) else CacheSpec(policy)
    return lower(spec, config(layers), sizes, lengths, **options)


def capacities(phase) -> tuple[int, ...]:
    return tuple(group.capacity for layer in phase for group in layer)


def test_rows_have_their_own_fractions():
    got = exactly(policies.h2o(budget=0.29))
    for (row,) in got.budgets.decode:
        np.testing.assert_array_equal(row, [29, 2, 11])
        assert row.dtype == np.int32
    assert capacities(got.layout.decode) == (30, 30)


def test_layers_have_their_own_budgets():
    got = exactly(policies.h2o(budget=(4, 0.5)), block=16)
    np.testing.assert_array_equal([row for (row,) in got.budgets.prompt], [[4, 4, 4], [50, 3, 20]])
    assert capacities(got.layout.decode) == (5, 51) and capacities(got.layout.prompt) == (20, 66)


@pytest.mark.parametrize(("budget", "capacity"), [(149, 150), (150, 150), (10_000, 150), (148, 149)])
def test_no_layer_holds_more_than_there_will_be(budget, capacity):
    got = exactly(policies.local_only(budget=budget), layers=1, block=64).layout
    assert capacities(got.decode) == (capacity,) and capacities(got.prompt) == (150,)


def test_everything():
    got = exactly(policies.full(), layers=3, block=8)
    assert got.budgets.prompt == got.budgets.decode == ((None,),) * 3
    assert capacities(got.layout.decode) == capacities(got.layout.prompt) == (150,) * 3


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (policies.h2o(budget=(4, 4)), "2 budgets were given for a model of 3 layers"),
        (policies.window(budget=0.3), "protects 4 slots, more than its budget of 2"),
        (policies.h2o(budget=(0.9, 0.9, 0.05), recent=5), "protects 5 slots, more than its budget of 1"),
        (policies.duo_attention([[1, 0]] * 2), "2 layers of 2 KV heads; this model has 3 layers"),
    ],
)
def test_refused_when_the_lengths_are_known(policy, match):
    with pytest.raises(PolicyError, match=match):
        exactly(policy, layers=3)


def test_half_of_a_single_slot_protects_nothing():
    got = exactly(policies.h2o(budget=0.5), total=5, layers=1, lengths=np.array([1]))
    np.testing.assert_array_equal(got.budgets.decode[0][0], [1])


def test_a_residual_is_apart_from_what_is_coded():
    """STORAGE.md, Capacities: a step's own token is in no store until it settles."""
    evicting = exactly(CacheSpec(policies.tova(budget=20), storage.int4(residual=6)))
    assert {group.slots for group in evicting.layout.groups} == {(20, 6)}
    for protecting in (policies.h2o(budget=20), policies.window(budget=20), policies.roco(budget=20, guard=6)):
        evicting = exactly(CacheSpec(protecting, storage.int4(residual=6)), block=16)
        assert {group.slots for layer in evicting.layout.prompt for group in layer} == {(14, 6)}
        assert {group.slots for group in evicting.layout.groups} == {(14, 6)}
    # Half of 20 slots are protected by h2o; a window of 16 and 4 sinks protects the newest 16.
    assert exactly(CacheSpec(policies.h2o(20), storage.int4(residual=11))).layout.groups[0].slots == (20, 11)
    assert exactly(CacheSpec(policies.window(20), storage.int4(residual=16))).layout.groups[0].slots == (4, 16)
    assert exactly(CacheSpec(policies.local_only(20), storage.int4(residual=30))).layout.groups[0].slots == (21,)
    keeping = exactly(CacheSpec(policies.full(), storage.int4(residual=6)))
    assert {group.slots for group in keeping.layout.groups} == {(144, 6)}
    assert {group.slots for group in exactly(CacheSpec(policies.h2o(20), storage.int8())).layout.groups} == {(20,)}


def test_split_heads_have_groups_of_their_own():
    got = exactly(policies.duo_attention([[1, 0], [0, 0]], sinks=2, recent=6))
    assert [[(group.heads, group.slots) for group in layer] for layer in got.layout.decode] == [
        [((0,), (150,)), ((1,), (9,))],
        [((0, 1), (9,))],
    ]


# --- buckets ---


def test_buckets_of_prompts():
    sizes = {prompt_bucket(n) for n in range(1, 2049)}
    assert len(sizes) <= 12 and max(sizes) == 2048
    assert all(n <= prompt_bucket(n) for n in range(1, 2049))
    lengths = np.arange(1, 2049)
    computed = sum(prompt_bucket(int(n)) for n in lengths)
    assert 1 - lengths.sum() / computed < 0.35
    assert [half_steps(n, 1) for n in (1, 2, 3, 4, 5, 7, 9, 13)] == [1, 2, 3, 4, 6, 8, 12, 16]


PYRAMIDS = {f"pyramidkv of {budget}": policies.pyramidkv(budget) for budget in (0.2, 0.9, 64, 200, 1024)}


def ragged_batches(rows: int, count: int) -> list[np.ndarray]:
    """Batches of random lengths up to 2,048; half of them uniform, half of them mostly short."""
    rng = np.random.default_rng(rows)
    uniform = rng.integers(1, 2049, (count // 2, rows))
    return [*uniform, *np.exp2(rng.uniform(0, 11, (count - count // 2, rows))).astype(int)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(
    "name", [name for name in all_policies() if name not in ("h2o[local]", "h2o[global]")] + list(PYRAMIDS)
)
def test_programs_of_all_prompts_up_to_2048(name, rows):
    """A policy has at most 12 programs for prompts and 4 for decoding, one for each layout."""
    policy, prompts, decoding, lowered = (all_policies() | PYRAMIDS)[name], set(), set(), 0
    pyramid = name in PYRAMIDS
    for lengths in ragged_batches(rows, 80 if pyramid else 40):
        sizes = sizes_for(lengths, 63, width=lengths.max(), block=None, limits=None, last_fed=False)
        try:
            layout = lower(CacheSpec(policy), config(layers=6 if pyramid else 2), sizes, lengths).layout
        except PolicyError:  # a fraction of so short a prompt is less than what is protected
            assert lengths.min() < 256
            continue
        prompts.add((layout, sizes.prompt))
        decoding.add(layout.decode)
        lowered += 1
    assert lowered >= 5 and len(prompts) <= 12 and len(decoding) <= 4


def test_limits_have_one_layout():
    """Whatever prompts a batch has: rows are replaced in arrays that are allocated once."""
    rng, limits = np.random.default_rng(3), Limits(prompt=40, new_tokens=8)
    for policy in (policies.pyramidkv(8, window=2), policies.pyramidkv(0.9, window=1), policies.h2o(0.5)):
        layouts = set()
        for rows in (1, 2, 8):
            for _ in range(20):
                lengths = rng.integers(3, 41, rows)
                sizes = sizes_for(lengths, 7, width=lengths.max(), block=None, limits=limits, last_fed=False)
                layouts.add(lower(CacheSpec(policy), config(layers=4), sizes, lengths).layout)
        assert len(layouts) == 1


def test_limits_of_one_length_have_the_slots_of_its_budget():
    def layers(policy, n, **limits):
        sizes = sizes_for(
            np.array([n]), 7, width=n, block=None, limits=Limits(40, new_tokens=8, **limits), last_fed=False
        )
        return capacities(lower(CacheSpec(policy), config(layers=4), sizes, np.array([n])).layout.decode)

    pyramid = policies.pyramidkv(8, window=2)
    exact = tuple(slots + 7 for slots in Pyramid(Slots(8), window=2, beta=20).slots(40, 4))
    assert layers(pyramid, 40, shortest=40) == exact == (21, 17, 13, 9)
    # A prompt of 9 tokens keeps 9 in each of the last layers.
    assert layers(pyramid, 40) == layers(pyramid, 9) == (21, 17, 16, 16)
    assert layers(policies.h2o(0.5), 40) == layers(policies.h2o(0.5), 40, shortest=40)


def test_a_pyramids_arrays_hold_the_budgets_of_every_length():
    budget = Pyramid(Slots(200), window=8, beta=20)
    for n in range(9, 1025):
        largest = budget.largest(range(1, power_of_two(n, 256) + 1), 12)
        assert all(a <= b for a, b in zip(budget.slots(n, 12), largest, strict=True))
    assert budget.largest(range(500, 501), 12) == budget.slots(500, 12)


def test_another_fraction_is_data():
    layouts = set()
    for fraction in (0.2, 0.201, 0.199, 0.198):
        lengths = np.array([1000])
        sizes = sizes_for(lengths, 63, width=1000, block=None, limits=None, last_fed=False)
        layouts.add(lower(CacheSpec(policies.h2o(fraction)), config(), sizes, lengths).layout)
    assert len(layouts) == 1


def test_slots_go_up_by_eighths():
    assert [slots_bucket(n) for n in (1, 8, 9, 103, 129, 205, 410)] == [8, 8, 16, 104, 144, 208, 416]
    assert all(n <= slots_bucket(n) <= max(n * 1.125, 8 + n) for n in range(1, 3000))


def test_a_callers_padding_is_kept():
    sizes = sizes_for(np.array([9, 5]), 3, width=40, block=None, limits=None, last_fed=False)
    assert sizes.prompt == 40


def test_limits_are_kept_to():
    with pytest.raises(InputError, match="the longest prompt has 9 tokens and 4 follow, more than Limits"):
        sizes_for(np.array([9]), 3, width=9, block=None, limits=Limits(9, 3), last_fed=False)
    with pytest.raises(InputError, match="the shortest prompt has 5 tokens, fewer than Limits"):
        sizes_for(np.array([9, 5]), 3, width=9, block=None, limits=Limits(9, 4, shortest=6), last_fed=False)
    with pytest.raises(InputError, match=r"limits\.prompt"):
        Limits(0, 4)
    with pytest.raises(InputError, match=r"limits\.shortest must be at most limits\.prompt, which is 9; got 10"):
        Limits(9, 4, shortest=10)


def test_blocks_are_bucketed_too():
    counts = {
        sizes_for(np.array([n]), 3, width=n, block=32, limits=None, last_fed=False).blocks for n in range(33, 2049)
    }
    assert len(counts) <= 12


def test_a_block_bounds_what_is_computed_at_once():
    """Not what the batch has: the arrays of prompts may be wider."""

    def widest(lengths, width, block, limits=None):
        sizes = sizes_for(np.array(lengths), 3, width=width, block=block, limits=limits, last_fed=False)
        assert sizes.blocks * (sizes.block or sizes.prompt) >= max(lengths)
        return sizes.block or sizes.prompt

    assert widest([20], 20, 64, Limits(1000, 8)) == 64
    assert widest([20], 1000, 64) == 64
    assert widest([100, 70], 100, 110) == 110 and widest([100], 100, 300) == 128
    assert widest([20], 20, 2000, Limits(1000, 8)) == 1000
    # A caller's padding and limits say how many blocks there are.
    for n in (20, 500, 999):
        assert sizes_for(np.array([n]), 3, width=1000, block=64, limits=None, last_fed=False).blocks == 16
        assert sizes_for(np.array([n]), 3, width=n, block=64, limits=Limits(1000, 8), last_fed=False).blocks == 16


# --- what is said ---


def test_a_name_that_cannot_run_raises():
    with pytest.raises(ConfigError, match=r"implementation='pallas_tpu' cannot run this: .*several parts"):
        exactly(CacheSpec(policies.h2o(20), storage.mikv()), implementation="pallas_tpu", platform="tpu")


def test_names_are_no_part_of_a_layout():
    one, two = (exactly(policies.evict(importance=policies.mass, budget=9, name=name)).layout for name in "ab")
    assert one == two and hash(one) == hash(two) and one.name != two.name
    assert exactly(policies.h2o(9)).layout == exactly(policies.h2o(np.int64(9))).layout


def test_bytes_are_those_of_the_arrays():
    got = exactly(CacheSpec(policies.h2o(20), storage.int8())).layout
    # 8 channels are 8 codes, a scale and a zero of 4 bytes each, for keys and for values.
    assert got.bytes(3) == 3 * 2 * 2 * 20 * 2 * (8 + 8)
    assert got.bytes(3, statistics=True) == got.bytes(3) + 3 * 2 * 2 * 20 * (4 + 4)


def test_a_selection_reads_only_from_its_first_layer_on():
    got = exactly(CacheSpec(policies.full(), selection=selection.quest(page=4, budget=16)), layers=4).layout
    assert [group.selection.reads_all for group in got.groups] == [True, True, False, False]
    assert all(group.selection.reads_all for layer in got.prompt for group in layer)


def test_only_the_rows_budgets_must_work():
    """A ring needs an odd budget: of each row, and not of the length that arrays are sized for."""
    lengths = np.array([30])
    sizes = sizes_for(lengths, 3, width=30, block=None, limits=None, last_fed=True)
    assert int(0.5 * sizes.budget_prompt) % 2 == 0
    got = lower(CacheSpec(policies.h2o(0.5, variant="ring")), config(), sizes, lengths)
    assert int(got.budgets.decode[0][0][0]) == 15


@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(policies.full()), CacheSpec(policies.tova(8), storage.int4(residual=3)),
        CacheSpec(policies.knorm(9), storage.fp8(), selection.quest(page=4, budget=16)),
        CacheSpec(policies.h2o(0.5, variant="masked")), CacheSpec(policies.duo_attention([[1, 0]] * 2)),
    ],
    ids=lambda spec: spec.name,
)  # fmt: skip
def test_a_spec_is_a_value(spec):
    names = {**vars(policies), **vars(storage), **vars(selection), "CacheSpec": CacheSpec}
    assert eval(repr(spec), names) == spec and pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))


def test_another_policy_leaves_the_selection_of_the_first():
    masked = CacheSpec(policies.h2o(0.3, variant="masked"), storage.int8())
    assert dataclasses.replace(masked, policy=policies.full()) == CacheSpec(policies.full(), storage.int8())
    other = policies.h2o(0.5, variant="masked")
    assert dataclasses.replace(masked, policy=other) == CacheSpec(other, storage.int8())
    assert dataclasses.replace(masked, storage=storage.dense()).selection == masked.policy.selection
    given = CacheSpec(policies.snapkv(40), selection=selection.optimal(4))
    assert dataclasses.replace(given, policy=policies.full()).selection == selection.optimal(4)


def test_a_storage_or_selection_of_another_type_is_refused():
    for given in (policies.full(), CacheSpec(policies.full())):
        with pytest.raises(StorageError, match="storage=0 is not a Storage"):
            as_spec(given, storage=0)
        with pytest.raises(SelectionError, match="selection=0 is not a Selection"):
            as_spec(given, selection=0)


def test_steps_of_a_quarter():
    sizes = [quarter_steps(n, 16) for n in range(1, 300)]
    assert sorted(set(sizes)) == [16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320]
    assert all(each >= n for n, each in enumerate(sizes, 1)) and quarter_steps(3, 8) == 8


@pytest.mark.parametrize(
    ("before", "after", "one"),
    [
        (8, 8, True),
        (8, 9, True),
        (9, 8, False),
        (0.2, 0.2, True),
        (0.3, 0.2, False),
        (8, 0.5, False),
        ((8, 8), 8, False),
    ],
)
def test_a_step_evicts_one_slot_if_the_second_budget_is_no_smaller(before, after, one):
    policy = policies.after_prefill(policies.knorm(before), then=policies.h2o(after))
    assert [group.evicts_one for layer in exactly(policy).layout.decode for group in layer] == [one, one]
    (branch,) = branches_of(policy, selection.everything(), config())
    assert not branch.in_layer(0, 6).evicts_one


@pytest.mark.parametrize("held", [storage.dense(), storage.int8()])
def test_pages_after_a_prompt_are_whole_and_have_room(held):
    """A new token has a slot before pages are freed, in a page of as many slots as any other."""
    policy = policies.after_prefill(policies.knorm(16), then=policies.by_page(policies.h2o(9), page=4))
    assert capacities(exactly(CacheSpec(policy, held)).layout.decode) == (20, 20)


def test_ranks_after_a_prompt_are_not_those_of_the_policy_that_decodes():
    compressor = policies.knorm(8, positions="cache")
    (branch,) = branches_of(
        policies.after_prefill(compressor, then=policies.streaming_llm(8)), selection.everything(), config()
    )
    assert not branch.evicts_one
