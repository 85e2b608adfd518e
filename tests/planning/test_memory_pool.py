"""Instances that hold slots of each other's requests: closed forms of one request, and what is conserved."""

import dataclasses
import itertools

import pytest

from kvjax import devices
from kvjax.errors import InputError
from kvjax.planning.attention_traffic import part_bytes
from kvjax.planning.memory_pool import Request, place, random_requests, simulate_pool
from kvjax.planning.served_model import ServedModel

MODEL = ServedModel(params=1_000_000, layers=2, heads=4, kv_heads=2, dim=8)
SLOT = MODEL.layers * MODEL.slot_bytes
ROOM = 1000  # slots of an instance


def device(slots: int = ROOM) -> devices.Device:
    memory = MODEL.weight_bytes + slots * SLOT
    return devices.Device("given", memory, 1e9, 1e11, "given", link=1e8, interconnect=1e7)


def test_places():
    assert place(5, [9, 9, 9], 1) == ((1, 5),)
    assert place(12, [9, 3, 9], 1) == ((1, 3), (0, 9))
    assert place(15, [4, 3, 9], 1) == ((1, 3), (2, 9), (0, 3))
    assert place(4, [4, 0, 4], 1) == ((0, 4),)
    assert place(17, [4, 3, 9], 1) is None and place(4, [9, 3, 9], 1, pooled=False) is None


def test_one_request_that_fits_at_home_is_the_closed_form():
    made = simulate_pool(MODEL, device(), [Request(3.0, 400, 3)], instances=3)
    # Prompts of a small model read weights for longer than they compute.
    first = max(MODEL.prefill_flops(400) / 1e11, (MODEL.weight_bytes + MODEL.cache_bytes(400)) / 1e9)
    steps = [(MODEL.weight_bytes + MODEL.cache_bytes(tokens)) / 1e9 for tokens in (401, 402)]
    assert made.ttft[50] == pytest.approx(first)
    assert made.seconds == pytest.approx(made.request_seconds[99]) == pytest.approx(first + sum(steps))
    assert (made.finished, made.refused, made.most_rows) == (1, 0, 1)
    assert made.peak == (402 * SLOT, 0, 0) and made.for_others == (0, 0, 0)
    assert (made.slots_moved, made.parts_moved) == (0, 0)
    mean = (400 * first + 401 * steps[0] + 402 * steps[1]) / ROOM / made.seconds
    assert made.use == pytest.approx((mean, 0, 0))


def test_one_request_with_slots_elsewhere_is_the_closed_form():
    """1,000 slots lie at home, 1,000 on the second instance and the rest on the third, as do those that follow."""
    request, link = Request(0.0, 2300, 3), 1e7
    made = simulate_pool(MODEL, device(), [request], instances=3)
    out, back, _ = part_bytes(MODEL.heads, MODEL.kv_heads, MODEL.dim)
    parts = 2 * MODEL.layers * (out + back)
    prompt = max(MODEL.prefill_flops(2300) / 1e11, (MODEL.weight_bytes + ROOM * SLOT) / 1e9) + 1300 * SLOT / link
    # At home weights are read besides as many slots as elsewhere.
    step = (MODEL.weight_bytes + ROOM * SLOT) / 1e9 + (SLOT + parts) / link
    assert made.ttft[50] == pytest.approx(prompt) and made.seconds == pytest.approx(prompt + 2 * step)
    assert made.peak == (ROOM * SLOT, ROOM * SLOT, 302 * SLOT) and made.for_others == (0, ROOM * SLOT, 302 * SLOT)
    assert (made.slots_moved, made.parts_moved) == (1302 * SLOT, 2 * parts)
    alone = simulate_pool(MODEL, device(), [request], instances=3, pooled=False)
    assert (alone.finished, alone.refused, alone.ttft) == (0, 1, {})
    # Under a budget, a row has as many slots as that, and one; each step that evicts asks for candidates.
    short = simulate_pool(MODEL, device(200), [request], instances=3, budget=300)
    assert short.peak == (200 * SLOT, 100 * SLOT, 0)
    evicting = MODEL.layers * sum(part_bytes(MODEL.heads, MODEL.kv_heads, MODEL.dim))
    assert (short.slots_moved, short.parts_moved) == ((100 + 2) * SLOT, 2 * evicting)


@pytest.fixture(scope="module")
def trace():
    return random_requests(60, rate=2000.0, prompt=80, output=20, long=500, long_share=0.15, seed=1)


