"""Where the tokens of a step go if slots are divided over devices: each device writes to its own slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.context_parallel import gathered_state
from kvjax.cache.context_parallel.leaving_tokens import LeavingTokens, packed, places_of, unpacked
from kvjax.cache.groups import Group
from kvjax.cache.slots import forget, write
from kvjax.cache.state import EMPTY, LayerKV
from kvjax.storage import store as held
from kvjax.storage.side import Sides

Array = jax.Array
Stats = dict[str, Array]


class NewTokens(NamedTuple):
    """The step's own tokens, which every device knows.

    Attributes:
      key: [B, K, n, D], as it is held.
      value: [B, K, n, D].
      position: [B, K, n] int32, -1 = padding.
      stats: leaves [B, K, n, ...], after the step was observed.
    """

    key: Array
    value: Array
    position: Array
    stats: Stats


class RemainingSlots(NamedTuple):
    """Counts of the slots that are left in a step, which every device has.

    Attributes:
      free: see `PendingWrites`.
      found: [B, K, n] bool, which of the tokens that leave the residual are in a slot of some device.
    """

    free: Array
    found: Array


class PendingWrites(NamedTuple):
    """The tokens that a step writes after attention, and the slots that they come from.

    Attributes:
      layer: of this device, with the statistics after the step and the positions before it.
      new_tokens: the step's own tokens.
      leaving: the tokens of this device that leave the residual; None for a storage of one store.
      vectors: [B, K, n, 2 * D + 1] float32, keys and values of those of all devices, and whether there is one; or None.
      free: [C, B, K, m] int32, empty slots of each store of each device; those that tokens leave count as empty.
      newest: [B] int32 newest position of each row.
      group: the policy and the storage.
      axes: that slots are divided over.
      sides: what keys and values share.
    """

    layer: LayerKV
    new_tokens: NewTokens
    leaving: LeavingTokens | None
    vectors: Array | None
    free: Array
    newest: Array
    group: Group
    axes: tuple[str, ...]
    sides: Sides

    def packed(self) -> Array:
        """Returns what is known of this device's leaving tokens, [B, K, m] int32, to be added up over all devices."""
        batch, kv_heads = self.layer.position.shape[:2]
        if self.leaving is None:
            return jnp.zeros((batch, kv_heads, 0), jnp.int32)
        return packed(self._exact_stats(self.layer.stats), self.leaving.slot, self.leaving.position >= 0)

    def counted(self, position: Array) -> RemainingSlots:
        """Counts the slots that are left, positions [B, K, S] of this device, in one collective at most."""
        if self.leaving is None:
            # A token takes the slot of the victim.
            return RemainingSlots(self.free, self.found)
        coded_at, exact_at = self._positions(position)
        empty = [gathered_state.empty_slots(each) for each in (coded_at, self._without_leaving(exact_at))]
        every = jax.lax.all_gather(jnp.concatenate([*empty, self._here(exact_at).astype(jnp.int32)], axis=2), self.axes)
        return RemainingSlots(every[..., :2], jnp.sum(every[..., 2:], axis=0) > 0)

    def after(self, position: Array, left: RemainingSlots) -> "PendingWrites":
        """Returns what is left to move if this device's slots have positions [B, K, S], of which some were evicted."""
        vectors = self.vectors
        if vectors is not None:
            vectors = jnp.concatenate([vectors[..., :-1], left.found[..., None].astype(vectors.dtype)], axis=3)
        layer = self.layer.replace(position=position, stats=forget(self.layer.stats, position))
        return self._replace(layer=layer, free=left.free, vectors=vectors)

    def with_eviction(self, victim: Array, bits: Array) -> LayerKV:
        """Writes the step's only token after an eviction of at most one slot of each head.

        Args:
          victim: [B, K, 1] int32, the position that is evicted, on whichever device it is; -1 = none.
          bits: [B, K, m] int32, the sum of `packed` over all devices.
        """
        new = self.new_tokens
        if self.leaving is None:
            target = self._target(self.layer.position, new.position, victim, self.free)
            return self._written(self.layer.position, target, new, self.layer.stats)
        coded_at, exact_at = self._positions(self.layer.position)
        # [B, 1, 1]: what leaves, and older tokens that are not among the first, are in coded slots.
        leaving, sinks = self.leaving.target, self.group.storage.sinks
        old = self.newest[:, None, None] - self.group.storage.residual
        is_coded = (victim >= sinks) & (victim < old)
        stats = unpacked(bits, new.stats, 1)
        leaves = self._all_leaving(self.found & (victim != leaving), stats, new.position != victim)
        into = self._target(coded_at, leaves.position, jnp.where(is_coded, victim, EMPTY), self.free[..., :1])
        stays = (new.position >= 0) & (new.position != victim) & (new.position != leaving)
        # A slot that a token leaves counts as empty, also where that token is evicted.
        left = jnp.where(exact_at == leaving, EMPTY, exact_at)
        of_exact = jnp.where(is_coded | (victim == leaving), EMPTY, victim)
        at = self._target(left, jnp.where(stays, new.position, EMPTY), of_exact, self.free[..., 1:])
        position = store_order.joined([coded_at, left])
        return self._in_stores(jnp.where(position == victim, EMPTY, position), leaves, into, at)

    def after_evictions(self, position: Array, stays: Array) -> LayerKV:
        """Writes the step's own tokens after any number of evictions.

        Args:
          position: [B, K, S] int32 of this device's slots that are left.
          stays: [B, K, n] bool, which own tokens are left, as the first device knows; False on others.
        """
        own, n = self.new_tokens, self.new_tokens.key.shape[2]
        layer = self.layer.replace(stats=forget(self.layer.stats, position))
        if self.leaving is None:
            free = gathered_state.empty_slots(position)
            every = jax.lax.all_gather(jnp.concatenate([stays.astype(jnp.int32), free], axis=2), self.axes)
            target = gathered_state.places(
                position, every[0, :, :, :n] > 0, every[:, :, :, n:], self.axes, in_order=self.group.in_pages
            )
            return self._replace(layer=layer)._written(position, target, own, layer.stats)
        coded_at, exact_at = self._positions(position)
        # What is left of the leaving tokens.
        here = self._here(exact_at)
        left = self._without_leaving(exact_at)
        known = [
            stays.astype(jnp.int32), here.astype(jnp.int32), gathered_state.empty_slots(coded_at),
            gathered_state.empty_slots(left), packed(self._exact_stats(layer.stats), self.leaving.slot, here),
        ]  # fmt: skip
        every = jax.lax.all_gather(jnp.concatenate(known, axis=2), self.axes)
        found, bits = jnp.sum(every[..., n : 2 * n], axis=0) > 0, jnp.sum(every[..., 2 * n + 2 :], axis=0)
        moves = self._replace(layer=layer, free=every[..., 2 * n : 2 * n + 2])
        return moves._write_remaining(coded_at, left, every[0, :, :, :n] > 0, found, unpacked(bits, own.stats, n))

    def without_evictions(self) -> LayerKV:
        """Writes the step's own tokens where nothing is evicted."""
        own, position = self.new_tokens, self.layer.position
        if self.leaving is None:
            target = gathered_state.places(
                position, own.position >= 0, self.free, self.axes, in_order=self.group.in_pages
            )
            return self._written(position, target, own, self.layer.stats)
        if own.stats:
            # The statistics of what leaves must be told.
            first = jax.lax.axis_index(self.axes) == 0
            return self.after_evictions(position, (own.position >= 0) & first)
        coded_at, exact_at = self._positions(position)
        return self._write_remaining(coded_at, self._without_leaving(exact_at), own.position >= 0, self.found, {})

    def appended(self, target: Array) -> LayerKV:
        """Writes the step's own tokens to slots [B, K, n] int32 of this device's only store; S for none."""
        return self._written(self.layer.position, target, self.new_tokens, self.layer.stats)

    def _write_remaining(self, coded_at: Array, left: Array, stays: Array, found: Array, stats: Stats) -> LayerKV:
        """Writes what leaves the residual, and the step's own tokens, to empty slots.

        Args:
          coded_at: [B, K, S_0] int32, the positions of coded slots.
          left: [B, K, R] int32, those of exact slots without what leaves.
          stays: [B, K, n] bool, which own tokens are left.
          found: [B, K, n] bool, which of the leaving tokens are left of those in slots.
          stats: of these.
        """
        assert self.leaving is not None
        leaves = self._all_leaving(found, stats, stays)
        into = gathered_state.places(
            coded_at, leaves.position >= 0, self.free[..., :1], self.axes, in_order=self.group.in_pages
        )
        exact = stays & ~places_of(self.leaving.target, self.new_tokens.position)[1]
        at = gathered_state.places(left, exact, self.free[..., 1:], self.axes, in_order=self.group.in_pages)
        return self._in_stores(store_order.joined([coded_at, left]), leaves, into, at)

    def _all_leaving(self, found: Array, stats: Stats, stays: Array) -> NewTokens:
        """Returns the tokens of all devices that leave the residual, and those of the step's own that never enter it.

        Args:
          found: [B, K, n] bool, which targets are in a slot of some device and not evicted.
          stats: [B, K, n, ...] of these.
          stays: [B, K, n] bool, which of the step's own tokens are not evicted.
        """
        assert self.leaving is not None and self.vectors is not None
        own, dim = self.new_tokens, self.layer.dim
        target = jnp.broadcast_to(self.leaving.target, found.shape)
        at, of_own = places_of(jnp.where(stays, own.position, EMPTY), target)

        def pick(one: Array, other: Array) -> Array:
            """Returns the entries of tokens in slots, or else those of the step's own."""
            wide = (*at.shape, *(1,) * (other.ndim - 3))
            chosen = jnp.take_along_axis(other, at.reshape(wide), axis=2)
            return jnp.where(found.reshape(wide), one.astype(other.dtype), chosen)

        return NewTokens(
            pick(self.vectors[..., :dim], own.key),
            pick(self.vectors[..., dim : 2 * dim], own.value),
            jnp.where(found | of_own, target, EMPTY),
            {name: pick(stats[name], leaf) for name, leaf in own.stats.items()},
        )

    def _in_stores(self, position: Array, leaves: NewTokens, into: Array, at: Array) -> LayerKV:
        """Writes what leaves the residual to coded slots, and the step's own tokens to exact ones.

        Args:
          position: [B, K, S] int32 of this device, after evictions and without what leaves.
          leaves: from `_all_leaving`.
          into: [B, K, n] int32, the coded slots that are written to; S_0 for none.
          at: [B, K, n] int32, the exact slots; R for none.
        """
        layer, own, (coded, exact) = self.layer, self.new_tokens, self.layer.stores
        made = held.encode(self.group.stores[0], leaves.key, leaves.value, own.value.dtype, self.sides)
        coded = jax.tree.map(lambda old, new: write(old, into, new), coded, made)
        exact = {
            side: {"exact": write(exact[side]["exact"], at, x.astype(exact[side]["exact"].dtype))}
            for side, x in (("key", own.key), ("value", own.value))
        }

        def written(old: Array, moved: Array, new: Array) -> Array:
            one, two = store_order.separated(old, self._sizes)
            return store_order.joined([write(one, into, moved), write(two, at, new)])

        stats = forget(layer.stats, position)
        return layer.replace(
            position=written(position, leaves.position, own.position),
            stores=(coded, exact),
            stats={name: written(old, leaves.stats[name], own.stats[name]) for name, old in stats.items()},
        )

    def _written(self, position: Array, target: Array, own: NewTokens, stats: Stats) -> LayerKV:
        """Writes the step's own tokens to slots [B, K, n] of this device's only store."""
        (store,) = self.layer.stores
        made = held.encode(self.group.storage, own.key, own.value, own.value.dtype, self.sides)
        return self.layer.replace(
            position=write(position, target, own.position),
            stores=(jax.tree.map(lambda old, new: write(old, target, new), store, made),),
            stats={name: write(old, target, own.stats[name]) for name, old in stats.items()},
        )

    def _target(self, position: Array, own: Array, victim: Array, free: Array) -> Array:
        """Returns the slot of this device that one token is written to, [B, K, 1] int32; see `exchange.place_of`."""
        found = gathered_state.place_of(position, own, victim, free, self.axes, in_order=self.group.in_pages)
        return jnp.where(own >= 0, found, position.shape[2])

    @property
    def found(self) -> Array:
        """[B, K, n] bool: which of the positions that leave are in a slot of some device, before the step."""
        if self.vectors is None:
            return jnp.zeros((*self.new_tokens.position.shape[:2], 0), bool)
        return self.vectors[..., -1] > 0

    def _here(self, exact_at: Array) -> Array:
        """[B, K, n] bool: which of the tokens that leave this device's exact slots are left in [B, K, R]."""
        assert self.leaving is not None
        return (self.leaving.position >= 0) & (jnp.take_along_axis(exact_at, self.leaving.slot, axis=2) >= 0)

    @property
    def _sizes(self) -> list[int]:
        """The slots of each store on this device."""
        return [jax.tree.leaves(store)[0].shape[2] for store in self.layer.stores]

    def _positions(self, position: Array) -> list[Array]:
        return store_order.separated(position, self._sizes)

    def _exact_stats(self, stats: Stats) -> Stats:
        """Returns the statistics of the exact slots."""
        return {name: store_order.separated(leaf, self._sizes)[1] for name, leaf in stats.items()}

    def _without_leaving(self, exact_at: Array) -> Array:
        """Returns positions [B, K, R] without those that leave."""
        assert self.leaving is not None
        is_leaving = jnp.any(exact_at[..., None] == self.leaving.target[:, :, None], axis=3)
        return jnp.where(is_leaving, EMPTY, exact_at)
