"""A step of a layer whose slots are divided over devices: each attends to its own slots and ranks them.

Two collectives join the devices, whatever the number of slots. The first gathers the partial outputs, their
log-sum-exps and the number of slots that are in use; the outputs are then combined, and each device computes the
statistics of its slots from the joined log-sum-exps. The second gathers each device's slot of lowest priority. The
lowest of all is evicted, and the step's token takes its place, on that device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax import across, attention, sharding
from kvjax.cache import evict, exchange, slotwise
from kvjax.cache.groups import Group
from kvjax.cache.pool import Pool, pieces
from kvjax.cache.slots import empty_stats, forget, write
from kvjax.cache.state import EMPTY, Block, LayerKV
from kvjax.kernels.coded import as_array
from kvjax.policies.base import View
from kvjax.policies.components import Everything
from kvjax.policies.window import First
from kvjax.rope import Rope
from kvjax.storage import store as held
from kvjax.storage.base import UNROTATED
from kvjax.storage.layouts import slots as single_slots

Array = jax.Array
HEADS = ("batch", "kv_heads")


def refuses(group: Group, kv_heads: int, dim: int) -> str | None:
    """Returns why the slots of a group are not divided over devices, or None if they can be.

    Args:
      group: with its stores.
      kv_heads: KV heads of the group.
      dim: features of a head.
    """
    storage, policy = group.storage, group.policy
    if storage.on_host:
        return f"storage {storage.label} is in host memory"
    if storage.layout != single_slots or len(group.slots) != 1:
        return f"storage {storage.label} holds a token in one of several stores, or in a block"
    if storage.sides or storage.shortened or storage.frame == UNROTATED or storage.joint_heads > 1:
        return f"storage {storage.label} holds vectors that share something, or that attention changes first"
    if policy.positions != "original" and not _known_ranks(group):
        return f"positions={policy.positions!r} ranks all slots of a head in each step"
    if not group.selection.reads_all:
        return f"selection {group.selection.name} chooses among all slots"
    if policy.merge is not None:
        return f"the merge of {policy.name} compares what is evicted with all slots"
    if policy.page > 1:
        return "whole pages are evicted"
    if policy.budget is None:
        return None
    return slotwise.reason(policy, group.needs, group.heads, kv_heads, dim) or None


def _known_ranks(group: Group) -> bool:
    """Returns whether positions alone say what is held, and so the rank of each slot: the first and the newest."""
    policy = group.policy
    first = isinstance(policy.scope, First | Everything)
    return first and policy.importance.by_age and group.evicts_one and policy.when == "step" and policy.merge is None


class Rows(NamedTuple):
    """What a step knows of its rows; see `Block`.

    Attributes:
      position: [B, n] int32.
      prompt: [B] int32.
      budget: [B] int32 slots per KV head; zeros if the group keeps everything.
    """

    position: Array
    prompt: Array
    budget: Array


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
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> tuple[Array, LayerKV]:
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
      scale: of the logits.
      soft_cap: of the logits.
      window: the layer's sliding window.

    Returns:
      The output [B, H, n, D], and the layer afterwards.
    """
    batch, kv_heads, n, dim = key.shape
    mesh = jax.sharding.get_abstract_mesh()
    grouped = query.reshape(batch, kv_heads, -1, n, dim)
    rows = Rows(block.position, block.prompt, jnp.zeros_like(block.prompt) if budget is None else budget)
    of_heads = tuple(name for name in sharding.mesh_axes("kv_heads", kv_heads, mesh) if mesh.shape[name] > 1)
    axes = across.Across(slots=group.slot_axes, heads=of_heads)

    def specs(tree: Any, *names: str) -> Any:
        return jax.tree.map(lambda leaf: sharding.spec(names, leaf.shape[: len(names)], mesh), tree)

    by_head, by_slot = specs(key, *HEADS), specs(layer, *HEADS, "slots")
    run = functools.partial(_step, group=group, axes=axes, rope=rope, scale=scale, soft_cap=soft_cap, window=window)
    number = jnp.zeros((), jnp.int32) if block.layer is None else block.layer
    output, after = jax.shard_map(
        run, mesh=mesh, in_specs=(by_head, by_head, by_head, by_slot, specs(rows, "batch"), PartitionSpec()),
        out_specs=(by_head, by_slot), check_vma=False,
    )(grouped, key, value, layer, rows, number)  # fmt: skip
    return attention.ungroup(output), after


