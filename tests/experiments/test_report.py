"""Numbers and labels as a person reads them."""

import pytest

from experiments import report


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1580, "1.58 kB"), (59.9e9, "59.9 GB"), (2e15, "2e+03 TB")]
)
def test_bytes(count, shown):
    assert report.show_bytes(count) == shown


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([5], [5]),
        ([0, 100], [0, 100]),
        ([0, 0], [-5, 5]),
        ([0, 1, 2, 100], [-9, 1, 11, 100]),
        # The second pair pushes into the first: all four share one mean.
        ([0, 0, 12, 12], [-9, 1, 11, 21]),
    ],
)
def test_labels_are_moved_apart_and_no_further(places, expected):
    assert report.spread(places, 10) == pytest.approx(expected)


def test_a_table_says_so_when_there_is_nothing():
    assert report.table([]) == "(nothing)"
