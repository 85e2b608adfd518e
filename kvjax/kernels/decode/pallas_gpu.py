"""Attention of one query per head over the slots of a cache, with column statistics, on a Hopper GPU (Mosaic GPU).

A program processes the slots of one (row, KV head), or a span of them, tile by tile (`pass_gpu`). Slots are cut into
spans, which XLA combines, if there are too few rows to fill the GPU, or too many slots for a program's shared memory.
Most decoding steps run in `kvjax.kernels.step.gpu` instead, which does the rest of a step too.

The kernel is memory-bound: for 1,024 heads of 128 features and 2,048 slots in bfloat16, it reads at 94 % of a copy's
bandwidth on an H200, and at 90 % with statistics (experiments/measured). Products have at least 64 rows, whatever the
size of the group, and take a third of the tensor cores' time in 16 bits; a group of 8 would take all of the time of the
CUDA cores. float32, in three parts, is slower. A number of slots that is not a multiple of 8 prevents copies in the
order that tensor cores read; then tiles pass through registers, as in float32.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper, registry, softmax
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import codes_gpu
from kvjax.kernels.decode.launch_gpu import WIDE, Launch
from kvjax.kernels.decode.pass_gpu import Pass, gathered
from kvjax.kernels.forms import form_of
from kvjax.kernels.hopper import COMPILER, PER_COLUMN, PER_ROW, TILE, tiled, untiled
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.kernels.softmax import NEGATIVE

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    if reason := registry.refuses_problem(request, tokens=1, coded=True):
        return reason
    form = None
    if any(request.codecs):
        if reason := codes_gpu.refuses_codecs(request):
            return reason
        form = form_of(request.codecs[0], request.dim)
    try:
        hopper.check_dim(request.dim)
        reports = any(statistic.needs_attention for statistic in request.statistics)
        launch = Launch(
            request.group, request.dim, max(request.slots, TILE), jnp.dtype(request.dtype), reports, form=form
        )
        launch.cut(request.batch * request.kv_heads)
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def attend_and_reduce(
    problem: Problem, lse: Array | None = None, seen: Array | None = None
) -> tuple[Attended, dict[str, Array]]:
    """Like `kvjax.kernels.decode.xla.attend_and_reduce`, without gradients; see `refuses`.

    Args:
      problem: arrays, or codes, which may be one part of several.
      lse: [B, K, G, 1] float32, the log-sum-exps over all other parts; -inf where none of their slots is seen.
      seen: [B, K, 1] float32, the number of slots that each query sees in all other parts.

    Returns:
      The output, float32, under the softmax over all parts, is the sum over this part alone; log-sum-exps are those of
      all parts.
    """
    check(problem)
    registry.require("decode", "pallas_gpu", problem)
    query, dtype, size = problem.query, problem.key.dtype, problem.slots
    batch, kv_heads, group, _, dim = query.shape
    pairs = batch * kv_heads
    # If there are fewer slots than a tile has, slots that no query sees are inserted before them.
    front = max(TILE - size, 0)
    form = form_of(problem.key.codec, dim) if isinstance(problem.key, Coded) else None
    factor = 1.0 if form is None else form.factor
    launch = Launch(
        group, dim, size + front, dtype, bool(problem.statistics), problem.group_reduce, problem.scale * factor,
        form=form,
    ).cut(pairs)  # fmt: skip
    held = [array for x in (problem.key, problem.value) for array in codes_gpu.operands(x, pairs, front, form)]
    # [B, K, 1, S]
    mask = softmax.visible(problem)
    # [B, K, S]
    bias = jnp.where(mask[:, :, 0], 0.0 if problem.log_weight is None else problem.log_weight, NEGATIVE)
    # [pairs, spans, tiles of a span, TILE]
    bias = tiled(bias.astype(jnp.float32).reshape(pairs, size), TILE, NEGATIVE, launch.spans * launch.span)
    bias = bias.reshape(pairs, launch.spans, launch.span, TILE)
    # [pairs, parts, G padded, D]
    parts = codes_gpu.queries(query.reshape(pairs, group, dim), launch)
    # [pairs, G]
    others = jnp.full((pairs, group), NEGATIVE) if lse is None else jnp.maximum(lse.reshape(pairs, group), NEGATIVE)
    # [pairs, rows]: spans are joined with the other parts below
    before = others if launch.spans == 1 else jnp.full_like(others, NEGATIVE)
    before = jnp.pad(before, ((0, 0), (0, launch.rows - group)), constant_values=NEGATIVE)
    output, ends, *columns = _call(launch, pairs)(parts, before, bias, *held)
    # [pairs, spans, G, D]
    output = gathered(output, group, dim)
    # [pairs, spans, G]: the maximum and the sum of each span
    top, total = ends[:, :, 0, :group], ends[:, :, 1, :group]
    # [pairs, G], of the other parts, if they are not in the first span
    separate = jnp.where(others > NEGATIVE / 2, 1.0, 0.0) if launch.spans > 1 else jnp.zeros_like(others)
    # [pairs, 1, G]
    highest = jnp.max(top, axis=1, keepdims=True)
    highest = jnp.maximum(highest, others[:, None]) if launch.spans > 1 else highest
    # [pairs, spans, G]
    share = total * jnp.exp(top - highest)
    # [pairs, 1, G]
    sums = jnp.sum(share, axis=1, keepdims=True) + separate[:, None] * jnp.exp(others[:, None] - highest)
    known = jnp.where(sums > 0, sums, 1.0)
    # [pairs, G, D]
    output = codes_gpu.outputs(jnp.sum(output * (share / known)[..., None], axis=1), launch)
    # [B, K, G, 1]
    lses = jnp.where(sums > 0, highest + jnp.log(known), -jnp.inf).reshape(query.shape[:4])
    attended = Attended(output.reshape(query.shape).astype(dtype if form is None else jnp.float32), lses)
    if not problem.statistics:
        return attended, {}
    # [pairs, 1 or G, S]
    column = untiled(columns[0], size)
    if launch.spans > 1:
        weight = jnp.where(column > NEGATIVE / 2, jnp.exp(column - highest[:, 0, :, None]), 0.0)
        column = weight / known[:, 0, :, None]
    # [B, K, 1 or G, 1, S]
    probability = column.reshape(batch, kv_heads, -1, 1, size)
    # [B, K, 1]
    count = softmax.count_seen(mask) + (0.0 if seen is None else seen)
    return attended, softmax.column_sums(problem, probability, 1 / jnp.maximum(count, 1))


def _call(launch: Launch, pairs: int) -> Any:
    """Returns the kernel as a function of arrays."""
    chunks = -(-launch.dim // TILE)
    out_type = [
        jax.ShapeDtypeStruct((pairs, launch.spans, launch.padded, chunks * WIDE), jnp.float32),
        jax.ShapeDtypeStruct((pairs, launch.spans, 2, launch.rows), jnp.float32),
    ]
    if launch.reports:
        rows = 1 if launch.spans == 1 else launch.group
        out_type.append(jax.ShapeDtypeStruct((pairs, rows, launch.spans * launch.span * TILE), jnp.float32))
    return plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=out_type,
        scratch_types=launch.scratch()
        | {
            "bias_smem": plgpu.SMEM((launch.span, TILE), jnp.float32),
            "begun": plgpu.Barrier(num_arrivals=launch.parts + 1),
        },
        grid=(pairs, launch.spans),
        grid_names=("pair", "span"),
        compiler_params=COMPILER,
        kernel_name="attend_one_query",
    )


def _kernel(
    query_ref, others_ref, bias_ref, *refs, query_smem, bias_smem, begun, launch, **scratch,
):  # fmt: skip
    """Processes one span of the slots of one (row, KV head)."""
    # Keys and values, each with its scales and zeros if there are any.
    held = 1 if launch.form is None else len(launch.form.parts)
    (key_ref, *key_lines), (value_ref, *value_lines) = refs[:held], refs[held : 2 * held]
    output_ref, ends_ref, *column_refs = refs[2 * held :]
    pair, span = lax.axis_index("pair"), lax.axis_index("span")
    first = span * launch.span
    count = jnp.minimum(launch.span, launch.tiles - first)
    scratch |= {"key_lines": tuple(key_lines), "value_lines": tuple(value_lines)}
    tiles = Pass(launch, pair, first, count, key_ref, value_ref, query_smem, **scratch)
    for i in range(launch.parts):
        plgpu.copy_gmem_to_smem(query_ref.at[pair, i], query_smem.at[i, pl.ds(0, launch.padded)], begun)
    plgpu.copy_gmem_to_smem(bias_ref.at[pair, span], bias_smem, begun)
    tiles.begin()
    plgpu.barrier_wait(begun)
    others = hopper.load(others_ref.at[pair], PER_ROW)
    top, total = tiles.softmax(lambda at: plgpu.layout_cast(bias_smem[at], PER_COLUMN), others)
    ends_ref[pair, span, 0] = top
    ends_ref[pair, span, 1] = total

    def report(at):
        """Writes m of a tile's slots or, if there are several spans, the logits, for a softmax over all spans."""
        (column_ref,) = column_refs
        here = pl.ds((first + at) * TILE, TILE)
        if launch.spans == 1:
            column_ref[pair, 0, here] = tiles.column(at)
            return

        @pl.loop(0, launch.group)
        def _(head):
            column_ref[pair, head, here] = tiles.logits(at, head)

    if launch.reports:
        pl.loop(0, count)(report)
    tiles.store(tiles.output(top, total), output_ref.at[pair, span])
