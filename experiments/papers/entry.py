"""An entry: one table or figure of a paper, what answers it here, and the registry of all entries."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence

import experiments.papers
from experiments.papers.names import NAMES, PAPERS
from experiments.papers.parts import Part, Result
from experiments.papers.settings import Settings
from experiments.papers.verdict import Judgement
from kvjax.errors import ConfigError

Found = Mapping[Part, Result]  # the results of an entry's parts
FOLDERS = ("h2o", "roco", "infinigen")  # below this package, whose modules hold entries


@dataclasses.dataclass(frozen=True)
class Published:
    """The paper's numbers.

    Attributes:
      caption: what the table or figure shows, and under which setting.
      rows: its numbers, a dict of cells for each row; none where only a shape is known.
      shape: what a figure without printed numbers shows, or what the text says beside the numbers.
    """

    caption: str
    rows: Sequence[Mapping[str, str]] = ()
    shape: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One table or figure.

    Attributes:
      name: as in PAPERS.md, such as h2o_table6.
      question: what it asks, one sentence.
      published: the paper's answer.
      here: what is measured instead, in a sentence or two.
      parts: the measurements, of some settings.
      judge: the tables, claims and comparisons, a pure function of the measurements.
      needs: the hardware or the software without which the rest cannot be measured; empty if nothing is missing.
      exact: whether the result does not depend on the sizes, so that a trial decides too.
    """

    name: str
    question: str
    published: Published
    here: str
    parts: Callable[[Settings], Iterable[Part]]
    judge: Callable[[Settings, Found], Judgement]
    needs: str = ""
    exact: bool = False

    @property
    def paper(self) -> str:
        """The paper that it is of."""
        return next(paper for paper, names in PAPERS.items() if self.name in names)


@functools.cache
def registry() -> Mapping[str, Entry]:
    """Every entry by name, in the order of the papers.

    Raises:
      ConfigError: two entries of one name, or one that no paper has.
    """
    found: dict[str, Entry] = {}
    for folder in FOLDERS:
        package = importlib.import_module(f"{experiments.papers.__name__}.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            for entry in importlib.import_module(f"{package.__name__}.{module.name}").ENTRIES:
                if entry.name in found or entry.name not in NAMES:
                    raise ConfigError(f"entry {entry.name!r} is defined twice, or is of no paper.")
                found[entry.name] = entry
    return {name: found[name] for name in NAMES if name in found}


def numbers(text: str) -> list[dict[str, str]]:
    """Rows of a table that is written with bars between its cells, the names of the columns first."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def with_published(
    measured: Iterable[Mapping[str, str]], published: Published, matches: Mapping[str, str], key: str
) -> list[dict[str, str]]:
    """Measured rows with the paper's numbers in further columns.

    Args:
      measured: rows; the first column names each.
      published: of the entry.
      matches: a measured row's name -> the paper's name for it.
      key: the column of the paper's table that has that name.
    """
    theirs = {row[key]: row for row in published.rows}
    columns = [column for column in (published.rows[0] if published.rows else {}) if column != key]
    rows = []
    for row in measured:
        other = theirs.get(matches.get(next(iter(row.values())), ""), {})
        rows.append(dict(row) | {f"paper: {column}": other.get(column, "-") for column in columns})
    return rows
