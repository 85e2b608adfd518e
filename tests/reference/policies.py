"""Reference policies: a priority for every live slot of one KV head.

A policy here is a set of column statistics and a function from a `View` of one head to `Ranking`:
one priority a slot (larger stays, +inf is protected). Nearly all are importance x scope, as in
`evict`. Who is removed is decided in `step.py`, never here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


class View(NamedTuple):
    """One KV head after its statistics were updated; slots are in ascending order of position."""

    position: Array  # [S] int
    key: Array  # [S, D] as stored
    value: Array  # [S, D]
    stats: dict[str, Array]  # [S, ...]
    layer_stats: list[dict[str, Array]]  # the statistics of all KV heads of the layer
    budget: int  # b of this row and layer
    prompt_length: int  # of this row


class Observed(NamedTuple):
    """What one block's n queries tell about the S live slots of one KV head."""

    m: Array  # [n, S] attention reduced over the query group, 0 where not seen
    sees: Array  # [n, S] bool
    query_position: Array  # [n]
    prompt_length: int


class Ranking(NamedTuple):
    priority: Array  # [S]
    gap: float = math.inf  # the narrowest decision taken while choosing whom to protect


class Statistic(NamedTuple):
    """A statistic starts at zeros of [S, *width]; `update` maps (old, Observed) to new."""

    update: Callable[[Array, Observed], Array]
    width: tuple[int, ...] = ()


