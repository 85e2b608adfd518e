"""Observe and evict: the statistics of a step, and which slots go."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.state import EMPTY, FAR
from kvjax.numerics.statistics import Statistic, by_name
from kvjax.numerics.top_k import largest, lowest
from kvjax.policies.base import Evict, View
from kvjax.policies.round_memory import written

Array = jax.Array


def observe(
    stats: dict[str, Array],
    needs: frozenset[Statistic],
    columns: dict[str, Array],
    queries: Array,
    most: int | None = None,
) -> dict[str, Array]:
    """Adds a block's columns to the statistics, which are constants to a gradient.

    Args:
      stats: statistic name -> [B, K, S, ...].
      columns: statistic name -> [B, K, S, ...] float32 sums of the block.
      queries: [B] int32 number of real queries of each row.
      most: the largest number of queries of a row; None = not known.
    """
    columns, queries = jax.lax.stop_gradient((columns, queries))
    return stats | {s.name: s.merge(stats[s.name], columns[s.name], queries, most) for s in by_name(needs)}


class Round(NamedTuple):
    """The outcome of ranking.

    Attributes:
      victim: [B, K, S] bool, the slots that are evicted.
      remembered: name of a `kvjax.policies.round_memory.RoundMemory` -> its numbers after the step.
    """

    victim: Array
    remembered: dict[str, Array]


def ranked(policy: Evict, stats: dict[str, Array], view: View, *, one: bool) -> Round:
    """Chooses the slots to evict, and computes the round memories afterwards; for the arguments see `victims`."""
    if policy.every > 1 or policy.rounds:
        return _round(policy, stats, view)
    return Round(victims(policy, stats, view, one=one), {})


def victims(policy: Evict, stats: dict[str, Array], view: View, *, one: bool, max_victims: int | None = None) -> Array:
    """Chooses the slots to evict so that every head is within its limit, lowest priority first.

    Args:
      policy: one that has a budget.
      stats: statistic name -> [B, K, S, ...].
      view: the slots.
      one: whether at most one slot per head can be over the limit.
      max_victims: of slots on several devices, the most per head that can be over the limit; None = any number.

    Returns:
      [B, K, S] bool.
    """
    if policy.every > 1:
        return _round(policy, stats, view).victim
    priority, limit = ranking(policy, stats, view)
    if policy.page > 1:
        return page_victims(priority, view.position, limit, policy.page)
    if max_victims is not None:
        return lowest(priority, view.position, limit, max_victims)
    return (one_victim if one else all_victims)(priority, view.position, limit)


def _round(policy: Evict, stats: dict[str, Array], view: View) -> Round:
    """Chooses the slots to evict of the heads that hold `every` slots more than their limit.

    The slots are ranked only in steps in which a head of any row is due.
    """
    # [B, K, 1]
    live = jnp.sum(view.live, axis=2, keepdims=True, dtype=jnp.int32)
    limit = jnp.where(_evicts_now(policy, view)[:, None, None], policy.limit(stats, view), FAR)
    due = live >= jnp.minimum(limit, FAR - policy.every) + policy.every

    def choose() -> Round:
        priority, _ = ranking(policy, stats, view)
        victim = all_victims(priority, view.position, jnp.where(due, limit, FAR))
        return Round(victim, written(policy.rounds, due, stats, view, victim))

    def wait() -> Round:
        unchanged = {each.name: each.before(stats, view) for each in policy.rounds}
        return Round(jnp.zeros(view.position.shape, bool), unchanged)

    return jax.lax.cond(jnp.any(due), choose, wait)


def _evicts_now(policy: Evict, view: View) -> Array:
    """Marks the rows that may evict in this step, [B] bool.

    A row without tokens in this block is unchanged, even if the policy that decodes has a smaller budget.
    """
    return view.newest >= 0 if policy.when == "step" else view.at_prompt_end


def ranking(policy: Evict, stats: dict[str, Array], view: View) -> tuple[Array, Array]:
    """Returns the priority of each slot, [B, K, S] float32, and the slots or pages of a head, [B, K or 1, 1] int32.

    Args:
      policy: one that has a budget.
      stats: statistic name -> [B, K, S, ...].
      view: the slots.
    """
    # [B, K, S]; NaN, which a policy may return, would escape the limit
    priority = policy.priority(stats, view)
    priority = jnp.where(jnp.isnan(priority), -jnp.inf, priority)
    # [B, 1, 1] or [B, K, 1]
    limit = policy.limit(stats, view)
    return priority, jnp.where(
        _evicts_now(policy, view)[:, None, None], limit // policy.page if policy.page > 1 else limit, FAR
    )


def lowest_priority_oldest(priority: Array, position: Array, axis: int | tuple[int, ...] = 2) -> tuple[Array, Array]:
    """Returns the lowest priority of live slots and, of those that have it, the oldest position; FAR = none is live.

    This is the order of evictions, of slots of one device as of those that devices name. Minima and comparisons only:
    argmin and sort are not vectorised on CPUs.

    Args:
      priority: float32.
      position: int32 of the same shape, -1 = empty.
      axis: that is reduced to size 1.
    """
    live = position >= 0
    lowest = jnp.min(jnp.where(live, priority, jnp.inf), axis=axis, keepdims=True)
    return lowest, jnp.min(jnp.where(live & (priority == lowest), position, FAR), axis=axis, keepdims=True)


def one_victim(priority: Array, position: Array, limit: Array) -> Array:
    """Marks the slot of lowest priority, among equals the oldest, in heads over the limit; [B, K, S] bool."""
    over = jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32) > limit
    return over & (position == lowest_priority_oldest(priority, position)[1])


def all_victims(priority: Array, position: Array, limit: Array) -> Array:
    """Marks slots until `limit` are left, lowest priority first, among equals the older; [B, K, S] bool."""
    return (position >= 0) & ~largest(priority, position, limit)


def page_victims(priority: Array, position: Array, limit: Array, page: int) -> Array:
    """Marks whole pages until at most `limit` full pages of slots are left, lowest worth first; [B, K, S] bool.

    The worth of a page is the highest priority of its slots. The newest page stays, and of equal pages the newer.

    Args:
      priority: [B, K, S] float32.
      position: [B, K, S] int32; pages are consecutive slots, of which only the newest is not full.
      limit: [B, 1, 1] or [B, K, 1] int32 pages.
      page: slots of a page.
    """
    # [B, K, U]
    newest = by_page(position, page, EMPTY)
    worth = by_page(jnp.where(position >= 0, priority, -jnp.inf), page, -jnp.inf)
    worth = jnp.where(newest == jnp.max(newest, axis=2, keepdims=True), jnp.inf, worth)
    # [B, K, 1]: slots of a newest page that is not full do not count as a page's
    live = jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    over = jnp.maximum(live - jnp.minimum(limit, FAR // page) * page, 0)
    pages = jnp.sum(newest >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    stay = largest(worth, newest, pages - (over + page - 1) // page)
    # [B, K, S]
    return (position >= 0) & ~jnp.repeat(stay, page, axis=2)[:, :, : position.shape[2]]


def by_page(x: Array, page: int, fill: float) -> Array:
    """Returns the largest number of each page: [B, K, S] -> [B, K, U]; `fill` stands in slots that do not exist."""
    batch, kv_heads, size = x.shape
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -size % page)), constant_values=fill)
    return jnp.max(padded.reshape(batch, kv_heads, -1, page), axis=3)
