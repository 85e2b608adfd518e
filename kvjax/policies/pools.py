"""Pool limits: policies that evict what a selection fetches least (InfiniGen, arXiv:2406.19707, section 4.4).

They rank slots by what a selection chose, so that they need one. A layer that reads everything chooses nothing; there,
`lru` and `counter` evict the oldest slot, as `fifo` does.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.numerics.statistics import FETCHED, LAST_FETCHED, Statistic, saturating_fetched
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.window import recency

Array = jax.Array
ONE_BYTE = 255  # the largest counter of one byte


@dataclasses.dataclass(frozen=True)
class LastFetched(Importance):
    """Ranks a slot by the last query for which a selection chose it."""

    needs = frozenset({LAST_FETCHED})
    amount = False

    def score(self, stats: Stats, view: View) -> Array:
        return stats[LAST_FETCHED.name]


@dataclasses.dataclass(frozen=True)
class Fetched(Importance):
    """Ranks a slot by how often a selection chose it.

    Attributes:
      saturate: the counters of a head are halved when one of them reaches this number; None = never.
    """

    saturate: int | None = ONE_BYTE

    def __post_init__(self) -> None:
        if self.saturate is not None:
            object.__setattr__(self, "saturate", count_argument("saturate", self.saturate, minimum=1))

    @property
    def _statistic(self) -> Statistic:
        return FETCHED if self.saturate is None else saturating_fetched(self.saturate)

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({self._statistic})

    def score(self, stats: Stats, view: View) -> Array:
        return stats[self._statistic.name]


@dataclasses.dataclass(frozen=True)
class Ends(Scope):
    """Protects the newest tokens, which had no time to be fetched, and the first positions.

    Attributes:
      recent: the number of newest tokens; None = half of the budget.
      sinks: the number of first positions.
      min_recent: the least number of newest tokens.
    """

    recent: int | None = None
    sinks: int = 0
    min_recent: int = 1
    needs = frozenset()

    def __post_init__(self) -> None:
        if self.recent is not None:
            object.__setattr__(self, "recent", count_argument("recent", self.recent))
        for field in ("sinks", "min_recent"):
            object.__setattr__(self, field, count_argument(field, getattr(self, field)))

    def protected(self, stats: Stats, view: View) -> Array:
        recent = jnp.maximum(self.min_recent, view.budget // 2 if self.recent is None else self.recent)
        return view.recent(recent) | (view.live & (view.position < self.sinks))

    def count(self, budget: int) -> int:
        return self.newest(budget) + self.sinks

    def newest(self, budget: int) -> int:
        return max(self.min_recent, budget // 2 if self.recent is None else self.recent)


def protecting(policy: Evict, sinks: int, recent: int) -> Evict:
    """Returns a policy under which slots that a selection always reads, and never chooses, do not look unused.

    Args:
      policy: is returned unchanged unless it is made of `lru` or `counter`.
      sinks: the number of first positions that are always read.
      recent: the number of newest tokens that are always read.
    """

    def widened(scope: Scope) -> Scope:
        if not isinstance(scope, Ends):
            return scope
        return dataclasses.replace(scope, sinks=max(scope.sinks, sinks), min_recent=max(scope.min_recent, recent))

    scope = policy.scope.mapped(widened)
    return policy if scope == policy.scope else dataclasses.replace(policy, scope=scope)


@factory
def fifo(budget: BudgetLike, *, every: int = 1) -> Evict:
    """Evicts the oldest slot: ``window(sinks=0)`` (InfiniGen, section 4.4).

    Args:
      budget: slots per KV head; see `evict`.
      every: see `evict`.
    """
    return evict(importance=recency, budget=budget, every=every, name="fifo")


@factory
def lru(budget: BudgetLike, *, recent: int | None = None, sinks: int = 0, every: int = 1) -> Evict:
    """Evicts the slot that a selection has not chosen for the longest time (InfiniGen, section 4.4).

    Among slots that were never chosen the oldest is evicted. Importance is the position of the last query for which the
    slot was chosen; the newest tokens are protected.

    Args:
      budget: slots per KV head; see `evict`.
      recent: the number of newest tokens that are protected; None = half of the budget, as in the authors' simulation.
        Without protection, a full pool would evict every new token.
      sinks: the number of first positions that are protected.
      every: see `evict`.
    """
    return evict(importance=LastFetched(), scope=Ends(recent, sinks), budget=budget, every=every, name="lru")


@factory
def counter(
    budget: BudgetLike, *, saturate: int | None = ONE_BYTE, recent: int | None = None, sinks: int = 0, every: int = 1
) -> Evict:
    """Evicts the slot that a selection has chosen least often (InfiniGen, section 4.4).

    Importance is the number of queries for which the slot was chosen; the newest tokens are protected.

    Args:
      budget: slots per KV head; see `evict`.
      saturate: all counters of a head are halved when one of them reaches this number; None = never.
      recent: see `lru`.
      sinks: see `lru`.
      every: see `evict`.
    """
    return evict(importance=Fetched(saturate), scope=Ends(recent, sinks), budget=budget, every=every, name="counter")
