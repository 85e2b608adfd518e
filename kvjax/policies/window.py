"""Sliding windows, with or without attention sinks, and the policy that keeps everything."""

import jax.numpy as jnp

from kvjax.policies.base import Budget, Importance, Merge, Policy, Scope, count_argument, evict, keep, memoized

#: A slot is worth its position: the oldest goes first.
recency = Importance(frozenset(), lambda stats, view: view.position.astype(jnp.float32), in_kernel=True)


@memoized
def protect_first(count: int) -> Scope:
    """Protects the first `count` positions of the text (attention sinks, StreamingLLM, arXiv:2309.17453)."""
    count = count_argument("sinks", count)
    return Scope(frozenset(), lambda stats, view: view.position < count, lambda budget: count, in_kernel=True)


@memoized
def full(*, positions: str = "original") -> Policy:
    """Keeps every token: no budget and no eviction; the reference for every other policy."""
    return evict(importance=keep, budget=None, positions=positions, name="full")


@memoized
def window(budget: Budget, *, sinks: int = 4, positions: str = "original", merge: Merge | None = None) -> Policy:
    """The newest tokens and the first `sinks`: importance p, the position; {p < sinks} protected.

    "Local" with ``sinks=0`` (H2O, arXiv:2306.14048, Table 1); StreamingLLM with ``positions="cache"``.

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

    Importance p, {p < sinks} protected; a slot is rotated to |{live slots older than it}|. The authors' code counts
    recent tokens beside the sinks, and evicts before it appends; here the budget is what remains after a step.

    Args:
      budget, sinks, merge: see `window`.
    """
    return window(budget, sinks=sinks, positions="cache", merge=merge)._replace(name="streaming_llm")


@memoized
def local_only(budget: Budget, *, positions: str = "original", merge: Merge | None = None) -> Policy:
    """The newest tokens alone, importance p: ``window(sinks=0)`` (H2O, arXiv:2306.14048, Table 6).

    Where released code slices from -window, a window of 0 is everything; here a budget is at least 1.
    """
    return window(budget, sinks=0, positions=positions, merge=merge)._replace(name="local_only")
