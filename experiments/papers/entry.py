"""An entry: one table or figure of a paper, what answers it here, and the registry of all entries."""

import dataclasses
import functools
import importlib
import pkgutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

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
      name: such as h2o_table6; a table of the paper's file beside this module has the same.
      question: what it asks, one sentence.
      here: what is measured instead, in a sentence or two.
      parts: the measurements, of some settings.
      judge: the tables, claims and comparisons, a pure function of the measurements.
      needs: the hardware or the software without which the rest cannot be measured; empty if nothing is missing.
      exact: whether the result does not depend on the sizes, so that a trial decides too.
    """

    name: str
    question: str
    here: str
    parts: Callable[[Settings], Iterable[Part]]
    judge: Callable[[Settings, Found], Judgement]
    needs: str = ""
    exact: bool = False

    @property
    def published(self) -> Published:
        """The paper's numbers."""
        return published(self.name)

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
                    raise ConfigError(f"entry {entry.name!r} is defined twice, or does not belong to a paper.")
                found[entry.name] = entry
    return {name: found[name] for name in NAMES if name in found}


def published(name: str) -> Published:
    """Returns the paper's numbers for an entry, from h2o.toml, roco.toml or infinigen.toml.

    Args:
      name: of the entry.

    Raises:
      ConfigError: no file has it.
    """
    known = _published()
    if name not in known:
        raise ConfigError(f"the papers' files have no table [{name}]; they have {', '.join(known)}.")
    return known[name]


@functools.cache
def _published() -> Mapping[str, Published]:
    """Every entry's numbers, by name."""
    found = {}
    for folder in FOLDERS:
        tables = tomllib.loads((Path(__file__).parent / f"{folder}.toml").read_text(encoding="utf-8"))
        for name, table in tables.items():
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table.get("rows", ())]
            found[name] = Published(table["caption"], rows, table.get("shape", ""))
    return found


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
