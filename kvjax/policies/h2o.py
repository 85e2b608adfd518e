"""Heavy-hitter oracle (H2O, arXiv:2306.14048): accumulated attention, the newest tokens protected."""

from kvjax.errors import PolicyError
from kvjax.policies.base import (
    Budget,
    Importance,
    Merge,
    Policy,
    Scope,
    count_argument,
    evict,
    memoized,
    number_argument,
)
from kvjax.policies.h2o_variants import MASKS, VARIANTS, masked, ring
from kvjax.statistics import decayed

#: A slot is worth the attention it has received so far, S (H2O, section 4, "accumulated attention score").
mass = Importance(frozenset({"mass"}), lambda stats, view: stats["mass"], in_kernel=True)


@memoized
def decayed_mass(gamma: float) -> Importance:
    """A slot is worth the attention it has received, older queries counting less: E <- γE + (1 - γ)m."""
    statistic = decayed(number_argument("gamma", gamma, minimum=0.0, maximum=1.0))
    return Importance(frozenset({statistic}), lambda stats, view: stats[statistic.name], in_kernel=True)


@memoized
def protect_newest(count: int | None = None) -> Scope:
    """Protects the `count` newest positions; None = half of each row's own budget, ⌊b/2⌋."""
    if count is None:
        return Scope(
            frozenset(), lambda stats, view: view.recent(view.budget // 2), lambda budget: budget // 2, in_kernel=True
        )
    fixed = count_argument("recent", count)
    return Scope(frozenset(), lambda stats, view: view.recent(fixed), lambda budget: fixed, in_kernel=True)


@memoized
def h2o(
    budget: Budget,
    *,
    recent: int | None = None,
    variant: str = "drop",
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Policy:
    """Keeps the heavy hitters and the `recent` newest tokens (H2O, section 4, Algorithm 1).

    Importance S_j = Σ_i m_ij, the attention that all queries i so far paid slot j; {p > newest - recent} protected.

    Args:
      budget: slots per KV head, heavy and recent together; see `evict`.
      recent: how many newest positions are protected; None = ⌊b/2⌋, as in the paper's equal split.
      variant: ``drop`` is the authors' "real drop"; for the other algorithms that they released under the same name see
        `kvjax.policies.h2o_variants`.
      positions: see `evict`.
      group_reduce, merge: see `evict`.

    Scores are float32, a row's and a KV head's own, and start at a token's first query. The authors' code keeps them in
    the model's dtype, adds them up over the batch, and has one mask a query head on a cache of fewer KV heads.
    """
    if variant not in VARIANTS:
        raise PolicyError(f"h2o: variant={variant!r} is not valid; use {', '.join(map(repr, VARIANTS))}.")
    if variant == "ring" and recent is not None:
        raise PolicyError(f"h2o: variant='ring' has a ring of half its budget; recent={recent!r} has no place in it.")
    policy = evict(
        importance=mass,
        scope=ring if variant == "ring" else protect_newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="h2o" if variant == "drop" else f"h2o[{variant}]",
    )
    if variant in MASKS:
        return masked(policy, MASKS[variant], recent)
    return policy


@memoized
def heavy_only(
    budget: Budget, *, positions: str = "original", group_reduce: str = "mean", merge: Merge | None = None
) -> Policy:
    """Heavy hitters with the whole budget, importance S and nobody protected: ``h2o(recent=0)`` (H2O, Table 6).

    The newest token competes like any other: with one query's attention it is often the first to go.
    """
    made = h2o(budget, recent=0, positions=positions, group_reduce=group_reduce, merge=merge)
    return made._replace(name="heavy_only")


@memoized
def h2o_decay(
    budget: Budget,
    *,
    gamma: float = 0.96,
    recent: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Policy:
    """Heavy hitters of late, by exponentially decayed attention (EasyKV's ``h2o_head_decay``; not in a paper).

    Importance E <- γE + (1 - γ)m, query by query; {p > newest - recent} protected.

    Args:
      budget: see `evict`.
      gamma: of the decay, from 0 (the last query alone) to 1 (nothing is ever added).
      recent: how many newest positions are protected; None = ⌊b/2⌋.
      positions: see `evict`.
      group_reduce, merge: see `evict`.

    Every query decays, also inside of a block, so that blocks of any size agree.
    """
    return evict(
        importance=decayed_mass(gamma),
        scope=protect_newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="h2o_decay",
    )
