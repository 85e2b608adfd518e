"""Order statistics over slots without a sort: which slots hold the `count` largest values.

A radix search over the bits of the values: one comparison and one sum over the slots per bit, at most 32 of them. On a
CPU this takes one fifteenth of the time of a sort.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.numerics.mask_indices import compact
from kvjax.parallel import slot_reductions

Array = jax.Array
LANES = 64  # counters that a CPU adds to at once, see `_count_in_blocks`
FEW = 8  # numbers that are found one after the other; more are sorted
DEPTH = 32  # numbers that each of them counts, at most; below 128
BITS, DIGIT = 32, 4  # of a key, and those that a round finds of keys on several devices
FIRST = 256  # slots that each names first, if it may be asked for more than `CANDIDATES`
CANDIDATES = 1024  # slots that each of several devices names, at most; of more, a threshold is searched
SIGN = np.uint32(1 << 31)  # the sign bit of a float32


def largest(value: Array, position: Array, count: Array | int, *, in_kernels: bool = True) -> Array:
    """Marks the live slots with the `count` largest values; among equal values the newer slots.

    Args:
      value: [..., S] float32. Infinities are allowed, NaN is not.
      position: [..., S] int32, distinct per row. Negative for an empty slot, which is never marked.
      count: int32 that broadcasts against [..., 1]. If fewer slots are live, all of them are marked.
      in_kernels: whether a kernel may run this, so that a way of counting that is three times as fast on CPUs, but of
        which kernels lack the operations, is not taken.

    Returns:
      [..., S] bool.
    """
    # [..., S]
    live = position >= 0
    if slot_reductions.current().traced:
        return live & (value == value)
    if (assumed := slot_reductions.current().assumed) is not None:
        return assumed.answer(value, position, count)
    on_several = bool(slot_reductions.current().slots)
    if on_several and isinstance(count, int) and count <= CANDIDATES:
        return _largest_by_candidates(value, position, count).marks
    # [..., 1]
    count = jnp.broadcast_to(jnp.asarray(count, jnp.float32), (*value.shape[:-1], 1))
    # [..., S]
    keys = jnp.where(live, ordered_bits(value), 0)
    by_rows = in_kernels or value.shape[-1] < LANES * DEPTH
    # [..., 1]
    threshold, reached = _threshold(keys, count, by_rows)

    # [..., S]
    tied = live & (keys == threshold)
    # [..., S]: larger for a newer slot
    recency = jnp.where(tied, position + 1, 0).astype(jnp.uint32)

    def newest_tied() -> Array:
        # [..., 1]
        remaining = count - slot_reductions.sum_over_slots(_count(keys > threshold))
        return _threshold(recency, remaining, by_rows)[0]

    # [..., 1]: usually exactly `count` keys are at or above the threshold, and then every tied slot is marked.
    ties = slot_reductions.anywhere(jnp.any(reached > count))
    oldest_marked = jax.lax.cond(ties, newest_tied, lambda: jnp.zeros_like(threshold))
    # [..., S]
    return (keys > threshold) | (tied & (recency >= oldest_marked))


def lowest(value: Array, position: Array, keep: Array, maximum: int) -> Array:
    """Marks live slots of several devices until `keep` are left, the smallest values first; of equal ones the older.

    Each device names `maximum` of its own, in one collective.

    Args:
      value: [B, K, S] float32; see `largest`.
      position: [B, K, S] int32; see `largest`.
      keep: int32 that broadcasts against [B, K, 1].
      maximum: the most slots of all devices that are marked.

    Returns:
      [B, K, S] bool.
    """
    # Larger for an older slot.
    age = jnp.where(position >= 0, np.iinfo(np.int32).max - 1 - position, -1)
    live = jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    return _largest_by_candidates(-value, age, maximum, live, lambda total: jnp.maximum(total - keep, 0)).marks


def largest_counted(
    value: Array, position: Array, maximum: int, numbers: Array, count: Callable[[Array], Array]
) -> Array:
    """Marks the live slots with the largest values, whose number follows from sums over the slots of all devices.

    In one collective, if at most `CANDIDATES` are marked. Of more, each device names `FIRST` of its own, and a
    threshold is searched only where all that one of them names are marked.

    Args:
      value: [B, K, S] float32; see `largest`.
      position: [B, K, S] int32; see `largest`.
      maximum: the largest number of slots that are marked.
      numbers: [B, K, m] int32, the sums over this device's slots.
      count: the sums over all slots, [B, K, m] -> the number of slots to mark, [B, K or 1, 1] int32.

    Returns:
      [B, K, S] bool.
    """
    if not slot_reductions.current().slots:
        return largest(value, position, count(numbers), in_kernels=False)
    if maximum <= CANDIDATES:
        return _largest_by_candidates(value, position, maximum, numbers, count).marks
    found = _largest_by_candidates(value, position, FIRST, numbers, count)
    unknown = slot_reductions.anywhere(jnp.any(found.more))
    return jax.lax.cond(unknown, lambda: largest(value, position, found.number), lambda: found.marks)


class Found(NamedTuple):
    """The largest values of those that devices name.

    Attributes:
      marks: [B, K, S] bool, of this device's slots.
      more: [B, K, 1] bool, whether a device may have more of them than it names.
      number: the number of slots to mark.
    """

    marks: Array
    more: Array
    number: Array | int


def _largest_by_candidates(
    value: Array,
    position: Array,
    maximum: int,
    numbers: Array | None = None,
    count: Callable[[Array], Array] | None = None,
) -> Found:
    """Marks the largest values of several devices: each names those of its own that may be among them.

    Args:
      value: [B, K, S] float32; see `largest`.
      position: [B, K, S] int32; see `largest`.
      maximum: the number of slots that a device names.
      numbers: [B, K, m] int32 to be added up over all devices, or None.
      count: the sums -> the number of slots to mark; None = `maximum` are marked.
    """
    live = position >= 0
    width = min(maximum, value.shape[2])
    with slot_reductions.alone():
        mine = largest(value, position, width, in_kernels=False)
    # [B, K, W]
    slots, valid = compact(mine, width)
    held = jnp.where(valid, jnp.take_along_axis(position, slots, axis=2), -1)
    bits = jax.lax.bitcast_convert_type(jnp.take_along_axis(value, slots, axis=2), jnp.int32)
    more = jnp.zeros((*held.shape[:2], 0), jnp.int32) if numbers is None else numbers
    # [C, B, K, 2 * W + m]
    every = slot_reductions.gather(jnp.concatenate([bits, held, more], axis=2))
    number: Array | int = maximum if count is None else count(jnp.sum(every[..., 2 * width :], axis=0))
    # [B, K, C * W]
    bits, held = (
        jnp.moveaxis(part, 0, 2).reshape(*value.shape[:2], -1)
        for part in (every[..., :width], every[..., width : 2 * width])
    )
    values = jax.lax.bitcast_convert_type(bits, jnp.float32)
    with slot_reductions.alone():
        chosen = largest(values, held, number, in_kernels=False)
    # [B, K, 1]: the last that is marked
    minimum = jnp.min(jnp.where(chosen, values, jnp.inf), axis=2, keepdims=True)
    last = chosen & (values == minimum)
    oldest = jnp.min(jnp.where(last, held, np.iinfo(np.int32).max), axis=2, keepdims=True)
    beyond = (value > minimum) | ((value == minimum) & (position >= oldest))
    # [B, K, C, W]: devices whose named slots are all marked
    all_chosen = jnp.all(chosen.reshape(*value.shape[:2], -1, width), axis=3)
    more = jnp.any(all_chosen, axis=2, keepdims=True) & (width < value.shape[2])
    return Found(live & beyond & jnp.any(chosen, axis=2, keepdims=True), more, number)


def indices_of_largest(x: Array, count: int) -> Array:
    """Returns where the largest entries of each vector are, in falling order; of equal entries the first come first.

    Unlike `jax.lax.top_k`, which gathers sharded vectors on some backends, it runs where each vector is.

    Args:
      x: [..., D] float32, without NaN and without zeros of both signs.
      count: at most D.

    Returns:
      [..., count] int32.
    """
    if count > FEW:
        return jnp.argsort(-x, axis=-1, stable=True)[..., :count].astype(jnp.int32)
    found = jnp.zeros((*x.shape[:-1], 0), jnp.int32)
    place = jnp.arange(x.shape[-1], dtype=jnp.int32)
    for _ in range(count):
        # [..., 1]
        first = jnp.argmax(x, axis=-1, keepdims=True).astype(jnp.int32)
        found = jnp.concatenate([found, first], axis=-1)
        x = jnp.where(place == first, -jnp.inf, x)
    return found


def ordered_bits(value: Array) -> Array:
    """Maps floats [..., S] to uint32 [..., S] in the same order."""
    # [..., S]: -0.0 and 0.0 compare equal but have different bits.
    value = jnp.where(value == 0, jnp.float32(0), value.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _threshold(keys: Array, count: Array, by_rows: bool) -> tuple[Array, Array]:
    """Finds a threshold that `count` keys reach, or the fewest above `count` that ties allow.

    The threshold is a prefix of the `count`-th largest key, long enough to separate it from the next smaller key. Where
    keys are far apart, half of the rounds or fewer suffice.

    Args:
      keys: [..., S] uint32, 0 for an empty slot.
      count: [..., 1] float32.
      by_rows: whether to count with `_count`; otherwise with `_count_on_platform`.

    Returns:
      The threshold, [..., 1] uint32, which is 0 if fewer than `count` keys are above 0, and the number of keys at or
      above it, [..., 1] float32.
    """
    if slot_reductions.current().slots:
        return _threshold_by_digits(keys, count)
    count_marks = _count
    if not by_rows:
        count_marks = _count_on_platform
        blocks, depth = _blocks(keys.shape[-1])
        # An empty slot, 0, never reaches a threshold.
        missing = blocks * depth * LANES - keys.shape[-1]
        keys = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, missing)])
    # On a mesh the rows are on several devices, which would have to synchronise in every round to stop early.
    unsharded = jax.sharding.get_abstract_mesh().empty

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        bit, _, reached = state
        return (bit > 0) & jnp.any(reached > count) if unsharded else bit > 0

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, prefix, reached = state
        # [..., 1]
        candidate = prefix | bit
        reaches = count_marks(keys >= candidate)
        enough = reaches >= count
        return bit >> 1, jnp.where(enough, candidate, prefix), jnp.where(enough, reaches, reached)

    start = (jnp.uint32(SIGN), jnp.zeros((*keys.shape[:-1], 1), jnp.uint32), count_marks(keys > 0))
    return jax.lax.while_loop(unfinished, narrow, start)[1:]


def _threshold_by_digits(keys: Array, count: Array) -> tuple[Array, Array]:
    """Finds what `_threshold` finds, of keys on several devices, in an eighth of the rounds: one per `DIGIT` bits.

    Devices add up their counts in each round, which takes longer than to count.
    """
    # [digits]
    digit = jnp.arange(1, 1 << DIGIT, dtype=jnp.uint32)

    def narrow(number: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        prefix, reached = state
        # [..., digits]: fewer keys reach a larger candidate
        candidate = prefix | digit << jnp.uint32(BITS - DIGIT) - jnp.uint32(DIGIT) * jnp.uint32(number)
        marks = jnp.sum(keys[..., None, :] >= candidate[..., None], axis=-1, dtype=jnp.float32)
        reaches = slot_reductions.sum_over_slots(marks)
        # [..., 1]
        enough = jnp.sum(reaches >= count, axis=-1, keepdims=True, dtype=jnp.int32)
        at = jnp.maximum(enough - 1, 0)
        prefix = jnp.where(enough > 0, jnp.take_along_axis(candidate, at, axis=-1), prefix)
        return prefix, jnp.where(enough > 0, jnp.take_along_axis(reaches, at, axis=-1), reached)

    start = (jnp.zeros((*keys.shape[:-1], 1), jnp.uint32), slot_reductions.sum_over_slots(_count(keys > 0)))
    return jax.lax.fori_loop(0, BITS // DIGIT, narrow, start)


def _count(mask: Array) -> Array:
    """Counts the marked slots: [..., S] bool -> [..., 1] float32.

    float32 is exact below 2²⁴ and twice as fast to sum as int32 on CPUs.
    """
    # [..., 1]
    return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)


def _count_on_platform(mask: Array) -> Array:
    """Counts as `_count` does, on CPUs with `_count_in_blocks`."""
    return jax.lax.platform_dependent(mask, cpu=_count_in_blocks, default=_count)


def _blocks(size: int) -> tuple[int, int]:
    """Returns the number of blocks that `size` marks are counted in, and the depth of a block."""
    blocks = -(-size // (LANES * DEPTH))
    return blocks, -(-size // (LANES * blocks))


def _count_in_blocks(mask: Array) -> Array:
    """Counts as `_count` does, of rows in whole blocks.

    XLA compares and counts in one loop if the counts are of 8 bits and side by side.
    """
    blocks, depth = _blocks(mask.shape[-1])
    # [..., blocks, depth, LANES]
    marks = mask.reshape(*mask.shape[:-1], blocks, depth, LANES)
    # [..., blocks, LANES]
    counts = jnp.sum(marks, axis=-2, dtype=jnp.int8)
    # [..., 1]
    return jnp.sum(counts.astype(jnp.float32), axis=(-2, -1))[..., None]
