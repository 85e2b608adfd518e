"""EMS: ranks by the attention of all queries and of the newest ones, and merges evicted slots (arXiv:2412.08521)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.numerics.statistics import MASS, Statistic, latest
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.h2o import Newest
from kvjax.policies.merge import SimilarKey

Array = jax.Array


def _of_largest(x: Array) -> Array:
    """Divides numbers [B, K, S], at least 0, by the largest of their head; 0 if all are 0."""
    largest = jnp.max(x, axis=2, keepdims=True)
    return jnp.where(largest > 0, x / jnp.where(largest > 0, largest, 1.0), 0.0)


@dataclasses.dataclass(frozen=True)
class GlobalOrLocal(Importance):
    """Ranks a slot by the larger of its attention from all queries and from the newest ones (arXiv:2412.08521).

    The score is max(S / max S, S_w / max S_w), with the maxima over the live slots of a head. S is the attention from
    all queries since the slot was written, and S_w that from the last `window` queries.

    Attributes:
      window: the number of newest queries.
    """

    window: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))

    @property
    def statistic(self) -> Statistic:
        """The attention of each of the last `window` queries."""
        return latest(self.window)

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({MASS, self.statistic})

    def score(self, stats: Stats, view: View) -> Array:
        whole = jnp.where(view.live, stats[MASS.name], 0.0)
        newest = jnp.where(view.live, jnp.sum(stats[self.statistic.name], axis=3), 0.0)
        return jnp.maximum(_of_largest(whole), _of_largest(newest))


@factory
def ems(
    budget: BudgetLike,
    *,
    recent: int | None = None,
    window: int = 32,
    threshold: float = 0.6,
    positions: str = "original",
    group_reduce: str = "mean",
    every: int = 1,
) -> Evict:
    """Keeps the slots that all queries or the newest ones attend to, and merges evicted slots (EMS, arXiv:2412.08521).

    Importance is the larger of two shares of attention, see `GlobalOrLocal`; the `recent` newest positions are
    protected. A slot that is evicted is averaged into the kept slot of the most similar key, or dropped if there is
    none, see `kvjax.policies.merge.SimilarKey`.

    Args:
      budget: see `evict`.
      recent: the number of newest positions that are protected; None = ⌊b/2⌋.
      window: the number of newest queries whose attention is stored, one float32 number per query and slot.
      threshold: the smallest cosine of keys that are merged, -1 to 1.
      positions: see `evict`.
      group_reduce: see `evict`.
      every: see `evict`.

    Written from the paper's text, without its code: the maximum of the two shares and the weights of the merge are
    kvjax's choices. The paper also gives each head its own budget.
    """
    return evict(
        importance=GlobalOrLocal(window), scope=Newest(recent), budget=budget, merge=SimilarKey(threshold),
        positions=positions, group_reduce=group_reduce, every=every, name="ems",
    )  # fmt: skip
