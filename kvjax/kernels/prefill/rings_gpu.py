"""Parts of both passes of the GPU's prefill kernel: rings of tiles, products with them, and warpgroups."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.hopper import COMPILER
from kvjax.kernels.prefill.grid_gpu import LINES, Tiling
from kvjax.typing import Ref

Array = jax.Array
LOG2E = math.log2(math.e)
REGISTERS = 232, 40  # per thread of the two warpgroups that compute, and of the one that copies; 504 in total


@dataclasses.dataclass(frozen=True)
class Ring:
    """Places in shared memory that one warpgroup fills in turn and others read.

    Attributes:
      places: [stages, ...].
      ready: one barrier per place: its content can be read.
      free: one barrier per place: it can be overwritten.
    """

    places: Any
    ready: Any
    free: Any

    def put(self, step: Array, source: Ref) -> None:
        """Starts to copy `source` to the place of a step, as soon as it is free."""
        stages = self.places.shape[0]
        at = lax.rem(step, jnp.int32(stages))
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(self.free.at[at]))
        plgpu.copy_gmem_to_smem(source, self.places.at[at], self.ready.at[at])

    def take(self, step: Array) -> Array:
        """Waits until the place of a step can be read, and returns its index."""
        at = lax.rem(step, jnp.int32(self.places.shape[0]))
        plgpu.barrier_wait(self.ready.at[at])
        return at

    def release(self, at: Array) -> None:
        """Frees a place for one warpgroup."""
        plgpu.barrier_arrive(self.free.at[at])

    def skip(self, step: Array) -> None:
        """Frees the place of a step for one warpgroup without reading it."""
        self.release(self.take(step))


def rings(warpgroups: int, stages: int, tile: object, lines: Sequence[int]) -> dict[str, Ref]:
    """Returns the scratch memory of a kernel's two rings, of tiles and of lines.

    Args:
      warpgroups: the number of warpgroups that compute.
      stages: the number of places of the ring of tiles.
      tile: shared memory of the ring of tiles.
      lines: the shape of a place of the ring of lines.
    """
    barriers = {}
    for name, count in (("tile", stages), ("line", LINES)):
        barriers[f"{name}_ready"] = plgpu.Barrier(num_barriers=count)
        barriers[f"{name}_free"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=count)
    return {"tiles": tile, "lines": plgpu.SMEM((LINES, *lines), jnp.float32), **barriers}


def logits_of(left: Ref, ring: Ring, step: Array, shape: tuple[int, int], tiling: Tiling) -> Array:
    """Computes the logits of a tile, to base 2.

    Args:
      left: [parts, rows, D] the tile that stays.
      ring: the ring of passing tiles.
      step: the step of the ring with the first part of the passing tile.
      shape: the shape of the logits.
      tiling: how the problem is cut.

    Returns:
      The product with the transposed passing tile, in float32.
    """

    def dot(into):
        for i in range(tiling.parts):
            at = ring.take(step + i)
            for j in range(tiling.parts - i):
                plgpu.wgmma(into, left.at[j], ring.places.at[at].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            ring.release(at)
        return into[...]

    return pl.run_scoped(dot, plgpu.ACC(shape, jnp.float32)) * (tiling.scale * LOG2E)


def pass_by(
    visits_ref: Ref, pair: Array, program: Array, warpgroups: int, copy: Callable[[Array, Array], None],
    compute: Callable[[Array, Callable[..., Any]], None], skip: Callable[[Array], None],
) -> None:  # fmt: skip
    """Runs all warpgroups: the last one copies every tile that one of the others visits.

    Args:
      visits_ref: [pairs, tiles, 2], the first and the last passing tile for each tile that stays.
      pair: index of the (row, KV head).
      program: index of the program.
      warpgroups: the number of warpgroups that compute, each for one tile that stays.
      copy: (turn, tile) -> None, starts to copy a tile.
      compute: (tile that stays, loop) -> None, where loop(body, carry) calls body(turn, tile, carry) for each visited
        tile.
      skip: (turn) -> None, frees a tile that only another warpgroup visits.
    """
    own = lax.axis_index("wg")
    ends = [[visits_ref[pair, program * warpgroups + i, end] for i in range(warpgroups)] for end in (0, 1)]
    low, stop = ends[0][0], ends[1][0] + 1
    for first, last in zip(ends[0][1:], ends[1][1:], strict=True):
        low, stop = jnp.minimum(low, first), jnp.maximum(stop, last + 1)
    stop = jnp.maximum(stop, low)

    @pl.when(own < warpgroups)
    def _():
        if warpgroups > 1:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        tile = program * warpgroups + own
        begin = jnp.minimum(visits_ref[pair, tile, 0], stop)
        end = jnp.maximum(visits_ref[pair, tile, 1] + 1, begin)

        def loop(body, carry):
            pl.loop(low, begin)(lambda at: skip(at - low))
            carry = lax.fori_loop(begin, end, lambda at, carry: body(at - low, at, carry), carry)
            pl.loop(end, stop)(lambda at: skip(at - low))
            return carry

        compute(tile, loop)

    @pl.when(own == warpgroups)
    def _():
        if warpgroups > 1:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        pl.loop(low, stop)(lambda at: copy(at - low, at))


def call(
    kernel: Callable[..., None], out_type: object, scratch: dict[str, Ref], grid: tuple[int, int], warpgroups: int,
    name: str,
) -> Callable[..., Any]:  # fmt: skip
    """Returns a kernel as a function of arrays; a program has `warpgroups` that compute and one more that copies."""
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("pair", "program"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        compiler_params=COMPILER,
        kernel_name=name,
    )
