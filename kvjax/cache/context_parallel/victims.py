"""The victim of a step where slots are on several devices: each device names one, and the lowest of all is evicted.

If a policy protects the largest values of a statistic, `protected_victim` finds it instead; `step_end` decides.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, FAR
from kvjax.cache.step import evict
from kvjax.policies.base import View

Array = jax.Array

#: Slots [B, K, W] int32 -> what their device sends of them, [B, K, W, m] int32.
VictimPayload = Callable[[Array], Array]


class Evicted(NamedTuple):
    """The slot that a step evicts in each head, as every device knows it.

    Attributes:
      position: [B, K, 1] int32, -1 = none.
      sent: [B, K, 1, m] int32, what its device sends of it; of the slot that would be next where none is evicted.
      total: [B, K, m'] int32, the sum over all devices of what was given.
    """

    position: Array
    sent: Array
    total: Array


def nothing(slots: Array) -> Array:
    """Sends nothing of slots [B, K, W]."""
    return jnp.zeros((*slots.shape, 0), jnp.int32)


class LocalVictim(NamedTuple):
    """The slot of this device that would be evicted first.

    Attributes:
      bits: [B, K, 2 + m' + m] int32, the bits of its priority, its position, what is added up over all devices, and
        what is sent of the slot.
      limit: [B, K or 1, 1] int32, the slots that a head may hold.
      added: m'.
    """

    bits: Array
    limit: Array
    added: int


def local_victim(
    group: Group, stats: dict[str, Array], view: View, more: Array, sent: VictimPayload = nothing
) -> LocalVictim:
    """Names the slot of lowest priority of this device; for the arguments see `exact_victim`."""
    priority, limit = evict.ranking(group.policy, stats, view)
    # [B, K, 1] each, of this device's slots
    lowest, oldest = evict.lowest_priority_oldest(priority, view.position)
    here = sent(slots_at(view.position, oldest))[:, :, 0]
    bits = jax.lax.bitcast_convert_type(lowest, jnp.int32)
    return LocalVictim(jnp.concatenate([bits, oldest, more, here], axis=2), limit, more.shape[2])


def global_victim(every: Array, own: LocalVictim, total: Array) -> Evicted:
    """Finds the slot that is evicted in each head.

    Args:
      every: [C, B, K, 2 + m' + m] int32, `LocalVictim.bits` of all devices.
      own: of this device.
      total: [B, K, 1] int32 live slots on all devices, with the step's own token.
    """
    positions = jnp.where(every[..., 1:2] < FAR, every[..., 1:2], EMPTY)
    priority = jax.lax.bitcast_convert_type(every[..., :1], jnp.float32)
    found = evict.lowest_priority_oldest(priority, positions, axis=0)[1]
    end = 2 + own.added
    # Positions of a head are distinct.
    of_victim = jnp.sum(jnp.where(positions == found, every[..., end:], 0), axis=0)[:, :, None]
    chosen = jnp.where((total > own.limit) & (found[0] < FAR), found[0], EMPTY)
    return Evicted(chosen, of_victim, jnp.sum(every[..., 2:end], axis=0))


def exact_victim(
    group: Group,
    stats: dict[str, Array],
    view: View,
    total: Array,
    axes: tuple[str, ...],
    more: Array,
    sent: VictimPayload = nothing,
) -> Evicted:
    """Finds the slot that is evicted in each head, in one collective.

    Args:
      group: the policy.
      stats: of this device's slots, and of the step's own token.
      view: the same slots.
      total: [B, K, 1] int32 live slots on all devices, with the step's own token.
      axes: that slots are divided over.
      more: [B, K, m'] int32 to be added up over all devices.
      sent: of the view's slots; every device sends it of its own slot of lowest priority.
    """
    own = local_victim(group, stats, view, more, sent)
    return global_victim(jax.lax.all_gather(own.bits, axes), own, total)


def slots_at(position: Array, wanted: Array) -> Array:
    """Returns the slots that hold the positions [B, K, W], in bounds: [B, K, W] int32; undefined if none does."""
    size = position.shape[2]
    slot = jnp.arange(size, dtype=jnp.int32)
    same = position[:, :, None] == wanted[..., None]
    return jnp.min(jnp.where(same, slot, size - 1), axis=3)
