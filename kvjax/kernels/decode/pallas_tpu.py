"""Attention of one query per head over the slots of a cache, with column statistics, on a TPU (Pallas, Mosaic).

Keys and values are read once. Tile by tile, the logits of a group's queries go to a scratch row, and the output is
summed up under a running maximum as in flash attention. After the last tile every probability is known, and the rows
are reduced to the statistics. What is visible is passed as a bias, 4 bytes per slot besides the 4·D of a bfloat16 pair.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels import registry, softmax
from kvjax.kernels.problem import Attended, Problem
from kvjax.kernels.softmax import NEGATIVE

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
LANES = 128
TILE_BYTES = 1 << 20  # of keys, and as many of values; Pallas holds two tiles of each


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    return registry.refuses_problem(request, tokens=1)


def attend_and_reduce(problem: Problem) -> tuple[Attended, dict[str, Array]]:
    """As `kvjax.kernels.decode.xla.attend_and_reduce`, without log-sum-exps and gradients; see `refuses`."""
    registry.require("decode", "pallas_tpu", problem)
    query, key, value = problem.query, problem.key, problem.value
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
    seen = {
        name: column[:, 0, :size].reshape(batch, kv_heads, size)
        for name, column in zip(transforms, columns, strict=True)
    }
    sums = {}
    for statistic, weight in zip(problem.statistics, problem.weights, strict=True):
        # [B, 1, 1] or [B, 1, 1, words] of the one query
        own = weight[:, 0].reshape(batch, 1, 1, *weight.shape[2:])
        column = seen[statistic.transform]
        sums[statistic.name] = (column if own.ndim == 3 else column[..., None]) * own
    return Attended(output.reshape(query.shape), None), sums


def tiling(rows: int, size: int, dim: int, itemsize: int) -> tuple[int, int]:
    """The number of slots of a tile, and of (row, KV head) pairs that one program takes.

    With few slots a program has less work than it takes to start one, and takes several pairs; many slots do not fit
    into a core's memory, and are cut into tiles.
    """
    slot_bytes = -(-dim // LANES) * LANES * itemsize
    fit = TILE_BYTES // slot_bytes
    if size > fit:
        return max(fit // LANES, 1) * LANES, 1
    most = min(max(fit // size, 1), rows)
    return size, next(count for count in range(most, 0, -1) if rows % count == 0)


def _kernel(
    query_ref, key_ref, value_ref, bias_ref, output_ref, *refs, transforms, scale, size, tile, group_reduce
):  # fmt: skip
    """Takes one tile of slots: query [R, G, D], key and value [R, tile, D], bias [R, 1, slots]."""
    *column_refs, logits_ref, top_ref, total_ref, sum_ref = refs
    at, tiles = pl.program_id(1), pl.num_programs(1)
    here = slice(None) if tile >= size else pl.ds(pl.multiple_of(at * tile, LANES), tile)

    @pl.when(at == 0)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, NEGATIVE, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    key, value, bias = key_ref[...], value_ref[...], bias_ref[:, :, here]
    # [R, G, tile]
    logits = jnp.where(bias > NEGATIVE / 2, product(query_ref[...], key, 2) * scale + bias, NEGATIVE)
    logits_ref[:, :, here] = logits
    top, total = add_tile(logits, value, at, size, top_ref, total_ref, sum_ref)

    @pl.when(at == tiles - 1)
    def _():
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        output_ref[...] = (sum_ref[...] * share).astype(output_ref.dtype)
        if not transforms:
            return
        # [R, G, slots]
        logits = logits_ref[...]
        probability = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top), 0.0) * share
        reduce = jnp.sum if group_reduce == "mean" else jnp.max
        # [R, 1, slots]
        m = reduce(probability, axis=1, keepdims=True)
        m = m * (1.0 / probability.shape[1]) if group_reduce == "mean" else m
        for transform, column_ref in zip(transforms, column_refs, strict=True):
            match transform:
                case "identity":
                    column_ref[...] = m
                case "square":
                    column_ref[...] = m * m
                case "above":
                    seen = (bias_ref[...] > NEGATIVE / 2).astype(jnp.float32)
                    count = jnp.maximum(jnp.sum(seen, axis=2, keepdims=True), 1.0)
                    column_ref[...] = jnp.where(m >= 1.0 / count, seen, 0.0)


def product(one: Array, two: Array, axis: int) -> Array:
    """[R, m, x] times [R, ...], summed over x, which is `axis` of the second; [R, m, n] float32."""
    # In full float32: by default, the matrix unit multiplies bfloat16.
    exact = jax.lax.Precision.HIGHEST if two.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        one, two, (((2,), (axis,)), ((0,), (0,))), precision=exact, preferred_element_type=jnp.float32
    )


def add_tile(
    logits: Array, value: Array, at: Array, size: int, top_ref: Any, total_ref: Any, sum_ref: Any
) -> tuple[Array, Array]:
    """Adds a tile to a running softmax, and returns its maximum and its sum so far, [R, G, 1].

    Args:
      logits: [R, G, tile] float32, `NEGATIVE` for slots that are not seen.
      value: [R, tile, D].
      at: index of the tile.
      size: number of slots of all tiles.
      top_ref: [R, G, lanes] the maximum so far.
      total_ref: [R, G, lanes] the sum so far.
      sum_ref: [R, G, D] the output times the sum so far.
    """
    tile = logits.shape[2]
    before = top_ref[:, :, :1]
    top = jnp.maximum(before, jnp.max(logits, axis=2, keepdims=True))
    weight = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top), 0.0)
    shrink = jnp.exp(before - top)
    total = total_ref[:, :, :1] * shrink + jnp.sum(weight, axis=2, keepdims=True)
    if size % tile:
        # Memory behind the last slot is not zero, and may be NaN.
        slot = at * tile + jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)
        value = jnp.where(slot < size, value, jnp.zeros((), value.dtype))
    sum_ref[...] = sum_ref[...] * shrink + product(weight.astype(value.dtype), value, 1)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
    return top, total
