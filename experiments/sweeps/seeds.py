"""Results that differ in their seed alone: their mean and their spread."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.reports import tables
from experiments.reports.tables import Row

SEED = "seed"  # the field


def groups(found: Sequence[Row]) -> list[list[Row]]:
    """Results of a sweep, those together whose swept fields are equal but for the seed."""
    kept: dict[str, list[Row]] = {}
    for result in found:
        settings = {path: value for path, value in result["swept"].items() if path != SEED}
        kept.setdefault(repr(settings), []).append(result)
    return list(kept.values())


def mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, entry by entry in mappings; of anything else the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values]) for key in first}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numbers or len(set(values)) == 1:
        return first
    return statistics.fmean(values)


def deviation(values: Sequence[Any]) -> float | None:
    """The sample standard deviation; None of fewer than two numbers."""
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else None


def cells(rows: Sequence[Row]) -> dict[str, str]:
    """The measurements of one setting under several seeds as a person reads them: 2.95 ± 0.02."""
    shown = tables.cells(_whole(mean(rows)))
    spread = {"perplexity": (deviation([row["perplexity"] for row in rows]), ".2f", "")}
    agreement = deviation([row["agreement"] for row in rows])
    spread["agrees with full"] = (None if agreement is None else 100 * agreement, ".1f", " %")
    for task in rows[0].get("recall", {}):
        share = deviation([row["recall"][task] for row in rows])
        spread[task] = (None if share is None else 100 * share, ".0f", " %")
    for name in tables.headlines(rows[0]):
        spread[name] = (deviation([tables.headlines(row)[name] for row in rows]), ".2f", "")
    for name, (value, form, unit) in spread.items():
        if value is not None and shown.get(name, tables.NONE) != tables.NONE:
            shown[name] = f"{shown[name].removesuffix(unit)} ± {value:{form}}{unit}"
    return shown


def _whole(row: Row) -> Row:
    """Counts are whole numbers in a table."""
    counts = ("slots", "least_slots", "new_tokens", "kv_bytes", "full_kv_bytes")
    return row | {name: round(row[name]) for name in counts}
