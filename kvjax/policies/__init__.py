"""Policies: what a cache keeps. A new one is a factory in its family's file and one line of `POLICIES`."""

import inspect
from collections.abc import Callable

from kvjax.errors import PolicyError
from kvjax.policies.base import Importance, Policy, Scope, View, compress, evict
from kvjax.policies.combinators import after_prefill, value_norm, with_heavy_hitters
from kvjax.policies.h2o import decayed_mass, h2o, h2o_decay, heavy_only, mass, protect_newest
from kvjax.policies.heads import compensation, duo_attention, razor_attention, split_heads
from kvjax.policies.keys import keydiff, knorm, low_norm, unlike
from kvjax.policies.merge import MERGES, anchors, cam, d2o, kvmerger
from kvjax.policies.patterns import fixed, random, strided
from kvjax.policies.roco import mean_attention, mean_mass, protect_varying, roco
from kvjax.policies.scissorhands import scissorhands, times_above
from kvjax.policies.snapkv import adakv, heard_at_the_end, protect_prompt_end, pyramidkv, snapkv
from kvjax.policies.tova import last, shared_last, tova
from kvjax.policies.window import full, local_only, protect_first, recency, streaming_llm, window

#: Every named policy: the command line, sweeps and conformance tests take the list from here.
POLICIES: dict[str, Callable[..., Policy]] = {
    "full": full,
    "random": random,
    "window": window,
    "local_only": local_only,
    "streaming_llm": streaming_llm,
    "strided": strided,
    "fixed": fixed,
    "h2o": h2o,
    "heavy_only": heavy_only,
    "h2o_decay": h2o_decay,
    "scissorhands": scissorhands,
    "tova": tova,
    "mean_attention": mean_attention,
    "roco": roco,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
    "knorm": knorm,
    "keydiff": keydiff,
}

#: Policies for a table of heads, which belongs to one model: `kvjax.analysis.retrieval_heads` makes one.
HEAD_PLANS: dict[str, Callable[..., Policy]] = {
    "split_heads": split_heads,
    "duo_attention": duo_attention,
    "razor_attention": razor_attention,
}

#: What makes a policy of another one.
COMBINATORS: dict[str, Callable[..., Policy]] = {
    "with_heavy_hitters": with_heavy_hitters,
    "value_norm": value_norm,
    "adakv": adakv,
    "after_prefill": after_prefill,
}


def by_name(name: str, **arguments) -> Policy:
    """The policy `name` of `POLICIES`, built with `arguments`.

    Raises:
      PolicyError: an unknown name, an argument it does not take, or values that cannot work.
    """
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; known policies: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name](**arguments)


def accepts(name: str) -> frozenset[str]:
    """The argument names that policy `name` takes."""
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; known policies: {', '.join(sorted(POLICIES))}.")
    return frozenset(inspect.signature(POLICIES[name]).parameters)


__all__ = [
    "COMBINATORS", "HEAD_PLANS", "MERGES", "POLICIES", "Importance", "Policy", "Scope", "View", "accepts",
    "adakv", "after_prefill", "anchors", "by_name", "cam", "compensation", "compress", "d2o", "decayed_mass",
    "duo_attention", "evict", "fixed", "full", "h2o", "h2o_decay", "heard_at_the_end", "heavy_only",
    "keydiff", "knorm", "kvmerger", "last", "local_only", "low_norm", "mass", "mean_attention", "mean_mass",
    "protect_first", "protect_newest", "protect_prompt_end", "protect_varying", "pyramidkv", "random",
    "razor_attention", "recency", "roco", "scissorhands", "shared_last", "snapkv", "split_heads",
    "streaming_llm", "strided", "times_above", "tova", "unlike", "value_norm", "window", "with_heavy_hitters",
]  # fmt: skip
