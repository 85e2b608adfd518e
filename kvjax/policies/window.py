"""Sliding windows, with or without attention sinks, and the policy that keeps every token."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.policies.base import Evict, evict, factory, keep
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Scope, Stats, View

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Recency(Importance):
    """Ranks a slot by its position: the oldest is evicted first."""

    needs = frozenset()
    by_age = True

    def score(self, stats: Stats, view: View) -> Array:
        return view.position.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class First(Scope):
    """Protects the first positions of the text, the attention sinks (StreamingLLM, arXiv:2309.17453).

    Attributes:
      number: the number of positions.
    """

    number: int
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", count_argument("sinks", self.number))

    def protected(self, stats: Stats, view: View) -> Array:
        return view.position < self.number

    def count(self, budget: int) -> int:
        return self.number


recency = Recency()
protect_first = First


@factory
def full(*, positions: str = "original") -> Evict:
    """Keeps every token: no budget and no eviction; the reference for every other policy.

    Args:
      positions: see `evict`.
    """
    return evict(importance=keep, budget=None, positions=positions, name="full")


@factory
def window(
    budget: BudgetLike, *, sinks: int = 4, positions: str = "original", merge: Merge | None = None, every: int = 1
) -> Evict:
    """Keeps the newest tokens and the first `sinks`: importance p, the position; {p < sinks} protected.

    This is "Local" with ``sinks=0`` (H2O, arXiv:2306.14048, Table 1), and StreamingLLM with ``positions="cache"``.

    Args:
      budget: slots per KV head, the sinks included; see `evict`.
      sinks: the number of first positions that are protected; at most the budget.
      positions: see `evict`.
      merge: see `evict`.
      every: see `evict`.
    """
    return evict(
        importance=recency,
        scope=First(sinks),
        budget=budget,
        positions=positions,
        merge=merge,
        every=every,
        name="window",
    )


@factory
def streaming_llm(budget: BudgetLike, *, sinks: int = 4, merge: Merge | None = None, every: int = 1) -> Evict:
    """`window` with RoPE by rank in the cache, for texts of any length (StreamingLLM, arXiv:2309.17453, section 3.2).

    Importance p, {p < sinks} protected; a key is rotated to the number of live slots that are older than its own.

    Args:
      budget: see `window`.
      sinks: see `window`.
      merge: see `evict`.
      every: see `evict`.

    The authors' code counts the recent tokens without the sinks, and evicts before it appends; here the budget includes
    the sinks and is what remains after a step.
    """
    return evict(
        importance=recency,
        scope=First(sinks),
        budget=budget,
        positions="cache",
        merge=merge,
        every=every,
        name="streaming_llm",
    )


@factory
def local_only(budget: BudgetLike, *, positions: str = "original", merge: Merge | None = None, every: int = 1) -> Evict:
    """Keeps the newest tokens alone, importance p: ``window(sinks=0)`` (H2O, arXiv:2306.14048, Table 6).

    Args:
      budget: see `evict`.
      positions: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    Released code that slices from -window keeps everything when the window is 0; here a budget is at least 1.
    """
    return evict(
        importance=recency,
        scope=First(0),
        budget=budget,
        positions=positions,
        merge=merge,
        every=every,
        name="local_only",
    )
