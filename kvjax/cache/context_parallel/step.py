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
from kvjax.cache.context_parallel import attend, select, step_end
from kvjax.cache.context_parallel.attend import SelectionInputs
from kvjax.cache.context_parallel.select import ReadMask, Rows
from kvjax.cache.context_parallel.shared_params import SharedParams
from kvjax.cache.groups import Group
from kvjax.cache.slots import AXES, divided
from kvjax.cache.state import EMPTY, Block, LayerKV
from kvjax.cache.step.interface import AttentionOperands, LayerArgs, StepInputs, add_to_prompt_index
from kvjax.numerics.rope import Rope
from kvjax.parallel import sharding, slot_reductions
from kvjax.typing import PyTree

Array = jax.Array
HEADS = AXES[:2]


def step(
    layer: LayerKV, inputs: StepInputs, block: Block, group: Group, budget: Array | None, args: LayerArgs
) -> tuple[Array, LayerKV, AttentionOperands]:
    """Runs a step of one group of heads; for the arguments see `kvjax.cache.step.step.step`.

    Args:
      layer: the slots, whose number divides into equal parts.
      inputs: the step's own tokens.
      block: the tokens of the step.
      group: the policy, storage and selection.
      budget: [B] int32 or None.
      args: of the layer.
    """
    if group.prompt_index is not None:
        layer = layer.replace(index=add_to_prompt_index(layer.index, group.prompt_index, inputs, block, args.skew))
    batch, kv_heads, n, dim = inputs.key.shape
    mesh = jax.sharding.get_abstract_mesh()
    grouped = inputs.query.reshape(batch, kv_heads, -1, n, dim)
    ahead = inputs.guess is not None and group.selection.ahead and select.chooses(group, n)
    guess = inputs.guess.reshape(grouped.shape) if ahead and inputs.guess is not None else None
    selection_inputs = SelectionInputs(guess, args.skew)
    shared = SharedParams(args.sides or {}, None if inputs.rotation is None else inputs.rotation.frequencies)
    rows = Rows(block.position, block.prompt, jnp.zeros_like(block.prompt) if budget is None else budget)
    of_heads = tuple(name for name in sharding.mesh_axes("kv_heads", kv_heads, mesh) if mesh.shape[name] > 1)
    axes = slot_reductions.Across(slots=group.slot_axes, heads=of_heads)

    def specs(tree: PyTree, *names: str) -> PyTree:
        return jax.tree.map(lambda leaf: sharding.spec(names, leaf.shape[: len(names)], mesh), tree)

    by_head = specs(inputs.key, *HEADS)
    by_slot = jax.tree.map(lambda leaf, count: specs(leaf, *AXES[:count]), layer, divided(layer, group.per_head))
    of_shared = SharedParams(specs(shared.sides, "kv_heads"), specs(shared.frequencies, "batch"))
    of_selection_inputs = SelectionInputs(
        specs(selection_inputs.guess, *HEADS), specs(selection_inputs.skew, "kv_heads")
    )
    options: dict[str, Any] = {"scale": inputs.scale, "soft_cap": args.soft_cap, "window": args.window}
    run: Any = functools.partial(_step, group=group, axes=axes, rope=args.rope, **options)
    layer_index = jnp.zeros((), jnp.int32) if block.layer is None else block.layer
    masks = ReadMask(by_slot.position, by_slot.position) if select.chooses(group, n) else None
    output, after, mask = jax.shard_map(
        run, mesh=mesh,
        in_specs=(
            by_head, by_head, by_head, by_slot, specs(rows, "batch"), of_shared, PartitionSpec(), of_selection_inputs,
        ),
        out_specs=(by_head, by_slot, masks), check_vma=False,
    )(grouped, inputs.key, inputs.value, layer, rows, shared, layer_index, selection_inputs)  # fmt: skip
    return attention.ungroup(output), after, _seen(inputs.query, layer, block, mask)


def _seen(query: Array, layer: LayerKV, block: Block, mask: ReadMask | None) -> AttentionOperands:
    """Returns the operands of attention without the keys, which are on several devices."""
    own = jnp.broadcast_to(block.position[:, None], (*layer.position.shape[:2], block.position.shape[1]))
    every = jnp.concatenate([layer.position, own], axis=2)
    if mask is None:
        return AttentionOperands(query, None, every, None, every)
    read = jnp.concatenate([jnp.where(mask.read, layer.position, EMPTY), own], axis=2)
    choice = jnp.pad(mask.chosen, ((0, 0), (0, 0), (0, own.shape[2])))
    return AttentionOperands(query, None, read, None, every, choice)


def _step(
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
) -> tuple[Array, LayerKV, ReadMask | None]:
    """Runs `step` on one device, for its rows, heads and slots; the step's own tokens are on every device."""
    observed = attend.attend(
        query,
        key,
        value,
        layer,
        rows,
        shared,
        layer_index,
        selection_inputs,
        group=group,
        axes=axes,
        rope=rope,
        **options,
    )
    after = step_end.finish(observed, rows, layer_index, group, axes, selection_inputs.skew)
    return observed.output, after, None if observed.choice is None else observed.choice.mask
