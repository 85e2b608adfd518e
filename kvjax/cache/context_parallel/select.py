"""Reads the slots of one device that a selection chooses among the slots of several devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.context_parallel import gathered_state
from kvjax.cache.context_parallel.leaving_tokens import LeavingTokens
from kvjax.cache.context_parallel.placement import NewTokens
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, LayerKV
from kvjax.cache.step.attend import spread
from kvjax.cache.step.operands import fetched
from kvjax.cache.step.pool import Pool
from kvjax.parallel import slot_reductions
from kvjax.parallel.host_memory import gather, write
from kvjax.selection.base import Selection, SelectView
from kvjax.selection.choose import compact
from kvjax.selection.oldest_and_newest import ends_of_all
from kvjax.typing import PyTree

Array = jax.Array


class Rows(NamedTuple):
    """The rows of a step; see `Block`.

    Attributes:
      position: [B, n] int32.
      prompt: [B] int32.
      budget: [B] int32 slots per KV head; zeros if the group keeps everything.
    """

    position: Array
    prompt: Array
    budget: Array


class ReadMask(NamedTuple):
    """Which slots a step reads.

    Attributes:
      read: [B, K, S] bool.
      chosen: [B, K, S] bool, without those that are always read.
    """

    read: Array
    chosen: Array


class Choice(NamedTuple):
    """The slots of this device that a step reads.

    Attributes:
      positions: [B, K, S_i] int32 of each store, -1 = empty or not read; of the first store [B, K, W] if slots of it
        are gathered.
      slots: [B, K, W] int32, the slots that are gathered; S_0 = none. None = the whole store is read.
      index: of the selection, with the step's token.
      mask: of this device's slots.
    """

    positions: list[Array]
    slots: Array | None
    index: Any
    mask: ReadMask

    def fetched(self, pool: Pool, group: Group, keys: PyTree, values: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the keys and values of the first store that are read, from those of each store."""
        if self.slots is None:
            return keys[0], values[0]
        inside = jnp.minimum(self.slots, self.mask.read.shape[2] - 1)
        return fetched(pool, group, inside, (keys[0], values[0]))

    def spread(self, columns: dict[str, Array], size: int) -> dict[str, Array]:
        """Returns the columns of the first store's slots, 0 where they are not read."""
        if self.slots is None:
            return columns
        return {name: spread(x, self.slots, size) for name, x in columns.items()}


def chooses(group: Group, tokens: int) -> bool:
    """Returns whether a selection chooses what a step of `tokens` tokens reads."""
    return not group.selection.reads_all and group.decoding and tokens == 1


