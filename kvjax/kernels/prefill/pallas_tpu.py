"""Attention of a block of queries with column statistics, on a TPU (Pallas, Mosaic), in linear memory.

There are two passes. The first is FlashAttention-2's forward pass (arXiv:2307.08691, algorithm 1): for each tile of
queries, a loop over tiles of slots computes a running softmax, and the log-sum-exps of the rows are stored. The second
loops over tiles of queries for each tile of slots: it recomputes probabilities from the log-sum-exps, which needs only
Q Kᵀ, half of attention's FLOPs, and reduces them to Σ_i w_i f(m[i, j]) for every statistic. Visibility is computed from
positions inside the kernels, so no array has queries × slots elements.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels import registry, softmax
from kvjax.kernels.decode.pallas_tpu import LANES, add_tile, product
from kvjax.kernels.prefill import positions
from kvjax.kernels.prefill.grid_tpu import Grid, clip, costs, grids
from kvjax.kernels.prefill.positions import pad
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.kernels.softmax import NEGATIVE, transformed
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
# The number of words of one transform from which on the matrix unit computes their sums. A float32 product takes six
# bfloat16 products, however few rows it has: for one word, libtpu 0.0.42 schedules 2108 bundles per tile of a v5e with
# the matrix unit, and 1105 with the vector unit.
WIDE = 8


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    return registry.refuses_problem(request)


def attend_and_reduce(problem: Problem) -> tuple[Attended, dict[str, Array]]:
    """Like `kvjax.kernels.prefill.xla.attend_and_reduce`, without log-sum-exps and gradients; see `refuses`.

    In addition to inputs and outputs, the memory is 4 bytes per query and head (the log-sum-exps), a few lines of
    positions, one float32 per query and word of the weights, and the sums; without statistics, only the positions.
    """
    check(problem)
    registry.require("prefill", "pallas_tpu", problem)
    query, (key, value) = problem.query, problem.arrays()
    batch, kv_heads, group, n, dim = query.shape
    size, rows = problem.slots, batch * kv_heads
    window = problem.window if problem.exempt is None else None
    first, second = grids(group, n, size, dim, key.dtype.itemsize, problem.causal, window)
    # Sorted by transform, so that the words of each transform are consecutive.
    order = sorted(range(len(problem.statistics)), key=lambda i: problem.statistics[i].transform)
    statistics, weights = [problem.statistics[i] for i in order], [problem.weights[i] for i in order]
    # [B, words, n] for each statistic
    weights = [w[:, None] if w.ndim == 2 else jnp.swapaxes(w, 1, 2) for w in weights]
    words = sum(w.shape[1] for w in weights)
    attention_cost, columns_cost = costs(first, second, rows, group, dim, key.dtype.itemsize, words)

    # [B, 1, n] and [B·K, lines, S]
    query_line, slot_lines = positions.lines(problem)
    # [B·K, lines, S padded to whole tiles]
    slot_lines = pad(slot_lines, first.shape[1] * first.slots, jnp.inf)
    inputs = (query.reshape(rows, group, n, dim), key.reshape(rows, size, dim), value.reshape(rows, size, dim))
    masks = {
        "windowed": problem.window is not None, "weighted": problem.log_weight is not None, "scale": problem.scale,
        "kv_heads": kv_heads,
    }  # fmt: skip
    output, *kept = _attention(
        first, attention_cost, inputs, query_line, slot_lines, bool(statistics), problem.needs_seen, masks
    )
    attended = Attended(output.reshape(query.shape), None)
    if not statistics:
        return attended, {}
    stops = itertools.accumulate(w.shape[1] for w in weights)
    slices = [(stop - w.shape[1], stop) for w, stop in zip(weights, stops, strict=True)]
    # Transform -> its first word and the word after its last
    spans: dict[str, tuple[int, int]] = {}
    for statistic, (start, stop) in zip(statistics, slices, strict=True):
        spans[statistic.transform] = (spans.get(statistic.transform, (start,))[0], stop)
    # [B, words, n]
    weight = jnp.concatenate(weights, axis=1)
    sums = _columns(
        second, columns_cost, inputs[:2], query_line, slot_lines, weight, kept, spans, problem.group_reduce, masks
    )
    # [B, K, words, S]
    sums = sums[..., :size].reshape(batch, kv_heads, words, size)
    return attended, {
        statistic.name: jnp.moveaxis(sums[:, :, start:stop], 2, 3) if statistic.words else sums[:, :, start]
        for statistic, (start, stop) in zip(statistics, slices, strict=True)
    }


def _attention(
    grid: Grid, cost: pl.CostEstimate, inputs: tuple[Array, Array, Array], query_line: Array, slot_lines: Array,
    keep: bool, above: bool, masks: dict[str, PyTree],
) -> list[Array]:  # fmt: skip
    """Runs the first pass.

    Args:
      grid: the grid of the first pass.
      cost: the cost of the first pass.
      inputs: query [B·K, G, n, D], key [B·K, S, D] and value [B·K, S, D].
      query_line: [B, 1, n] positions, from `positions.lines`.
      slot_lines: [B·K, lines, S padded to whole tiles], from `positions.lines`.
      keep: whether to return log-sum-exps.
      above: whether to return the number of slots that are seen.
      masks: static options of the kernels.

    Returns:
      The output [B·K, G, n, D]; if `keep`, the log-sum-exps [B·K, G, 1, n padded to whole tiles] float32; if `above`,
      the number of slots that each query sees, [B·K, G / heads, 1, n padded to whole tiles] float32.
    """
    query, key, value = inputs
    rows, group, _, dim = query.shape
    tiles, (heads, queries, slots) = grid.shape, (grid.heads, grid.queries, grid.slots)
    padded, kv_heads = tiles[0] * queries, masks["kv_heads"]
    query_line = pad(query_line, padded, -jnp.inf)

    def slot_tile(row, at, slot, last_ref):
        """Returns the tile to fetch; for a skipped tile, one that has been fetched, so that there is no copy."""
        return jnp.where(at <= last_ref[row // kv_heads], clip(slot, *grid.slot_tiles(at)), 0)

    stays = pl.BlockSpec((1, heads, queries, dim), lambda row, head, at, slot, last: (row, head, at, 0))
    passes = pl.BlockSpec((1, slots, dim), lambda row, _, *at: (row, slot_tile(row, *at), 0))
    line = pl.BlockSpec((1, 1, queries), lambda row, head, at, *_: (row // kv_heads, 0, at))
    lines = pl.BlockSpec((1, slot_lines.shape[1], slots), lambda row, _, *at: (row, 0, slot_tile(row, *at)))
    kept = [(group, heads)] * keep + [(group // heads, 1)] * above
    return pl.pallas_call(
        functools.partial(_attention_kernel, grid=grid, keep=keep, above=above, **masks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, group // heads, *tiles),
            in_specs=[stays, passes, passes, line, lines],
            out_specs=[
                stays,
                *(pl.BlockSpec((1, own, 1, queries), lambda row, head, at, *_: (row, head, 0, at)) for _, own in kept),
            ],
            scratch_shapes=[
                *[pltpu.VMEM((1, heads * queries, LANES), jnp.float32)] * 2,
                pltpu.VMEM((1, heads * queries, dim), jnp.float32),
                *[pltpu.VMEM((queries, LANES), jnp.float32)] * 2,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, value.dtype),
            *(jax.ShapeDtypeStruct((rows, count, 1, padded), jnp.float32) for count, _ in kept),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
        cost_estimate=cost,
        name="attend_queries",
    )(_active(query_line >= 0, queries)[1], query, key, value, query_line, slot_lines)


def _attention_kernel(
    last_ref, query_ref, key_ref, value_ref, query_line_ref, slot_lines_ref, output_ref, *refs,
    grid, keep, above, windowed, weighted, scale, kv_heads,
):  # fmt: skip
    """Processes one tile of queries and one of slots.

    Blocks: query and output [1, heads, t, D], key and value [1, slots, D], positions [1, 1, t] and [1, lines, slots].
    """
    *kept_refs, top_ref, total_ref, sum_ref, position_ref, count_ref = refs
    at, slot = pl.program_id(2), pl.program_id(3)
    heads, queries, slots = grid.heads, grid.queries, grid.slots

    @pl.when(slot == 0)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, NEGATIVE, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        # [t, lanes], since queries are rows of the logits
        position_ref[...] = jnp.broadcast_to(query_line_ref[0], (LANES, queries)).T
        count_ref[...] = jnp.zeros(count_ref.shape, jnp.float32)

    first, last = grid.slot_tiles(at)

    @pl.when((first <= slot) & (slot <= last) & (at <= last_ref[pl.program_id(0) // kv_heads]))
    def _():
        # [t, 1] and [lines, slots]
        position, lines = position_ref[:, :1], slot_lines_ref[0]
        # [t, slots]
        seen = lines[:1] <= position
        if windowed:
            seen = seen & (position <= lines[1:2])
        # [1, heads * t, D]
        rows = query_ref[...].reshape(1, heads * queries, -1)
        # [heads, t, slots]
        logits = product(rows, key_ref[...], 2).reshape(heads, queries, slots) * scale
        if weighted:
            logits = logits + lines[-1:]
        # [1, heads * t, slots]
        logits = jnp.where(seen[None], logits, NEGATIVE).reshape(1, heads * queries, slots)
        add_tile(logits, value_ref[...], slot, grid.size, top_ref, total_ref, sum_ref)
        if above:
            count_ref[...] += jnp.sum(jnp.where(seen, 1.0, 0.0), axis=1, keepdims=True)

    @pl.when(slot == pl.num_programs(3) - 1)
    def _():
        # [1, heads * t, lanes]
        total = total_ref[...]
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        # [1, heads * t, D]
        output = sum_ref[...] * share[:, :, :1]
        output_ref[...] = output.reshape(output_ref.shape).astype(output_ref.dtype)
        if keep:
            top_ref[...] -= jnp.log(share)
            for head in range(heads):
                kept_refs[0][0, head] = top_ref[0, head * queries : (head + 1) * queries].T[:1]
        if above:
            kept_refs[1][0, 0] = count_ref[...].T[:1]


def _columns(
    grid: Grid, cost: pl.CostEstimate, inputs: tuple[Array, Array], query_line: Array, slot_lines: Array, weight: Array,
    kept: Sequence[Array], spans: dict[str, tuple[int, int]], group_reduce: str, masks: dict[str, PyTree],
) -> Array:  # fmt: skip
    """Runs the second pass.

    Args:
      grid: the grid of the second pass.
      cost: the cost of the second pass.
      inputs: query [B·K, G, n, D] and key [B·K, S, D].
      query_line: [B, 1, n] positions, from `positions.lines`.
      slot_lines: [B·K, lines, S padded to whole tiles], from `positions.lines`.
      weight: [B, words, n].
      kept: what the first pass returned besides the output.
      spans: transform -> its first word and the word after its last.
      group_reduce: see `Problem`.
      masks: static options of the kernels.

    Returns:
      The sums [B·K, words, S padded to whole tiles] float32.
    """
    query, key = inputs
    rows, group, _, dim = query.shape
    words, (tiles, slot_tiles) = weight.shape[1], grid.shape
    queries, slots, kv_heads = grid.queries, grid.slots, masks["kv_heads"]
    query_line, weight = pad(query_line, tiles * queries, -jnp.inf), pad(weight, tiles * queries, 0.0)
    # [2, B]: tiles of queries with weight 0 are skipped, such as padding and all but the observed end of a prompt
    active = jnp.stack(_active(weight != 0, queries))

    def query_tile(row, slot, at, active):
        first, last = grid.query_tiles(slot)
        row = row // kv_heads
        return clip(at, jnp.maximum(first, active[0, row]), jnp.minimum(last, active[1, row]))

    def passing(*block: int, by_row: int = 1) -> pl.BlockSpec:
        """Returns the spec of lines of queries, whose last dimension is cut into tiles."""
        zeros = (0,) * (len(block) - 1)
        return pl.BlockSpec((1, *block), lambda row, *at: (row // by_row, *zeros, query_tile(row, *at)))

    narrow = sum(stop - start for start, stop in spans.values() if stop - start < WIDE)
    return pl.pallas_call(
        functools.partial(_columns_kernel, grid=grid, spans=spans, group_reduce=group_reduce, **masks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, slot_tiles, tiles),
            in_specs=[
                pl.BlockSpec((1, group, queries, dim), lambda row, *at: (row, 0, query_tile(row, *at), 0)),
                pl.BlockSpec((1, slots, dim), lambda row, slot, *_: (row, slot, 0)),
                passing(1, queries, by_row=kv_heads),
                pl.BlockSpec((1, slot_lines.shape[1], slots), lambda row, slot, *_: (row, 0, slot)),
                passing(words, queries, by_row=kv_heads),
                passing(group, 1, queries),
                *[passing(1, 1, queries)] * (len(kept) - 1),
            ],
            out_specs=pl.BlockSpec((1, words, slots), lambda row, slot, *_: (row, 0, slot)),
            scratch_shapes=[
                pltpu.VMEM((slot_lines.shape[1], slots, LANES), jnp.float32),
                pltpu.VMEM((max(narrow, 1), slots, min(queries, LANES)), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, words, slot_tiles * slots), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        name="reduce_columns",
    )(active, query, key, query_line, slot_lines, weight, *kept)


def _columns_kernel(
    active_ref, query_ref, key_ref, query_line_ref, slot_lines_ref, weight_ref, lse_ref, *refs,
    grid, spans, group_reduce, windowed, weighted, scale, kv_heads,
):  # fmt: skip
    """Processes one tile of slots and one of queries.

    Blocks: query [1, G, t, D], key [1, slots, D], positions [1, 1, t] and [1, lines, slots], weights [1, words, t],
    log-sum-exps [1, G, 1, t], sums [1, words, slots].
    """
    *count_ref, sums_ref, lines_ref, narrow_ref = refs
    row, slot, at = pl.program_id(0) // kv_heads, pl.program_id(1), pl.program_id(2)
    group, lanes = query_ref.shape[1], narrow_ref.shape[2]
    first, last = grid.query_tiles(slot)

    @pl.when(at == 0)
    def _():
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)
        narrow_ref[...] = jnp.zeros(narrow_ref.shape, jnp.float32)
        for line in range(lines_ref.shape[0]):
            # [slots, lanes], since slots are rows of the logits here, and queries are columns
            lines_ref[line] = jnp.broadcast_to(slot_lines_ref[0, line : line + 1], (LANES, grid.slots)).T

    @pl.when((first <= at) & (at <= last) & (active_ref[0, row] <= at) & (at <= active_ref[1, row]))
    def _():
        def head(which, m):
            # [slots, t]
            logits = product(key_ref[...], query_ref[:, which], 2)[0] * scale
            if weighted:
                logits = logits + lines_ref[lines_ref.shape[0] - 1, :, :1]
            probability = jnp.exp(logits - lse_ref[0, which])
            return m + probability if group_reduce == "mean" else jnp.maximum(m, probability)

        # [1, t]
        position = query_line_ref[0]
        # [slots, t]
        seen = lines_ref[0, :, :1] <= position
        if windowed:
            seen = seen & (position <= lines_ref[1, :, :1])
        # [slots, t]
        m = jax.lax.fori_loop(0, group, head, jnp.zeros(seen.shape, jnp.float32), unroll=group <= WIDE)
        # Logits were not masked, so m is not valid yet for slots that are not seen.
        m = jnp.where(seen, m * (1.0 / group) if group_reduce == "mean" else m, 0.0)
        done = 0
        for transform, (start, stop) in spans.items():
            term = transformed(transform, m, lambda: softmax.uniform_share(count_ref[0][0, 0]))
            if stop - start >= WIDE:
                sums_ref[:, start:stop] += product(weight_ref[:, start:stop], term[None], 2)
                continue
            for word in range(start, stop):
                weighed = term * weight_ref[0, word : word + 1]
                parts = [weighed[:, left : left + lanes] for left in range(0, grid.queries, lanes)]
                narrow_ref[done] += functools.reduce(jnp.add, parts)
                done += 1

    @pl.when(at == pl.num_programs(2) - 1)
    def _():
        done = 0
        for start, stop in spans.values():
            for word in range(start, stop) if stop - start < WIDE else ():
                sums_ref[0, word : word + 1] = jnp.sum(narrow_ref[done].T, axis=0, keepdims=True)
                done += 1


def _active(flag: Array, tile: int) -> tuple[Array, Array]:
    """Finds the tiles in which a flag is set.

    Args:
      flag: [B, lines, n] bool.
      tile: the number of queries of a tile; divides n.

    Returns:
      The first and the last tile in which a flag of any line is set, [B] int32 each; 0 if there is none.
    """
    batch = flag.shape[0]
    # [B, tiles]
    tiles = jnp.any(flag.reshape(batch, flag.shape[1], -1, tile), axis=(1, 3))
    index = jnp.arange(tiles.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(tiles, index, 0), axis=1)
    return jnp.min(jnp.where(tiles, index, last[:, None]), axis=1), last
