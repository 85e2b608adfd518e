"""Scissorhands: how often a token was attended to above average (arXiv:2305.17118, as RoCo and AQAS read it)."""

from kvjax.policies.base import Budget, Importance, Merge, Policy, count_argument, evict, memoized
from kvjax.policies.h2o import protect_newest
from kvjax.statistics import popcount, recent_above


@memoized
def times_above(history: int | None = None) -> Importance:
    """A slot is worth the number of queries that gave it at least a uniform share; of the last `history` only."""
    if history is None:
        return Importance(frozenset({"above"}), lambda stats, view: stats["above"], in_kernel=True)
    statistic = recent_above(count_argument("history", history, minimum=1))
    return Importance(frozenset({statistic}), lambda stats, view: popcount(stats[statistic.name]))


@memoized
def scissorhands(
    budget: Budget,
    *,
    recent: int | None = None,
    history: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Policy:
    """Keeps what was most often above average, and the newest (Scissorhands, Algorithm 2; RoCo, section 2).

    Importance A_j = Σ_i [m_ij ≥ 1 / (slots that i sees)], over the last `history` queries; {p > newest - recent}
    protected.

    Args:
      budget: see `evict`.
      recent: how many newest positions are protected; None = ⌊b/2⌋.
      history: queries that count, one bit each; None = all since the slot was written. The authors' window is 400.
      positions: see `evict`.
      group_reduce, merge: see `evict`.

    The authors count misses (below 1 / t) and drop the most frequent; they also halve the budget layer by layer, which
    here is a budget a layer.
    """
    return evict(
        importance=times_above(history),
        scope=protect_newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="scissorhands",
    )
