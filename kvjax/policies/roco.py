"""RoCo: ranks by mean attention and protects the slots whose attention varies (RoCo/EasyKV, arXiv:2402.06262)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.numerics.top_k import largest
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Scope, Stats, View
from kvjax.policies.h2o import Newest

Array = jax.Array


def _mean(stats: Stats) -> Array:
    """[B, K, S] float32: S / N."""
    return stats["mass"] / jnp.maximum(stats["count"], 1)


@dataclasses.dataclass(frozen=True)
class MeanMass(Importance):
    """Ranks a slot by the attention that a query pays it on average, S / N (RoCo, section 4.1, "MAS")."""

    needs = frozenset({"mass", "count"})

    def score(self, stats: Stats, view: View) -> Array:
        return _mean(stats)


@dataclasses.dataclass(frozen=True)
class Varying(Scope):
    """Protects the slots whose attention varies most (RoCo, section 4.2).

    Attributes:
      protect: the number of protected slots; None = three tenths of each row's own budget, ⌊3b/10⌋.
      guard: the number of newest positions whose deviation counts as infinite; if it exceeds `protect`, only the
        newest `protect` of them are protected.
    """

    protect: int | None = None
    guard: int = 10
    needs = frozenset({"mass", "mass_sq", "count"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "guard", count_argument("guard", self.guard))
        if self.protect is not None:
            object.__setattr__(self, "protect", count_argument("protect", self.protect))

    def protected(self, stats: Stats, view: View) -> Array:
        # [B, K, S]: the variance orders slots as the standard deviation does, and separates close values better.
        variance = jnp.maximum(stats["mass_sq"] / jnp.maximum(stats["count"], 1) - jnp.square(_mean(stats)), 0)
        variance = jnp.where(view.recent(self.guard), jnp.inf, variance)
        # [B]
        number = 3 * view.budget // 10 if self.protect is None else jnp.full_like(view.budget, self.protect)
        return largest(variance, view.position, number[:, None, None])

    def newest(self, budget: int) -> int:
        return min(self.guard, self.count(budget))

    def count(self, budget: int) -> int:
        return 3 * budget // 10 if self.protect is None else self.protect


mean_mass = MeanMass()
protect_varying = Varying


@factory
def mean_attention(
    budget: BudgetLike,
    *,
    recent: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Keeps the highest mean attention and the newest: RoCo's importance in H2O's scope (RoCo, Table 1, "MAS").

    Importance S_j / N_j, N_j the number of queries that saw slot j; {p > newest - recent} protected.

    Args:
      budget: see `evict`.
      recent: the number of newest positions that are protected; None = ⌊b/2⌋.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.
    """
    return evict(
        importance=mean_mass,
        scope=Newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        every=every,
        name="mean_attention",
    )


@factory
def roco(
    budget: BudgetLike,
    *,
    protect: int | None = None,
    guard: int = 10,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Evicts the lowest mean attention, except where it varies most or is new (RoCo, section 4, Algorithm 1).

    Importance S / N; protected are the `protect` slots of largest std = √max(Q / N - (S / N)², 0), Q = Σ_i m_ij², where
    the `guard` newest positions have std = ∞.

    Args:
      budget: see `evict`.
      protect: see `Varying`.
      guard: see `Varying`.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    Prompts, blocks and decoding follow this rule. While decoding, the authors' code protects one slot more and always
    0.3 of the budget; in blocks it protects 0.1 of budget and block, and the first four positions.
    """
    return evict(
        importance=mean_mass,
        scope=Varying(protect, guard),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        every=every,
        name="roco",
    )
