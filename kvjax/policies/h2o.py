"""Heavy-hitter oracle (H2O, arXiv:2306.14048): accumulated attention, the newest tokens protected."""

import dataclasses

import jax

from kvjax.errors import PolicyError
from kvjax.policies.base import (
    Evict,
    Importance,
    Merge,
    Policy,
    Scope,
    Stats,
    View,
    count_argument,
    evict,
    factory,
    number_argument,
)
from kvjax.policies.budget import BudgetLike
from kvjax.statistics import Statistic, decayed

Array = jax.Array
VARIANTS = ("drop", "ring", "masked", "global", "local")


@dataclasses.dataclass(frozen=True)
class Mass(Importance):
    """A slot is worth the attention it has received so far, S (H2O, section 4, "accumulated attention score")."""

    needs = frozenset({"mass"})

    def score(self, stats: Stats, view: View) -> Array:
        return stats["mass"]


@dataclasses.dataclass(frozen=True)
class DecayedMass(Importance):
    """A slot is worth the attention it has received, older queries counting less: E <- γE + (1 - γ)m.

    Attributes:
      gamma: γ, from 0 (the last query alone) to 1 (nothing is ever added).
    """

    gamma: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", number_argument("gamma", self.gamma, minimum=0.0, maximum=1.0))

    @property
    def needs(self) -> frozenset[Statistic]:  # type: ignore[override]
        return frozenset({decayed(self.gamma)})

    def score(self, stats: Stats, view: View) -> Array:
        return stats[decayed(self.gamma).name]


@dataclasses.dataclass(frozen=True)
class Newest(Scope):
    """Protects the newest positions.

    Attributes:
      number: how many; None = half of each row's own budget, ⌊b/2⌋.
    """

    number: int | None = None
    needs = frozenset()

    def __post_init__(self) -> None:
        if self.number is not None:
            object.__setattr__(self, "number", count_argument("recent", self.number))

    def protected(self, stats: Stats, view: View) -> Array:
        return view.recent(view.budget // 2 if self.number is None else self.number)

    def count(self, budget: int) -> int:
        return budget // 2 if self.number is None else self.number


@dataclasses.dataclass(frozen=True)
class Ring(Scope):
    """The ring of the FlexGen port (``h2o(variant="ring")``): the k - 1 newest of a budget of 2k - 1 slots.

    While decoding, the new token takes the place of the ring's oldest, which has not joined the heavy slots yet when
    the lowest of these is evicted: k slots are protected.
    """

    needs = frozenset()

    def protected(self, stats: Stats, view: View) -> Array:
        return view.recent(view.budget // 2 + int(view.decoding))

    def count(self, budget: int) -> int:
        if budget % 2 == 0:  # a fraction's too: each row's own
            raise PolicyError(
                f"variant='ring' holds k heavy slots and k - 1 of its ring; a budget of {budget} is even, give "
                f"{budget - 1} or {budget + 1}."
            )
        return (budget + 1) // 2


mass = Mass()
decayed_mass = DecayedMass
protect_newest = Newest
ring = Ring()


@factory
def h2o(
    budget: BudgetLike,
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
        `Ring` and `kvjax.selection.h2o`.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.

    Scores are float32, separate for each row and KV head, and start at a token's first query. The authors' code keeps
    them in the model's dtype, sums them over the batch, and has one mask per query head on a cache of fewer KV heads.
    """
    if variant not in VARIANTS:
        raise PolicyError(f"h2o: variant={variant!r} is not valid; use {', '.join(map(repr, VARIANTS))}.")
    if variant == "ring" and recent is not None:
        raise PolicyError(f"h2o: variant='ring' has a ring of half its budget; recent={recent!r} has no place in it.")
    name = "h2o" if variant == "drop" else f"h2o[{variant}]"
    policy = evict(
        importance=mass,
        scope=ring if variant == "ring" else Newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name=name,
    )
    if variant in ("drop", "ring"):
        return policy
    # Imported here: selections are built on this package's views and budgets.
    from kvjax.policies.h2o_variants import hidden

    return hidden(policy, variant, recent)


@factory
def heavy_only(
    budget: BudgetLike, *, positions: str = "original", group_reduce: str = "mean", merge: Merge | None = None
) -> Evict:
    """Heavy hitters with the whole budget, importance S and no slot protected: ``h2o(recent=0)`` (H2O, Table 6).

    The newest token competes like any other: with one query's attention it is often the first to be evicted.

    Args:
      budget: see `evict`.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
    """
    return evict(
        importance=mass, scope=Newest(0), budget=budget, positions=positions, group_reduce=group_reduce, merge=merge,
        name="heavy_only",
    )  # fmt: skip


@factory
def h2o_decay(
    budget: BudgetLike,
    *,
    gamma: float = 0.96,
    recent: int | None = None,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Evict:
    """Heavy hitters of late, by exponentially decayed attention (EasyKV's ``h2o_head_decay``; not in a paper).

    Importance E <- γE + (1 - γ)m, query by query; {p > newest - recent} protected.

    Args:
      budget: see `evict`.
      gamma: see `DecayedMass`.
      recent: how many newest positions are protected; None = ⌊b/2⌋.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.

    Every query decays, also inside a block, so that blocks of any size agree.
    """
    return evict(
        importance=DecayedMass(gamma),
        scope=Newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="h2o_decay",
    )