@dataclass(frozen=True)
class Policy:
    """`budget`: slots, a fraction of the prompt, a tuple of these (one a layer), None: no limit.

    `by_layer`: (b, prompt length, number of layers) -> the slots of every layer, where they follow from b.
    `shares`: the layer's heads -> which slots each keeps and the narrowest decision, where heads share a budget.
    `then`: who goes on after the prompt.
    `compensates`: the position whose slot becomes the mean of all that was evicted, and weighs as much.
    `by_head`: layer -> KV head -> the policy it is under.
    `hides`: "masked" or "global": nothing is evicted, `hidden_recent` newest and the heaviest are seen.
    """

    budget: int | float | tuple[int | float, ...] | None
    rank: Callable[[View], Ranking] | None
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    positions: str = "original"
    group_reduce: str = "mean"
    at_prompt_end_only: bool = False  # the prompt-phase compressors
    by_layer: Callable[[int, int, int], list[int]] | None = None
    shares: Callable[[list[View]], list[tuple[Array, float]]] | None = None
    then: Policy | None = None
    hides: str | None = None
    hidden_recent: int | None = None
    compensates: int | None = None
    by_head: tuple[tuple[Policy, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert self.positions in ("original", "cache") and self.group_reduce in ("mean", "max")

    def slots(self, layer: int, prompt_length: int, num_layers: int = 1) -> Any:
        """The budget b of one layer for a row whose prompt has `prompt_length` tokens.

        Of a policy by head: (the head's policy, its budget) for each of them.
        """
        if self.by_head is not None:
            return [(own, own.slots(layer, prompt_length, num_layers)) for own in self.by_head[layer]]
        budget = self.budget[layer] if isinstance(self.budget, tuple) else self.budget
        if isinstance(budget, float):
            budget = max(1, math.floor(budget * prompt_length + 1e-9))
        if self.by_layer is not None:
            # A prompt of at most b tokens is left alone.
            return None if prompt_length <= budget else self.by_layer(budget, prompt_length, num_layers)[layer]
        return budget


# --- column statistics ---


def is_above(block: Observed) -> Array:
    """[n, S] bool: query i gives slot j at least the uniform share of what i sees."""
    return block.sees & (block.m >= 1.0 / block.sees.sum(axis=1, keepdims=True))


def _decay(gamma: float) -> Callable[[Array, Observed], Array]:
    def update(old: Array, block: Observed) -> Array:
        for row in block.m:
            old = gamma * old + (1.0 - gamma) * row
        return old

    return update


def _last_above(history: int) -> Callable[[Array, Observed], Array]:
    def update(old: Array, block: Observed) -> Array:
        return np.concatenate([old, is_above(block).T], axis=1)[:, -history:]  # [S, history]

    return update


def _prompt_tail_mass(window: int) -> Callable[[Array, Observed], Array]:
    def update(old: Array, block: Observed) -> Array:
        back = block.prompt_length - block.query_position  # 1 is the prompt's last query
        return old + block.m[(back >= 1) & (back <= window)].sum(axis=0)

    return update


MASS = Statistic(lambda old, block: old + block.m.sum(axis=0))
MASS_SQ = Statistic(lambda old, block: old + (block.m**2).sum(axis=0))
COUNT = Statistic(lambda old, block: old + block.sees.sum(axis=0))
ABOVE = Statistic(lambda old, block: old + is_above(block).sum(axis=0))
LAST = Statistic(lambda old, block: block.m[-1])

# --- importance: (what it needs, View -> [S]) ---


class Importance(NamedTuple):
    statistics: Mapping[str, Statistic]
    of: Callable[[View], Array]


def by_position() -> Importance:
    return Importance({}, lambda view: view.position.astype(np.float64))


def by_mass() -> Importance:
    return Importance({"mass": MASS}, lambda view: view.stats["mass"])


def by_mean() -> Importance:
    needs = {"mass": MASS, "count": COUNT}
    return Importance(needs, lambda view: view.stats["mass"] / view.stats["count"])


def by_decayed(gamma: float) -> Importance:
    return Importance({"decayed": Statistic(_decay(gamma))}, lambda view: view.stats["decayed"])


def by_above(history: int | None = None) -> Importance:
    if history is None:
        return Importance({"above": ABOVE}, lambda view: view.stats["above"])
    needs = {"above": Statistic(_last_above(history), (history,))}
    return Importance(needs, lambda view: view.stats["above"].sum(axis=1))


def by_last(share_heads: bool) -> Importance:
    def of(view: View) -> Array:
        if share_heads:  # all heads hold the same positions, because they evict the same ones
            return np.mean([stats["last"] for stats in view.layer_stats], axis=0)
        return view.stats["last"]

    return Importance({"last": LAST}, of)


def times_value_norm(importance: Importance) -> Importance:
    def of(view: View) -> Array:
        return importance.of(view) * np.linalg.norm(view.value, axis=1)

    return Importance(importance.statistics, of)


# --- scope: (what it needs, View -> (protected [S] bool, gap)) ---


class Scope(NamedTuple):
    statistics: Mapping[str, Statistic]
    protects: Callable[[View], tuple[Array, float]]


def newest(view: View, count: int) -> Array:
    """[S] bool: the `count` newest positions, counted from the newest token's whether or not they are live."""
    return view.position > view.position[-1] - count


def all_slots() -> Scope:
    return Scope({}, lambda view: (np.zeros(len(view.position), bool), math.inf))


def all_but_recent(recent: int | None = None) -> Scope:
    def protects(view: View) -> tuple[Array, float]:
        return newest(view, view.budget // 2 if recent is None else recent), math.inf

    return Scope({}, protects)


def all_but_sinks(sinks: int) -> Scope:
    return Scope({}, lambda view: (view.position < sinks, math.inf))


def all_but_steady(protect: int | None = None, guard: int = 10) -> Scope:
    """RoCo: the top `protect` by (std, position) stay; the `guard` newest have std = +inf."""

    def protects(view: View) -> tuple[Array, float]:
        top = 3 * view.budget // 10 if protect is None else protect
        mean = view.stats["mass"] / view.stats["count"]
        std = np.sqrt(np.maximum(view.stats["mass_sq"] / view.stats["count"] - mean**2, 0.0))
        std = np.where(newest(view, guard), np.inf, std)
        outside, gap = lowest(std, view.position, max(len(std) - top, 0))
        protected = np.ones(len(std), bool)
        protected[outside] = False
        return protected, gap

    return Scope({"mass": MASS, "mass_sq": MASS_SQ, "count": COUNT}, protects)


def lowest(values: Array, position: Array, count: int) -> tuple[Array, float]:
    """The `count` lowest slots (equal: the older) and the relative gap to the next one.

    An exact tie, settled by position, and a step up to +inf are not close calls: their gap is inf.
    """
    order = np.lexsort((position, values))
    if not 0 < count < len(order):
        return order[:count], math.inf
    below, above = values[order[count - 1]], values[order[count]]
    if below == above or np.isinf(above):
        return order[:count], math.inf
    return order[:count], float((above - below) / max(abs(above), abs(below)))


# --- policies ---


def evict(importance: Importance, scope: Scope, budget: Any, **options: Any) -> Policy:
    """Lowest importance first, among those that `scope` does not protect."""

    def rank(view: View) -> Ranking:
        protected, gap = scope.protects(view)
        return Ranking(np.where(protected, np.inf, importance.of(view)), gap)

    return Policy(budget, rank, {**importance.statistics, **scope.statistics}, **options)


def full(**options: Any) -> Policy:
    return Policy(None, None, **options)


def window(budget: Any, sinks: int = 4, **options: Any) -> Policy:
    return evict(by_position(), all_but_sinks(sinks), budget, **options)


def local_only(budget: Any, **options: Any) -> Policy:
    return window(budget, sinks=0, **options)


def streaming_llm(budget: Any, sinks: int = 4, **options: Any) -> Policy:
    return window(budget, sinks, positions="cache", **options)


def h2o(budget: Any, recent: int | None = None, **options: Any) -> Policy:
    return evict(by_mass(), all_but_recent(recent), budget, **options)


def heavy_only(budget: Any, **options: Any) -> Policy:
    return h2o(budget, recent=0, **options)


def h2o_decay(budget: Any, gamma: float = 0.96, recent: int | None = None, **options: Any) -> Policy:
    return evict(by_decayed(gamma), all_but_recent(recent), budget, **options)


def scissorhands(budget: Any, recent: int | None = None, history: int | None = None, **options: Any) -> Policy:
    return evict(by_above(history), all_but_recent(recent), budget, **options)


def tova(budget: Any, share_heads: bool = True, **options: Any) -> Policy:
    return evict(by_last(share_heads), all_slots(), budget, **options)


def mean_attention(budget: Any, recent: int | None = None, **options: Any) -> Policy:
    return evict(by_mean(), all_but_recent(recent), budget, **options)


def roco(budget: Any, protect: int | None = None, guard: int = 10, **options: Any) -> Policy:
    return evict(by_mean(), all_but_steady(protect, guard), budget, **options)


def with_heavy_hitters(policy: Policy, fraction: float = 0.5) -> Policy:
    """`policy` keeps its best; of the others the largest S stay."""

    def rank(view: View) -> Ranking:
        inner = policy.rank(view)
        heavy = math.floor(fraction * view.budget + 1e-9)
        others, gap = lowest(inner.priority, view.position, max(len(view.position) - (view.budget - heavy), 0))
        priority = np.full(len(view.position), np.inf)
        priority[others] = view.stats["mass"][others]
        return Ranking(priority, min(gap, inner.gap))

    return Policy(policy.budget, rank, {**policy.statistics, "mass": MASS}, policy.positions, policy.group_reduce)


def value_norm(policy: Policy) -> Policy:
    """The importance times the norm of the value; what is protected stays."""

    def rank(view: View) -> Ranking:
        inner = policy.rank(view)
        with np.errstate(invalid="ignore"):
            scaled = inner.priority * np.linalg.norm(view.value, axis=1)
        return Ranking(np.where(np.isinf(inner.priority), np.inf, scaled), inner.gap)

    return replace(policy, rank=rank)


def ring(budget: Any, **options: Any) -> Policy:
    """FlexGen's H2O, b = 2k - 1: heavy slots and a ring of the k - 1 newest."""

    def rank(view: View) -> Ranking:
        k = (view.budget + 1) // 2
        decoding = view.position[-1] >= view.prompt_length
        # The ring and, while decoding, the token that comes: the ring's oldest moves up only after the victim went.
        safe = newest(view, k - 1 + decoding)
        return Ranking(np.where(safe, np.inf, view.stats["mass"]))

    return Policy(budget, rank, {"mass": MASS}, **options)


def _classes(protects: Callable[[View], Array], goes_first: Callable[[Array], Array], budget: Any, **options) -> Policy:
    """Unprotected slots go in two classes, `goes_first` before the others, each oldest first."""

    def rank(view: View) -> Ranking:
        later = np.where(goes_first(view.position), 0, 1) * (view.position[-1] + 1)
        return Ranking(np.where(protects(view), np.inf, later + view.position))

    return Policy(budget, rank, **options)


def strided(budget: Any, stride: int, local: int | None = None, **options: Any) -> Policy:
    def protects(view: View) -> Array:
        return newest(view, view.budget // 2 if local is None else local)

    return _classes(protects, lambda position: position % stride != 0, budget, **options)


def fixed(budget: Any, block: int, columns: int, **options: Any) -> Policy:
    def protects(view: View) -> Array:
        return view.position // block == view.position[-1] // block

    return _classes(protects, lambda p: p % block < block - columns, budget, **options)


def snapkv(budget: Any, window: int = 32, kernel: int = 5, pooling: str = "avg", **options: Any) -> Policy:
    """Evicts once, when the prompt is complete; decoding appends."""
    statistics = {"tail": Statistic(_prompt_tail_mass(window))}
    rank = functools.partial(_snapkv_rank, window=window, kernel=kernel, pooling=pooling)
    return Policy(budget, rank, statistics, at_prompt_end_only=True, **options)


def _snapkv_rank(view: View, *, window: int, kernel: int, pooling: str) -> Ranking:
    outside = view.position < view.prompt_length - window
    scores, reach = view.stats["tail"][outside], kernel // 2
    near = [scores[max(j - reach, 0) : j + reach + 1] for j in range(len(scores))]
    pooled = [part.sum() / kernel if pooling == "avg" else part.max() for part in near]
    priority = np.full(len(outside), np.inf)
    priority[outside] = pooled
    return Ranking(priority)


def pyramidkv(budget: Any, window: int = 32, beta: int = 20, **options: Any) -> Policy:
    """SnapKV, with budgets that fall from layer to layer."""

    def by_layer(b: int, n: int, layers: int) -> list[int]:
        low = (b - window) // beta
        high = 2 * (b - window) - low
        if high > n - window:
            high = n - window
            low = 2 * (b - window) - high
        step = 0 if layers == 1 else (high - low) // (layers - 1)
        return [high - layer * step + window for layer in range(layers)]

    return replace(snapkv(budget, window, **options), by_layer=by_layer)


def adakv(base: Policy, safeguard: float = 0.2) -> Policy:
    """Heads share their layer's slots: a safeguard each, the rest to the largest of all."""

    def shares(heads: list[View]) -> list[tuple[Array, float]]:
        priority = [base.rank(view).priority for view in heads]
        keep = [np.isinf(p) for p in priority]  # the window
        room = heads[0].budget - int(keep[0].sum())
        own = math.floor(safeguard * room + 1e-9)
        gaps = []
        for p, kept in zip(priority, keep, strict=True):
            best = sorted(np.flatnonzero(~kept), key=lambda j: (p[j], j), reverse=True)
            if 0 < own < len(best):
                gaps.append(_relative(p[best[own - 1]], p[best[own]]))
            kept[best[:own]] = True
        left = [(p[j], -head, j) for head, p in enumerate(priority) for j in np.flatnonzero(~keep[head])]
        left.sort(reverse=True)
        count = len(heads) * (room - own)
        if 0 < count < len(left):
            gaps.append(_relative(left[count - 1][0], left[count][0]))
        for _, head, j in left[:count]:
            keep[-head][j] = True
        return [(kept, min([math.inf, *gaps])) for kept in keep]

    return replace(base, shares=shares)


def _relative(above: float, below: float) -> float:
    return math.inf if above == below else float((above - below) / max(abs(above), abs(below)))


def knorm(budget: Any, **options: Any) -> Policy:
    return Policy(budget, lambda view: Ranking(-np.linalg.norm(view.key, axis=1)), at_prompt_end_only=True, **options)


def keydiff(budget: Any, **options: Any) -> Policy:
    def rank(view: View) -> Ranking:
        unit = view.key / np.linalg.norm(view.key, axis=1, keepdims=True)
        mean = unit.mean(axis=0)
        return Ranking(-(unit @ mean) / np.linalg.norm(mean))

    return Policy(budget, rank, at_prompt_end_only=True, **options)


def after_prefill(compressor: Policy, then: Policy) -> Policy:
    return replace(compressor, statistics={**compressor.statistics, **then.statistics}, then=then)


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
    "strided": strided,
    "fixed": fixed,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
    "knorm": knorm,
    "keydiff": keydiff,
}
COMBINATORS: dict[str, Callable[..., Policy]] = {
    "with_heavy_hitters": with_heavy_hitters,
    "value_norm": value_norm,
    "adakv": adakv,
    "after_prefill": after_prefill,
}


def by_name(name: str, **arguments: Any) -> Policy:
    variant = arguments.pop("variant", None)
    if variant == "ring":
        return ring(**arguments)
    if variant is not None:
        recent = arguments.pop("recent", None)
        # Allowed slots; those of the next step, of which the whole text of "global" has none.
        statistics = {"mass": MASS, "allowed": Statistic(lambda old, block: old)}
        return Policy(**arguments, rank=None, statistics=statistics, hides=variant, hidden_recent=recent)
    return POLICIES[name](**arguments)