@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize("pooled", [False, True])
def test_no_slot_is_lost_or_held_twice(trace, pooled, budget):
    seen, for_others = [], 0

    def check(snapshot):
        nonlocal for_others
        assert not seen or snapshot.seconds >= seen[-1].seconds
        seen.append(snapshot)
        room = [ROOM] * 3
        for number, promised in snapshot.promised.items():
            held = snapshot.held[number]
            most = trace[number].prompt + trace[number].output - 1 if budget is None else budget + 1
            assert sum(own for _, own in promised) == most
            assert 0 < sum(own for _, own in held) <= most
            assert len({instance for instance, _ in held}) == len(held)
            assert all(own <= dict(promised)[instance] for instance, own in held)
            for_others += sum(own for instance, own in held) if len(held) > 1 else 0
            for instance, own in promised:
                room[instance] -= own
        assert min(room) >= 0

    made = simulate_pool(MODEL, device(), trace, instances=3, pooled=pooled, budget=budget, observe=check)
    assert made.finished + made.refused == len(trace)
    assert max(made.peak) <= ROOM * SLOT and all(0 < each <= 1 for each in made.use)
    # The slots of a request never leave their places, and are never fewer.
    for before, after in itertools.pairwise(seen):
        for number in before.held.keys() & after.held.keys():
            assert before.promised[number] == after.promised[number]
            assert all(dict(after.held[number])[instance] >= own for instance, own in before.held[number])
    assert not seen[-1].held
    assert bool(for_others) == pooled == bool(made.parts_moved)


def test_a_pool_runs_more_at_once_and_takes_what_one_instance_refuses(trace):
    alone, pool = (simulate_pool(MODEL, device(), trace, instances=3, pooled=each) for each in (False, True))
    assert alone.refused > 0 == pool.refused and pool.finished == len(trace)
    assert pool.most_rows >= alone.most_rows and max(pool.for_others) > 0
    assert pool == simulate_pool(MODEL, device(), trace, instances=3)
    other = random_requests(60, rate=2000.0, prompt=80, output=20, long=500, long_share=0.15, seed=2)
    assert other != trace and simulate_pool(MODEL, device(), other, instances=3) != pool
    assert random_requests(60, rate=2000.0, prompt=80, output=20, long=500, long_share=0.15, seed=1) == trace


def test_requests_wait_in_their_order():
    """Two requests of 600 slots do not fit in an instance at once, unless another one lends 200."""
    three = [Request(0.0, 600, 1), Request(0.0, 1, 1), Request(0.0, 600, 1)]
    pool = simulate_pool(MODEL, device(), three, instances=2)
    assert pool.for_others == (0, 200 * SLOT) and pool.slots_moved == 200 * SLOT and pool.most_rows == 3
    prompt = MODEL.prefill_flops(600) / 1e11
    alone = simulate_pool(MODEL, device(), three, instances=2, pooled=False)
    assert alone.most_rows == 2 and alone.ttft[99] == pytest.approx(2 * prompt)
    # A short request of the same instance does not pass the one before it, which waits until the first one ends.
    late = [Request(0.0, 600, 3), Request(prompt / 2, 600, 1), Request(prompt / 2, 9, 1)]
    made = simulate_pool(MODEL, device(), late, instances=1)
    steps = sum((MODEL.weight_bytes + slots * SLOT) / 1e9 for slots in (601, 602))
    both = (MODEL.prefill_flops(600) + MODEL.prefill_flops(9)) / 1e11
    assert made.ttft[95] == pytest.approx(prompt / 2 + steps + both)
    assert made.ttft[50] == made.ttft[95] and made.seconds == pytest.approx(prompt + steps + both)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda: simulate_pool(MODEL, device(), [], instances=1), "no requests"),
        (lambda: simulate_pool(MODEL, device(), [Request(0.0, 0, 1)], instances=1), "whole numbers"),
        (lambda: simulate_pool(MODEL, device(), [Request(float("inf"), 1, 1)], instances=1), "must arrive"),
        (lambda: simulate_pool(MODEL, device(), [Request(0.0, 1, 1)], instances=0), "instances"),
        (lambda: simulate_pool(MODEL, device(), [Request(0.0, 1, 1)], instances=1, budget=0), "budget"),
        (lambda: simulate_pool(MODEL, device(0), [Request(0.0, 1, 1)], instances=1), "leave no room"),
        (
            lambda: simulate_pool(
                MODEL, dataclasses.replace(device(), interconnect=None), [Request(0.0, 1, 1)], instances=1
            ),
            "links to other devices",
        ),
        (lambda: random_requests(1, rate=1, prompt=1, output=1, long=1, long_share=2), "long_share"),
        (lambda: random_requests(0, rate=1, prompt=1, output=1, long=1, long_share=0), "number"),
    ],
)
def test_what_is_refused(function, match):
    with pytest.raises(InputError, match=match):
        function()
