"""Chunks are sent as text where there is time for it, and otherwise at the highest level that arrives in time."""

import pytest

from kvjax.errors import InputError
from kvjax.transport import plan_transfer

SIZES = [(10, 20, 40)] * 4
SLOW = [9.0] * 4  # s to compute a chunk


def sent(slo, trace, **options):
    made = plan_transfer(SIZES, options.pop("recompute", SLOW), slo=slo, trace=trace, **options)
    assert made.in_time == (made.ttft <= slo)
    return made


@pytest.mark.parametrize(
    ("slo", "levels"), [(16.0, (3, 3, 3, 3)), (8.0, (2, 2, 2, 2)), (4.0, (1, 1, 1, 1)), (2.0, (1, 1, 1, 1))]
)
def test_a_constant_rate(slo, levels):
    made = sent(slo, [(0, 10.0)])
    assert made.levels == levels and made.ttft == pytest.approx(sum(SIZES[0][level - 1] for level in levels) / 10)


def test_all_is_text_if_there_is_time():
    assert sent(36.0, [(0, 1e9)]) == (("text",) * 4, 36.0, True)
    # After 1 and 2 s there is time to compute the others.
    assert sent(7.0, [(0, 10.0)], recompute=[9, 9, 1, 1]).levels == (1, 2, "text", "text")


def test_the_rate_of_the_last_chunk_is_what_counts():
    """It falls to a quarter in the middle of the second chunk, and rises again."""
    made = sent(16.0, [(0, 10.0), (6.0, 2.5), (12.0, 40.0)])
    # 4 s; then 20 bytes in 2 s and 15 in 6 s, 5 in 0.125 s: 4.9 bytes/s, by which 20 bytes may arrive in 3.9 s.
    assert made.levels == (3, 3, 1, 3)
    assert made.ttft == pytest.approx(12.125 + 10 / 40 + 40 / 40)


def test_what_is_assumed_for_the_first_chunk():
    assert sent(16.0, [(0, 10.0)], throughput=5.0).levels == (2, 3, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"trace": []}, "trace must be"),
        ({"trace": [(1, 5.0)]}, "trace must be"),
        ({"trace": [(0, 5.0), (2, 0.0)]}, "trace must be"),
        ({"sizes": [(1, 2), (1,)], "recompute": [1, 1]}, "at the same levels"),
        ({"recompute": [1.0]}, "at the same levels"),
        ({"slo": -1}, "slo must be"),
        ({"sizes": [(-10, 20)] * 4}, "at least 0"),
        ({"recompute": [-5.0] * 4}, "at least 0"),
    ],
)
def test_what_is_refused(arguments, match):
    given = {"sizes": SIZES, "recompute": SLOW, "slo": 1.0, "trace": [(0, 5.0)]} | arguments
    with pytest.raises(InputError, match=match):
        plan_transfer(given.pop("sizes"), given.pop("recompute"), **given)
