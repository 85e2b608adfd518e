"""The most probable entries of a distribution: the k largest, and the fewest that have a share of the probability.

A search over the bits of the entries, as in `kvjax.numerics.top_k`. To sort a vocabulary takes several times as long as
a small model's step on a CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.numerics.top_k import largest, ordered_bits

Array = jax.Array
LANES = 64  # sums that a CPU adds to at once
BITS = 32  # of a key
LARGEST = np.uint32((1 << BITS) - 1)


def most_probable(logits: Array, top_k: Array | int | None, top_p: Array | float | None) -> Array:
    """Marks the `top_k` largest entries, and of these the fewest whose probability is at least `top_p`.

    Of equal entries, the first ones are marked.

    Args:
      logits: [B, V] float32, without NaN; -inf for an entry that is excluded.
      top_k: the number of entries, or [B, 1] int32; None for all.
      top_p: above 0, or [B, 1] float32; None, or 1 and more, for all. The most probable entry is always marked.

    Returns:
      [B, V] bool.
    """
    size = logits.shape[-1]
    # [V]: larger for an entry that comes earlier
    turn = jnp.arange(size - 1, -1, -1, dtype=jnp.int32)
    marked = jnp.ones(logits.shape, bool)
    if top_k is not None:
        marked = largest(logits, jnp.broadcast_to(turn, logits.shape), top_k, in_kernels=False)
    if top_p is None:
        return marked
    # The sum of all may be rounded to less than 1, or to more.
    top_p = jnp.where(jnp.asarray(top_p, jnp.float32) >= 1, jnp.inf, top_p)
    # [B, V] each; the probability is that among the marked entries
    probability = jax.nn.softmax(jnp.where(marked, logits, -jnp.inf), axis=-1)
    keys = jnp.where(marked, ordered_bits(logits), 0)

    def above(threshold: Array) -> Array:
        """Returns the probability of larger keys, [B, 1]."""
        return _sum(jnp.where(keys > threshold, probability, 0.0))

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = above(middle) < top_p
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    # [B, 1] each: the least threshold above which there is less than `top_p`
    low = jnp.zeros((logits.shape[0], 1), jnp.uint32)
    _, threshold = jax.lax.fori_loop(0, BITS, halve, (low, jnp.full_like(low, LARGEST)))
    within = marked & (keys >= threshold)
    # Equal entries at the end are marked as long as those before them have less.
    last = jnp.min(jnp.where(within, keys, LARGEST), axis=-1, keepdims=True)
    tied = within & (keys == last)

    def first_tied() -> Array:
        number = jnp.cumsum(tied, axis=-1, dtype=jnp.int32) - 1
        return tied & (above(last) + number.astype(jnp.float32) * probability < top_p)

    some = jnp.any(jnp.sum(tied, axis=-1, dtype=jnp.int32) > 1)
    return (within & ~tied) | jax.lax.cond(some, first_tied, lambda: tied)


def _sum(x: Array) -> Array:
    """Adds up rows, [B, V] -> [B, 1], in an order that a CPU can vectorise."""
    rows, size = x.shape
    # [B, V / LANES, LANES]
    lanes = jnp.pad(x, ((0, 0), (0, -size % LANES))).reshape(rows, -1, LANES)
    return jnp.sum(jnp.sum(lanes, axis=1), axis=-1, keepdims=True)
