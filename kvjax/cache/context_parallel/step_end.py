"""The end of a step of a layer whose slots are divided over devices: what is evicted, and where its tokens go."""

import jax
import jax.numpy as jnp

from kvjax.cache.context_parallel import merge as folding
from kvjax.cache.context_parallel import policy_view, position_ranks, protected_victim, select, victims, write_blocks
from kvjax.cache.context_parallel.attend import AttendedStep
from kvjax.cache.context_parallel.placement import PendingWrites
from kvjax.cache.context_parallel.select import Rows
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, FAR, LayerKV
from kvjax.cache.step import evict
from kvjax.numerics.top_k import CANDIDATES
from kvjax.parallel import slot_reductions
from kvjax.policies.base import View

Array = jax.Array
Stats = dict[str, Array]


def finish(
    step: AttendedStep, rows: Rows, layer_index: Array, group: Group, axes: slot_reductions.Across, skew: Array | None
) -> LayerKV:
    """Returns the layer of this device after a step.

    Args:
      step: when its attention is complete.
      rows: the rows.
      layer_index: int32 index of the layer.
      group: of heads.
      axes: that slots and heads are divided over.
      skew: see `kvjax.cache.context_parallel.attend.SelectionInputs`.
    """
    layer, own, newest = step.layer, step.new_tokens, jnp.max(rows.position, axis=1)
    if group.arrangement.in_order:
        return write_blocks.write(layer, own, step.gathered, newest, group, step.first, step.sides)
    known = step.gathered
    moves = PendingWrites(layer, own, step.leaving, known.more, known.free, newest, group, axes.slots, step.sides)
    after = _evicted(step, moves, rows, layer_index, axes)
    if step.choice is None:
        return after
    index = select.with_entries(after, own, step.ranked[0][-1], step.leaving, known.more, group, skew)
    return after.replace(index=index)


def _evicted(
    step: AttendedStep, moves: PendingWrites, rows: Rows, layer_index: Array, axes: slot_reductions.Across
) -> LayerKV:
    """Evicts, and writes the step's own tokens; for the arguments see `finish`."""
    group, own = moves.group, moves.new_tokens
    if group.policy.budget is None:
        return moves.without_evictions()
    view = policy_view.view_of(moves.layer, own, step.ranked, rows, layer_index, group, axes)
    both = policy_view.both_stats(moves.layer, own)
    if own.key.shape[2] == 1 and group.policy.when == "step":
        return _evict_one(step, moves, both, view, axes)
    return _evict_several(step, moves, both, view, axes)


def _evict_one(
    step: AttendedStep, moves: PendingWrites, stats: Stats, view: View, axes: slot_reductions.Across
) -> LayerKV:
    """Writes the only token of a step, to the slot of what is evicted.

    Args:
      step: when its attention is complete.
      moves: what moves.
      stats: [B, K, S + 1, ...] of this device's slots and of the own token.
      view: the same slots.
      axes: that slots and heads are divided over.
    """
    group, merge = moves.group, moves.group.policy.merge
    total = step.gathered.live + (moves.newest >= 0).astype(jnp.int32)[:, None, None]
    with slot_reductions.devices(axes):
        if step.local_victim is not None:
            evicted = victims.global_victim(step.gathered.local_victims, step.local_victim, total)
        else:
            sent = victims.nothing if merge is None else folding.sender(moves, *step.ranked)
            evicted = protected_victim.find_victim(group, stats, view, total, axes, moves.packed(), sent)
        lowest = evicted.position
        if not group.evicts_one:
            moves, lowest = protected_victim.evicted_before(moves, stats, view, total, lowest, axes)
        if merge is not None:
            victim = (view.position == lowest) & (lowest >= 0)
            moves = folding.fold(moves, *step.ranked, victim, evicted, view)
    after = moves.with_eviction(lowest, evicted.total)
    return position_ranks.after_eviction(after, jnp.where(lowest >= 0, lowest, FAR)) if group.holds_ranks else after


def _evict_several(
    step: AttendedStep, moves: PendingWrites, stats: Stats, view: View, axes: slot_reductions.Across
) -> LayerKV:
    """Writes the tokens of a block, or of a step after which any number is evicted; see `_evict_one`."""
    group, policy, new = moves.group, moves.group.policy, moves.new_tokens
    size, n = moves.layer.position.shape[2], new.position.shape[2]
    evicted = None
    with slot_reductions.devices(axes):
        # A budget that stays as it is frees a slot for each token of the step.
        max_victims = n if group.evicts_one and policy.when == "step" and n <= CANDIDATES else None
        victim = evict.victims(policy, stats, view, one=False, max_victims=max_victims)
        if policy.merge is not None:
            evicted_pairs = folding.gather_victims(moves, *step.ranked, victim, view)
            moves = folding.fold(moves, *step.ranked, victim, evicted_pairs, view)
        if group.holds_ranks and policy.when == "step":
            evicted = position_ranks.evicted_positions(view.position, victim, n)
    position = jnp.where(victim[:, :, :size], EMPTY, moves.layer.position)
    after = moves.after_evictions(position, (view.position[:, :, size:] >= 0) & ~victim[:, :, size:])
    # Where a compressor evicts any number of slots, the prompt has ended, and `convert` ranks what is left.
    return after if evicted is None else position_ranks.after_eviction(after, evicted)
