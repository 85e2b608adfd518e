"""Sliding windows, with or without attention sinks, and the policy that keeps everything."""

import jax.numpy as jnp

from kvjax.policies.base import Budget, Importance, Merge, Policy, Scope, count_argument, evict, keep, memoized

#: A slot is worth its position: the oldest goes first.
recency = Importance(frozenset(), lambda stats, view: view.position.astype(jnp.float32))


@memoized
def protect_first(count: int) -> Scope:
    """Protects the first `count` positions of the text (attention sinks, StreamingLLM, arXiv:2309.17453)."""
    count = count_argument("sinks", count)
    return Scope(frozenset(), lambda stats, view: view.position < count, lambda budget: count)


@memoized
def full(*, positions: str = "original") -> Policy:
    """Keeps every token: no budget and no eviction; the reference for every other policy."""
    return evict(importance=keep, budget=None, positions=positions, name="full")


@memoized
def window(budget: Budget, *, sinks: int = 4, positions: str = "original", merge: Merge | None = None) -> Policy:
    """The newest tokens and the first `sinks` ("Local" when 0; StreamingLLM with ``positions="cache"``).

    Args:
      budget: slots per KV head, the sinks among them; see `evict`.
      sinks: how many of the first positions are never evicted; at most the budget.
      positions, merge: see `evict`.
    """
    return evict(
        importance=recency, scope=protect_first(sinks), budget=budget, positions=positions, merge=merge, name="window"
    )


@memoized
def streaming_llm(budget: Budget, *, sinks: int = 4, merge: Merge | None = None) -> Policy:
    """`window` with RoPE by rank in the cache: texts of any length (StreamingLLM, arXiv:2309.17453, section 3.2).

    Args:
      budget: see `window`; sinks: see `window`.
    """
    return evict(
        importance=recency,
        scope=protect_first(sinks),
        budget=budget,
        positions="cache",
        merge=merge,
        name="streaming_llm",
    )


@memoized
def local_only(budget: Budget, *, positions: str = "original", merge: Merge | None = None) -> Policy:
    """The newest tokens alone: ``window(sinks=0)`` (H2O, arXiv:2306.14048, Table 6)."""
    return evict(
        importance=recency, scope=protect_first(0), budget=budget, positions=positions, merge=merge, name="local_only"
    )
