"""Policies in layers with a sliding window: a token that the window has left is seen by no later query."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict
from kvjax.policies.components import Importance, Scope, Stats, View

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Seen(Importance):
    """An importance under which tokens outside of a sliding window are evicted before all others.

    Attributes:
      inner: ranks the tokens of the window.
      window: the number of newest positions that a query sees.
    """

    inner: Importance
    window: int

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return self.inner.needs

    @property
    def amount(self) -> bool:
        return self.inner.amount

    @property
    def shared_by_heads(self) -> bool:
        return self.inner.shared_by_heads

    @property
    def of_budget(self) -> bool:
        return self.inner.of_budget

    @property
    def by_age(self) -> bool:
        return self.inner.by_age

    @property
    def by_position(self) -> bool:
        return self.inner.by_position

    @property
    def reads(self) -> frozenset[str]:
        return self.inner.reads

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.inner,)

    @property
    def signed(self) -> bool:
        return self.inner.signed

    def score(self, stats: Stats, view: View) -> Array:
        return jnp.where(view.recent(self.window), self.inner.score(stats, view), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class SeenScope(Scope):
    """A scope that protects no token outside of a sliding window.

    Attributes:
      inner: protects tokens of the window.
      window: the number of newest positions that a query sees.
    """

    inner: Scope
    window: int

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return self.inner.needs

    @property
    def reads(self) -> frozenset[str]:
        return self.inner.reads

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.inner,)

    def protected(self, stats: Stats, view: View) -> Array:
        return self.inner.protected(stats, view) & view.recent(self.window)

    def count(self, budget: int) -> int:
        return self.inner.count(budget)

    def newest(self, budget: int) -> int:
        return self.inner.newest(budget)

    def traced(self) -> Scope:
        return dataclasses.replace(self, inner=self.inner.traced())


def in_window(policy: Evict, window: int) -> Evict:
    """Returns the policy of a layer with a sliding window: tokens that the window has left are evicted first.

    Args:
      policy: is returned unchanged if it keeps everything.
      window: the number of newest positions that a query sees, its own included.
    """
    if policy.budget is None:
        return policy
    return dataclasses.replace(
        policy,
        importance=Seen(policy.importance, window),
        scope=SeenScope(policy.scope, window),
        budget=policy.budget.in_window(window),
    )


def slots_in_window(slots: int, window: int, check: Callable[[int], None]) -> int:
    """Returns the slots that a layer with a sliding window needs under a budget: min(slots, window).

    A policy that protects more than the window's slots keeps its budget.

    Args:
      slots: the budget.
      window: the number of newest positions that a query sees, its own included.
      check: raises PolicyError if a number of slots is too small.
    """
    if slots <= window:
        return slots
    try:
        check(window)
    except PolicyError:
        return slots
    return window
