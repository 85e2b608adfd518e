"""Heavy-hitter oracle (H2O, arXiv:2306.14048): ranks by accumulated attention and protects the newest tokens."""

import dataclasses

import jax

from kvjax.arguments import choice_argument, count_argument, named, number_argument
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic, decayed
from kvjax.policies.base import Evict, Policy, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Scope, Stats, View

Array = jax.Array
HIDING = ("masked", "global", "local")  # variants that keep every token and hide some
VARIANTS = ("drop", "ring", *HIDING)


@dataclasses.dataclass(frozen=True)
class Mass(Importance):
    """Ranks a slot by the attention that it has received so far, S (H2O, section 4, "accumulated attention score")."""

    needs = frozenset({"mass"})

    def score(self, stats: Stats, view: View) -> Array:
        return stats["mass"]


@dataclasses.dataclass(frozen=True)
class DecayedMass(Importance):
    """Ranks a slot by the attention that it has received, with a decay: E <- γE + (1 - γ)m for each query.

    Attributes:
      gamma: γ, from 0 (only the last query counts) to 1 (nothing is added).
    """

    gamma: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", number_argument("gamma", self.gamma, minimum=0.0, maximum=1.0))

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({decayed(self.gamma)})

    def score(self, stats: Stats, view: View) -> Array:
        return stats[decayed(self.gamma).name]


@dataclasses.dataclass(frozen=True)
class Newest(Scope):
    """Protects the newest positions.

    Attributes:
      number: the number of positions; None = half of each row's own budget, ⌊b/2⌋.
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

    def newest(self, budget: int) -> int:
        return self.count(budget)


@dataclasses.dataclass(frozen=True)
class Ring(Scope):
    """Protects the ring of the FlexGen port (``h2o(variant="ring")``): the k - 1 newest of a budget of 2k - 1 slots.

    While decoding, the new token replaces the oldest of the ring, which joins the heavy slots only after the lowest of
    these is evicted; k slots are therefore protected.
    """

    needs = frozenset()

    def protected(self, stats: Stats, view: View) -> Array:
        return view.recent(view.budget // 2 + int(view.decoding))

    def count(self, budget: int) -> int:
        if budget % 2 == 0:  # for a fraction, the budget of any row
            raise PolicyError(
                f"variant='ring' has k heavy slots and a ring of k - 1; a budget of {budget} is even, give "
                f"{budget - 1} or {budget + 1}."
            )
        return (budget + 1) // 2

    def newest(self, budget: int) -> int:
        return budget // 2


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
    every: int = 1,
) -> Policy:
    """Keeps the heavy hitters and the `recent` newest tokens (H2O, section 4, Algorithm 1).

    Importance S_j = Σ_i m_ij, the attention of all queries i so far to slot j; {p > newest - recent} protected.

    Args:
      budget: slots per KV head, heavy and recent together; see `evict`.
      recent: the number of newest positions that are protected; None = ⌊b/2⌋, as in the paper's equal split.
      variant: ``drop`` is the authors' "real drop"; ``ring``, ``masked``, ``global`` and ``local`` are other algorithms
        that they released under the same name, see `Ring` and `kvjax.selection.h2o`.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    Scores are float32, separate for each row and KV head, and start at a token's first query. The authors' code keeps
    them in the model's dtype, sums them over the batch, and has one mask per query head on a cache of fewer KV heads.
    """
    with named("h2o"):
        choice_argument("variant", variant, VARIANTS)
        if variant == "ring" and recent is not None:
            raise PolicyError(
                f"recent={recent!r} is not valid with variant='ring', whose ring has half of the budget; leave it out."
            )
        if variant != "drop" and every != 1:
            raise PolicyError(
                f"every={every!r} is not valid with variant={variant!r}, which is defined token by token; leave it out."
            )
        if variant in HIDING and merge is not None:
            raise PolicyError(
                f"merge={merge!r} is not valid with variant={variant!r}, which evicts nothing; leave it out."
            )
        if variant in HIDING and budget is None:
            raise PolicyError(
                f"budget=None is not valid with variant={variant!r}, which hides slots; give slots or a fraction."
            )
    name = "h2o" if variant == "drop" else f"h2o[{variant}]"
    policy = evict(
        importance=mass,
        scope=ring if variant == "ring" else Newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        every=every,
        name=name,
    )
    if variant not in HIDING:
        return policy
    from kvjax.policies.h2o_variants import hidden  # which uses selections, which use this package

    return hidden(policy, variant, recent)


@factory
def heavy_only(
    budget: BudgetLike,
    *,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Keeps heavy hitters alone: importance S, no slot protected, as ``h2o(recent=0)`` (H2O, Table 6).

    The newest token is not protected either: with one query's attention it is often the first to be evicted.

    Args:
      budget: see `evict`.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.
    """
    return evict(
        importance=mass, scope=Newest(0), budget=budget, positions=positions, group_reduce=group_reduce, merge=merge,
        every=every, name="heavy_only",
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
    every: int = 1,
) -> Evict:
    """Keeps recent heavy hitters, by exponentially decayed attention (EasyKV's ``h2o_head_decay``; not in a paper).

    Importance E <- γE + (1 - γ)m, query by query; {p > newest - recent} protected.

    Args:
      budget: see `evict`.
      gamma: see `DecayedMass`.
      recent: the number of newest positions that are protected; None = ⌊b/2⌋.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    E decays at every query, also inside a block, so that the result does not depend on the size of blocks.
    """
    return evict(
        importance=DecayedMass(gamma),
        scope=Newest(recent),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        every=every,
        name="h2o_decay",
    )
