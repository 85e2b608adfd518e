"""Gathers the state of devices that share the slots of a head, and places a step's tokens in slots."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.attention import Attended
from kvjax.cache.context_parallel import packing
from kvjax.cache.slots import free_slots

Array = jax.Array


class GatheredState(NamedTuple):
    """The state of all devices that is gathered before a step's attention is complete.

    Attributes:
      parts: attention over the slots of each device.
      seen: [B, K, n] float32, the number of slots that each query sees on all devices.
      live: [B, K, 1] int32, the number of live slots on all devices.
      free: [C, B, K, m] int32, the number of empty slots of each store of each device.
      more: [B, K, ...] float32, the sum over all devices of what was given, or None.
      local_victims: [C, B, K, m] int32, `LocalVictim.bits` of each device, where it is known before attention; see
        `kvjax.cache.context_parallel.victims`.
    """

    parts: list[Attended]
    seen: Array
    live: Array
    free: Array
    more: Array | None
    local_victims: Array


def gather_state(
    here: Sequence[attention.Problem],
    maps: Sequence[attention.Mapped],
    live: Array,
    free: Array,
    axes: tuple[str, ...],
    more: Array | None = None,
    bits: Array | None = None,
) -> GatheredState:
    """Gathers what each device knows of its slots, in one collective.

    Args:
      here: attention to each of this device's stores.
      maps: of each, whose vectors may have other dimensions.
      live: [B, K, 1] int32 live slots of this device, read or not.
      free: [B, K, m] int32 empty slots of each store.
      axes: that slots are divided over.
      more: [B, K, ...] float32 to be added up.
      bits: [B, K, m] int32, see `GatheredState.local_victims`; or None.
    """
    part = attention.combine(*(of.mapped(attention.attend(each, "xla")) for each, of in zip(here, maps, strict=True)))
    assert part.lse is not None
    batch, kv_heads = part.output.shape[:2]
    flat = (batch, kv_heads, -1)
    # Of no more than 2²⁴ slots, float32 counts exactly.
    packed = [
        part.output.reshape(flat),
        part.lse.reshape(flat),
        sum(map(attention.count_seen, here), start=jnp.float32(0)),
        live.astype(jnp.float32),
        free.astype(jnp.float32),
        jnp.zeros((batch, kv_heads, 0)) if more is None else more.reshape(flat),
        packing.as_floats(jnp.zeros((batch, kv_heads, 0), jnp.int32) if bits is None else bits),
    ]
    # [C, B, K, G * n * (D + 1) + n + 1 + m + ...] float32, which has gradients
    every = jax.lax.all_gather(jnp.concatenate(packed, axis=2), axes)
    ends = np.cumsum([each.shape[2] for each in packed])[:-1].tolist()
    output, lse, seen, held, empty, added, names = jnp.split(every, ends, axis=3)
    parts = [
        Attended(one.reshape(part.output.shape), two.reshape(part.lse.shape))
        for one, two in zip(output, lse, strict=True)
    ]
    return GatheredState(
        parts, jnp.sum(seen, axis=0), jnp.sum(held, axis=0).astype(jnp.int32), empty.astype(jnp.int32),
        None if more is None else jnp.sum(added, axis=0).reshape(more.shape), packing.from_floats(names),
    )  # fmt: skip


def live_slots(position: Array) -> Array:
    """Counts the live slots [B, K, S] of each head: [B, K, 1] int32."""
    return jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32)


def empty_slots(position: Array) -> Array:
    """Counts the empty slots [B, K, S] of each head: [B, K, 1] int32."""
    return jnp.sum(position < 0, axis=2, keepdims=True, dtype=jnp.int32)


def place_of(
    position: Array, own: Array, victim: Array, free: Array, axes: tuple[str, ...], *, in_order: bool = False
) -> Array:
    """Returns the slot of this device that the step's own token is written to, [B, K, 1] int32.

    It is the victim's slot, or an empty one where no token is evicted; otherwise S, where writes are dropped: on other
    devices, and where the token itself is evicted.

    Args:
      position: [B, K, S] int32 of this device.
      own: [B, K, 1] int32 of the token, -1 = a row without one.
      victim: [B, K, 1] int32, from `kvjax.cache.context_parallel.victims`.
      free: [C, B, K, 1] int32 empty slots of each device.
      axes: that slots are divided over.
      in_order: see `places`.
    """
    size = position.shape[2]
    slot = jnp.arange(size, dtype=jnp.int32)
    evicted = jnp.min(jnp.where(position == victim, slot, size), axis=2, keepdims=True)
    return jnp.where(victim >= 0, evicted, places(position, own >= 0, free, axes, in_order=in_order))


def places(position: Array, stays: Array, free: Array, axes: tuple[str, ...], *, in_order: bool = False) -> Array:
    """Returns the empty slots of this device that the step's own tokens are written to, [B, K, n] int32.

    Each token goes to the device with the fewest live slots of its head in the store, of several to the first one
    (DistAttention's rule), so that no device attends to many slots while others wait for it. S, where writes are
    dropped, stands for a token that is written on another device or not at all.

    Args:
      position: [B, K, S] int32 of this device.
      stays: [B, K, n] bool, the tokens to write.
      free: [C, B, K, 1] int32 empty slots of each device.
      axes: that slots are divided over.
      in_order: the tokens fill the devices one after the other instead, since neighbours share a page.
    """
    size, n = position.shape[2], stays.shape[2]
    me = jax.lax.axis_index(axes)
    # [B, K, 1]
    mine = jax.lax.dynamic_index_in_dim(free, me, keepdims=False)
    # [C, 1, 1, 1]
    device = jnp.arange(len(free), dtype=jnp.int32)[:, None, None, None]
    # [B, K, n]: how many tokens other devices and this one have before it has 0, 1, 2, ... of them
    order = jnp.arange(n, dtype=jnp.int32)
    if in_order:
        taken = order + jnp.sum(jnp.where(device < me, free, 0), axis=0)
    else:
        taken = jnp.sum(jnp.clip(order - mine + free + (device < me).astype(jnp.int32), 0, free), axis=0)
    # [B, K, n]: the number of each token among those that stay
    number = jnp.cumsum(stays, axis=2, dtype=jnp.int32) - 1
    slots = free_slots(position, n)
    if n == 1:
        return jnp.where(stays & (taken == 0) & (mine > 0), slots, size)
    # [B, K, n]: which of the tokens of this device it would be
    found = jax.vmap(jax.vmap(jnp.searchsorted))(taken, number)
    found = jnp.minimum(found, n - 1)
    here = (jnp.take_along_axis(taken, found, axis=2) == number) & (found < mine)
    return jnp.where(stays & here, jnp.take_along_axis(slots, found, axis=2), size)
