"""RoCo: mean attention, and a scope of tokens whose attention varies (RoCo/EasyKV, arXiv:2402.06262)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.policies.base import Budget, Importance, Merge, Policy, Scope, View, count_argument, evict, memoized
from kvjax.policies.h2o import protect_newest
from kvjax.selection import largest

Array = jax.Array


def _mean(stats: Mapping[str, Array]) -> Array:
    return stats["mass"] / jnp.maximum(stats["count"], 1)


#: A slot is worth the attention that a query pays it on average, S / N (RoCo, section 4.1, "MAS").
mean_mass = Importance(frozenset({"mass", "count"}), lambda stats, view: _mean(stats), in_kernel=True)


@memoized
def protect_varying(protect: int | None = None, guard: int = 10) -> Scope:
    """Protects the `protect` slots whose attention varies most, the `guard` newest first of all (RoCo, section 4.2).

    Args:
      protect: slots; None = three tenths of each row's own budget, ⌊3b/10⌋.
      guard: newest positions that count as varying without end; those beyond `protect` are not safe.
    """
    guard = count_argument("guard", guard)
    fixed = None if protect is None else count_argument("protect", protect)

    def protected(stats: Mapping[str, Array], view: View) -> Array:
        # The variance ranks as the standard deviation does, and tells more apart.
        variance = jnp.maximum(stats["mass_sq"] / jnp.maximum(stats["count"], 1) - jnp.square(_mean(stats)), 0)
        variance = jnp.where(view.recent(guard), jnp.inf, variance)
        count = 3 * view.budget // 10 if fixed is None else jnp.full_like(view.budget, fixed)
        return largest(variance, view.position, count[:, None, None])

    return Scope(
        frozenset({"mass", "mass_sq", "count"}),
        protected,
        lambda budget: 3 * budget // 10 if fixed is None else fixed,
        in_kernel=True,
    )


@memoized
def mean_attention(
    budget: Budget,
    *,
    recent: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Policy:
    """Keeps the highest mean attention and the newest: RoCo's importance in H2O's scope (RoCo, Table 1, "MAS").

    Importance S_j / N_j, N_j the queries that saw slot j; {p > newest - recent} protected.

    Args:
      budget: see `evict`.
      recent: how many newest positions are protected; None = ⌊b/2⌋.
      positions: see `evict`.
      group_reduce, merge: see `evict`.
    """
    return evict(
        importance=mean_mass,
        scope=protect_newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="mean_attention",
    )


@memoized
def roco(
    budget: Budget,
    *,
    protect: int | None = None,
    guard: int = 10,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Policy:
    """Robust eviction: the lowest mean attention goes, unless it varies much or is new (RoCo, section 4, Algorithm 1).

    Importance S / N; protected are the `protect` slots of largest std = √max(Q / N - (S / N)², 0), Q = Σ_i m_ij², where
    the `guard` newest positions have std = ∞.

    Args:
      budget: see `evict`.
      protect, guard: see `protect_varying`.
      positions: see `evict`.
      group_reduce, merge: see `evict`.

    One rule for prompts, blocks and decoding. The authors' code protects one slot more while decoding and always 0.3 of
    the budget there, in blocks 0.1 of budget and block, and the first four positions.
    """
    return evict(
        importance=mean_mass,
        scope=protect_varying(protect, guard),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="roco",
    )
