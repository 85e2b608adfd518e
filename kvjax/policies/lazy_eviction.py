"""LazyEviction: ranks by the time since a slot last received attention, and its longest gap (arXiv:2506.15969)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import number_argument
from kvjax.numerics.statistics import Statistic, recurrence
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Stats, View
from kvjax.policies.h2o import Newest

Array = jax.Array
LEVELS = 1 << 16  # importance is rounded to multiples of 1 / LEVELS
SMALLEST = 1e-12  # the least threshold of a share of attention


@dataclasses.dataclass(frozen=True)
class Recurrence(Importance):
    """Ranks a slot by how likely it is to be attended to again (LazyEviction, arXiv:2506.15969).

    The score is 2σ(-1 - a / gap) + 2σ(1 - gap). a is the number of positions since a query last paid the slot at least
    `alpha`. gap is the largest number of positions between two such queries, or between the slot's birth and the first
    one. A slot without such a query has score 0. Scores are rounded to multiples of 2⁻¹⁶, so that slots of equal
    histories tie on every device.

    Attributes:
      alpha: the smallest share of attention that counts, greater than 0.
    """

    alpha: float = 1e-4

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", number_argument("alpha", self.alpha, minimum=SMALLEST, maximum=1.0))

    @property
    def statistic(self) -> Statistic:
        """The age of the last query that paid at least `alpha`, and the widest gap between two such queries."""
        return recurrence(self.alpha)

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({self.statistic})

    def score(self, stats: Stats, view: View) -> Array:
        # [B, K, S]
        last, gap = jnp.moveaxis(stats[self.statistic.name], -1, 0)
        since = (view.newest[:, None, None] - view.position + 1).astype(jnp.float32) - last
        again = 2 * jax.nn.sigmoid(-1 - since / jnp.maximum(gap, 1.0)) + 2 * jax.nn.sigmoid(1 - gap)
        return jnp.where(gap > 0, jnp.round(again * LEVELS) / LEVELS, 0.0)


@factory
def lazy(
    budget: BudgetLike,
    *,
    every: int,
    alpha: float = 1e-4,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Evict:
    """Keeps slots that receive attention repeatedly, even with long gaps (LazyEviction, arXiv:2506.15969).

    A slot is expected to receive attention again within its longest gap so far; see `Recurrence`. The `every` newest
    positions are protected. The queries of the prompt count.

    Args:
      budget: see `evict`.
      every: the number of slots that are evicted at once, see `evict`, and of newest positions that are protected. The
        authors take the 80th percentile of the gaps that they observe.
      alpha: the smallest share of attention that counts, greater than 0; the authors use 1e-4 to 5e-4.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.

    The authors' code does not observe the prompt's queries, adds 1e-5 to gaps, and does not round; it copies KV heads
    to query heads, so that each query head has its own slots.
    """
    return evict(
        importance=Recurrence(alpha), scope=Newest(every), budget=budget, positions=positions,
        group_reduce=group_reduce, merge=merge, every=every, name="lazy",
    )  # fmt: skip
