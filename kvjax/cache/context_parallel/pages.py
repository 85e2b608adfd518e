"""Eviction of whole pages in a step of a layer whose slots are divided over devices; no page is on two of them.

The step's own tokens first go where their pages are: into the page that is not full, whichever device has it, and then
into empty pages. One collective then joins the page of lowest worth of each device.
"""

import functools

import jax
import jax.numpy as jnp

from kvjax.cache.context_parallel.placement import Moves
from kvjax.cache.slots import forget, free_slots, write
from kvjax.cache.state import EMPTY, FAR, LayerKV
from kvjax.cache.step import evict
from kvjax.cache.step.evict import by_page
from kvjax.numerics.top_k import largest, lowest
from kvjax.parallel import slot_reductions
from kvjax.policies.base import View

Array = jax.Array


def empty_slots(position: Array, page: int) -> Array:
    """Counts the empty slots [B, K, S] in pages that are not full, and in empty pages: [B, K, 2] int32."""
    empty = position < 0
    begun = jnp.repeat(by_page(position, page, EMPTY) >= 0, page, axis=2)[:, :, : position.shape[2]]
    return jnp.stack([jnp.sum(empty & each, axis=2, dtype=jnp.int32) for each in (begun, ~begun)], axis=2)


def places(position: Array, stays: Array, free: Array, page: int, axes: tuple[str, ...]) -> Array:
    """Returns the empty slots of this device that the step's own tokens are written to; see `exchange.places`.

    Args:
      position: [B, K, S] int32 of this device.
      stays: [B, K, n] bool, the tokens to write.
      free: [C, B, K, 2] int32, from `empty_slots`, of each device.
      page: slots of a page.
      axes: that slots are divided over.
    """
    size, n = position.shape[2], stays.shape[2]
    me = jax.lax.axis_index(axes)
    # [B, K, 2]: of the devices before this one, and of this one
    before = jnp.sum(jnp.where(jnp.arange(len(free))[:, None, None, None] < me, free, 0), axis=0)
    mine = jax.lax.dynamic_index_in_dim(free, me, keepdims=False)
    # [B, K, n]: the number of each token among those that are written, in pages that are not full and in empty ones
    number = jnp.cumsum(stays, axis=2, dtype=jnp.int32) - 1
    first = number - before[..., :1]
    second = number - jnp.sum(free[..., :1], axis=0) - before[..., 1:]
    in_first, in_second = ((x >= 0) & (x < mine[..., i : i + 1]) for i, x in enumerate((first, second)))
    # A page that is not full comes first in `free_slots`.
    order = jnp.where(in_first, first, second + mine[..., :1])
    slots = jnp.take_along_axis(free_slots(position, n, page), jnp.clip(order, 0, n - 1), axis=2)
    return jnp.where(stays & (in_first | in_second), slots, size)


def finish(moves: Moves, stats: dict[str, Array], view: View, axes: slot_reductions.Across) -> LayerKV:
    """Writes the step's own tokens, and evicts pages until every head is within its limit.

    Args:
      moves: of the step; `Moves.free` is of `empty_slots`.
      stats: [B, K, S + n, ...] of this device's slots and of the step's own tokens.
      view: the same slots.
      axes: that slots and heads are divided over.
    """
    layer, own, group = moves.layer, moves.own, moves.group
    size, n, page = layer.position.shape[2], own.key.shape[2], group.policy.page
    target = places(layer.position, own.position >= 0, moves.free, page, axes.slots)
    # Each of the own tokens counts on the device that it is written to.
    counted = jnp.where(target < size, own.position, EMPTY)
    view = view._replace(position=jnp.concatenate([layer.position, counted], axis=2))
    with slot_reductions.devices(axes):
        priority, limit = evict.ranking(group.policy, stats, view)
        # [B, K, S]
        worth, position = (write(x[:, :, :size], target, x[:, :, size:]) for x in (priority, view.position))
        most = -(-n // page) if group.evicts_one else None
        if n == 1:
            chosen, more = _page(worth, position, limit, page, view)
            if not group.evicts_one:
                # As in the first step after a prompt.
                several = functools.partial(_pages, worth, position, limit, page, view, most)
                chosen = jax.lax.cond(slot_reductions.anywhere(jnp.any(more)), several, lambda: chosen)
        else:
            chosen = _pages(worth, position, limit, page, view, most)
    victim = jnp.repeat(chosen, page, axis=2)[:, :, :size]
    after = moves.appended(target)
    position = jnp.where(victim, EMPTY, after.position)
    return after.replace(position=position, stats=forget(after.stats, position))


def _worth(priority: Array, position: Array, page: int) -> tuple[Array, Array]:
    """Returns the worth of each page of this device, and its newest position, [B, K, U]."""
    live = jnp.where(position >= 0, priority, -jnp.inf)
    return by_page(live, page, -jnp.inf), by_page(position, page, EMPTY)


def _page(priority: Array, position: Array, limit: Array, page: int, view: View) -> tuple[Array, Array]:
    """Marks the page of lowest worth of all devices, of equal ones the older, in heads over the limit.

    For the arguments see `kvjax.cache.step.evict.page_victims`; the newest page has the step's own token.

    Returns:
      [B, K, U] bool, and whether a head must evict more pages, [B, K, 1] bool.
    """
    worth, newest = _worth(priority, position, page)
    open_to = (newest >= 0) & (newest != view.newest[:, None, None])
    least, oldest = evict.first_to_go(worth, jnp.where(open_to, newest, EMPTY))
    live = jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    # [C, B, K, 3] int32, of which the first are the bits of floats
    bits = jax.lax.bitcast_convert_type(least, jnp.int32)
    every = slot_reductions.gathered(jnp.concatenate([bits, oldest, live], axis=2))
    named = jnp.where(every[..., 1:2] < FAR, every[..., 1:2], EMPTY)
    goes = evict.first_to_go(jax.lax.bitcast_convert_type(every[..., :1], jnp.float32), named, axis=0)[1]
    over = jnp.sum(every[..., 2:], axis=0) - jnp.minimum(limit, FAR // page) * page
    return (over > 0) & open_to & (newest == goes[0]), over > page


def _pages(priority: Array, position: Array, limit: Array, page: int, view: View, most: int | None) -> Array:
    """Marks any number of pages, at most `most` of all devices if it is not None; see `_page`."""
    worth, newest = _worth(priority, position, page)
    worth = jnp.where(newest == view.newest[:, None, None], jnp.inf, worth)
    counts = [jnp.sum(each >= 0, axis=2, keepdims=True, dtype=jnp.int32) for each in (position, newest)]
    live, pages = jnp.split(slot_reductions.sum_over_slots(jnp.concatenate(counts, axis=2)), 2, axis=2)
    over = jnp.maximum(live - jnp.minimum(limit, FAR // page) * page, 0)
    keep = pages - (over + page - 1) // page
    if most is not None:
        return lowest(worth, newest, keep, most)
    return (newest >= 0) & ~largest(worth, newest, keep)
