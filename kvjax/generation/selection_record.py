"""Records: what selections chose and what was read, for each step, layer, row and KV head of a decoding loop."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.planning.layout import CacheLayout, Group, Phase
from kvjax.models.decoder import Choice
from kvjax.parallel import distributed
from kvjax.parallel.host_memory import HOST
from kvjax.summary import one_line

Array = jax.Array
STEPS = 64  # steps of one call of a loop that records; a record is large
NONE = -1  # no position; the count of a layer that reads everything, and of a row without a token
FAR = jnp.iinfo(jnp.int32).max
LOOPED = 4  # dimensions of the choices of layers that run as a loop, [L, B, K, S]


class Steps(flax.struct.PyTreeNode):
    """The record of some steps on the device; see `Record`."""

    positions: Array
    number: Array
    read: Array
    live: Array

    def __repr__(self) -> str:
        return one_line(self)


class Record(NamedTuple):
    """Slots that were chosen and read while decoding; for T steps, L layers, B rows and K KV heads.

    Attributes:
      positions: [T, L, B, K, W] int32 positions that were chosen, ascending, followed by -1. W is the largest number of
        slots that any layer can choose.
      number: [T, L, B, K] int32, how many they are; -1 where a layer reads everything, and for a row without a token.
      read: [T, L, B, K] int32 slots that were read, including the new token's.
      live: [T, L, B, K] int32 slots that were held, including the new token's.
      width: [L, K] int32, the number of slots that a gather of a fixed shape takes; -1 where a layer reads everything.
      moved: [L, K] int32, the number of slots that a step moves from host memory; 0 where slots are on the device.
      slot_bytes: the bytes of a key and a value of one slot; of those in host memory, if any are.
    """

    positions: np.ndarray
    number: np.ndarray
    read: np.ndarray
    live: np.ndarray
    width: np.ndarray
    moved: np.ndarray
    slot_bytes: int

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def share(self) -> np.ndarray:
        """[L] float64, the share of the held slots that the layer's queries read."""
        held = self.live.sum(axis=(0, 2, 3))
        return self.read.sum(axis=(0, 2, 3)) / np.maximum(held, 1)

    def bytes_needed(self) -> np.ndarray:
        """[T, L, B] int64 bytes of the slots that a step chose; in a layer that reads everything, of all older ones.

        Slots that are always read are not chosen.
        """
        slots = np.where(self.number >= 0, self.number, np.maximum(self.live - 1, 0))
        return slots.astype(np.int64).sum(axis=3) * self.slot_bytes

    def bytes_moved(self) -> np.ndarray:
        """[T, L, B] int64 bytes that arrays of fixed shapes move; for a row without a token 0.

        Of a pool in host memory, it is what the program moves: whole arrays where a layer reads everything. Of a cache
        on the device, it is what a gather from such a pool would move, and all older slots where everything is read.
        """
        gathered = np.where(self.number >= 0, self.width[:, None], self.live - 1)
        slots = np.where(self.moved[:, None] > 0, self.moved[:, None], gathered) * (self.live > 0)
        return slots.astype(np.int64).sum(axis=3) * self.slot_bytes


def widths(phase: Phase, kv_heads: int) -> np.ndarray:
    """Returns the slots that a gather takes of each layer and KV head, [L, K] int32; -1 = everything is read."""
    found = np.full((len(phase), kv_heads), NONE, np.int32)
    for layer, groups in enumerate(phase):
        for group in groups:
            if not group.selection.reads_all:
                width = group.selection.width(group.capacity)
                heads = slice(None) if group.heads is None else list(group.heads)
                # The new token is not gathered.
                found[layer, heads] = group.capacity if width is None else width - 1
    return found


def moved(phase: Phase, kv_heads: int) -> np.ndarray:
    """Returns the slots that a step moves from host memory, of each layer and KV head, [L, K] int32."""
    found = np.zeros((len(phase), kv_heads), np.int32)
    for layer, groups in enumerate(phase):
        for group in groups:
            found[layer, slice(None) if group.heads is None else list(group.heads)] = group.moved
    return found


