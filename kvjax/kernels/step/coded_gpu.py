"""A whole decoding step over a cache of codes in one kernel on a Hopper GPU: attend, observe, evict, append.

As `kvjax.kernels.step.gpu`, with codes that `kvjax.kernels.decode.codes_gpu` decodes. The step attends to its own token
exactly: its logit begins the softmax, and XLA adds its value. The token's codes, which XLA makes, are written into the
free slot in place once all slots have been read. An H200 has run its tests; its speed has not been measured.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper
from kvjax.kernels.decode import codes_gpu
from kvjax.kernels.decode.launch_gpu import WIDE, Launch
from kvjax.kernels.decode.pass_gpu import Pass, gathered
from kvjax.kernels.forms import Form
from kvjax.kernels.hopper import PER_ROW, TILE
from kvjax.kernels.softmax import NEGATIVE
from kvjax.kernels.step import lines_gpu
from kvjax.kernels.step.arguments import Step, Stepped
from kvjax.kernels.step.lines_gpu import Lines

Array = jax.Array
SIDES = "key", "value"


def step(given: Step, launch: Launch) -> Stepped:
    """Runs one decoding step of one layer whose keys and values are `Coded`.

    Args:
      given: the step.
      launch: of `kvjax.kernels.step.gpu.launch_of`.
    """
    query, new_key, new_value, key, value, position, stats, newest, budget, *_ = given
    batch, kv_heads, group, dim = query.shape
    pairs, size, form = batch * kv_heads, position.shape[2], launch.form
    assert form is not None
    assert given.encoded is not None
    names = tuple(sorted(stats))
    # [pairs, G]: the logits of the own token, of which a row that has ended has none
    own = jnp.sum(query.astype(jnp.float32) * new_key.astype(jnp.float32), axis=3) * given.scale
    own = jnp.where((newest >= 0)[:, None, None], own, NEGATIVE).reshape(pairs, group)
    # [pairs, parts, G padded, D]
    parts = codes_gpu.queries(query.reshape(pairs, group, dim), launch)
    held = dict(zip(SIDES, (key, value), strict=True))
    encoded = dict(zip(SIDES, given.encoded, strict=True))
    # [pairs, bytes] and [pairs, groups] of the new token, keys first
    new = [encoded[side][name].reshape(pairs, -1) for side in SIDES for name in form.parts]
    new = [lines_gpu.rows(x) if i % len(form.parts) == 0 else x for i, x in enumerate(new)]
    # [pairs, S, bytes] and [pairs, S * groups], as references, to which Mosaic writes in place
    kept = [jax.new_ref(x) for side in SIDES for x in codes_gpu.operands(held[side], pairs, 0, form)]
    # [pairs, S], positions first
    lines = [jax.new_ref(x.reshape(pairs, size)) for x in (position, *(stats[name] for name in names))]
    scratch = launch.scratch() | lines_gpu.scratch(size, len(names)) | {
        "codes_smem": plgpu.SMEM((2, lines_gpu.row_of(form.size, jnp.uint8)), jnp.uint8),
        "begun": plgpu.Barrier(num_arrivals=launch.parts + 2 + lines_gpu.copies(size, len(names))),
    }  # fmt: skip
    body = functools.partial(
        _kernel,
        launch=launch,
        names=names,
        observe_and_evict=given.observe_and_evict,
        transforms=given.transforms,
        window=given.window,
    )
    outputs = [
        jax.ShapeDtypeStruct((pairs, launch.padded, -(-dim // TILE) * WIDE), jnp.float32),
        jax.ShapeDtypeStruct((pairs, 2, launch.rows), jnp.float32),
    ]
    padded = jnp.pad(own, ((0, 0), (0, launch.rows - group)), constant_values=NEGATIVE)
    output, ends = lines_gpu.run(body, pairs, outputs, scratch)(parts, padded, newest, budget, *new, *kept, *lines)
    after: dict[str, dict[str, Array]] = {side: {} for side in SIDES}
    for (side, name), ref in zip(((side, name) for side in SIDES for name in form.parts), kept, strict=True):
        after[side][name] = ref[...].reshape(held[side].parts[name].shape)
    position, *found = (ref[...].reshape(position.shape) for ref in lines)
    # [pairs, G]: the maximum and the sum
    top, total = ends[:, 0, :group], ends[:, 1, :group]
    share = jnp.where(own > NEGATIVE / 2, jnp.exp(own - top), 0.0) / jnp.where(total > 0, total, 1.0)
    # [B, K, G, D]
    output = codes_gpu.outputs(gathered(output, group, dim), launch).reshape(query.shape)
    output = output + share.reshape(*query.shape[:3], 1) * new_value.astype(jnp.float32)
    key, value = (held[side].replace(parts=after[side]) for side in SIDES)
    return output.astype(new_value.dtype), key, value, position, dict(zip(names, found, strict=True))


def _kernel(
    query_ref, own_ref, newest_ref, budget_ref, *refs,
    query_smem, codes_smem, position_smem, column_smem, stat_smem, begun,
    launch, names, observe_and_evict, transforms, window, **scratch,
):  # fmt: skip
    """Processes all slots of one (row, KV head)."""
    form: Form = launch.form
    count = len(form.parts)
    # Codes, then scales and zeros, of keys and of values.
    new = refs[:count], refs[count : 2 * count]
    held = refs[2 * count : 3 * count], refs[3 * count : 4 * count]
    *line_refs, output_ref, ends_ref = refs[4 * count :]
    pair = lax.axis_index("pair")
    row = lax.div(pair, jnp.int32(output_ref.shape[0] // newest_ref.shape[0]))
    lines = Lines(
        pair, launch.size, newest_ref[row], window, tuple(line_refs), position_smem, column_smem, tuple(stat_smem)
    )
    (key_ref, *key_lines), (value_ref, *value_lines) = held
    tiles = Pass(
        launch, pair, 0, jnp.int32(launch.tiles), key_ref, value_ref, query_smem,
        key_lines=tuple(key_lines), value_lines=tuple(value_lines), **scratch,
    )  # fmt: skip
    tiles.begin()
    for i in range(launch.parts):
        plgpu.copy_gmem_to_smem(query_ref.at[pair, i], query_smem.at[i, pl.ds(0, launch.padded)], begun)
    for i, refs_of_side in enumerate(new):
        plgpu.copy_gmem_to_smem(refs_of_side[0].at[pair], codes_smem.at[i], begun)
    lines.read(begun)
    plgpu.barrier_wait(begun)
    free, position = lines.append()

    # Attend: to the codes of the slots, and to the own token
    top, total = tiles.softmax(lambda at: lines.bias(tiles, at, free), hopper.load(own_ref.at[pair], PER_ROW))
    ends_ref[pair, 0] = top
    ends_ref[pair, 1] = total
    lines.observe(tiles)
    tiles.store(tiles.output(top, total), output_ref.at[pair])

    # Append, unless the row has ended
    @pl.when((free < launch.size) & (lines.newest >= 0))
    def _():
        for i, (into, numbers) in enumerate(zip(held, new, strict=True)):
            plgpu.copy_smem_to_gmem(codes_smem.at[i, pl.ds(0, form.size)], into[0].at[pair, free])
            for line_ref, new_ref in zip(into[1:], numbers[1:], strict=True):
                # No copy is as small as the numbers of one slot.
                for one in range(form.groups):
                    line_ref[pair, free * form.groups + one] = new_ref[pair, one]

    def own(column: Array) -> Array:
        """Adds the probability of the own token, reduced over the group."""
        m = jnp.zeros_like(column)
        for head in range(launch.group):
            logit = jnp.broadcast_to(own_ref[pair, head] - tiles.ends_smem[0, head], column.shape)
            probability = jnp.exp(logit) * tiles.ends_smem[1, head]
            m = m + probability if launch.group_reduce == "mean" else jnp.maximum(m, probability)
        m = m * (1.0 / launch.group) if launch.group_reduce == "mean" else m
        return jnp.where(lines.slot == free, m, column)

    lines.observe_and_evict(observe_and_evict, names, transforms, position, budget_ref[row], own)
    plgpu.wait_smem_to_gmem(0)
