"""The victim where a policy protects the largest values of a statistic, and slots are on several devices.

Each device names the few slots that it would evict first. Whether one of them is protected follows from the number of
slots of all devices that hold larger values, which the devices add up for all that are named. A search for the smallest
value that is protected is needed only where every slot that is named may be protected.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.context_parallel import merge, policy_view, victims
from kvjax.cache.context_parallel.leaving_tokens import LeavingTokens
from kvjax.cache.context_parallel.placement import NewTokens, PendingWrites, RemainingSlots
from kvjax.cache.context_parallel.select import Rows
from kvjax.cache.context_parallel.victims import Evicted, LocalVictim, VictimPayload
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, FAR, LayerKV
from kvjax.cache.step import evict
from kvjax.numerics.assumed_top_k import Assumed, Call
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Evict, View

Array = jax.Array
Stats = dict[str, Array]

#: The number of candidates of a device.
CANDIDATES_PER_DEVICE = 8


def victim_before_attention(
    layer: LayerKV,
    own: NewTokens,
    leaving: LeavingTokens | None,
    ranked: tuple[tuple[Array, ...], tuple[Array, ...]],
    rows: Rows,
    layer_index: Array,
    group: Group,
    axes: slot_reductions.Across,
) -> LocalVictim | None:
    """Names the slot of this device that would be evicted first, if attention does not change it; otherwise None.

    That is so if no statistic of attention is kept, slots are ranked one by one, and a step evicts at most one slot of
    a head. For the arguments see `kvjax.cache.context_parallel.attend`.
    """
    policy = group.policy
    one = own.position.shape[2] == 1 and group.evicts and group.evicts_one and policy.when == "step"
    if not one or group.needs:
        return None
    none = jnp.zeros((*own.position.shape[:2], 0, 0), jnp.int32)
    moves = PendingWrites(layer, own, leaving, None, none, rows.position[:, 0], group, axes.slots, {})
    view, stats = (
        policy_view.view_of(layer, own, ranked, rows, layer_index, group, axes),
        policy_view.both_stats(layer, own),
    )
    assumed = Assumed(mark=False)
    with slot_reductions.devices(axes._replace(assumed=assumed)):
        sent = victims.nothing if policy.merge is None else merge.sender(moves, *ranked)
        found = victims.local_victim(group, stats, view, moves.packed(), sent)
    # A policy that asks which slots hold the largest values compares them.
    return None if assumed.calls else found


def find_victim(
    group: Group,
    stats: Stats,
    view: View,
    total: Array,
    axes: slot_reductions.Across,
    more: Array,
    sent: VictimPayload = victims.nothing,
) -> Evicted:
    """Finds the slot that is evicted in each head; see `victims.exact_victim`.

    It takes one collective if the policy compares no slots with each other, and two if it asks once which slots hold
    the largest values of a statistic. A third adds up one number if rows or heads are on several devices too.

    Args:
      group: the policy.
      stats: of this device's slots, and of the step's own token.
      view: the same slots.
      total: [B, K, 1] int32 live slots on all devices, with the step's own token.
      axes: that slots and heads are divided over.
      more: [B, K, m'] int32 to be added up over all devices.
      sent: of the view's slots; of those that a device names, every device gets it.
    """

    def ranked(mark: bool) -> tuple[Array, Array, list[Call]]:
        assumed = Assumed(mark)
        with slot_reductions.devices(axes._replace(assumed=assumed)):
            priority, limit = evict.ranking(group.policy, stats, view)
        return priority, limit, assumed.calls

    def exact(more: Array) -> Evicted:
        with slot_reductions.devices(axes):
            return victims.exact_victim(group, stats, view, total, axes.slots, more, sent)

    priority, limit, calls = ranked(mark=False)
    if len(calls) != 1 or calls[0].position is not view.position or calls[0].value.shape != view.position.shape:
        return exact(more)
    (call,) = calls
    number = jnp.asarray(call.number, jnp.float32)
    protected = ranked(mark=True)[0]
    slots, candidates = _lowest_priorities(jnp.minimum(priority, protected), view.position)
    values = [
        jnp.take_along_axis(each.astype(jnp.float32), slots, axis=2) for each in (priority, protected, call.value)
    ]
    bits = [jax.lax.bitcast_convert_type(each, jnp.int32) for each in values]
    # [B, K, W, m]
    vectors = sent(slots)
    flat = vectors.reshape(*slots.shape[:2], slots.shape[2] * vectors.shape[3])
    # [C, B, K, 4 * W + m' + W * m] int32
    every = jax.lax.all_gather(jnp.concatenate([*bits, candidates, more, flat], axis=2), axes.slots)
    # [C, B, K, W] each
    *bits, at, rest = jnp.split(every, np.arange(1, 5) * slots.shape[2], axis=3)
    without, with_it, value = (jax.lax.bitcast_convert_type(each, jnp.float32) for each in bits)
    with slot_reductions.devices(axes):
        rank = slot_reductions.sum_over_slots(_larger(call, value, at))
        worth = jnp.where(at < 0, jnp.inf, jnp.where(rank < number, with_it, without))
        # [B, K, 1]
        lowest, found = (each[0] for each in evict.lowest_priority_oldest(worth, at, axis=(0, 3)))
        # What a device does not name comes after what it names last, [C, B, K, 1] each.
        bound, last = jnp.minimum(without, with_it)[..., -1:], at[..., -1:]
        beyond = (last >= 0) & ((lowest > bound) | ((lowest == bound) & (found > last)))
        over = total > limit
        unknown = slot_reductions.anywhere(jnp.any(beyond & over))
    totals, every_sent = jnp.split(rest, [more.shape[2]], axis=3)
    every_sent = every_sent.reshape(*at.shape, vectors.shape[3])
    of_victim = jnp.sum(jnp.where((at == found)[..., None], every_sent, 0), axis=(0, 3))[:, :, None]
    none = jnp.zeros((*total.shape[:2], 0), jnp.int32)
    candidate = Evicted(jnp.where(over & (found < FAR), found, EMPTY), of_victim, none)
    chosen = jax.lax.cond(unknown, lambda: exact(none), lambda: candidate)
    return chosen._replace(total=jnp.sum(totals, axis=0))


def _lowest_priorities(priority: Array, position: Array) -> tuple[Array, Array]:
    """Returns the slots of lowest priority, of equal ones the oldest first, and their positions, [B, K, W] int32 each.

    Args:
      priority: [B, K, S] float32.
      position: [B, K, S] int32, -1 = empty.
    """
    slots, candidates, left = [], [], position
    for _ in range(min(CANDIDATES_PER_DEVICE, position.shape[2])):
        # [B, K, 1]
        oldest = evict.lowest_priority_oldest(priority, left)[1]
        slots.append(victims.slots_at(left, oldest))
        candidates.append(jnp.where(oldest < FAR, oldest, EMPTY))
        left = jnp.where(left == oldest, EMPTY, left)
    return jnp.concatenate(slots, axis=2), jnp.concatenate(candidates, axis=2)


def _larger(call: Call, value: Array, at: Array) -> Array:
    """Counts this device's slots that come before others in a search for the largest values, [C, B, K, W] float32.

    Args:
      call: of this device's slots.
      value: [C, B, K, W] float32 of other slots.
      at: [C, B, K, W] int32, their positions.
    """
    # [B, K, S], then [C, B, K, W, S]
    own = call.value.astype(jnp.float32)[:, :, None]
    value, at = value[..., None], at[..., None]
    before = (own > value) | ((own == value) & (call.position[:, :, None] > at))
    return jnp.sum(before & (call.position >= 0)[:, :, None], axis=4, dtype=jnp.float32)


def evicted_before(
    moves: PendingWrites, stats: Stats, view: View, total: Array, lowest: Array, axes: slot_reductions.Across
) -> tuple[PendingWrites, Array]:
    """Evicts what a head holds beyond its limit and one more slot, as in the first step after a prompt.

    Args:
      moves: of a step of one token that may evict several slots of a head.
      stats: see `find_victim`.
      view: see `find_victim`.
      total: see `find_victim`.
      lowest: [B, K, 1] int32, the position that `find_victim` finds.
      axes: see `find_victim`.

    Returns:
      What is left to move, and the position [B, K, 1] int32 that is evicted too, -1 where none is.
    """
    policy, position = moves.group.policy, moves.layer.position

    def several() -> tuple[Array, Array, RemainingSlots]:
        victim = evict.victims(policy, stats, view, one=False)
        # Of its victims, the newest is left to the step, which may be its own token.
        newest = jnp.max(jnp.where(victim, view.position, EMPTY), axis=2, keepdims=True)
        newest = slot_reductions.max_over_slots(newest)
        left = jnp.where(victim[:, :, : position.shape[2]] & (position != newest), EMPTY, position)
        return newest, left, moves.counted(left)

    def one() -> tuple[Array, Array, RemainingSlots]:
        return lowest, position, RemainingSlots(moves.free, moves.found)

    flag = needs_multi_evict(policy, stats, view, total, axes)
    with slot_reductions.devices(axes):
        lowest, position, left = jax.lax.cond(flag, several, one)
    return moves.after(position, left), lowest


def needs_multi_evict(policy: Evict, stats: Stats, view: View, total: Array, axes: slot_reductions.Across) -> Array:
    """Returns whether a head of any device evicts several slots, [] bool; see `find_victim`."""
    # The limit does not depend on a search, and the priority is not used.
    with slot_reductions.devices(axes._replace(assumed=Assumed(mark=False))):
        limit = evict.ranking(policy, stats, view)[1]
    with slot_reductions.devices(axes):
        return slot_reductions.anywhere(jnp.any(total - 1 > limit))
