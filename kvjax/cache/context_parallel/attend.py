"""The attention of a step of a layer whose slots are divided over devices, and what the step observes.

Each device attends to its own slots, and one collective joins the devices; see
`kvjax.cache.context_parallel.gathered_state.gather_state`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache import store_order
from kvjax.cache.context_parallel import gathered_state, position_ranks, protected_victim, select, write_blocks
from kvjax.cache.context_parallel.gathered_state import GatheredState
from kvjax.cache.context_parallel.leaving_tokens import LeavingTokens, find_leaving
from kvjax.cache.context_parallel.placement import NewTokens
from kvjax.cache.context_parallel.select import Choice, Rows
from kvjax.cache.context_parallel.shared_params import SharedParams, by_rank
from kvjax.cache.context_parallel.victims import LocalVictim
from kvjax.cache.groups import RANK, Group
from kvjax.cache.slots import empty_stats
from kvjax.cache.state import LayerKV
from kvjax.cache.step import evict
from kvjax.cache.step.operands import Part, operands, problems, ranked_vectors
from kvjax.cache.step.pool import KeyRotation, Pool
from kvjax.numerics.rope import Rope
from kvjax.numerics.statistics import by_name
from kvjax.parallel import slot_reductions
from kvjax.storage.side import Sides

Array = jax.Array
Columns = Mapping[str, Array]


class SelectionInputs(NamedTuple):
    """The inputs of a selection besides the step's query.

    Attributes:
      guess: [B, H, 1, D] the query of a selection that looks ahead, rotated; None = the query itself.
      skew: [K, D, D] of these heads, see `kvjax.models.skew`; None = the identity.
    """

    guess: Array | None
    skew: Array | None


class AttendedStep(NamedTuple):
    """A step on one device when its attention is complete.

    Attributes:
      output: [B, K, G, n, D].
      layer: the slots that the policy ranks, with the statistics after the step and the positions before it. The marks
        of blocks count from this device's first slot.
      new_tokens: the step's own tokens, with their statistics.
      gathered: what the devices told each other.
      leaving: the tokens that leave the residual, or None.
      ranked: keys and values [B, K, S_i, D] of each store and of the own tokens, as policies look at them.
      choice: the slots that a selection chose, or None.
      sides: what keys and values share.
      first: int32, this device's first slot, of a layout of blocks.
      local_victim: the slot of this device that would be evicted first, where it was known before attention, so that
        `GatheredState.local_victims` has that of all devices; otherwise None.
    """

    output: Array
    layer: LayerKV
    new_tokens: NewTokens
    gathered: GatheredState
    leaving: LeavingTokens | None
    ranked: tuple[tuple[Array, ...], tuple[Array, ...]]
    choice: Choice | None
    sides: Sides
    first: Array
    local_victim: LocalVictim | None


def attend(
    query: Array,
    key: Array,
    value: Array,
    layer: LayerKV,
    rows: Rows,
    shared: SharedParams,
    layer_index: Array,
    selection_inputs: SelectionInputs,
    *,
    group: Group,
    axes: slot_reductions.Across,
    rope: Rope | None,
    **options: Any,
) -> AttendedStep:
    """Attends to the slots of all devices and to the step's own tokens.

    Args:
      query: [B, K, G, n, D].
      key: [B, K, n, D], as it is held.
      value: [B, K, n, D].
      layer: of this device.
      rows: the rows.
      shared: what the vectors of all slots share.
      layer_index: int32 index of the layer.
      selection_inputs: what a selection chooses by.
      group: of heads.
      axes: that slots and heads are divided over.
      rope: the layer's rotary embedding.
      options: ``scale``, ``soft_cap`` and ``window`` of `kvjax.cache.context_parallel.step.step`.
    """
    own = _own(key, value, rows, group)
    layer, first = _local(layer, group, axes)
    sizes = [layer.position.shape[2]]
    if len(layer.stores) > 1:
        sizes = [jax.tree.leaves(store["value"])[0].shape[2] for store in layer.stores]
    # [B, K, S_i] of each store
    positions = store_order.separated(layer.position, sizes)
    sides = {**shared.sides, **layer.sides}
    pool = Pool(layer, (key, value), jnp.concatenate([layer.position, own.position], axis=2), {}, {}, sides)
    ranks = None
    if group.holds_ranks:
        ranks = position_ranks.of_step(layer, own.position, sizes, axes)
        own = own._replace(stats=own.stats | {RANK: ranks.each[-1].astype(jnp.float32)})
        layer = position_ranks.counted(layer, own.position)
    rotation = None if rope is None or shared.frequencies is None else KeyRotation(rope, shared.frequencies)
    to_ranks = by_rank((*positions, own.position), rows, group, rope, ranks)
    held = operands(pool, attention.ungroup(query), group, rotation, to_ranks)
    # XLA removes what no policy or selection looks at.
    ranked = ranked_vectors(pool, group, rotation, held)
    read, choice = positions, None
    if select.chooses(group, key.shape[2]):
        by = held.query if selection_inputs.guess is None else attention.ungroup(selection_inputs.guess)
        choice = select.choose(
            layer, ranked[0], own, by, rows, layer_index, group, axes, skew=selection_inputs.skew, **options
        )
        layer, read = layer.replace(index=choice.index), choice.positions
        first_key, first_value = choice.fetched(pool, group, held.keys, held.values)
        held = held._replace(keys=(first_key, *held.keys[1:]), values=(first_value, *held.values[1:]))
    parts, maps = problems(
        held.query, tuple(map(Part, held.keys, held.values, (*read, own.position))),
        _log_weights(layer, own, sizes, group), pool, group,
        query_position=rows.position, prompt=rows.prompt, group_reduce=group.policy.group_reduce, **options,
    )  # fmt: skip
    maps = [attention.Mapped()] * len(parts) if maps is None else maps
    newest = jnp.max(rows.position, axis=1)
    # What leaves the residual leaves an empty slot, whether it is encoded or evicted.
    leaving = find_leaving(positions[1], newest, key.shape[2], group.storage) if group.storage.divided else None
    local_victim = protected_victim.victim_before_attention(layer, own, leaving, ranked, rows, layer_index, group, axes)
    gathered = _gathered_state(layer, positions, parts[:-1], maps[:-1], leaving, newest, local_victim, group, axes)
    output, columns = _combined(gathered, parts)
    if choice is not None:
        columns[0] = choice.spread(columns[0], sizes[0])
    layer, own = _observed(columns, layer, own, rows, group)
    output = output.astype(value.dtype)
    return AttendedStep(output, layer, own, gathered, leaving, ranked, choice, sides, first, local_victim)


def _own(key: Array, value: Array, rows: Rows, group: Group) -> NewTokens:
    """Returns the step's own tokens, with empty statistics."""
    batch, kv_heads, n, _ = key.shape
    # [B, K, n]
    position = jnp.broadcast_to(rows.position[:, None], (batch, kv_heads, n))
    return NewTokens(key, value, position, empty_stats(group.needs, group.remembers, (batch, kv_heads, n)))


