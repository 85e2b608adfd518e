"""Functions that selections are made of: logits -> rank -> the n largest -> a mask -> slots in arrays of fixed width.

Shapes never depend on the number of slots that are chosen.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from kvjax.numerics.mask_indices import compact
from kvjax.numerics.soft_cap import soft_capped
from kvjax.numerics.top_k import largest
from kvjax.parallel import slot_reductions
from kvjax.products import product
from kvjax.selection.base import SelectView
from kvjax.selection.oldest_and_newest import Ends, ends_of_all

Array = jax.Array
Normalise = Literal["gap", "softmax", "probability", "none"]
Reduce = Literal["max", "mean"]


def grouped_logits(query: Array, key: Array, scale: float, soft_cap: float | None = None) -> Array:
    """Computes the logits of each query head over the keys, or summaries, of its KV head, as attention does.

    Args:
      query: [B, K, G, D].
      key: [B, K, U, D].
      scale: factor.
      soft_cap: see `SelectView`.

    Returns:
      [B, K, G, U] float32.
    """
    logits = product(query.astype(key.dtype), key, transposed=True, dtype=jnp.float32) * scale
    return soft_capped(logits, soft_cap)


def rank(
    score: Array,
    candidate: Array,
    *,
    normalise: Normalise,
    reduce: Reduce,
    visible: Array | None = None,
    known: Ends | None = None,
) -> Array:
    """Ranks candidates for the query heads that share a KV head.

    Args:
      score: [B, K, G, U] float32 logits.
      candidate: [B, K, U] bool.
      normalise: per query head, ``gap`` is s - max s over the candidates, ``softmax`` a softmax over the candidates,
        ``probability`` a softmax over all visible slots, ``none`` the score itself.
      reduce: ``max`` or ``mean`` over the query heads.
      visible: [B, K, U] bool, for ``probability``: the slots that a query attends to if it reads everything.
      known: of the candidates of all devices, their largest score and, for ``softmax``, the sum of exponentials.

    Returns:
      [B, K, U] float32; -inf except for candidates.
    """
    among = candidate[:, :, None]
    match normalise:
        case "gap":
            if known is not None and known.top is not None:
                top = known.top
            else:
                top = slot_reductions.max_over_slots(jnp.max(jnp.where(among, score, -jnp.inf), axis=-1, keepdims=True))
            # The comparison makes the maximum 0 even if a compiler fuses scaling and subtraction into one rounding.
            score = jnp.where(score >= top, 0.0, score - top)
        case "softmax":
            if known is not None and known.top is not None and known.total is not None:
                score = jnp.exp(jnp.where(among, score - known.top, -jnp.inf)) / jnp.maximum(known.total, 1.0)
            else:
                score = softmax(score, among)
        case "probability":
            if visible is None:
                raise ValueError("rank(normalise='probability') needs the visible slots")
            score = softmax(score, visible[:, :, None])
    # [B, K, U]
    reduced = jnp.max(score, axis=2) if reduce == "max" else jnp.mean(score, axis=2)
    return jnp.where(candidate, reduced, -jnp.inf)


def softmax(score: Array, mask: Array) -> Array:
    """Computes a softmax over the marked entries, [..., U] float32; 0 elsewhere, and everywhere if none is marked.

    Args:
      score: [..., U] float32.
      mask: bool, of a shape that broadcasts to that of `score`.
    """
    top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, score, -jnp.inf), axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(jnp.where(mask, score - top, -jnp.inf))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return slot_reductions.softmax_of_all(weight / jnp.where(total > 0, total, 1.0), top, total)


def best(worth: Array, candidate: Array, position: Array, count: Array | int) -> Array:
    """Marks the `count` candidates of largest worth, the newer of equal ones; all if there are no more than `count`.

    Args:
      worth: [B, K, U] float32, not NaN.
      candidate: [B, K, U] bool.
      position: [B, K, U] int32, distinct among the candidates of a head.
      count: a number, or int32 that broadcasts against [B, K, 1].

    Returns:
      [B, K, U] bool.
    """
    return largest(worth, jnp.where(candidate, position, -1), count, in_kernels=False)


def mark_ends(position: Array, new: Array, oldest: int, newest: int) -> Array:
    """Marks the `oldest` oldest and the `newest` newest live slots of each head, [B, K, S] bool.

    Args:
      position: [B, K, S] int32, -1 = empty.
      new: [B, K, S] bool, slots that do not count and are not marked.
      oldest: a number.
      newest: a number.
    """
    if slot_reductions.current().slots:
        return ends_of_all(jnp.where(new, -1, position), new, oldest, newest).marks
    marks = jnp.zeros(position.shape, bool)
    old = (position >= 0) & ~new
    # float32 is exact for positions below 2²⁴.
    age = -position.astype(jnp.float32)
    for number, worth in ((oldest, age), (newest, -age)):
        if number:
            marks |= best(worth, old, position, number)
    return marks


def view_ends(view: SelectView, oldest: int, newest: int) -> Array:
    """Marks the ends of the slots of a view; see `mark_ends`."""
    return mark_ends(view.position, view.new, oldest, newest) if view.ends is None else view.ends.marks


__all__ = ["Normalise", "Reduce", "best", "compact", "grouped_logits", "mark_ends", "rank", "softmax", "view_ends"]
