"""ALISA's phases: the split of least time is that of all splits, and its limits are closed forms."""

import dataclasses
import math

import pytest

from kvjax.errors import InputError
from kvjax.planning.cache_phases import DEVICE, HOST, RECOMPUTED, CachePhases
from kvjax.planning.served_model import ServedModel

MODEL = ServedModel(params=1_000_000, layers=2, heads=4, kv_heads=2, dim=8)
SLOT = MODEL.layers * MODEL.slot_bytes
PLAIN = CachePhases(
    model=MODEL, device_bytes=100 * SLOT, host_bytes=200 * SLOT, bandwidth=1e9, link=1e7, compute=2e11, rows=1
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compute", [2e10, 2e11, 1e12])
@pytest.mark.parametrize("read_share", [0.0, 0.3, 1.0])
def test_no_split_is_faster(overlap, compute, read_share):
    phases = dataclasses.replace(PLAIN, overlap=overlap, compute=compute, read_share=read_share)
    before = None
    for tokens in (1, 99, 100, 101, 102, 130, 220, 300, 301, 350):
        found, device = phases.split(tokens), min(tokens, 100)
        every = {again: phases.seconds(tokens, tokens - device - again, again)
                 for again in range(max(tokens - 300, 0), tokens - device + 1)}  # fmt: skip
        assert found.seconds == min(every.values()) == every[found.recomputed]
        assert found.recomputed == min(again for again, own in every.items() if own == found.seconds)
        assert found.device + found.host + found.recomputed == tokens and found.device == device
        # Tokens do not come back from a later phase.
        assert before is None or (found.recomputed >= before.recomputed and found.phase >= before.phase)
        before = found


def test_limits():
    for overlap in (False, True):
        fast = dataclasses.replace(PLAIN, link=math.inf, host_bytes=math.inf, overlap=overlap)
        assert [fast.split(tokens)[:3] for tokens in (50, 5000)] == [(50, 0, 0), (100, 4900, 0)]
        assert fast.boundaries(10_000) == (101, None)
        none = dataclasses.replace(PLAIN, host_bytes=0, overlap=overlap)
        assert none.split(5000)[:3] == (100, 0, 4900) and none.boundaries() == (101, 101)
        roomy = dataclasses.replace(PLAIN, device_bytes=math.inf, overlap=overlap)
        assert roomy.split(5000)[:3] == (5000, 0, 0) and roomy.boundaries(10_000) == (None, None)
        # A host of a slow link that is faster than computing is full before a token is computed again.
        slow = dataclasses.replace(PLAIN, compute=1e3, overlap=overlap)
        assert slow.boundaries() == (101, 301)


def test_times_are_the_closed_forms():
    read = (MODEL.weight_bytes + 3 * 250 * SLOT) / 1e9
    three = dataclasses.replace(PLAIN, rows=3, read_share=0.5)
    moved, again = 0.5 * 3 * SLOT * 40 / 1e7, 3 * MODEL.prefill_flops(60) / 2e11
    assert three.seconds(250, 40, 60) == pytest.approx(read + moved + again)
    hidden = dataclasses.replace(three, overlap=True)
    assert hidden.seconds(250, 40, 60) == pytest.approx(max(read + again, moved))
    assert hidden.seconds(250, 100, 0) == pytest.approx(max(read, moved * 2.5))
    assert three.split(33)[:3] == (33, 0, 0) and three.split(34)[0] == 33  # of 100 slots for three rows


def test_where_phases_begin():
    """A token moves in 12.8 us, and is computed in 10 us and as little more as there are older ones."""
    assert SLOT == 128 and MODEL.prefill_flops(1) / 2e11 == pytest.approx(1e-5, rel=1e-4)
    assert PLAIN.boundaries() == (101, 101)  # computing is faster from the first token on
    # A step reads for 2.0128 ms and 0.128 us for each token on the host, of which 159 move in 2.0352 ms. 160 move for
    # longer than it takes to read 260 tokens and compute one.
    hidden = dataclasses.replace(PLAIN, overlap=True)
    first, second = hidden.boundaries()
    assert (first, second) == (101, 260)
    last = hidden.split(second - 1)
    assert last.phase == HOST and hidden.split(first - 1).phase == DEVICE
    assert hidden.split(second).phase == RECOMPUTED
    assert last.seconds == pytest.approx((MODEL.weight_bytes + SLOT * 259) / 1e9, rel=1e-2)
    # More of either memory puts a phase off.
    for name in ("device_bytes", "host_bytes"):
        larger = dataclasses.replace(hidden, compute=1e3, **{name: 2 * getattr(hidden, name)})
        assert larger.boundaries()[1] > dataclasses.replace(hidden, compute=1e3).boundaries()[1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": 0}, "rows"), ({"link": 0}, "link"), ({"compute": math.nan}, "compute"),
        ({"device_bytes": -1}, "device_bytes"), ({"read_share": 1.1}, "read_share"),
    ],
)  # fmt: skip
def test_what_is_refused(change, match):
    with pytest.raises(InputError, match=match):
        dataclasses.replace(PLAIN, **change)
    with pytest.raises(InputError, match="tokens"):
        PLAIN.split(0)
    with pytest.raises(InputError, match="longest"):
        PLAIN.boundaries(0)
