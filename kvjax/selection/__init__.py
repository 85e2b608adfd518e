"""Selections: which slots a query reads. A new one is a factory in its family's file and one line of `SELECTIONS`."""

from kvjax.arguments import Registry
from kvjax.errors import SelectionError
from kvjax.selection.base import Selection, SelectView
from kvjax.selection.choose import compact
from kvjax.selection.everything import ReadAll, everything
from kvjax.selection.h2o import Allowed, Hindsight, Local
from kvjax.selection.oracle import Optimal, optimal
from kvjax.selection.pages import Quest, quest
from kvjax.selection.speculate import InfiniGen, infinigen

#: Every named selection: the command line, sweeps and conformance tests take the list from here.
SELECTIONS: Registry[Selection] = Registry(
    "selection",
    "selections",
    SelectionError,
    {
        "everything": everything,
        "optimal": optimal,
        "quest": quest,
        "infinigen": infinigen,
    },
)
by_name, accepts = SELECTIONS.by_name, SELECTIONS.accepts

__all__ = [
    "SELECTIONS", "Allowed", "Hindsight", "InfiniGen", "Local", "Optimal", "Quest", "ReadAll", "SelectView", "Selection",
    "accepts", "by_name", "compact", "everything", "infinigen", "optimal", "quest",
]  # fmt: skip
