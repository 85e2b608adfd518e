"""Sliding windows, with or without attention sinks, and the policy that keeps everything."""

import jax.numpy as jnp

from kvjax.policies.base import Budget, Importance, Policy, Scope, count_argument, evict, memoized

#: A slot is worth its position: the oldest goes first.
recency = Importance(frozenset(), lambda stats, view: view.position.astype(jnp.float32))


#: A slot is worth more than any other: nobody goes.
_keep = Importance(frozenset(), lambda stats, view: jnp.full(view.position.shape, jnp.inf))


@memoized
def protect_first(count: int) -> Scope:
    """Protects the first `count` positions of the text (attention sinks, StreamingLLM, arXiv:2309.17453)."""
    count = count_argument("sinks", count)
    return Scope(frozenset(), lambda stats, view: view.position < count, lambda budget: count)


@memoized
def full(*, positions: str = "original") -> Policy:
    """Keeps every token: no budget and no eviction; the reference for every other policy."""
    return evict(importance=_keep, budget=None, positions=positions, name="full")


@memoized
def window(budget: Budget, *, sinks: int = 4, positions: str = "original") -> Policy:
    """The newest tokens and the first `sinks` ("Local" when 0; StreamingLLM with ``positions="cache"``).

    Args:
      budget: slots per KV head, the sinks among them; see `evict`.
      sinks: how many of the first positions are never evicted; at most the budget.
      positions: see `evict`.
    """
    return evict(importance=recency, scope=protect_first(sinks), budget=budget, positions=positions, name="window")


@memoized
def local_only(budget: Budget, *, positions: str = "original") -> Policy:
    """The newest tokens alone: ``window(sinks=0)`` (H2O, arXiv:2306.14048, Table 6)."""
    return evict(importance=recency, scope=protect_first(0), budget=budget, positions=positions, name="local_only")
