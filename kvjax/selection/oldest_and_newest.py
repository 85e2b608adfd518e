"""The oldest and the newest slots of several devices, and what is known of the other candidates of a selection.

Which slots are always read follows from the positions of all devices, and a candidate is what is not among them. Each
device names its own oldest and newest slots, with their scores, and sums up the others: one collective tells both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.numerics.mask_indices import compact
from kvjax.numerics.top_k import largest
from kvjax.parallel import slot_reductions

Array = jax.Array
FAR = jnp.iinfo(jnp.int32).max


class Ends(NamedTuple):
    """The first and last slots of all devices.

    Attributes:
      marks: [B, K, S] bool, this device's slots that are among the oldest or the newest ones.
      among: [B, K, 1] int32, the number of candidates on all devices: slots that are visible and not marked.
      top: [B, K, G, 1] float32, the largest score of the candidates, 0 without one; None if no scores were given.
      total: [B, K, G, 1] float32, the sum of the exponentials of their scores less `top`; or None.
    """

    marks: Array
    among: Array
    top: Array | None = None
    total: Array | None = None


class _Part(NamedTuple):
    """Some slots of a device, one by one, or all others in one entry.

    Attributes:
      position: [B, K, W] int32, -1 = none.
      seen: [B, K, W] int32, the number of visible slots of an entry.
      top: [B, K, G, W] float32, the largest score of these; None if no scores were given.
      total: [B, K, G, W] float32, the sum of the exponentials of their scores less `top`; or None.
    """

    position: Array
    seen: Array
    top: Array | None
    total: Array | None


def ends_of_all(position: Array, visible: Array, oldest: int, newest: int, score: Array | None = None) -> Ends:
    """Finds the `oldest` oldest and the `newest` newest slots of all devices, in one collective.

    Args:
      position: [B, K, S] int32, distinct per head; -1 for a slot that does not count.
      visible: [B, K, S] bool, which slots may be candidates.
      oldest: a number.
      newest: a number.
      score: [B, K, G, S] float32, or None.
    """
    score = None if score is None else jax.lax.stop_gradient(score)
    left = visible & (position >= 0)
    # float32 is exact for positions below 2²⁴.
    age = -position.astype(jnp.float32)
    old, left = _named(position, left, age, oldest, score)
    new, left = _named(position, left, -age, newest, score)
    parts = slot_reductions.gather_tree((old, new, _others(left, score)))
    # [B, K, ..., C * W], of all devices
    old, new, others = (jax.tree.map(_side_by_side, each) for each in parts)
    # [B, K, 1]: the newest of the oldest slots, and the oldest of the newest
    last = _nth(old.position, oldest) if oldest else jnp.int32(-1)
    first = -_nth(jnp.where(new.position >= 0, -new.position, FAR), newest, least=-FAR) if newest else jnp.int32(FAR)
    # What is named and not marked is a candidate.
    within = [(each.position > last) & (each.position < first) for each in (old, new)]
    counts = jnp.concatenate([*within, jnp.ones(others.seen.shape, bool)], axis=2)
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), old, new, others)
    among = jnp.sum(jnp.where(counts, whole.seen, 0), axis=2, keepdims=True)
    marks = (position >= 0) & ((position <= last) | (position >= first))
    if score is None:
        return Ends(marks, among)
    # [B, K, G, C * W]
    counts = (counts & (whole.seen > 0))[:, :, None]
    top = jnp.max(jnp.where(counts, whole.top, -jnp.inf), axis=3, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.where(counts, whole.total * jnp.exp(whole.top - top), 0.0), axis=3, keepdims=True)
    return Ends(marks, among, top, total)


def _named(position: Array, left: Array, worth: Array, count: int, score: Array | None) -> tuple[_Part, Array]:
    """Names the `count` slots of this device of largest worth [B, K, S].

    Args:
      position: see `ends_of_all`.
      left: [B, K, S] bool, visible slots that were not named before, so that none is seen twice.
      worth: [B, K, S] float32.
      count: a number.
      score: see `ends_of_all`.

    Returns:
      The slots that are named, and `left` without them.
    """
    width = min(count, position.shape[2])
    marks = jnp.zeros(position.shape, bool)
    if width:
        with slot_reductions.alone():
            marks = largest(worth, position, width, in_kernels=False)
    slots, valid = compact(marks, width)
    seen = valid & jnp.take_along_axis(left, slots, axis=2)
    at = jnp.where(valid, jnp.take_along_axis(position, slots, axis=2), -1)
    top = None if score is None else jnp.take_along_axis(score, slots[:, :, None], axis=3)
    total = None if top is None else jnp.ones(top.shape, jnp.float32)
    return _Part(at, seen.astype(jnp.int32), top, total), left & ~marks


def _others(left: Array, score: Array | None) -> _Part:
    """Sums up the visible slots [B, K, S] that were not named."""
    seen = jnp.sum(left, axis=2, keepdims=True, dtype=jnp.int32)
    at = jnp.full(seen.shape, -1, jnp.int32)
    if score is None:
        return _Part(at, seen, None, None)
    top = jnp.max(jnp.where(left[:, :, None], score, -jnp.inf), axis=3, keepdims=True)
    weight = jnp.exp(jnp.where(left[:, :, None], score - jnp.where(jnp.isfinite(top), top, 0.0), -jnp.inf))
    return _Part(at, seen, top, jnp.sum(weight, axis=3, keepdims=True))


def _side_by_side(x: Array) -> Array:
    """[C, B, K, ..., W] -> [B, K, ..., C * W]"""
    return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], x.shape[0] * x.shape[-1])


def _nth(x: Array, count: int, least: int = 0) -> Array:
    """Returns the `count`-th smallest number of [B, K, W] that is at least `least`, [B, K, 1]; FAR if there is none."""
    ordered = jnp.sort(jnp.where(x >= least, x, FAR), axis=2)
    return ordered[..., min(count, x.shape[2]) - 1][..., None]
