"""Selections: which of the held slots a query reads. A new one is a factory in its family's file and a line here."""

import inspect
from collections.abc import Callable

from kvjax.errors import SelectionError
from kvjax.selection.base import Selection, SelectView
from kvjax.selection.choose import compact
from kvjax.selection.everything import ReadAll, everything
from kvjax.selection.h2o import Allowed, Hindsight, Local
from kvjax.selection.oracle import Optimal, optimal
from kvjax.selection.pages import Quest, quest

#: Every named selection: the command line, sweeps and conformance tests take the list from here.
SELECTIONS: dict[str, Callable[..., Selection]] = {
    "everything": everything,
    "optimal": optimal,
    "quest": quest,
}


def by_name(name: str, **arguments) -> Selection:
    """The selection `name` of `SELECTIONS`, built with `arguments`.

    Raises:
      SelectionError: an unknown name, an argument it does not take, or values that cannot work.
    """
    return _named(name)(**arguments)


def accepts(name: str) -> frozenset[str]:
    """The argument names that selection `name` takes.

    Raises:
      SelectionError: an unknown name.
    """
    return frozenset(inspect.signature(_named(name)).parameters)


def _named(name: str) -> Callable[..., Selection]:
    if name not in SELECTIONS:
        raise SelectionError(f"unknown selection {name!r}; known selections: {', '.join(sorted(SELECTIONS))}.")
    return SELECTIONS[name]


__all__ = [
    "SELECTIONS", "Allowed", "Hindsight", "Local", "Optimal", "Quest", "ReadAll", "SelectView", "Selection",
    "accepts", "by_name", "compact", "everything", "optimal", "quest",
]  # fmt: skip
