"""Tiers whose slots are divided over devices: a victim goes to the device that has the next slot of the low tier.

The slots of the low tier are filled one device after the other, in the order of evictions. Where a step evicts one slot
of a head, each device sends the vectors of its slot of lowest priority with that priority; several victims are sent
some at a time. See `kvjax.cache.arrangements.tiers`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.arrangements import tiers
from kvjax.cache.context_parallel import placement, victim_candidates
from kvjax.cache.context_parallel.gathered_state import Told
from kvjax.cache.context_parallel.placement import Own
from kvjax.cache.groups import Group
from kvjax.cache.slots import oldest_first, write
from kvjax.cache.state import EMPTY, FAR, LayerKV, Store
from kvjax.cache.step import evict
from kvjax.numerics.top_k import CANDIDATES
from kvjax.parallel import slot_reductions
from kvjax.parallel.host_memory import gather
from kvjax.policies.base import View
from kvjax.storage import store as held
from kvjax.storage.layouts import Tiers
from kvjax.storage.side import Sides

Array = jax.Array

MOST_SENT = 16  # victims of a head that are sent together


class Low(NamedTuple):
    """The low tier of one device.

    Attributes:
      position: [B, K, L] int32.
      store: what is held.
      demoted: [B, K, 1] int32, the tokens that were demoted so far, on all devices.
    """

    position: Array
    store: Store
    demoted: Array


class Tier(NamedTuple):
    """What does not change while victims are moved.

    Attributes:
      high: the high tier of this device, before evictions.
      own: the step's own tokens.
      group: of both tiers.
      axes: that slots are divided over.
      sides: what vectors share.
    """

    high: LayerKV
    own: Own
    group: Group
    axes: tuple[str, ...]
    sides: Sides

    @property
    def high_group(self) -> Group:
        """The group of the high tier alone."""
        return of_high(self.group)

    def vectors(self, index: Array) -> Array:
        """Returns keys and values [B, K, m, 2 * D] float32, as they are decoded.

        Args:
          index: [B, K, m] int32, of the slots of the high tier followed by the step's own tokens.
        """
        size = self.high.position.shape[2]
        (store,) = self.high.stores
        picked: Store = jax.tree.map(lambda leaf: gather(leaf, jnp.minimum(index, size - 1)), store)
        decoded = held.decode(self.high_group.storage, picked, self.high.dim, jnp.float32, self.sides)
        new = jnp.maximum(index - size, 0)
        both = [
            jnp.where((index < size)[..., None], one, gather(own, new)).astype(jnp.float32)
            for one, own in zip(decoded, (self.own.key, self.own.value), strict=True)
        ]
        return jnp.concatenate(both, axis=3)

    def written(self, low: Low, position: Array, vectors: Array) -> Low:
        """Writes victims of all devices to the slots of the low tier that are on this one.

        Args:
          low: before.
          position: [B, K, m] int32 in the order of eviction, -1 = none; those come last.
          vectors: [B, K, m, 2 * D] float32.
        """
        size, dim = low.position.shape[2], self.high.dim
        capacity = tiers.ring(self.group, size * self.group.slot_parts)
        m = position.shape[2]
        count = jnp.sum(position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
        turn = jnp.arange(m, dtype=jnp.int32)
        # The oldest entry is lost where the tier is full: of more victims than it has slots, all but the newest.
        due = (turn < count) & (turn >= count - capacity)
        at = (low.demoted + turn) % capacity - jax.lax.axis_index(self.axes) * size
        target = jnp.where(due & (at >= 0) & (at < size), at, size)
        made = held.encode(
            self.group.stores[0], vectors[..., :dim], vectors[..., dim:], self.own.value.dtype, self.sides
        )
        store = jax.tree.map(lambda old, new: write(old, target, new), low.store, made)
        return Low(write(low.position, target, position), store, low.demoted + count)

    def rounds(self, victim: Array) -> Array:
        """Returns the number of rounds in which `moved` moves victims; the same on all devices, which take part."""
        total = jax.lax.psum(jnp.sum(victim, axis=2, dtype=jnp.int32), self.axes)
        # As many as the head with the most victims needs.
        rounds = -(-jnp.max(total) // min(MOST_SENT, victim.shape[2]))
        return jax.lax.pmax(rounds, tuple(jax.sharding.get_abstract_mesh().axis_names))

    def moved(self, low: Low, victim: Array, most: int | None, rounds: Array | None = None) -> Low:
        """Moves all victims to the low tier, in the order of their positions.

        Args:
          low: before.
          victim: [B, K, H + n] bool, of this device's slots and the step's own tokens, which the first device counts.
          most: the most victims of a head on all devices; None = any number.
          rounds: from `rounds`, if it is known.
        """
        position = jnp.concatenate([self.high.position, self.own.position], axis=2)
        count = min(MOST_SENT, position.shape[2]) if most is None else min(MOST_SENT, most, position.shape[2])

        def some(low: Low, left: Array) -> tuple[Low, Array]:
            """Moves the oldest victims that are left."""
            index = oldest_first(position, left, count).astype(jnp.int32)
            due = jnp.take_along_axis(left, index, axis=2)
            at = jnp.where(due, jnp.take_along_axis(position, index, axis=2), FAR)
            # [C, B, K, m, 2 * D + 1] int32, of which all but the last are the bits of floats
            bits = _bits(self.vectors(index))
            every = jax.lax.all_gather(jnp.concatenate([bits, at[..., None]], axis=3), self.axes)
            # [B, K, C * m, ...]
            every = jnp.moveaxis(every, 0, 2).reshape(*at.shape[:2], -1, every.shape[-1])
            order = jnp.argsort(every[..., -1], axis=2, stable=True)[:, :, :count]
            chosen = jnp.take_along_axis(every, order[..., None], axis=2)
            first, vectors = chosen[..., -1], jax.lax.bitcast_convert_type(chosen[..., :-1], jnp.float32)
            low = self.written(low, jnp.where(first < FAR, first, EMPTY), vectors)
            return low, left & (position > first[:, :, -1:])

        if most is not None and most <= count:
            return some(low, victim)[0]
        rounds = self.rounds(victim) if rounds is None else rounds
        return jax.lax.fori_loop(0, rounds, lambda _, carry: some(*carry), (low, victim))[0]


def of_high(group: Group) -> Group:
    """Returns the group of the high tier alone, which its policy ranks as slots without tiers."""
    assert isinstance(group.storage.layout, Tiers)
    return dataclasses.replace(group, storage=group.storage.layout.high, slots=group.slots[1:])


def settle(layer: LayerKV, tier: Tier, told: Told, view: View, over: slot_reductions.Across) -> LayerKV:
    """Evicts, writes victims to the low tier, and the step's own tokens to the high one.

    Args:
      layer: both tiers of this device, before the step.
      tier: with the statistics after the step.
      told: of the slots of the high tier.
      view: of the high tier and of the step's own tokens, which the first device counts.
      over: that slots and heads are divided over.
    """
    high, own, group = tier.high, tier.own, tier.high_group
    low_slots, size, n = layer.position.shape[2] - high.position.shape[2], high.position.shape[2], own.key.shape[2]
    moves = placement.Moves(high, own, None, None, told.free, view.newest, group, tier.axes, tier.sides)
    count = jnp.sum(own.position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    # All tokens before the step are in the high tier, or were demoted.
    demoted = view.newest[:, None, None] + 1 - count - told.live
    low = Low(layer.position[:, :, :low_slots], layer.stores[0], demoted)
    if group.policy.budget is None:
        return _joined(layer, low, moves.without_evictions())
    both = {name: jnp.concatenate([high.stats[name], own.stats[name]], axis=2) for name in own.stats}
    with slot_reductions.devices(over):
        if n == 1 and group.policy.when == "step":
            total, sent = told.live + count, lambda slots: _bits(tier.vectors(slots))
            one = victim_candidates.lowest_position(group, both, view, total, over, moves.packed(), sent)
            lowest, told_of = one.position, one.position
            if not group.evicts_one:
                lowest, told_of, victim, rounds = _several(tier, both, view, total, lowest, over)
                low = tier.moved(low, victim, None, rounds)
                left = jnp.where(victim[:, :, :size] & (high.position != lowest), EMPTY, high.position)
                moves = moves.after(left, placement.Left(moves.free, moves.found))
            low = tier.written(low, told_of, jax.lax.bitcast_convert_type(one.sent, jnp.float32))
            return _joined(layer, low, moves.with_eviction(lowest, one.total))
        # A budget that stays as it is frees a slot for each token of the step.
        one_each = group.evicts_one and group.policy.when == "step" and n <= CANDIDATES
        most = n if one_each else None
        victim = evict.victims(group.policy, both, view, one=False, most=most)
    low = tier.moved(low, victim, most)
    left = jnp.where(victim[:, :, :size], EMPTY, high.position)
    stays = (view.position[:, :, size:] >= 0) & ~victim[:, :, size:]
    return _joined(layer, low, moves.after_evictions(left, stays))


def _several(
    tier: Tier, stats: dict[str, Array], view: View, total: Array, lowest: Array, over: slot_reductions.Across
) -> tuple[Array, Array, Array, Array]:
    """Searches for the victims of a step of one token, where some head has several, as in the first after a prompt.

    Args:
      tier: the slots.
      stats: of this device's slots, and of the step's own token.
      view: the same slots.
      total: [B, K, 1] int32 live slots on all devices, with the step's own token.
      lowest: [B, K, 1] int32, the victim of a head that has no other.
      over: that slots and heads are divided over.

    Returns:
      The victim whose slot the token takes, and that whose vectors every device has, [B, K, 1] int32 each, -1 = none;
      those that are still to be moved, [B, K, H + 1] bool; and in how many rounds.
    """

    def several() -> tuple[Array, Array, Array, Array]:
        victim = evict.victims(tier.group.policy, stats, view, one=False)
        newest = slot_reductions.max_over_slots(jnp.max(jnp.where(victim, view.position, EMPTY), axis=2, keepdims=True))
        return newest, jnp.full(newest.shape, EMPTY, jnp.int32), victim, tier.rounds(victim)

    def one() -> tuple[Array, Array, Array, Array]:
        return lowest, lowest, jnp.zeros(view.position.shape, bool), jnp.int32(0)

    flag = victim_candidates.several_go(tier.group.policy, stats, view, total, over)
    with slot_reductions.devices(over):
        return jax.lax.cond(flag, several, one)


def _joined(layer: LayerKV, low: Low, high: LayerKV) -> LayerKV:
    position = store_order.joined([low.position, high.position])
    return layer.replace(position=position, stores=(low.store, *high.stores), stats=high.stats)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
