"""The parts of reference policies: a priority for every live slot of one KV head.

A policy here is a set of column statistics and a function from a `View` of one head to `Ranking`:
one priority a slot (larger stays, +inf is protected). Nearly all are importance x scope, as in
`evict`. Who is removed is decided in `step.py`, never here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


class Query(NamedTuple):
    """The queries of one token on one KV head."""

    position: int
    rotated: Array  # [G, D], at its position
    unrotated: Array  # [G, D]


class View(NamedTuple):
    """One KV head after its statistics were updated; slots are in ascending order of position."""

    position: Array  # [S] int
    key: Array  # [S, D] as stored
    value: Array  # [S, D]
    stats: dict[str, Array]  # [S, ...]
    layer_stats: list[dict[str, Array]]  # the statistics of all KV heads of the layer
    budget: int  # b of this row and layer
    prompt_length: int  # of this row
    unrotated: Array | None = None  # [S, D] keys before RoPE
    rotated: Array | None = None  # [S, D] keys at their positions
    queries: tuple[Query, ...] = ()  # all that the row has had, in order
    theta: float | None = None  # of RoPE
    layer: int = 0
    head: int = 0  # of the model
    rounds: Any = None  # a dict of the head: what a policy remembers of its evictions, which `rank` may change
    hidden: Array | None = None  # [S, E] what each token's projections were of
    out: Array | None = None  # [G, D, E] the projection of the head's output


class Observed(NamedTuple):
    """The statistics that one block's n queries give the S live slots of one KV head."""

    m: Array  # [n, S] attention reduced over the query group, 0 where not seen
    sees: Array  # [n, S] bool
    query_position: Array  # [n]
    prompt_length: int
    slot_position: Array | None = None  # [S]
    chosen: Array | None = None  # [S] bool, what a selection chose for the only query; None: everything is read


class Ranking(NamedTuple):
    """Priorities; of rounded ones also how far, relatively, each was from being rounded to the neighbour."""

    priority: Array  # [S]
    gap: float = math.inf  # the narrowest decision taken while choosing whom to protect
    distance: Array | None = None  # [S]
    unit: float = 0.0  # the largest relative distance of two neighbours


class Statistic(NamedTuple):
    """A statistic starts at zeros of [S, *width]; `update` maps (old, Observed) to new.

    `threshold`: what m is compared with; None: the uniform share, of the statistic that is named "above".
    """

    update: Callable[[Array, Observed], Array]
    width: tuple[int, ...] = ()
    threshold: float | None = None


