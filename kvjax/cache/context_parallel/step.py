"""A step of a layer whose slots are divided over devices: each attends to its own slots and ranks them.

A few collectives join the devices, two in most steps (docs/meshes.md), whatever the number of slots. The first gathers
the partial outputs, their log-sum-exps and the number of slots that are in use; the outputs are then combined, and each
device computes the statistics of its slots from the joined log-sum-exps. The second gathers each device's slot of
lowest priority. The lowest of all is evicted, and the step's token takes its place, on that device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax import attention
from kvjax.cache.context_parallel import attend, evict, select
from kvjax.cache.context_parallel.attend import Hint
from kvjax.cache.context_parallel.operands import Common
from kvjax.cache.context_parallel.select import Looked, Rows
from kvjax.cache.groups import Group
from kvjax.cache.slots import AXES, divided
from kvjax.cache.state import Block, LayerKV
from kvjax.numerics.rope import Rope
from kvjax.parallel import sharding, slot_reductions

Array = jax.Array
HEADS = AXES[:2]


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
    ahead = hint.guess is not None and group.selection.ahead and select.chooses(group, n)
    hint = hint._replace(guess=hint.guess.reshape(grouped.shape) if ahead and hint.guess is not None else None)
    rows = Rows(block.position, block.prompt, jnp.zeros_like(block.prompt) if budget is None else budget)
    of_heads = tuple(name for name in sharding.mesh_axes("kv_heads", kv_heads, mesh) if mesh.shape[name] > 1)
    axes = slot_reductions.Across(slots=group.slot_axes, heads=of_heads)

    def specs(tree: Any, *names: str) -> Any:
        return jax.tree.map(lambda leaf: sharding.spec(names, leaf.shape[: len(names)], mesh), tree)

    by_head = specs(key, *HEADS)
    by_slot = jax.tree.map(lambda leaf, count: specs(leaf, *AXES[:count]), layer, divided(layer, group.per_head))
    shared = Common(specs(common.sides, "kv_heads"), specs(common.frequencies, "batch"))
    of_hint = Hint(specs(hint.guess, *HEADS), specs(hint.skew, "kv_heads"))
    run = functools.partial(_step, group=group, axes=axes, rope=rope, scale=scale, soft_cap=soft_cap, window=window)
    number = jnp.zeros((), jnp.int32) if block.layer is None else block.layer
    looks = Looked(by_slot.position, by_slot.position) if select.chooses(group, n) else None
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
    axes: slot_reductions.Across,
    rope: Rope | None,
    **options: Any,
) -> tuple[Array, LayerKV, Looked | None]:
    """Runs `step` on one device, for its rows, heads and slots; the step's own tokens are on every device."""
    observed = attend.attend(
        query, key, value, layer, rows, common, number, hint, group=group, axes=axes, rope=rope, **options
    )
    after = evict.settle(observed, rows, number, group, axes, hint.skew)
    return observed.output, after, None if observed.choice is None else observed.choice.looked
