"""G-KV: redundancy, and a score that is remembered over rounds of evictions (arXiv:2512.00504)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument, number_argument
from kvjax.numerics.group_reductions import max_over_group
from kvjax.numerics.soft_cap import soft_capped
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.h2o import Newest
from kvjax.policies.query_window import mean_over_queries, recent_logits, redundancy, softmax_over
from kvjax.policies.round_memory import RoundMemory
from kvjax.policies.row_memory import RecentQueries, RowMemory

Array = jax.Array


def relative(x: Array) -> Array:
    """Returns numbers [B, K, S], at least 0, divided by the largest of each head."""
    largest = jnp.max(x, axis=2, keepdims=True)
    return x / jnp.where(largest > 0, largest, 1.0)


@dataclasses.dataclass(frozen=True)
class GlobalScore(RoundMemory):
    """Remembers the largest attention of each slot over rounds, with decay: F = max(α·F, a).

    a is the attention of the last `window` queries: the maximum over the query heads that share a KV head, averaged
    over the queries, and divided by its maximum over the slots that are older than all of these queries. For slots that
    are not older, a is 0.

    Attributes:
      window: the number of newest queries.
      alpha: α, 0 to 1.
    """

    window: int
    alpha: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "alpha", number_argument("alpha", self.alpha, minimum=0.0, maximum=1.0))

    def after(self, stats: Mapping[str, Array], view: View, victim: Array) -> Array:
        return self.lasting(stats, view)

    def lasting(self, stats: Mapping[str, Array], view: View) -> Array:
        """Returns F of this round, [B, K, S] float32."""
        return jnp.maximum(self.alpha * self.before(stats, view), self.attention(view))

    def attention(self, view: View) -> Array:
        """Returns a, [B, K, S] float32."""
        logits, older, there = recent_logits(view, self.window)
        position = view.memory[RecentQueries(self.window).name]["position"]
        # [B, K, w, S]
        distance = position[..., None] - view.position[:, :, None]
        seen = view.live[:, :, None] & (distance >= 0)
        if view.window is not None:
            seen &= distance < view.window
        logits = soft_capped(logits, view.soft_cap)
        shares = softmax_over(logits, jnp.broadcast_to(seen[:, :, None], logits.shape))
        mean = mean_over_queries(max_over_group(shares), there)
        return relative(jnp.where(older, mean, 0.0))


@dataclasses.dataclass(frozen=True)
class GlobalRedundancy(Importance):
    """Ranks a slot by its global score less its redundancy, λ·F - (1 - λ)·ρ (G-KV, arXiv:2512.00504).

    F is the score of `GlobalScore`. ρ is the redundancy of R-KV, see `Redundancy`, divided by its maximum over the
    slots that are older than the last `window` queries.

    Attributes:
      window: the number of newest queries.
      lam: λ, 0 to 1.
      alpha: the factor of a global score from one round to the next, 0 to 1.
      similar: the cosine above which keys count as similar.
    """

    window: int
    lam: float
    alpha: float
    similar: float
    needs = frozenset()
    signed = True
    reads = frozenset({"key"})

    def __post_init__(self) -> None:
        for field in ("lam", "alpha"):
            object.__setattr__(self, field, number_argument(field, getattr(self, field), minimum=0.0, maximum=1.0))
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "similar", number_argument("similar", self.similar, minimum=-1.0, maximum=1.0))

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (RecentQueries(self.window), GlobalScore(self.window, self.alpha))

    def score(self, stats: Stats, view: View) -> Array:
        lasting = GlobalScore(self.window, self.alpha).lasting(stats, view)
        older = view.live & ~view.recent(self.window)
        alike = relative(jnp.where(older, redundancy(view.rotated(), view.position, self.similar), 0.0))
        # The newest are protected by the scope.
        return self.lam * lasting - (1 - self.lam) * alike


@factory
def gkv(
    budget: BudgetLike,
    *,
    every: int = 128,
    window: int = 8,
    lam: float = 0.1,
    alpha: float = 0.8,
    similar: float = 0.5,
    positions: str = "original",
) -> Evict:
    """Keeps slots of high attention in this round or earlier ones, and of low redundancy (G-KV, arXiv:2512.00504).

    Importance is λ·F - (1 - λ)·redundancy, see `GlobalRedundancy`. F is the larger of the slot's attention in this
    round and α times its F of the last round. The `window` newest positions are protected.

    Args:
      budget: see `evict`.
      every: see `evict`. All keys of a head are compared with each other whenever it evicts.
      window: the number of newest queries whose attention counts, and of newest positions that are protected.
      lam: λ, the weight of attention, 0 to 1.
      alpha: α, the factor of F from one round to the next, 0 to 1.
      similar: the cosine above which keys count as similar.
      positions: see `evict`.
    """
    return evict(
        importance=GlobalRedundancy(window, lam, alpha, similar), scope=Newest(window), budget=budget,
        positions=positions, every=every, name="gkv",
    )  # fmt: skip
