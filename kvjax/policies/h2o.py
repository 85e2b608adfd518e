"""Heavy-hitter oracle (H2O, arXiv:2306.14048): accumulated attention, the newest tokens protected."""

from kvjax.policies.base import Budget, Importance, Policy, Scope, count_argument, evict, memoized

#: A slot is worth the attention it has received so far, S (H2O, section 4, "accumulated attention score").
mass = Importance(frozenset({"mass"}), lambda stats, view: stats["mass"])


@memoized
def protect_newest(count: int | None = None) -> Scope:
    """Protects the `count` newest positions; None = half of each row's own budget, ⌊b/2⌋."""
    if count is None:
        return Scope(frozenset(), lambda stats, view: view.recent(view.budget // 2), lambda budget: budget // 2)
    fixed = count_argument("recent", count)
    return Scope(frozenset(), lambda stats, view: view.recent(fixed), lambda budget: fixed)


@memoized
def h2o(
    budget: Budget,
    *,
    recent: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
) -> Policy:
    """Keeps the heavy hitters and the `recent` newest tokens (H2O, Algorithm 1; the authors' "real drop").

    Args:
      budget: slots per KV head, heavy and recent together; see `evict`.
      recent: how many newest positions are protected; None = ⌊b/2⌋, as in the paper's equal split.
      positions: see `evict`.
      group_reduce: see `evict`.

    Scores are kept in float32 and per row; the authors' code keeps them in the model's dtype.
    """
    return evict(
        importance=mass,
        scope=protect_newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        name="h2o",
    )


@memoized
def heavy_only(budget: Budget, *, positions: str = "original", group_reduce: str = "mean") -> Policy:
    """Heavy hitters with the whole budget, no recent tokens protected: ``h2o(recent=0)`` (H2O, Table 6)."""
    return evict(
        importance=mass,
        scope=protect_newest(0),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        name="heavy_only",
    )
