"""Warnings of a sweep whose rows or tokens are too few, and of caches that its numbers do not tell apart."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from experiments.papers.statistics import MIN_PROMPTS, MIN_ROWS
from experiments.reports import tables
from experiments.reports.bootstrap import MIN_VALUES
from experiments.reports.tables import Row
from experiments.sweeps import intervals, seeds, table
from experiments.sweeps.intervals import AGREEMENT, FULL, PERPLEXITY, SAME_UNTIL, Values
from kvjax.typing import JsonObject

MIN_TOKENS = 1_000  # that are scored, of which a perplexity says something
MAX_NAMED = 4  # caches, or pairs of them, that a warning names


class Setting(NamedTuple):
    """One combination of a sweep, all seeds in one.

    Attributes:
      name: its cache, as tables name it.
      swept: its fields without the seed.
      values: see `experiments.sweeps.intervals.values`.
      full: those of the full cache on the same rows; empty where it was not measured.
      new_tokens: the number of tokens of a row that are scored.
    """

    name: str
    swept: JsonObject
    values: Values
    full: Values
    new_tokens: int

    @property
    def text(self) -> str:
        """Returns the setting in words: ``h2o (budget=0.1)``."""
        others = ", ".join(f"{path.split('.')[-1]}={value}" for path, value in self.other_fields.items())
        return f"{self.name} ({others})" if others else self.name

    @property
    def other_fields(self) -> JsonObject:
        """Returns the fields that the name does not show."""
        return {path: value for path, value in self.swept.items() if path not in table.NAMING}


def settings(found: Sequence[Row]) -> list[Setting]:
    """Returns the combinations of a sweep that were measured."""
    made = []
    for group in seeds.groups([result for result in found if result["status"] == "ok"]):
        own = [tables.own_row(result) for result in group]
        swept = {path: value for path, value in group[0]["swept"].items() if path != seeds.SEED}
        made.append(Setting(
            table.label_of(group[0]), swept, intervals.pooled(own), intervals.pooled(table.full_rows(group)),
            own[0]["new_tokens"],
        ))  # fmt: skip
    return made


def warnings(found: Sequence[Row]) -> list[str]:
    """Returns what a reader should know before believing a difference; nothing where the numbers suffice."""
    made = settings(found)
    lines = [*_few(made), *_rates(found)]
    for column in dict.fromkeys(column for each in made for column in each.values):
        if column not in (AGREEMENT, SAME_UNTIL):
            lines += _against_full(made, column)
        if column != SAME_UNTIL:  # it says little besides agreement
            lines += _pairs(made, column)
    return lines


def _few(made: Sequence[Setting]) -> list[str]:
    """Says where rows, tokens or prompts are too few."""
    lines = []
    rows = {each.values[PERPLEXITY].size: each.new_tokens for each in made if PERPLEXITY in each.values}
    if rows:
        count, tokens = min(rows), rows[min(rows)]
        more = f"--config.data.num_sequences={MIN_ROWS}, or several seeds by --sweep=seed=0,1,2,"
        if count < intervals.LEAST:
            lines.append(
                f"One row of {tokens} tokens: no intervals, and no comparison of caches; {more} gives more rows."
            )
        elif count < MIN_VALUES:
            lines.append(
                f"Few rows: {count} of {tokens} tokens. Intervals of fewer than {MIN_VALUES} rows are too narrow, and "
                f"a comparison needs {MIN_ROWS}; {more} gives more."
            )
        if count * tokens < MIN_TOKENS:
            lines.append(
                f"Few tokens: {count * tokens:,} are scored in all, fewer than {MIN_TOKENS:,}; "
                "--config.data.new_tokens scores more of each row."
            )
    tasks = {
        column: size for each in made for column, size in ((name, scores.size) for name, scores in each.values.items())
        if column not in (PERPLEXITY, AGREEMENT, SAME_UNTIL) and size < MIN_VALUES
    }  # fmt: skip
    if tasks:
        counts = ", ".join(f"{size} of {column}" for column, size in tasks.items())
        lines.append(
            f"Few prompts: {counts}. Of fewer than {MIN_VALUES} prompts only all and none say much; a comparison needs "
            f"{MIN_PROMPTS}."
        )
    return lines


def _rates(found: Sequence[Row]) -> list[str]:
    """Says that rates of a single repetition are left out."""
    if any(result["status"] == "ok" and result.get("config", {}).get("repeats") == 1 for result in found):
        return [
            "Tokens per second are left out: those of a single repetition are noise; --config.repeats=3 gives them."
        ]
    return []


def _against_full(made: Sequence[Setting], column: str) -> list[str]:
    """Says which caches a column does not tell from the full cache."""
    compared = [
        (each, comparison) for each in made
        if each.name != FULL and (comparison := intervals.difference(each.text, each.values, each.full, column))
    ]  # fmt: skip
    same = [each.text for each, comparison in compared if not comparison.differs]
    if not same:
        return []
    first = compared[0][1]
    test = "the sign test finds no difference" if first.p is not None else "its 95 % interval includes 0"
    reason = f"({test}; {first.number} {_unit(column)})"
    if len(same) < len(compared) or len(same) == 1:
        return [f"{_head(column)}: the difference of {_listed(same)} to the full cache may be chance {reason}."]
    return [f"{_head(column)}: the difference of every cache to the full cache may be chance {reason}."]


def _pairs(made: Sequence[Setting], column: str) -> list[str]:
    """Says which caches with equal other fields a column does not tell apart."""
    compared = []
    for one, other in itertools.combinations(made, 2):
        if FULL not in (one.name, other.name) and one.other_fields == other.other_fields:
            what = f"{one.name} and {other.text}"
            if comparison := intervals.difference(what, one.values, other.values, column):
                compared.append((what, comparison))
    same = [what for what, comparison in compared if not comparison.differs]
    if not same:
        return []
    if len(same) == len(compared) > MAX_NAMED:
        return [f"{_head(column)} tells none of the {len(compared)} pairs of caches with equal other settings apart."]
    count = f"{len(same)} of {len(compared)} pairs of caches" if len(compared) > 1 else "the two caches"
    return [f"{_head(column)} does not tell {count} apart: {_listed(same, '; ')}."]


def _head(column: str) -> str:
    column = "agreement with the full cache" if column == AGREEMENT else column
    return column[0].upper() + column[1:]


def _unit(column: str) -> str:
    return "rows" if column in (PERPLEXITY, AGREEMENT, SAME_UNTIL) else "prompts"


def _listed(names: Sequence[str], comma: str = ", ") -> str:
    """Returns names in a line, of which many are counted instead."""
    more = f"{comma}and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return comma.join(names[:MAX_NAMED]) + more