def _step(
    query: Array,
    key: Array,
    value: Array,
    layer: LayerKV,
    rows: Rows,
    number: Array,
    *,
    group: Group,
    axes: across.Across,
    rope: Rope | None,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> tuple[Array, LayerKV]:
    """Runs `step` on one device, for its rows, heads and slots; the step's own tokens are on every device."""
    batch, kv_heads, size = layer.position.shape
    n = key.shape[2]
    newest = jnp.max(rows.position, axis=1)
    # [B, K, n]
    own_position = jnp.broadcast_to(rows.position[:, None], (batch, kv_heads, n))
    fresh = empty_stats(group.needs, group.policy.remembers, (batch, kv_heads, n))
    pool = Pool(layer, (key, value), jnp.concatenate([layer.position, own_position], axis=2), {}, {}, {})
    keys, values = pieces(pool, group)
    stored = [as_array(each) for each in keys], [as_array(each) for each in values]
    query = attention.ungroup(query)
    if rope is not None and group.policy.positions == "cache":
        query, keys = _rotated_by_rank(query, stored[0], (layer.position, own_position), rows, group, rope)
    here, own = (
        attention.problem(
            query, each, other, key_position=position, query_position=rows.position,
            needs=group.reports, scale=scale, soft_cap=soft_cap, window=window, prompt=rows.prompt,
            group_reduce=group.policy.group_reduce,
        )
        for each, other, position in zip(keys, values, (layer.position, own_position), strict=True)
    )  # fmt: skip
    parts, seen, live, free = exchange.gathered(here, axes.slots)
    combined = attention.combine(*parts, attention.attend(own, "xla"))
    lse = combined.lse
    assert lse is not None
    seen = seen + attention.count_seen(own)
    zeros = {s.name: jnp.zeros((), jnp.float32) for s in group.needs if s.of_selection}
    queries = jnp.sum(rows.position >= 0, axis=1, dtype=jnp.int32)

    def observed(problem: attention.Problem, stats: dict[str, Array]) -> dict[str, Array]:
        columns = attention.column_sums(problem, lse, seen, "xla")
        none = {name: jnp.broadcast_to(zero, problem.key_position.shape) for name, zero in zeros.items()}
        return evict.observe(stats, group.needs, columns | none, queries)

    stats, own_stats = observed(here, layer.stats), observed(own, fresh)
    output = combined.output.astype(value.dtype)
    if group.policy.budget is None:
        target = exchange.places(layer.position, own_position >= 0, free, axes.slots)
        return output, _written(layer, stats, key, value, own_position, own_stats, target, group)
    # The step's own tokens count once, on the first device.
    first = jax.lax.axis_index(axes.slots) == 0
    counted = jnp.where(first, own_position, EMPTY)
    view = View(
        jnp.concatenate([layer.position, counted], axis=2),
        jax.lax.stop_gradient(jnp.concatenate(stored[0], axis=2)),
        jax.lax.stop_gradient(jnp.concatenate(stored[1], axis=2)),
        newest, rows.budget, rows.prompt, number, group.decoding, _heads(group, kv_heads, axes.heads),
    )  # fmt: skip
    both = {name: jnp.concatenate([stats[name], own_stats[name]], axis=2) for name in stats}
    with across.devices(axes):
        if n == 1 and group.evicts_one and group.policy.when == "step":
            total = live + (newest >= 0).astype(jnp.int32)[:, None, None]
            lowest = exchange.lowest_position(group, both, view, total, axes.slots)
            target = exchange.place_of(layer.position, own_position, lowest, free, axes.slots)
            return output, _written(layer, stats, key, value, own_position, own_stats, target, group)
        victim = evict.victims(group.policy, both, view, one=False)
    position = jnp.where(victim[:, :, :size], EMPTY, layer.position)
    # [C, B, K, n + 1]: which own tokens stay, as the first device knows, and the number of empty slots
    stays = (counted >= 0) & ~victim[:, :, size:]
    gathered = jax.lax.all_gather(
        jnp.concatenate([stays.astype(jnp.int32), exchange.empty_slots(position)], axis=2), axes.slots
    )
    target = exchange.places(position, gathered[0, :, :, :n] > 0, gathered[:, :, :, n:], axes.slots)
    layer = layer.replace(position=position)
    return output, _written(layer, forget(stats, position), key, value, own_position, own_stats, target, group)


def _rotated_by_rank(
    query: Array, keys: list[Array], positions: tuple[Array, Array], rows: Rows, group: Group, rope: Rope
) -> tuple[Array, tuple[Array, ...]]:
    """Rotates queries and keys to their ranks among the live slots of their head, on all devices.

    What is held are the first positions, which the scope protects, and the newest; see `_known_ranks`.

    Args:
      query: [B, H, n, D], not rotated.
      keys: [B, K, S, D] of this device's slots and of the step's own tokens, not rotated.
      positions: [B, K, S] int32 of both.
      rows: the rows.
      group: the policy.
      rope: the layer's rotary embedding.
    """
    sinks = group.policy.scope.count(0)
    # [B]: the tokens before the step, those that are held of them, and those that are not
    before = jnp.maximum(rows.position[:, 0], 0)
    kept = jnp.minimum(before, rows.budget)
    gone = (before - kept)[:, None, None]
    frequencies = rope.frequencies(kept + jnp.sum(rows.position >= 0, axis=1, dtype=jnp.int32))

    def rank(position: Array) -> Array:
        return jnp.where(position < sinks, position, position - gone)

    turned = (rope.rotate(key, rank(at), frequencies) for key, at in zip(keys, positions, strict=True))
    # [B, H, n]
    own = jnp.broadcast_to(rank(rows.position[:, None]), query.shape[:3])
    return rope.rotate(query, own, frequencies), tuple(turned)


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


def _written(
    layer: LayerKV,
    stats: dict[str, Array],
    key: Array,
    value: Array,
    own_position: Array,
    own_stats: dict[str, Array],
    target: Array,
    group: Group,
) -> LayerKV:
    """Writes the step's own tokens to slots [B, K, n] of this device."""
    storage, (store,) = group.storage, layer.stores
    made = held.encode(storage, key, value, value.dtype)
    store = jax.tree.map(lambda old, new: write(old, target, new), store, made)
    return layer.replace(
        position=write(layer.position, target, own_position),
        stores=(store,),
        stats={name: write(old, target, own_stats[name]) for name, old in stats.items()},
    )
