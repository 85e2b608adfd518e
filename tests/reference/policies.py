"""Reference policies by name, and what makes policies of policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.reference.base import MASS, Array, Policy, Ranking, Statistic, View, lowest
from tests.reference.compressors import adakv, chunkkv, keydiff, knorm, pyramidkv, snapkv
from tests.reference.draws import random, vase, vase_dkv
from tests.reference.eviction import (
    counter,
    ems,
    fifo,
    fixed,
    full,
    h2o,
    h2o_decay,
    heavy_only,
    lazy,
    local_only,
    lru,
    mean_attention,
    ring,
    roco,
    scissorhands,
    streaming_llm,
    strided,
    tova,
    window,
)
from tests.reference.learned import critical, learned, qfilters, triattention
from tests.reference.matched import matched
from tests.reference.prompt_replay import kvgrad, kvzip
from tests.reference.queries import compactor, expected_attention, morphkv, rkv
from tests.reference.rounds import gkv, ladder
from tests.reference.scores import caote, cur, lagkv, leverage, phases, value_aware


def with_heavy_hitters(policy: Policy, fraction: float = 0.5) -> Policy:
    """`policy` keeps its best; of the others the largest S stay."""

    def rank(view: View) -> Ranking:
        inner = policy.rank(view)
        heavy = math.floor(fraction * view.budget + 1e-9)
        others, gap = lowest(inner.priority, view.position, max(len(view.position) - (view.budget - heavy), 0))
        priority = np.full(len(view.position), np.inf)
        priority[others] = view.stats["mass"][others]
        return Ranking(priority, min(gap, inner.gap))

    return Policy(
        policy.budget,
        rank,
        {**policy.statistics, "mass": MASS},
        policy.positions,
        policy.group_reduce,
        every=policy.every,
    )


def value_norm(policy: Policy) -> Policy:
    """The importance times the norm of the value; what is protected stays."""

    def rank(view: View) -> Ranking:
        inner = policy.rank(view)
        with np.errstate(invalid="ignore"):
            scaled = inner.priority * np.linalg.norm(view.value, axis=1)
        return inner._replace(priority=np.where(np.isinf(inner.priority), np.inf, scaled))

    def importance(view: View) -> Array:
        assert policy.importance is not None
        return policy.importance(view) * np.linalg.norm(view.value, axis=1)

    return replace(policy, rank=rank, importance=importance)


def after_prefill(compressor: Policy, then: Policy) -> Policy:
    return replace(compressor, statistics={**compressor.statistics, **then.statistics}, then=then)


def from_layer(policy: Policy, first: int) -> Policy:
    """Layers before `first` keep every token."""
    return replace(policy, first_layer=first)


def by_page(policy: Policy, page: int) -> Policy:
    """Pages of consecutive kept tokens go whole."""
    return replace(policy, page=page)


POLICIES: dict[str, Callable[..., Policy]] = {
    "full": full,
    "window": window,
    "local_only": local_only,
    "streaming_llm": streaming_llm,
    "h2o": h2o,
    "heavy_only": heavy_only,
    "h2o_decay": h2o_decay,
    "scissorhands": scissorhands,
    "tova": tova,
    "mean_attention": mean_attention,
    "roco": roco,
    "lazy": lazy,
    "ems": ems,
    "strided": strided,
    "fixed": fixed,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
    "knorm": knorm,
    "keydiff": keydiff,
    "fifo": fifo,
    "lru": lru,
    "counter": counter,
    "rkv": rkv,
    "morphkv": morphkv,
    "gkv": gkv,
    "ladder": ladder,
    "random": random,
    "vase": vase,
    "vase_dkv": vase_dkv,
    "expected_attention": expected_attention,
    "lagkv": lagkv,
    "leverage": leverage,
    "cur": cur,
    "compactor": compactor,
    "matched": matched,
    "kvzip": kvzip,
    "kvgrad": kvgrad,
    "triattention": triattention,
    "qfilters": qfilters,
    "learned": learned,
}
COMBINATORS: dict[str, Callable[..., Policy]] = {
    "with_heavy_hitters": with_heavy_hitters,
    "value_norm": value_norm,
    "adakv": adakv,
    "after_prefill": after_prefill,
    "from_layer": from_layer,
    "by_page": by_page,
    "caote": caote,
    "critical": critical,
    "value_aware": value_aware,
    "chunkkv": chunkkv,
    "phases": phases,
}


def by_name(name: str, **arguments: Any) -> Policy:
    variant = arguments.pop("variant", None)
    if variant == "ring":
        return ring(**arguments)
    if variant not in (None, "drop"):
        recent = arguments.pop("recent", None)
        # Allowed slots: those of the next step, which a text that is read at once does not have.
        statistics = {"mass": MASS, "allowed": Statistic(lambda old, block: old)}
        return Policy(**arguments, rank=None, statistics=statistics, hides=variant, hidden_recent=recent)
    return POLICIES[name](**arguments)