def empty(phase: Phase, rows: int, kv_heads: int) -> Steps:
    """Allocates the record of `STEPS` steps."""
    shape = (STEPS, len(phase), rows, kv_heads)
    width = max(1, int(widths(phase, kv_heads).max()))
    return Steps(
        positions=jnp.full((*shape, width), NONE, jnp.int32),
        number=jnp.full(shape, NONE, jnp.int32),
        read=jnp.zeros(shape, jnp.int32),
        live=jnp.zeros(shape, jnp.int32),
    )


def add(steps: Steps, number: Array, choices: Mapping[int, tuple[Choice, ...]], phase: Phase, active: Array) -> Steps:
    """Records a step.

    Args:
      steps: the record so far.
      number: int32 index of the step.
      choices: from `kvjax.models.bound.BoundDecoder.step`.
      phase: the groups of each layer.
      active: [B] bool, whether the row had a token.
    """
    width, spans = steps.positions.shape[-1], []
    for index, own in sorted(choices.items()):
        of_layer = functools.partial(_layer, groups=phase[index], active=active, width=width)
        looped = own[0].position.ndim == LOOPED
        spans.append(jax.vmap(of_layer)(own) if looped else jax.tree.map(lambda leaf: leaf[None], of_layer(own)))
    # [L, B, K, ...] each
    made: Steps = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *spans)
    return jax.tree.map(lambda old, new: old.at[number].set(new), steps, made)


def _layer(choices: tuple[Choice, ...], groups: tuple[Group, ...], active: Array, width: int) -> Steps:
    """The record of one layer, leaves [B, K, ...]."""
    parts = []
    for each in choices:
        mask = active[:, None]
        read = jnp.sum(each.position >= 0, axis=2, dtype=jnp.int32)
        live = jnp.sum(each.held >= 0, axis=2, dtype=jnp.int32)
        if each.choice is None:
            count = jnp.full(read.shape, NONE, jnp.int32)
            chosen = jnp.full((*read.shape, width), NONE, jnp.int32)
        else:
            count = jnp.where(mask, jnp.sum(each.choice, axis=2, dtype=jnp.int32), NONE)
            chosen = jnp.sort(jnp.where(each.choice, each.held, FAR), axis=2)[:, :, :width]
            chosen = jnp.where(chosen == FAR, NONE, chosen)
            chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, width - chosen.shape[2])), constant_values=NONE)
        parts.append(Steps(chosen, count, jnp.where(mask, read, 0), jnp.where(mask, live, 0)))
    whole: Steps = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
    order = np.argsort([head for group in groups for head in group.heads or ()])
    return jax.tree.map(lambda leaf: leaf[:, order], whole) if len(order) else whole


def joined(parts: list[tuple[Steps | None, int]], layout: CacheLayout, rows: int) -> Record | None:
    """Joins the records of several calls, each with its number of steps, on the host; None if nothing was recorded.

    Args:
      parts: the records.
      layout: of the cache.
      rows: the number of rows, which others of the arrays may follow.
    """
    host = [
        jax.tree.map(lambda leaf, taken=taken: leaf[:taken, :, :rows], distributed.to_host(steps))
        for steps, taken in parts
        if steps is not None
    ]
    if not host:
        return None
    made = jax.tree.map(lambda *leaves: np.concatenate(leaves), *host)
    # Groups whose newest tokens are all that stays may be on the device; the others are alike.
    storages = [group.storage for group in layout.groups]
    storage = next((storage for storage in storages if storage.on_host), storages[0])
    # Only the part in host memory counts, if there is one.
    slot = storage.bytes_per_slot(layout.head_dim, layout.dtype, HOST if storage.on_host else None)
    arrays = (widths(layout.decode, layout.kv_heads), moved(layout.decode, layout.kv_heads))
    return Record(made.positions, made.number, made.read, made.live, *arrays, slot)
