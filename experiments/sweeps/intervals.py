"""Error bars of a sweep: the scores of single rows and prompts, and 95 % intervals of their means.

Intervals are those of leaderboards; differences are compared as in the pages of papers.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.papers import statistics
from experiments.papers.statistics import Comparison
from experiments.reports import tables
from experiments.reports.bootstrap import interval
from experiments.reports.tables import Row

PERPLEXITY, AGREEMENT, SAME_UNTIL = "perplexity", "agrees with full", "first differs after"  # columns of tables
LEAST = 2  # values of which there is an interval
FULL = "full"  # the policy of the full cache's row
RESAMPLES = 2_000
Values = Mapping[str, np.ndarray]


def values(row: Row) -> dict[str, np.ndarray]:
    """Returns the scores of single rows and prompts by the column of a table that has their mean.

    Args:
      row: of a result. Those of older code have fewer of these scores.

    Returns:
      Column -> [rows or prompts] numbers: nats per token for perplexity, shares for agreement and recall tasks, tokens,
      and the unit of the score for other tasks. Columns with a number that is not finite are left out.
    """
    listed = {
        PERPLEXITY: row.get("nats_by_row"), AGREEMENT: row.get("agreement_by_row"),
        SAME_UNTIL: row.get("same_until_by_row"), **row.get("recall_by_prompt", {}),
    }  # fmt: skip
    made = row.get("tasks", {})
    for task, name in tables.short_names(list(made)).items():
        if made[task]["headline"]:
            listed[f"{name}: {made[task]['headline'][0]}"] = made[task]["by_question"]
    arrays = {column: np.asarray(each, np.float64) for column, each in listed.items() if each}
    return {column: each for column, each in arrays.items() if np.isfinite(each).all()}


def pooled(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Returns `values` of several results, such as those of several seeds, one after another."""
    found = [values(row) for row in rows]
    shared = [column for column in found[0] if all(column in each for each in found)] if found else []
    return {column: np.concatenate([each[column] for each in found]) for column in shared}


def bounds(rows: Sequence[Row], name: str) -> dict[str, tuple[float, float]]:
    """Returns the 95 % interval of each column in the unit of the column; none where all values are equal.

    Args:
      rows: results of one setting.
      name: of the setting, which seeds the draws.

    Returns:
      Column -> the interval; shares are from 0 to 1.
    """
    found = {}
    for column, each in pooled(rows).items():
        # The bootstrap of equal values has no width, but 8 right answers of 8 do not mean 100 % of all prompts.
        if each.size >= LEAST and np.ptp(each) > 0:
            low, high = interval(each, f"{name} {column}")
            found[column] = (exp(low), exp(high)) if column == PERPLEXITY else (low, high)
    return found


def difference(what: str, one: Values, other: Values, column: str) -> Comparison | None:
    """Compares a column of two settings on the same rows or prompts.

    Returns:
      A sign test of right and wrong answers, and a paired bootstrap of everything else, which for perplexity is of nats
      per token. None if one of them has no such column, or other rows, or fewer than two.
    """
    if column not in one or column not in other:
        return None
    first, second = one[column], other[column]
    if first.size != second.size or first.size < LEAST:
        return None
    if np.isin(np.concatenate([first, second]), (0, 1)).all() and column not in (PERPLEXITY, AGREEMENT, SAME_UNTIL):
        return statistics.sign_test(what, first > 0, second > 0)
    return statistics.paired_bootstrap(what, first, second, seed=0, resamples=RESAMPLES)


def against_full(what: str, rows: Sequence[Row], full: Sequence[Row]) -> Comparison | None:
    """Compares the nats per token of a setting with the full cache's on the same rows."""
    return difference(what, pooled(rows), pooled(full), PERPLEXITY)


def show_percent(comparison: Comparison) -> str:
    """Returns a difference of nats as percent of the perplexity, with its interval: ``+2.1 % (+0.5 to +3.9)``."""
    low, high = comparison.low, comparison.high
    assert low is not None and high is not None
    mean, low, high = (100 * (exp(nats) - 1) for nats in (comparison.difference, low, high))
    return f"{mean:+,.1f} % ({low:+,.1f} to {high:+,.1f})"


def shown(column: str, text: str, low: float, high: float) -> str:
    """Returns the cell of a table with its interval in parentheses.

    Args:
      column: its head.
      text: the cell without an interval.
      low: of the interval, in the unit of `bounds`.
      high: likewise.
    """
    if column == PERPLEXITY:
        form = ",.2f" if high < 1000 else ",.0f"
    elif column in (AGREEMENT, SAME_UNTIL):
        form = ".1f"
    else:
        form = ".0f" if text.endswith("%") else ".2f"
    scale = 100 if text.endswith("%") else 1
    return f"{text} ({scale * low:{form}} to {scale * high:{form}})"


def full_row(result: Row) -> Row | None:
    """Returns the full cache's row of a result that was measured, or None if it has none."""
    return next((row for row in result["rows"] if row["policy"] == FULL), None)


def exp(nats: float) -> float:
    """Returns the exponential of nats, or infinity where that is too large for a float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
