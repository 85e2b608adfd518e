"""Scissorhands: ranks by how often a token was attended to above average (arXiv:2305.17118, as in RoCo and AQAS)."""

import dataclasses

import jax

from kvjax.arguments import count_argument
from kvjax.numerics.statistics import ABOVE, Statistic, popcount, recent_above
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Stats, View
from kvjax.policies.h2o import Newest

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TimesAbove(Importance):
    """Ranks a slot by the number of queries that paid it at least a uniform share, m ≥ 1 / (slots that they see).

    Attributes:
      history: only the last `history` queries count; None = all since the slot was written.
    """

    history: int | None = None

    def __post_init__(self) -> None:
        if self.history is not None:
            object.__setattr__(self, "history", count_argument("history", self.history, minimum=1))

    @property
    def statistic(self) -> Statistic:
        """The statistic that counts the queries."""
        return ABOVE if self.history is None else recent_above(self.history)

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({self.statistic})

    def score(self, stats: Stats, view: View) -> Array:
        counted = stats[self.statistic.name]
        return counted if self.history is None else popcount(counted)


times_above = TimesAbove


@factory
def scissorhands(
    budget: BudgetLike,
    *,
    recent: int | None = None,
    history: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Keeps the slots most often above average and the newest (Scissorhands, Algorithm 2; RoCo, section 2).

    Importance A_j = Σ_i [m_ij ≥ 1 / (slots that i sees)], over the last `history` queries; {p > newest - recent}
    protected.

    Args:
      budget: see `evict`.
      recent: the number of newest positions that are protected; None = ⌊b/2⌋.
      history: the number of queries that count, one bit each; None = all since the slot was written. The authors use
        400.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    The authors count misses (below 1 / t) and evict the slots with the most. They also halve the budget from layer to
    layer; give one budget per layer for that.
    """
    return evict(
        importance=TimesAbove(history),
        scope=Newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        every=every,
        name="scissorhands",
    )
