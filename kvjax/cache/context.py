"""A step of a layer whose slots are divided over devices: each attends to its own slots and ranks them.

A few collectives join the devices, two in most steps (docs/meshes.md), whatever the number of slots. The first gathers
the partial outputs, their log-sum-exps and the number of slots that are in use; the outputs are then combined, and each
device computes the statistics of its slots from the joined log-sum-exps. The second gathers each device's slot of
lowest priority. The lowest of all is evicted, and the step's token takes its place, on that device.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax import across, attention, sharding
from kvjax.cache import (
    arrange,
    candidates,
    choosing,
    demoting,
    evict,
    exchange,
    folding,
    paging,
    placing,
    prompt_blocks,
    ranking,
    segmenting,
)
from kvjax.cache.blocks import PROMPT
from kvjax.cache.choosing import Looked, Rows
from kvjax.cache.groups import RANK, Group
from kvjax.cache.leaving import leaving
from kvjax.cache.operands import Common, operands, problems
from kvjax.cache.placing import Own
from kvjax.cache.pool import Pool
from kvjax.cache.slots import AXES, divided, empty_stats
from kvjax.cache.state import EMPTY, FAR, LIVE, Block, LayerKV
from kvjax.order import CANDIDATES
from kvjax.policies.base import View
from kvjax.rope import Rope
from kvjax.storage.layouts import Blocks, Segments, Tiers

Array = jax.Array
HEADS = AXES[:2]


class Hint(NamedTuple):
    """What a selection chooses by, besides the step's query.

    Attributes:
      guess: [B, H, 1, D] the query of a selection that looks ahead, rotated; None = the query itself.
      skew: [K, D, D] of these heads, see `kvjax.models.skew`; None = the identity.
    """

    guess: Array | None
    skew: Array | None


def step(
    layer: LayerKV,
    query: Array,
    key: Array,
    value: Array,
    *,
    block: Block,
    group: Group,
    budget: Array | None,
    rope: Rope | None,
    common: Common,
    hint: Hint,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> tuple[Array, LayerKV, Looked | None]:
    """Runs a step of one group of heads.

    Args:
      layer: the slots, whose number divides into equal parts.
      query: [B, H, n, D], rotated, unless ``positions="cache"``.
      key: [B, K, n, D], as it is held.
      value: [B, K, n, D].
      block: the tokens of the step.
      group: see `kvjax.cache.step.step`.
      budget: [B] int32 or None.
      rope: the layer's rotary embedding.
      common: what the vectors of all slots share.
      hint: what a selection chooses by.
      scale: of the logits.
      soft_cap: of the logits.
      window: the layer's sliding window.

    Returns:
      The output [B, H, n, D], the layer afterwards, and which slots are read; None if all are.
    """
    batch, kv_heads, n, dim = key.shape
    mesh = jax.sharding.get_abstract_mesh()
    grouped = query.reshape(batch, kv_heads, -1, n, dim)
    ahead = hint.guess is not None and group.selection.ahead and choosing.chooses(group, n)
    hint = hint._replace(guess=hint.guess.reshape(grouped.shape) if ahead and hint.guess is not None else None)
    rows = Rows(block.position, block.prompt, jnp.zeros_like(block.prompt) if budget is None else budget)
    of_heads = tuple(name for name in sharding.mesh_axes("kv_heads", kv_heads, mesh) if mesh.shape[name] > 1)
    axes = across.Across(slots=group.slot_axes, heads=of_heads)

    def specs(tree: Any, *names: str) -> Any:
        return jax.tree.map(lambda leaf: sharding.spec(names, leaf.shape[: len(names)], mesh), tree)

    by_head = specs(key, *HEADS)
    by_slot = jax.tree.map(lambda leaf, count: specs(leaf, *AXES[:count]), layer, divided(layer, group.per_head))
    shared = Common(specs(common.sides, "kv_heads"), specs(common.frequencies, "batch"))
    of_hint = Hint(specs(hint.guess, *HEADS), specs(hint.skew, "kv_heads"))
    run = functools.partial(_step, group=group, axes=axes, rope=rope, scale=scale, soft_cap=soft_cap, window=window)
    number = jnp.zeros((), jnp.int32) if block.layer is None else block.layer
    looks = Looked(by_slot.position, by_slot.position) if choosing.chooses(group, n) else None
    output, after, looked = jax.shard_map(
        run, mesh=mesh,
        in_specs=(by_head, by_head, by_head, by_slot, specs(rows, "batch"), shared, PartitionSpec(), of_hint),
        out_specs=(by_head, by_slot, looks), check_vma=False,
    )(grouped, key, value, layer, rows, common, number, hint)  # fmt: skip
    return attention.ungroup(output), after, looked


def _step(
    query: Array,
    key: Array,
    value: Array,
    layer: LayerKV,
    rows: Rows,
    common: Common,
    number: Array,
    hint: Hint,
    *,
    group: Group,
    axes: across.Across,
    rope: Rope | None,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> tuple[Array, LayerKV, Looked | None]:
    """Runs `step` on one device, for its rows, heads and slots; the step's own tokens are on every device."""
    batch, kv_heads, size = layer.position.shape
    n = key.shape[2]
    newest = jnp.max(rows.position, axis=1)
    # [B, K, n]
    own_position = jnp.broadcast_to(rows.position[:, None], (batch, kv_heads, n))
    own = Own(key, value, own_position, empty_stats(group.needs, group.remembers, (batch, kv_heads, n)))
    several = len(layer.stores) > 1
    sizes = [jax.tree.leaves(store["value"])[0].shape[2] for store in layer.stores] if several else [size]
    in_blocks, tiers, in_segments = (isinstance(group.storage.layout, each) for each in (Blocks, Tiers, Segments))
    # Stores whose slots the policy does not rank, and parts that every device has.
    unranked, known, before = group.unranked_stores, 2 if in_segments else 1, layer
    if in_segments:
        layer = segmenting.with_window(layer, own_position)
    if in_blocks:
        # Slots count from this device's first one.
        offset = jax.lax.axis_index(axes.slots) * _later(layer, group).position.shape[2]
        layer = layer.replace(marks=_shifted(layer.marks, -offset))
    # [B, K, S_i] of each store
    positions = arrange.separated(layer.position, sizes)
    sides = {**common.sides, **layer.sides}
    pool = Pool(layer, (key, value), jnp.concatenate([layer.position, own_position], axis=2), {}, {}, sides)
    ranks = None
    if group.holds_ranks:
        ranks = ranking.of_step(layer, own_position, sizes, axes)
        own = own._replace(stats=own.stats | {RANK: ranks.each[-1].astype(jnp.float32)})
        layer = ranking.counted(layer, own_position)
    held = operands(pool, attention.ungroup(query), (*positions, own_position), rows, group, rope, common, ranks)
    merge = group.policy.merge
    weights: Sequence[Array | None] = [None] * len(held.keys)
    if merge is not None and (log_weight := merge.log_weight(layer.stats)) is not None:
        weights = [*arrange.separated(log_weight, sizes), merge.log_weight(own.stats)]
    read, choice = positions, None
    if choosing.chooses(group, n):
        by = held.query if hint.guess is None else attention.ungroup(hint.guess)
        choice = choosing.choose(
            layer, held.stored[0], own, by, rows, number, group, axes, scale=scale, soft_cap=soft_cap, window=window,
            skew=hint.skew,
        )  # fmt: skip
        layer, read = layer.replace(index=choice.index), choice.positions
        first_key, first_value = choice.fetched(pool, group, held.keys, held.values)
        held = held._replace(keys=(first_key, *held.keys[1:]), values=(first_value, *held.values[1:]))
    parts, maps = problems(
        held, (*read, own_position), weights, pool, group, query_position=rows.position, scale=scale, soft_cap=soft_cap,
        window=window, prompt=rows.prompt,
    )  # fmt: skip
    # What leaves the residual leaves an empty slot, whether it is encoded or evicted.
    goes = leaving(positions[1], newest, n, group.storage) if group.storage.divided else None
    free = [exchange.empty_slots(each) for each in positions[unranked:]]
    paged = group.evicts and group.policy.page > 1
    if paged:
        free = [paging.empty_slots(layer.position, group.policy.page)]
    if goes is not None:
        free[1] += jnp.sum(goes.position >= 0, axis=2, keepdims=True, dtype=jnp.int32)
    more = None if goes is None else goes.vectors(layer.stores[1])
    if in_blocks:
        more = placing.older(layer.position, newest, group.storage).astype(jnp.float32)
    parts = [each.without_statistics() for each in parts[:unranked]] + parts[unranked:]
    live = exchange.live_slots(
        _later(layer, group).position if in_blocks else positions[1] if tiers else layer.position
    )
    told = exchange.gathered(parts[:-known], maps[:-known], live, jnp.concatenate(free, axis=2), axes.slots, more)
    combined = attention.combine(*told.parts, *(attention.attend(each, "xla") for each in parts[-known:]))
    lse = combined.lse
    assert lse is not None
    seen = sum((attention.count_seen(each) for each in parts[-known:]), start=told.seen)
    columns = [attention.column_sums(each, lse, seen, "xla") for each in parts]
    if choice is not None:
        columns[0] = choice.spread(columns[0], sizes[0])
    looked = None if choice is None else choice.looked
    zeros = {s.name: jnp.zeros((), jnp.float32) for s in group.needs if s.of_selection}
    queries = jnp.sum(rows.position >= 0, axis=1, dtype=jnp.int32)

    def observed(columns: Sequence[dict[str, Array]], position: Array, stats: dict[str, Array]) -> dict[str, Array]:
        whole = {name: jnp.concatenate([each[name] for each in columns], axis=2) for name in columns[0]}
        none = {name: jnp.broadcast_to(zero, position.shape) for name, zero in zeros.items()}
        return evict.observe(stats, group.needs, whole | none, queries)

    if tiers:
        layer = layer.replace(position=positions[1], stores=layer.stores[1:])
    layer = layer.replace(stats=observed(columns[unranked:-1], layer.position, layer.stats))
    own = own._replace(stats=observed(columns[-1:], own_position, own.stats))
    output = combined.output.astype(value.dtype)
    if in_blocks:
        write = prompt_blocks.settle if prompt_blocks.apart(layer) else placing.in_blocks
        after = write(layer, own, told, newest, group, offset, sides)
        return output, after.replace(marks=_shifted(after.marks, offset)), looked
    if in_segments:
        return output, segmenting.settle(before, layer, own, group, sides, axes.slots), looked

    def settled(after: LayerKV) -> tuple[Array, LayerKV, Looked | None]:
        if choice is not None:
            index = choosing.with_entries(after, own, held.stored[0][-1], goes, told.more, group, hint.skew)
            after = after.replace(index=index)
        return output, after, looked

    moves = placing.Moves(layer, own, goes, told.more, told.free, newest, group, axes.slots, sides)
    if group.policy.budget is None:
        return settled(moves.without_evictions())
    about: dict[str, Any] = {
        "key": jax.lax.stop_gradient(jnp.concatenate(held.stored[0][unranked:], axis=2)),
        "value": jax.lax.stop_gradient(jnp.concatenate(held.stored[1][unranked:], axis=2)),
        "newest": newest, "budget": rows.budget, "prompt": rows.prompt, "layer": number, "decoding": group.decoding,
        "heads": _heads(group, kv_heads, axes.heads),
    }  # fmt: skip
    both = {name: jnp.concatenate([layer.stats[name], own.stats[name]], axis=2) for name in own.stats}
    if paged:
        return settled(paging.finish(moves, both, about, axes))
    # The step's own tokens count once, on the first device.
    first = jax.lax.axis_index(axes.slots) == 0
    counted = jnp.where(first, own_position, EMPTY)
    view = View(position=jnp.concatenate([layer.position, counted], axis=2), **about)
    if tiers:
        tier = demoting.Tier(layer, own, group, axes.slots, sides)
        return output, demoting.settle(before, tier, told, view, axes), looked
    with across.devices(axes):
        if n == 1 and group.policy.when == "step":
            total = told.live + (newest >= 0).astype(jnp.int32)[:, None, None]
            sent = exchange.nothing if merge is None else folding.sender(moves, *held.stored)
            evicted = candidates.lowest_position(group, both, view, total, axes, moves.packed(), sent)
            lowest, bits = evicted.position, evicted.total
            if not group.evicts_one:
                moves, lowest = candidates.evicted_before(moves, both, view, total, lowest, axes)
            if merge is not None:
                victim = (view.position == lowest) & (lowest >= 0)
                moves, bits = folding.fold(moves, *held.stored, victim, evicted, view)
            after = moves.with_eviction(lowest, bits)
            if group.holds_ranks:
                after = ranking.after_eviction(after, jnp.where(lowest >= 0, lowest, FAR))
            return settled(after)
        # A budget that stays as it is frees a slot for each token of the step.
        most = n if group.evicts_one and group.policy.when == "step" and n <= CANDIDATES else None
        victim = evict.victims(group.policy, both, view, one=False, most=most)
        if merge is not None:
            gone = folding.gathered(moves, *held.stored, victim, view)
            moves, _ = folding.fold(moves, *held.stored, victim, gone, view)
        evicted_at = None
        if group.holds_ranks and group.policy.when == "step":
            evicted_at = ranking.evicted_positions(view.position, victim, n)
    position = jnp.where(victim[:, :, :size], EMPTY, layer.position)
    after = moves.after_evictions(position, (counted >= 0) & ~victim[:, :, size:])
    # Where a compressor evicts any number of slots, the prompt has ended, and `convert` ranks what is left.
    return settled(after if evicted_at is None else ranking.after_eviction(after, evicted_at))


def _later(layer: LayerKV, group: Group) -> LayerKV:
    """Returns the slots of a layer in blocks that a step may write to."""
    return prompt_blocks.halves(layer, group.storage).later if prompt_blocks.apart(layer) else layer


def _shifted(marks: dict[str, Array], by: Array) -> dict[str, Array]:
    """Returns marks that count from another slot; that of the prompt's own blocks counts from the first of all."""
    return {name: mark if name in (PROMPT, LIVE) else mark + by for name, mark in marks.items()}


def _heads(group: Group, kv_heads: int, axes: tuple[str, ...]) -> tuple[int, ...] | Array | None:
    """Returns the model's indices of this device's KV heads; see `View`.

    Args:
      group: of heads.
      kv_heads: KV heads of the group on a device.
      axes: that heads are divided over.
    """
    if not axes:
        return group.heads
    first = jax.lax.axis_index(axes) * kv_heads
    if group.heads is None:
        return first + jnp.arange(kv_heads, dtype=jnp.int32)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(group.heads, jnp.int32), first, kv_heads)
