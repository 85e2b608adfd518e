"""The first pass of the GPU's prefill kernel: attention of rows of queries, and the log-sum-exps of the rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper
from kvjax.kernels.hopper import MATRIX, PER_COLUMN, PER_ROW, ROWS, along_columns, along_rows, full, operand
from kvjax.kernels.prefill import rings_gpu
from kvjax.kernels.prefill.grid_gpu import Tiling
from kvjax.kernels.prefill.rings_gpu import Ring
from kvjax.kernels.softmax import NEGATIVE

Array = jax.Array
WIDTH = 128  # columns of the output that one product computes; they need registers in addition to the sums so far


def attend_rows(
    tiling: Tiling, rows: Array, key: Array, value: Array, row_line: Array, slot_lines: Array, visits: Array,
    keep: bool, above: bool,
) -> list[Array]:  # fmt: skip
    """Computes attention of all rows, in whole tiles.

    Args:
      tiling: how the problem is cut.
      rows: [pairs, parts, rows, D] queries of all heads.
      key: [pairs, parts, S, D].
      value: [pairs, parts, S, D].
      row_line: [B, tiles of rows, rows] positions, from `positions.lines`.
      slot_lines: [pairs, tiles of slots, lines, slots], from `positions.lines`, with `log_weight` to base 2.
      visits: [pairs, tiles of rows, 2], from `grid_gpu.slots_of_rows`.
      keep: whether to return log-sum-exps.
      above: whether to return the number of slots that are seen.

    Returns:
      The output [pairs, rows, D]; if `keep`, the log-sum-exps to base 2, [pairs, rows] float32; if `above`, the number
      of slots that each row sees, [pairs, rows] float32.
    """
    pairs, parts, count, dim = rows.shape
    warpgroups, stages = tiling.first()
    out_type = [jax.ShapeDtypeStruct((pairs, count, dim), tiling.dtype)]
    out_type += [jax.ShapeDtypeStruct((pairs, count), jnp.float32)] * (keep + above)
    scratch = {
        "query_smem": operand((warpgroups, parts, ROWS, dim), tiling.part_dtype),
        "weight_smem": operand((warpgroups, parts, ROWS, tiling.slots), tiling.part_dtype, columns=dim),
        "position_smem": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        "begun": plgpu.Barrier(num_arrivals=parts + 1, num_barriers=warpgroups),
        **rings_gpu.rings(
            warpgroups,
            stages,
            operand((stages, tiling.slots, dim), tiling.part_dtype),
            (tiling.slot_lines, tiling.slots),
        ),
    }
    kernel = functools.partial(_kernel, tiling=tiling, warpgroups=warpgroups, keep=keep, above=above)
    grid = (pairs, count // (warpgroups * ROWS))
    return rings_gpu.call(kernel, out_type, scratch, grid, warpgroups, "attend_queries")(
        rows, key, value, row_line, slot_lines, visits
    )


def _kernel(
    query_ref, key_ref, value_ref, row_line_ref, slot_lines_ref, visits_ref, output_ref, *kept_refs,
    query_smem, weight_smem, position_smem, begun, tiles, tile_ready, tile_free, lines, line_ready, line_free,
    tiling, warpgroups, keep, above,
):  # fmt: skip
    """Processes one or two tiles of rows of a (row, KV head)."""
    pair, own = lax.axis_index("pair"), lax.axis_index("wg")
    # The last tiles start first, since they take longest under a causal mask.
    program = query_ref.shape[2] // (warpgroups * ROWS) - 1 - lax.axis_index("program")
    batch = lax.div(pair, query_ref.shape[0] // row_line_ref.shape[0])
    parts, slots, shape = tiling.parts, tiling.slots, (ROWS, tiling.slots)
    tile_ring, line_ring = Ring(tiles, tile_ready, tile_free), Ring(lines, line_ready, line_free)
    chunks = [(start, min(WIDTH, tiling.dim - start)) for start in range(0, tiling.dim, WIDTH)]

    def copy(turn, at):
        start = jnp.minimum(at * slots, tiling.size - slots)
        line_ring.put(turn, slot_lines_ref.at[pair, at])
        for which, source in enumerate((key_ref, value_ref)):
            for i in range(parts):
                tile_ring.put((turn * 2 + which) * parts + i, source.at[pair, i, pl.ds(start, slots)])

    def skip(turn):
        line_ring.skip(turn)
        for i in range(2 * parts):
            tile_ring.skip(turn * 2 * parts + i)

    def compute(tile, loop):
        here = pl.ds(tile * ROWS, ROWS)
        for i in range(parts):
            plgpu.copy_gmem_to_smem(query_ref.at[pair, i, here], query_smem.at[own, i], begun.at[own])
        plgpu.copy_gmem_to_smem(row_line_ref.at[batch, tile], position_smem.at[own], begun.at[own])
        plgpu.barrier_wait(begun.at[own])
        # [rows, slots]
        position = along_rows(plgpu.layout_cast(position_smem[own], PER_ROW), shape)

        def add(turn, at, carry):
            sums, top, total, count = carry
            # [rows, slots]
            logits = rings_gpu.logits_of(query_smem.at[own], tile_ring, turn * 2 * parts, shape, tiling)
            place = line_ring.take(turn)

            def line(i):
                return along_columns(plgpu.layout_cast(lines[place, i], PER_COLUMN), shape)

            seen = line(0) <= position
            if tiling.windowed:
                seen = seen & (position <= line(1))
            if tiling.weighted:
                logits = logits + line(tiling.slot_lines - 1)
            logits = jnp.where(seen, logits, NEGATIVE)
            # [rows]
            highest = jnp.maximum(top, jnp.max(logits, axis=1))
            fade = jnp.exp2(top - highest)
            # [rows, slots]
            weight = jnp.exp2(logits - along_rows(highest, shape))
            total = total * fade + jnp.sum(weight, axis=1)
            if above:
                count = count + jnp.sum(jnp.where(seen, 1.0, 0.0), axis=1)
            sums = [x * along_rows(fade, x.shape) for x in sums]
            for i in range(parts):
                leading = hopper.leading(weight) if i < parts - 1 else weight
                weight_smem[own, i] = leading.astype(tiling.part_dtype)
                weight = weight - leading
            plgpu.commit_smem()
            line_ring.release(place)
            for i in range(parts):
                place = tile_ring.take((turn * 2 + 1) * parts + i)
                for c, (start, width) in enumerate(chunks):

                    def dot(into, i=i, place=place, start=start, width=width):
                        for j in range(parts - i):
                            plgpu.wgmma(into, weight_smem.at[own, j], tiles.at[place, :, pl.ds(start, width)])
                        return into[...]

                    sums[c] = sums[c] + pl.run_scoped(dot, plgpu.ACC((ROWS, width), jnp.float32))
                tile_ring.release(place)
            return tuple(sums), highest, total, count

        zeros = full((ROWS,), 0.0, PER_ROW)
        nothing = tuple(full((ROWS, width), 0.0, MATRIX) for _, width in chunks)
        # Far above the logits of slots that are not seen, so that these get weight 0, and far below all others
        floor = full((ROWS,), NEGATIVE / 2, PER_ROW)
        carry = loop(add, (nothing, floor, zeros, zeros if above else None))
        sums, top, total, count = carry
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        for x, (start, width) in zip(sums, chunks, strict=True):
            x, columns = x * along_rows(share, x.shape), pl.ds(start, width)
            if parts > 1:
                output_ref[pair, here, columns] = x
            else:  # the query is no longer needed, so the output overwrites it
                query_smem[own, 0, :, columns] = x.astype(tiling.dtype)
        if parts == 1:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(query_smem.at[own, 0], output_ref.at[pair, here])
            plgpu.wait_smem_to_gmem(0)
        kept = [top - jnp.log(share) * rings_gpu.LOG2E] * keep + [count] * above
        for ref, line in zip(kept_refs, kept, strict=True):
            ref[pair, here] = line

    rings_gpu.pass_by(visits_ref, pair, program, warpgroups, copy, compute, skip)
