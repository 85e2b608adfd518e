"""Observe and evict: the statistics of a step, and which slots go."""

import jax
import jax.numpy as jnp

from kvjax.cache.state import FAR
from kvjax.order import largest
from kvjax.policies.base import Evict, View
from kvjax.statistics import Statistic

Array = jax.Array


def observe(
    stats: dict[str, Array], needs: frozenset[Statistic], columns: dict[str, Array], queries: Array
) -> dict[str, Array]:
    """Adds a block's columns to the statistics, which are constants to a gradient.

    Args:
      stats: statistic name -> [B, K, S, ...].
      columns: statistic name -> [B, K, S, ...] float32 sums of the block.
      queries: [B] int32 number of real queries of each row.
    """
    columns, queries = jax.lax.stop_gradient((columns, queries))
    return stats | {s.name: s.merge(stats[s.name], columns[s.name], queries) for s in needs}


def victims(policy: Evict, stats: dict[str, Array], view: View, *, one: bool) -> Array:
    """Chooses the slots to evict so that every head is within its limit, lowest priority first.

    Args:
      policy: one that has a budget.
      stats: statistic name -> [B, K, S, ...].
      view: the slots.
      one: whether at most one slot per head can be over the limit.

    Returns:
      [B, K, S] bool.
    """
    # [B, K, S]; NaN, which a policy may return, would escape the limit
    priority = policy.priority(stats, view)
    priority = jnp.where(jnp.isnan(priority), -jnp.inf, priority)
    # [B, 1, 1] or [B, K, 1]
    limit = policy.limit(stats, view)
    # A row without tokens in this block is unchanged, even if the policy that decodes has a smaller budget.
    counts = view.newest >= 0 if policy.when == "step" else view.at_prompt_end
    limit = jnp.where(counts[:, None, None], limit, FAR)
    return (one_victim if one else all_victims)(priority, view.position, limit)


def one_victim(priority: Array, position: Array, limit: Array) -> Array:
    """Marks the slot of lowest priority, among equals the oldest, in heads over the limit; [B, K, S] bool.

    Minima and comparisons only: argmin and sort are not vectorised on CPUs.
    """
    live = position >= 0
    over = jnp.sum(live, axis=2, keepdims=True, dtype=jnp.int32) > limit
    lowest = jnp.min(jnp.where(live, priority, jnp.inf), axis=2, keepdims=True)
    tied = live & (priority == lowest)
    oldest = jnp.min(jnp.where(tied, position, FAR), axis=2, keepdims=True)
    return over & tied & (position == oldest)


def all_victims(priority: Array, position: Array, limit: Array) -> Array:
    """Marks slots until `limit` are left, lowest priority first, among equals the older; [B, K, S] bool."""
    return (position >= 0) & ~largest(priority, position, limit)
