"""Attention of one query per head over the slots of a cache, with column statistics, on a TPU (Pallas, Mosaic).

Keys and values are read once. For each tile, the logits of a group's queries are written to scratch memory, and the
output is accumulated with a running maximum as in flash attention. After the last tile all probabilities are known and
are reduced to the statistics. Visibility is passed as a bias, 4 bytes per slot in addition to the 4·D of keys and
values in bfloat16.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels import registry, softmax
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import coded_tpu, codes_tpu
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.kernels.softmax import NEGATIVE, transformed
from kvjax.typing import Ref

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
LANES = 128
TILE_BYTES = 1 << 20  # bytes of a tile of keys, and of a tile of values; Pallas holds two tiles of each


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    if any(request.codecs):
        if reason := codes_tpu.refuses_codecs(request):
            return reason
        if (held := coded_tpu.held_bytes(request)) > coded_tpu.HELD_BYTES:
            return (
                f"{request.group} queries over {request.slots} slots would hold {held / 2**20:.1f} MiB of a TPU core's "
                f"memory, more than {coded_tpu.HELD_BYTES >> 20} MiB"
            )
    return registry.refuses_problem(request, tokens=1, coded=True)


def attend_and_reduce(
    problem: Problem, lse: Array | None = None, seen: Array | None = None
) -> tuple[Attended, dict[str, Array]]:
    """Like `kvjax.kernels.decode.xla.attend_and_reduce`, without gradients; see `refuses`.

    Args:
      problem: arrays, of which log-sum-exps are not reported, or codes; see `coded_tpu`.
      lse: of other parts, if the problem is of codes.
      seen: of other parts, if the problem is of codes.
    """
    check(problem)
    registry.require("decode", "pallas_tpu", problem)
    query, key, value = problem.query, problem.key, problem.value
    if isinstance(key, Coded) or isinstance(value, Coded):
        return coded_tpu.attend_and_reduce(problem, lse, seen)
    batch, kv_heads, group, _, dim = query.shape
    size, rows = problem.slots, batch * kv_heads
    tile, pairs = tiling(rows, size, dim, key.dtype.itemsize)
    tiles = -(-size // tile)
    # [B, K, 1, S]
    mask = softmax.visible(problem)
    # [B, K, S]
    bias = jnp.where(mask[:, :, 0], 0.0 if problem.log_weight is None else problem.log_weight, NEGATIVE)
    # [B * K, 1, slots], padded to whole tiles with slots that no query sees
    bias = bias.astype(jnp.float32).reshape(rows, 1, size)
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, tiles * tile - size)), constant_values=NEGATIVE)
    transforms = tuple(dict.fromkeys(statistic.transform for statistic in problem.statistics))

    whole = pl.BlockSpec((pairs, group, dim), lambda row, _: (row, 0, 0))
    tiled = pl.BlockSpec((pairs, tile, dim), lambda row, at: (row, at, 0))
    line = pl.BlockSpec((pairs, 1, tiles * tile), lambda row, _: (row, 0, 0))
    output, *columns = pl.pallas_call(
        functools.partial(
            _kernel, transforms=transforms, scale=problem.scale, size=size, tile=tile, group_reduce=problem.group_reduce
        ),
        grid=(rows // pairs, tiles),
        in_specs=[whole, tiled, tiled, line],
        out_specs=[whole, *[line] * len(transforms)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, group, dim), value.dtype),
            *[jax.ShapeDtypeStruct((rows, 1, tiles * tile), jnp.float32)] * len(transforms),
        ],
        scratch_shapes=[
            pltpu.VMEM((pairs, group, tiles * tile), jnp.float32),
            pltpu.VMEM((pairs, group, LANES), jnp.float32),
            pltpu.VMEM((pairs, group, LANES), jnp.float32),
            pltpu.VMEM((pairs, group, dim), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="attend_one_query",
    )(query.reshape(rows, group, dim), key.reshape(rows, size, dim), value.reshape(rows, size, dim), bias)
    # Transform -> [B, K, S]
    found: dict[str, Array] = {
        name: column[:, 0, :size].reshape(batch, kv_heads, size)
        for name, column in zip(transforms, columns, strict=True)
    }
    return Attended(output.reshape(query.shape), None), coded_tpu.weighted(problem, found)


def tiling(rows: int, size: int, dim: int, itemsize: int) -> tuple[int, int]:
    """Returns the number of slots of a tile, and the number of (row, KV head) pairs of a program.

    If there are few slots, a program processes several pairs, since starting a program takes longer than processing
    one. If there are too many slots for a core's memory, they are cut into tiles.
    """
    slot_bytes = -(-dim // LANES) * LANES * itemsize
    fit = TILE_BYTES // slot_bytes
    if size > fit:
        return max(fit // LANES, 1) * LANES, 1
    maximum = min(max(fit // size, 1), rows)
    return size, next(count for count in range(maximum, 0, -1) if rows % count == 0)


def _kernel(
    query_ref, key_ref, value_ref, bias_ref, output_ref, *refs, transforms, scale, size, tile, group_reduce
):  # fmt: skip
    """Processes one tile of slots of R (row, KV head) pairs.

    Blocks: query and output [R, G, D], key and value [R, tile, D], bias and columns [R, 1, slots].
    """
    *column_refs, logits_ref, top_ref, total_ref, sum_ref = refs
    at, tiles = pl.program_id(1), pl.num_programs(1)
    here = slice(None) if tile >= size else pl.ds(pl.multiple_of(at * tile, LANES), tile)

    @pl.when(at == 0)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, NEGATIVE, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    # [R, tile, D] twice, and [R, 1, tile]
    key, value, bias = key_ref[...], value_ref[...], bias_ref[:, :, here]
    # [R, G, tile]
    logits = jnp.where(bias > NEGATIVE / 2, product(query_ref[...], key, 2) * scale + bias, NEGATIVE)
    logits_ref[:, :, here] = logits
    top, total = add_tile(logits, value, at, size, top_ref, total_ref, sum_ref)

    @pl.when(at == tiles - 1)
    def _():
        # [R, G, 1]
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        output_ref[...] = (sum_ref[...] * share).astype(output_ref.dtype)
        if not transforms:
            return
        # [R, G, slots]
        logits = logits_ref[...]
        # [R, G, slots]
        probability = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top), 0.0) * share
        reduce = jnp.sum if group_reduce == "mean" else jnp.max
        # [R, 1, slots]
        m = reduce(probability, axis=1, keepdims=True)
        m = m * (1.0 / probability.shape[1]) if group_reduce == "mean" else m

        def uniform() -> Array:
            seen = (bias_ref[...] > NEGATIVE / 2).astype(jnp.float32)
            # [R, 1, 1]
            return 1.0 / jnp.maximum(jnp.sum(seen, axis=2, keepdims=True), 1.0)

        for transform, column_ref in zip(transforms, column_refs, strict=True):
            column_ref[...] = transformed(transform, m, uniform)


def product(one: Array, two: Array, axis: int) -> Array:
    """Multiplies batches of matrices.

    Args:
      one: [R, m, x].
      two: [R, x, n] or [R, n, x].
      axis: the axis of x in `two`.

    Returns:
      [R, m, n] float32.
    """
    # In full float32: by default, the matrix unit multiplies bfloat16.
    exact = jax.lax.Precision.HIGHEST if two.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        one, two, (((2,), (axis,)), ((0,), (0,))), precision=exact, preferred_element_type=jnp.float32
    )


def add_tile(
    logits: Array, value: Array, at: Array, size: int, top_ref: Ref, total_ref: Ref, sum_ref: Ref
) -> tuple[Array, Array]:
    """Adds a tile to a running softmax.

    Args:
      logits: [R, G, tile] float32, `NEGATIVE` for slots that are not seen.
      value: [R, tile, D].
      at: index of the tile.
      size: the number of slots of all tiles.
      top_ref: [R, G, lanes] the maximum so far; updated.
      total_ref: [R, G, lanes] the sum so far; updated.
      sum_ref: [R, G, D] the output times the sum so far; updated.

    Returns:
      The maximum and the sum so far, [R, G, 1] each.
    """
    tile = logits.shape[2]
    # [R, G, 1]
    before = top_ref[:, :, :1]
    top = jnp.maximum(before, jnp.max(logits, axis=2, keepdims=True))
    # [R, G, tile]
    weight = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top), 0.0)
    # [R, G, 1]
    shrink = jnp.exp(before - top)
    total = total_ref[:, :, :1] * shrink + jnp.sum(weight, axis=2, keepdims=True)
    if size % tile:
        # Memory after the last slot is not zero and may contain NaN.
        slot = at * tile + jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)
        value = jnp.where(slot < size, value, jnp.zeros((), value.dtype))
    sum_ref[...] = sum_ref[...] * shrink + product(weight.astype(value.dtype), value, 1)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
    return top, total