def choose(
    layer: LayerKV,
    keys: tuple[Array, ...],
    own: NewTokens,
    query: Array,
    rows: Rows,
    layer_index: Array,
    group: Group,
    axes: slot_reductions.Across,
    **about: Any,
) -> Choice:
    """Chooses the slots to read.

    Args:
      layer: of this device.
      keys: [B, K, S_i, D] of each store and of the step's own token, rotated.
      own: the step's own token.
      query: [B, H, 1, D] that chooses, rotated.
      rows: the rows.
      layer_index: int32 index of the layer.
      group: the selection.
      axes: that slots and heads are divided over.
      about: ``scale``, ``soft_cap``, ``window`` and ``skew`` of `kvjax.cache.step.step`.
    """
    selection, size, newest = group.selection, layer.position.shape[2], jnp.max(rows.position, axis=1)
    sizes = [key.shape[2] for key in keys[:-1]]
    first_store = store_order.separated(layer.position, sizes)[0]
    slot = jnp.full(first_store.shape[:2], sizes[0], jnp.int32)
    # [B, K, G, D]
    by = query.reshape(*first_store.shape[:2], -1, *query.shape[2:])[:, :, :, -1]
    # The step's own token counts once, on the first device.
    counted = jnp.where(jax.lax.axis_index(axes.slots) == 0, own.position, EMPTY)
    view = SelectView(
        position=jnp.concatenate([layer.position, counted], axis=2), key=jnp.concatenate(keys, axis=2), newest=newest,
        budget=rows.budget, prompt=rows.prompt, slot=slot, layer=layer_index, first=rows.position[:, 0], **about,
    )  # fmt: skip
    if type(selection).write is not Selection.write:
        # Pages must know which of them the token goes to.
        numbers = selection.to_devices(layer.index, by, view._replace(position=layer.position, key=None))
        free = gathered_state.empty_slots(first_store)
        every = jax.lax.all_gather(jnp.concatenate([free, numbers], axis=2), axes.slots)
        slot = gathered_state.places(
            first_store, own.position >= 0, every[..., :1], axes.slots, in_order=group.in_pages
        )[:, :, 0]
        view = view._replace(slot=slot, from_devices=every[..., 1:])
    index = selection.write(layer.index, keys[-1], slot, newest >= 0)
    with slot_reductions.devices(axes):
        if selection.ahead:
            # A choice that looks ahead depends on nothing of this layer's input; see `kvjax.cache.step.attend`.
            view = view._replace(position=layer.position, key=None)
        if any(selection.ends):
            counted, scores = jnp.where(view.new, EMPTY, view.position), selection.ends_scores(index, by, view)
            view = view._replace(ends=ends_of_all(counted, view.visible, *selection.ends, scores))
        if selection.ahead:
            chosen, index = selection.choose(index, by, view)
        else:
            own_entries = selection.entries(index, keys[-1], view.skew) if selection.per_slot else {}
            joined = {name: jnp.concatenate([index[name], new], axis=2) for name, new in own_entries.items()}
            chosen, index = selection.choose(index | joined, by, view)
            index = index | {name: index[name][:, :, :size] for name in joined}
        mask = chosen[:, :, :size] | selection.always(index, view)[:, :, :size]
    positions = store_order.separated(jnp.where(mask, layer.position, EMPTY), sizes)
    read_mask = ReadMask(mask, chosen[:, :, :size])
    width = selection.width(group.capacity)
    if width is None or width >= sizes[0]:
        return Choice(positions, None, index, read_mask)
    slots, valid = compact(store_order.separated(mask, sizes)[0], width)
    positions[0] = jnp.where(valid, gather(first_store, slots), EMPTY)
    return Choice(positions, jnp.where(valid, slots, sizes[0]), index, read_mask)


def with_entries(
    after: LayerKV,
    own: NewTokens,
    key: Array,
    leaving: LeavingTokens | None,
    vectors: Array | None,
    group: Group,
    skew: Array | None,
) -> PyTree:
    """Returns the index of the layer after a step, with the entries of the tokens that the step wrote to slots.

    Args:
      after: of this device, with its index before the tokens were written.
      own: the step's own token.
      key: [B, K, 1, D], its key, rotated.
      leaving: the token of this device that leaves the residual; None for a storage of one store.
      vectors: see `kvjax.cache.context_parallel.placement.PendingWrites`.
      group: the selection.
      skew: of these heads, or None.
    """
    selection, index = group.selection, after.index
    if not selection.per_slot:
        return index
    moved = [(key, own.position)]
    if leaving is not None:
        assert vectors is not None
        left = vectors[..., : own.key.shape[3]].astype(own.key.dtype)
        moved.append((left, jnp.where(vectors[..., -1] > 0, leaving.target, EMPTY)))
    size = after.position.shape[2]
    slot = jnp.arange(size, dtype=jnp.int32)
    for key, position in moved:
        # [B, K, 1]: where the token is now; out of bounds, where writes are dropped, if it is not on this device
        here = (after.position == position) & (position >= 0)
        target = jnp.min(jnp.where(here, slot, size), axis=2, keepdims=True)
        entries = selection.entries(index, key, skew)
        index = index | {
            name: write(index[name], target, new.astype(index[name].dtype)) for name, new in entries.items()
        }
    return index