@dataclass(frozen=True)
class Policy:
    """`budget`: slots, a fraction of the prompt, a tuple of these (one a layer), None: no limit.

    `by_layer`: (b, prompt length, number of layers) -> the slots of every layer, where they follow from b.
    `shares`: the layer's heads -> which slots each keeps and the narrowest decision, where heads share a budget.
    `over_layers`: whether these are the heads of all layers.
    `then`: who goes on after the prompt.
    `fits`: what is kept, [S] bool, when something goes -> the values [S, D] and log-weights [S] of these slots.
    `folds`: what is kept, [S] bool, when something goes -> the keys and values [S, D] of these slots, with what goes
    merged into them, and the narrowest decision.
    `compensates`: the position whose slot becomes the mean of all that was evicted, and weighs as much.
    `by_head`: layer -> KV head -> the policy it is under.
    `first_layer`: layers before it keep every token.
    `page`: the number of consecutive kept tokens that are evicted together.
    `every`: a head evicts when it holds as many slots more than its budget, all of them at once.
    `beyond_prompt`: the budget is of the tokens after the prompt.
    `replay`: how the prompt is replayed when it ends, before slots are evicted; see `prompt_replay.py`.
    `bounded`: slots of priority -inf go even where there is room for them.
    `importance`: of all slots, those that are protected too.
    `protects`: the slots that `rank` protects and the narrowest decision, where it compares slots with each other.
    `of_budget`: whether `rank` chooses slots for a part of the budget.
    `hides`: "masked", "global" or "local": nothing is evicted, `hidden_recent` newest and the heaviest are seen.
    """

    budget: int | float | tuple[int | float, ...] | None
    rank: Callable[[View], Ranking] | None
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    positions: str = "original"
    group_reduce: str = "mean"
    at_prompt_end_only: bool = False  # the prompt-phase compressors
    by_layer: Callable[[int, int, int], list[int]] | None = None
    shares: Callable[[list[View]], list[tuple[Array, float]]] | None = None
    over_layers: bool = False
    then: Policy | None = None
    fits: Callable[[View, Array], tuple[Array, Array]] | None = None
    hides: str | None = None
    hidden_recent: int | None = None
    folds: Callable[[View, Array], tuple[Array, Array, float]] | None = None
    compensates: int | None = None
    by_head: tuple[tuple[Policy, ...], ...] | None = None
    first_layer: int = 0
    page: int = 1
    every: int = 1
    beyond_prompt: bool = False
    bounded: bool = False
    importance: Callable[[View], Array] | None = None
    protects: Callable[[View], tuple[Array, float]] | None = None
    of_budget: bool = False
    replay: Any = None

    def __post_init__(self) -> None:
        assert self.positions in ("original", "cache") and self.group_reduce in ("mean", "max")

    def slots(self, layer: int, prompt_length: int, num_layers: int = 1) -> Any:
        """The budget b of one layer for a row whose prompt has `prompt_length` tokens.

        Of a policy by head: (the head's policy, its budget) for each of them.
        """
        if self.by_head is not None:
            return [(own, own.slots(layer, prompt_length, num_layers)) for own in self.by_head[layer]]
        if layer < self.first_layer:
            return None
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


def latest(window: int) -> Statistic:
    """[S, window]: the attention of the last queries, the newest first."""
    return Statistic(lambda old, block: np.concatenate([block.m[::-1].T, old], axis=1)[:, :window], (window,))


def recurrence(alpha: float) -> Statistic:
    """[S, 2]: positions from before a slot's birth to the last query with m >= alpha, and the widest gap."""

    def update(old: Array, block: Observed) -> Array:
        last, gap = old.T
        for m, position in zip(block.m, block.query_position, strict=True):
            now = position - (block.slot_position - 1)
            gap = np.where(m >= alpha, np.maximum(gap, now - last), gap)
            last = np.where(m >= alpha, now, last)
        return np.stack([last, gap], axis=1)

    return Statistic(update, (2,), alpha)


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


def _count_fetches(saturate: int | None) -> Callable[[Array, Observed], Array]:
    def update(old: Array, block: Observed) -> Array:
        count = old if block.chosen is None else old + block.chosen
        return count // 2 if saturate is not None and count.max(initial=0) >= saturate else count

    return update


def _last_fetch(old: Array, block: Observed) -> Array:
    """1 plus the position of the last query that chose a slot; 0: none has."""
    return old if block.chosen is None else np.where(block.chosen, block.query_position[-1] + 1, old)


LAST_FETCHED = Statistic(_last_fetch)

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


def by_last_fetched() -> Importance:
    return Importance({"last_fetched": LAST_FETCHED}, lambda view: view.stats["last_fetched"])


def by_fetches(saturate: int | None) -> Importance:
    return Importance({"fetched": Statistic(_count_fetches(saturate))}, lambda view: view.stats["fetched"])


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


def all_but_newest_half(recent: int | None, sinks: int) -> Scope:
    """Protects the newest tokens, which had no time to be fetched, and the first positions."""

    def protects(view: View) -> tuple[Array, float]:
        count = max(1, view.budget // 2) if recent is None else recent
        return newest(view, count) | (view.position < sinks), math.inf

    return Scope({}, protects)


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

    statistics = {**importance.statistics, **scope.statistics}
    return Policy(budget, rank, statistics, importance=importance.of, protects=scope.protects, **options)
