"""Numbers and labels as a person reads them."""

import pytest

from experiments.reports import plots, tables


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1580, "1.58 kB"), (59.9e9, "59.9 GB"), (2e15, "2e+03 TB")]
)
def test_bytes(count, shown):
    assert tables.show_bytes(count) == shown


@pytest.mark.parametrize(
    ("budget", "least", "most", "keeps_all", "shown"),
    [
        (None, 895, 895, True, "all (895)"),
        (0.2, 153, 153, False, "20 % (153)"),
        (256, 256, 256, False, "256"),
        (1024, 1024, 1024, False, "1,024"),
        (0.2, 40, 229, False, "20 % (40 to 229)"),  # pyramidkv
        (None, 153, 895, False, "153 to 895"),  # razor_attention
        ([16, 0.5], 16, 384, False, "16 to 384"),
        (0.2, 895, 895, True, "all (895), 20 % read"),  # h2o(variant=masked)
        (64, 895, 895, True, "all (895), 64 read"),
    ],
)
def test_a_budget_says_all_only_where_everything_is_kept(budget, least, most, keeps_all, shown):
    row = {"budget": budget, "least_slots": least, "slots": most, "keeps_all": keeps_all}
    assert tables.show_budget(row) == shown


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
    assert plots.spread(places, 10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([1, 1, 50], [5, 15, 50]),
        ([50, 94, 96], [50, 85, 95]),
        # Those that are moved up push the next one.
        ([0, 0, 18], [5, 15, 25]),
        # Without enough room they begin at the lower bound.
        ([0] * 12, list(range(5, 125, 10))),
    ],
)
def test_labels_stay_between_bounds(places, expected):
    assert plots.spread(places, 10, low=5, high=95) == pytest.approx(expected)


def test_only_labels_that_would_overlap_are_moved():
    _, ((axes,),) = plots.new_figure(1, figsize=(6, 4))
    axes.set(xlim=(0, 10), ylim=(0, 10))
    plots.label_lines(axes, [(1, 5, "first", "k"), (1, 5, "second", "k"), (6, 5, "alone", "k"), (9, 0, "lowest", "k")])
    shifts = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert shifts["alone"] == pytest.approx(0) and shifts["lowest"] > 0
    assert abs(shifts["first"] - shifts["second"]) == pytest.approx(11)


def test_a_table_says_so_when_there_is_nothing():
    assert tables.table([]) == "(nothing)"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("h2o", "h2o"),
        ("full + int8 + quest", "full\n+ int8\n+ quest"),
        ("/home/me/policies/mine.py:loudest + int8", "mine.py:loudest\n+ int8"),
        ("value_norm(../mine.py:loudest)", "value_norm(mine.py:loudest)"),
        ("after_prefill(snapkv(window=16), then=roco)", "after_prefill(snapkv(window=16),\nthen=roco)"),
    ],
)
def test_a_label_is_broken_into_lines_and_names_no_folder(name, shown):
    assert plots.label_of(name) == shown


def test_bytes_are_shown_by_kind_where_anything_is_coded():
    parts = {"codes": 400, "parameters": 100, "exact": 0, "sides": 0, "stores": 500, "rest": 60, "calibration": 32}
    coded = {"policy": "full + int4", "full_kv_bytes": 2000, "kv_parts": parts}
    exact = {
        "policy": "full",
        "full_kv_bytes": 2000,
        "kv_parts": dict.fromkeys(parts, 0) | {"exact": 2000, "stores": 2000},
    }
    old = {"policy": "h2o", "full_kv_bytes": 2000}
    assert tables.sections([exact, old]) == []
    (section,) = tables.sections([exact, coded, old])
    *_, first, second = section.markdown().splitlines()
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        "full",
        "-",
        "-",
        "2 kB",
        "-",
        "-",
        "-",
        "100.0 %",
        "100.0 %",
    ]
    shown = ["full + int4", "400 B", "100 B", "-", "-", "60 B", "32 B", "25.0 %", "28.0 %"]
    assert [cell.strip() for cell in second.split("|")[1:-1]] == shown
