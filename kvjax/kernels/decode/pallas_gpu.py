"""Attention of one query a head over the slots of a cache, with column statistics, on a Hopper GPU (Mosaic GPU).

A program takes the slots, or a span of them, of one (row, KV head), tile by tile (`pass_gpu`). Spans are joined by XLA:
where there are too few rows to fill the GPU, or too many slots for a program's shared memory. Most decoding steps go
through `step_gpu` instead, which does the rest of a step too.

What should bind, and no GPU has confirmed it: memory, at 18 bytes a clock for each of an H200's 132 processors.
Products have 64 rows at least, of which a group fills some, and in 16 bits take a third of the tensor cores' time
whatever the group; on CUDA cores a group of 8 would need all of them. float32, in three parts, is slower. Slots that
are no multiple of 8 cannot be copied into the order that tensor cores read: they pass through registers, as float32
does.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper, softmax
from kvjax.kernels.decode.pass_gpu import Pass, gathered
from kvjax.kernels.decode.plan_gpu import WIDE, Plan
from kvjax.kernels.hopper import COMPILER, PER_COLUMN, TILE, tiled, untiled
from kvjax.kernels.softmax import NEGATIVE
from kvjax.statistics import Statistic

Array = jax.Array


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_position: Array,
    key_position: Array,
    statistics: Sequence[Statistic],
    weights: Sequence[Array],
    scale: float,
    window: int | Array | None,
    exempt: Array | None,
    log_weight: Array | None,
    group_reduce: str,
) -> tuple[Array, dict[str, Array]]:
    """As `kernels.decode.xla.attend`, for one query a head (n = 1), head sizes of 64 to 256, a multiple of 16."""
    batch, kv_heads, group, n, dim = query.shape
    if n != 1:
        raise ValueError(f"the decode kernel takes one query a head; got {n}.")
    if dim % 16 or not TILE <= dim <= 256:
        raise ValueError(f"the GPU's decode kernel takes head sizes of 64 to 256, a multiple of 16; got {dim}.")
    pairs, size = batch * kv_heads, key.shape[2]
    # Fewer slots than a tile get others before them that nobody sees.
    front = max(TILE - size, 0)
    key, value = (
        jnp.pad(x.reshape(pairs, size, dim), ((0, 0), (front, 0), (0, 0))) if front else x.reshape(pairs, size, dim)
        for x in (key, value)
    )
    plan = Plan(group, dim, size + front, key.dtype, bool(statistics), group_reduce, scale).cut(pairs)
    mask = softmax.visible(query_position, key_position, window, exempt)
    bias = jnp.where(mask[:, :, 0], 0.0 if log_weight is None else log_weight, NEGATIVE).astype(jnp.float32)
    bias = tiled(bias.reshape(pairs, size), TILE, NEGATIVE, plan.spans * plan.span)
    bias = bias.reshape(pairs, plan.spans, plan.span, TILE)
    # [pairs, parts, G filled up, D]
    parts = jnp.stack(hopper.parts(query.reshape(pairs, group, dim).astype(key.dtype)), axis=1)
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, plan.padded - group), (0, 0)))
    output, ends, *columns = _call(plan, pairs)(parts, key, value, bias)
    # [pairs, spans, G, D]; [pairs, spans, G] maximum and sum
    output = gathered(output, group, dim)
    top, total = ends[:, :, 0, :group], ends[:, :, 1, :group]
    highest = jnp.max(top, axis=1, keepdims=True)
    share = total * jnp.exp(top - highest)
    sums = jnp.sum(share, axis=1, keepdims=True)
    share = share / jnp.where(sums > 0, sums, 1.0)
    output = jnp.sum(output * share[..., None], axis=1).astype(value.dtype).reshape(query.shape)
    if not statistics:
        return output, {}
    # [pairs, 1 or G, slots]
    column = untiled(columns[0], size)
    if plan.spans > 1:
        weight = jnp.where(column > NEGATIVE / 2, jnp.exp(column - highest[:, 0, :, None]), 0.0)
        column = weight / jnp.where(sums > 0, sums, 1.0)[:, 0, :, None]
    probability = column.reshape(batch, kv_heads, -1, 1, size)
    return output, softmax.column_sums(statistics, weights, probability, mask, group_reduce)


def _call(plan: Plan, pairs: int) -> Any:
    chunks = -(-plan.dim // TILE)
    out_type = [
        jax.ShapeDtypeStruct((pairs, plan.spans, plan.padded, chunks * WIDE), jnp.float32),
        jax.ShapeDtypeStruct((pairs, plan.spans, 2, plan.rows), jnp.float32),
    ]
    if plan.told:
        rows = 1 if plan.spans == 1 else plan.group
        out_type.append(jax.ShapeDtypeStruct((pairs, rows, plan.spans * plan.span * TILE), jnp.float32))
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        scratch_types=plan.scratch()
        | {
            "bias_smem": plgpu.SMEM((plan.span, TILE), jnp.float32),
            "begun": plgpu.Barrier(num_arrivals=plan.parts + 1),
        },
        grid=(pairs, plan.spans),
        grid_names=("pair", "span"),
        compiler_params=COMPILER,
        kernel_name="attend_one_query",
    )


def _kernel(
    query_ref, key_ref, value_ref, bias_ref, output_ref, ends_ref, *column_refs,
    query_smem, bias_smem, begun, plan, **scratch,
):  # fmt: skip
    """One span of the slots of one (row, KV head)."""
    pair, span = lax.axis_index("pair"), lax.axis_index("span")
    first = span * plan.span
    count = jnp.minimum(plan.span, plan.tiles - first)
    tiles = Pass(plan, pair, first, count, key_ref, value_ref, query_smem, **scratch)
    for i in range(plan.parts):
        plgpu.copy_gmem_to_smem(query_ref.at[pair, i], query_smem.at[i, pl.ds(0, plan.padded)], begun)
    plgpu.copy_gmem_to_smem(bias_ref.at[pair, span], bias_smem, begun)
    tiles.begin()
    plgpu.barrier_wait(begun)
    top, total = tiles.softmax(lambda at: plgpu.layout_cast(bias_smem[at], PER_COLUMN))
    ends_ref[pair, span, 0] = top
    ends_ref[pair, span, 1] = total

    def tell(at):
        """Writes what statistics are made of: m of a tile's slots or, for a later softmax over all spans, logits."""
        (column_ref,) = column_refs
        here = pl.ds((first + at) * TILE, TILE)
        if plan.spans == 1:
            column_ref[pair, 0, here] = tiles.column(at)
            return

        @pl.loop(0, plan.group)
        def _(head):
            column_ref[pair, head, here] = tiles.logits(at, head)

    if plan.told:
        pl.loop(0, count)(tell)
    tiles.store(tiles.output(top, total), output_ref.at[pair, span])