def _local(layer: LayerKV, group: Group, axes: slot_reductions.Across) -> tuple[LayerKV, Array]:
    """Returns a layer as this device sees it, and its first slot; see `AttendedStep`.

    Args:
      layer: of this device.
      group: of heads.
      axes: that slots are divided over.
    """
    first = jnp.int32(0)
    if group.arrangement.in_order:
        first = write_blocks.first_slot(layer, axes)
        layer = layer.replace(marks=write_blocks.shifted(layer.marks, -first))
    return layer, first


def _log_weights(layer: LayerKV, own: NewTokens, sizes: list[int], group: Group) -> Sequence[Array | None]:
    """Returns what a merge adds to the logits of each store and of the step's own tokens, [B, K, S_i] or None each."""
    merge = group.policy.merge
    if merge is None or (log_weight := merge.log_weight(layer.stats)) is None:
        return [None] * (len(sizes) + 1)
    return [*store_order.separated(log_weight, sizes), merge.log_weight(own.stats)]


def _gathered_state(
    layer: LayerKV,
    positions: Sequence[Array],
    parts: Sequence[attention.Problem],
    maps: Sequence[attention.Mapped],
    leaving: LeavingTokens | None,
    newest: Array,
    local_victim: LocalVictim | None,
    group: Group,
    axes: slot_reductions.Across,
) -> GatheredState:
    """Gathers what each device knows of its slots.

    Args:
      layer: of this device.
      positions: [B, K, S_i] int32 of each store.
      parts: attention to each store.
      maps: of each.
      leaving: the tokens that leave the residual, or None.
      newest: [B] int32 newest position of each row.
      local_victim: see `AttendedStep`.
      group: of heads.
      axes: that slots are divided over.
    """
    storage = group.storage
    free, more = [gathered_state.empty_slots(each) for each in positions], None
    if leaving is not None:
        free[1] += jnp.sum(leaving.position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
        more = leaving.vectors(layer.stores[1])
    if group.arrangement.in_order:
        more = write_blocks.older(layer.position, newest, storage).astype(jnp.float32)
    live = gathered_state.live_slots(layer.position)
    bits = None if local_victim is None else local_victim.bits
    return gathered_state.gather_state(parts, maps, live, jnp.concatenate(free, axis=2), axes.slots, more, bits)


def _combined(gathered: GatheredState, parts: Sequence[attention.Problem]) -> tuple[Array, list[dict[str, Array]]]:
    """Returns the output of all slots, [B, K, G, n, D], and the columns of each part.

    Args:
      gathered: what the devices told each other.
      parts: attention to each store of this device, and to the step's own tokens, which every device has.
    """
    combined = attention.combine(*gathered.parts, attention.attend(parts[-1], "xla"))
    lse = combined.lse
    assert lse is not None
    seen = gathered.seen + attention.count_seen(parts[-1])
    return combined.output, [attention.column_sums(each, lse, seen, "xla") for each in parts]


def _observed(
    columns: Sequence[dict[str, Array]], layer: LayerKV, own: NewTokens, rows: Rows, group: Group
) -> tuple[LayerKV, NewTokens]:
    """Returns the slots that the policy ranks, and the step's own tokens, with the statistics after the step.

    Args:
      columns: of each store, and of the own tokens.
      layer: of this device.
      own: the step's own tokens.
      rows: the rows.
      group: of heads.
    """
    zeros = {s.name: jnp.zeros((), jnp.float32) for s in by_name(group.needs) if s.of_selection}
    queries = jnp.sum(rows.position >= 0, axis=1, dtype=jnp.int32)

    def after(columns: Sequence[Columns], position: Array, stats: dict[str, Array]) -> dict[str, Array]:
        whole = {name: jnp.concatenate([each[name] for each in columns], axis=2) for name in columns[0]}
        none = {name: jnp.broadcast_to(zero, position.shape) for name, zero in zeros.items()}
        return evict.observe(stats, group.needs, whole | none, queries)

    layer = layer.replace(stats=after(columns[:-1], layer.position, layer.stats))
    return layer, own._replace(stats=after(columns[-1:], own.position, own.stats))
