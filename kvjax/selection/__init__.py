"""Selections: which slots a query reads. A new one is a factory in its family's file and one line of `SELECTIONS`."""

from kvjax.arguments import Registry
from kvjax.errors import SelectionError
from kvjax.selection.a2ats import Codebook, a2ats
from kvjax.selection.alisa import Alisa, alisa
from kvjax.selection.base import Held, Selection, SelectView
from kvjax.selection.choose import best, compact, grouped_logits, mark_ends, rank
from kvjax.selection.everything import ReadAll, everything
from kvjax.selection.h2o import Allowed, Hindsight, Local
from kvjax.selection.lowrank import ShadowKV, shadowkv
from kvjax.selection.oracle import Optimal, optimal
from kvjax.selection.page_summaries import Pages
from kvjax.selection.query_blocks import QueryBlocks
from kvjax.selection.quest import LServe, MeanKeys, Quest, lserve, quest, retrieval
from kvjax.selection.rekv import ReKV, rekv
from kvjax.selection.sparf import SparF, sparf
from kvjax.selection.speculate import InfiniGen, infinigen
from kvjax.selection.votes import TokenSelect, tokenselect

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
        "lserve": lserve,
        "retrieval": retrieval,
        "tokenselect": tokenselect,
        "shadowkv": shadowkv,
        "alisa": alisa,
        "a2ats": a2ats,
        "sparf": sparf,
        "rekv": rekv,
    },
)
by_name, accepts, names = SELECTIONS.by_name, SELECTIONS.accepts, SELECTIONS.names

__all__ = [
    "SELECTIONS", "Alisa", "Allowed", "Codebook", "Held", "Hindsight", "InfiniGen", "LServe", "Local", "MeanKeys",
    "Optimal", "Pages", "QueryBlocks", "Quest", "ReKV", "ReadAll", "SelectView", "Selection", "ShadowKV", "SparF",
    "TokenSelect", "a2ats", "accepts", "alisa", "best", "by_name", "compact", "everything", "grouped_logits",
    "infinigen", "lserve", "mark_ends", "names", "optimal", "quest", "rank", "rekv", "retrieval", "shadowkv", "sparf",
    "tokenselect",
]  # fmt: skip
