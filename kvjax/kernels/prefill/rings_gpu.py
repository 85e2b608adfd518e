"""What both passes of the GPU's prefill kernel share: rings of tiles that pass, products with them, warpgroups."""

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

Array = jax.Array
LOG2E = math.log2(math.e)
REGISTERS = 232, 40  # per thread of two warpgroups that compute, and of one that copies; 504 in all


@dataclasses.dataclass(frozen=True)
class Ring:
    """Places in shared memory that one warpgroup fills in turn, and others read and free.

    Attributes:
      places: [stages, ...].
      ready: a barrier per place, for its reads.
      free: a barrier per place, for its next write.
    """

    places: Any
    ready: Any
    free: Any

    def put(self, step: Array, source: Any) -> None:
        stages = self.places.shape[0]
        at = lax.rem(step, jnp.int32(stages))
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(self.free.at[at]))
        plgpu.copy_gmem_to_smem(source, self.places.at[at], self.ready.at[at])

    def take(self, step: Array) -> Array:
        at = lax.rem(step, jnp.int32(self.places.shape[0]))
        plgpu.barrier_wait(self.ready.at[at])
        return at

    def release(self, at: Array) -> None:
        plgpu.barrier_arrive(self.free.at[at])

    def skip(self, step: Array) -> None:
        self.release(self.take(step))


def rings(warpgroups: int, stages: int, tile: Any, lines: Sequence[int]) -> dict[str, Any]:
    """The scratch memory of a kernel's two rings: parts of tiles, and lines of numbers."""
    barriers = {}
    for name, count in (("tile", stages), ("line", LINES)):
        barriers[f"{name}_ready"] = plgpu.Barrier(num_barriers=count)
        barriers[f"{name}_free"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=count)
    return {"tiles": tile, "lines": plgpu.SMEM((LINES, *lines), jnp.float32), **barriers}


def logits_of(left: Any, ring: Ring, step: Array, shape: tuple[int, int], tiling: Tiling) -> Array:
    """What stays, [parts, rows, D], times a tile that passes, transposed, part by part: float32 logits to base 2."""

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
    visits_ref: Any, pair: Array, program: Array, warpgroups: int, copy: Callable[[Array, Array], None],
    compute: Callable[[Array, Callable[..., Any]], None], skip: Callable[[Array], None],
) -> None:  # fmt: skip
    """Runs every warpgroup: the last copies the tiles that any of the others visits, and these compute.

    Args:
      visits_ref: [pairs, tiles, 2], the first and the last tile that passes for each that stays.
      pair: index of the (row, KV head).
      program: index of the program.
      warpgroups: the number that compute, each on a tile that stays.
      copy: (turn, tile) starts to copy a tile.
      compute: (tile that stays, loop), where loop(body, carry) calls body(turn, tile, carry) for the visited tiles.
      skip: (turn) frees a tile that only another warpgroup visits.
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
    kernel: Callable[..., None], out_type: Any, scratch: dict[str, Any], grid: tuple[int, int], warpgroups: int,
    name: str,
) -> Callable[..., Any]:  # fmt: skip
    """A kernel as a function of arrays; a program is the warpgroups that compute and one that copies."""
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
