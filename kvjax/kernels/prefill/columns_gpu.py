"""The second pass of the GPU's prefill kernel: column sums of probabilities, from the log-sum-exps of the rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.hopper import MATRIX, PER_COLUMN, PER_ROW, TILE, along_columns, along_rows, full, operand
from kvjax.kernels.prefill import rings_gpu
from kvjax.kernels.prefill.grid_gpu import Tiling
from kvjax.kernels.prefill.rings_gpu import Ring
from kvjax.kernels.softmax import transformed

Array = jax.Array


def reduce_columns(
    tiling: Tiling, transforms: tuple[str, ...], rows: Array, key: Array, query_lines: Array, slot_lines: Array,
    visits: Array, above: bool,
) -> Array:  # fmt: skip
    """Computes Σ_i w_i f(m[i, j]) for every word.

    Args:
      tiling: how the problem is cut.
      transforms: the transform f of each word; equal ones are consecutive.
      rows: [pairs, parts, rows, D] queries of all heads.
      key: [pairs, parts, S, D].
      query_lines: [pairs, tiles, lines, queries padded] positions; if `above`, the uniform share; the weight w of each
        word; the log-sum-exp of each head, to base 2.
      slot_lines: [pairs, tiles of slots, lines, slots], from `positions.lines`, with `log_weight` to base 2.
      visits: [pairs, tiles of slots, 2], from `grid_gpu.queries_of_slots`.
      above: whether a statistic has the transform ``above``.

    Returns:
      [pairs, words, slots padded to whole tiles] float32; the last tile ends with the last slot.
    """
    pairs, parts, _, dim = rows.shape
    warpgroups, stages = tiling.second(query_lines.shape[2])
    scratch = {
        "key_smem": operand((warpgroups, parts, TILE, dim), tiling.part_dtype),
        "slot_smem": plgpu.SMEM((warpgroups, tiling.slot_lines, TILE), jnp.float32),
        "begun": plgpu.Barrier(num_arrivals=parts + 1, num_barriers=warpgroups),
        **rings_gpu.rings(
            warpgroups, stages, operand((stages, tiling.queries, dim), tiling.part_dtype), query_lines.shape[2:]
        ),
    }
    count = slot_lines.shape[1]
    kernel = functools.partial(_kernel, tiling=tiling, warpgroups=warpgroups, transforms=transforms, above=above)
    out_type = jax.ShapeDtypeStruct((pairs, len(transforms), count * TILE), jnp.float32)
    return rings_gpu.call(kernel, out_type, scratch, (pairs, count // warpgroups), warpgroups, "reduce_columns")(
        rows, key, query_lines, slot_lines, visits
    )


def _kernel(
    query_ref, key_ref, query_lines_ref, slot_lines_ref, visits_ref, sums_ref,
    key_smem, slot_smem, begun, tiles, tile_ready, tile_free, lines, line_ready, line_free,
    tiling, warpgroups, transforms, above,
):  # fmt: skip
    """Processes one or two tiles of slots of a (row, KV head); slots are rows of the logits, queries are columns."""
    pair, program, own = lax.axis_index("pair"), lax.axis_index("program"), lax.axis_index("wg")
    parts, queries, shape = tiling.parts, tiling.queries, (TILE, tiling.queries)
    steps, mean = tiling.group * parts, tiling.group_reduce == "mean"
    tile_ring, line_ring = Ring(tiles, tile_ready, tile_free), Ring(lines, line_ready, line_free)

    def copy(turn, at):
        line_ring.put(turn, query_lines_ref.at[pair, at])

        @pl.loop(0, tiling.group)
        def _(head):
            for i in range(parts):
                source = query_ref.at[pair, i, pl.ds(head * tiling.n + at * queries, queries)]
                tile_ring.put(turn * steps + head * parts + i, source)

    def skip(turn):
        line_ring.skip(turn)
        pl.loop(0, steps)(lambda i: tile_ring.skip(turn * steps + i))

    def compute(tile, loop):
        start = jnp.minimum(tile * TILE, tiling.size - TILE)
        for i in range(parts):
            plgpu.copy_gmem_to_smem(key_ref.at[pair, i, pl.ds(start, TILE)], key_smem.at[own, i], begun.at[own])
        plgpu.copy_gmem_to_smem(slot_lines_ref.at[pair, tile], slot_smem.at[own], begun.at[own])
        plgpu.barrier_wait(begun.at[own])

        def slot_line(i):
            return along_rows(plgpu.layout_cast(slot_smem[own, i], PER_ROW), shape)

        def add(turn, at, sums):
            place = line_ring.take(turn)

            def line(i):
                return along_columns(plgpu.layout_cast(lines[place, i, pl.ds(0, queries)], PER_COLUMN), shape)

            def head(which, m):
                # [slots, queries]
                logits = rings_gpu.logits_of(key_smem.at[own], tile_ring, turn * steps + which * parts, shape, tiling)
                if tiling.weighted:
                    logits = logits + slot_line(tiling.slot_lines - 1)
                probability = jnp.exp2(logits - line(1 + above + len(transforms) + which))
                return m + probability if mean else jnp.maximum(m, probability)

            # [slots, queries]
            m = lax.fori_loop(0, tiling.group, head, full(shape, 0.0, MATRIX))
            position = line(0)
            seen = slot_line(0) <= position
            if tiling.windowed:
                seen = seen & (position <= slot_line(1))
            # Logits were not masked, so m is not valid yet for slots that are not seen.
            m = jnp.where(seen, m * (1.0 / tiling.group) if mean else m, 0.0)
            terms = {each: transformed(each, m, lambda: line(1)) for each in dict.fromkeys(transforms)}
            # [slots] for each word
            sums = tuple(
                total + jnp.sum(terms[transform] * line(1 + above + i), axis=1)
                for i, (transform, total) in enumerate(zip(transforms, sums, strict=True))
            )
            plgpu.commit_smem()  # orders the reads before the next copy into this place
            line_ring.release(place)
            return sums

        sums = loop(add, tuple(full((TILE,), 0.0, PER_ROW) for _ in transforms))
        for word, total in enumerate(sums):
            sums_ref[pair, word, pl.ds(tile * TILE, TILE)] = total

    rings_gpu.pass_by(visits_ref, pair, program, warpgroups, copy, compute, skip)
