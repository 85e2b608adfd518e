"""A program's one pass over keys and values on a GPU: what the kernels of decoding share.

Tile by tile, first all keys and then all values pass once through a ring in shared memory. The keys leave logits in
shared memory, and the softmax's maximum and sum. Then every probability is known: it is reduced over the group to what
statistics need, and weights the values. The last tile ends with the last slot and reads some slots again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper
from kvjax.kernels.decode.launch_gpu import WIDE, Launch
from kvjax.kernels.hopper import MATRIX, PER_ROW, TILE, along_columns, along_rows, full
from kvjax.kernels.softmax import NEGATIVE

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True)
class Pass:
    """A program's pass over some tiles of one (row, KV head).

    Call `begin`, `softmax`, `column` of every tile, `output`, `store` in this order.

    Attributes:
      launch: how the problem is cut.
      pair: index of the (row, KV head).
      first: first tile.
      count: number of tiles.
      key_ref: [pairs, S, D] keys of all pairs.
      value_ref: [pairs, S, D] values of all pairs.
      query_smem: [parts, rows, D] parts of the query; weights of the values later.
      ring: [stages, TILE, D] tiles that pass.
      part: [TILE, D] a tile's part, where tiles pass through registers.
      kept: logits of all tiles, a row per query head of the group.
      ends_smem: [2, rows] maximum and reciprocal sum.
      ready: barriers of the ring.
    """

    launch: Launch
    pair: Array
    first: Array | int
    count: Array | int
    key_ref: Ref
    value_ref: Ref
    query_smem: Ref
    ring: Ref
    part: Ref
    kept: Ref
    ends_smem: Ref
    ready: Ref

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a tile's logits."""
        return self.launch.rows, TILE

    def start(self, tile: Array | int) -> Array:
        """The first slot of a tile."""
        return jnp.minimum((self.first + tile) * TILE, self.launch.size - TILE)

    def begin(self) -> None:
        """Starts to fill the ring."""
        for step in range(self.launch.stages):
            self._fetch(jnp.int32(step))

    def softmax(self, bias: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Maximum and sum [rows] over all tiles; bias(tile) [TILE] is added to the logits, NEGATIVE hides a slot."""
        launch, shape = self.launch, self.shape

        def add_keys(at, carry):
            top, total = carry

            def dot(into):
                self._multiply(into, self.query_smem, at, True)
                return into[...]

            # [rows, TILE]
            logits = pl.run_scoped(dot, plgpu.ACC(shape, jnp.float32))
            added = along_columns(bias(at), shape)
            logits = jnp.where(added > NEGATIVE / 2, logits * launch.scale + added, NEGATIVE)
            self.kept[pl.ds(at * launch.group, launch.rows), pl.ds(0, TILE)] = logits
            highest = jnp.maximum(top, jnp.max(logits, axis=1))
            weight = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - along_rows(highest, shape)), 0.0)
            return highest, total * jnp.exp(top - highest) + jnp.sum(weight, axis=1)

        nothing = full((launch.rows,), NEGATIVE, PER_ROW), full((launch.rows,), 0.0, PER_ROW)
        top, total = lax.fori_loop(0, self.count, add_keys, nothing)
        self.ends_smem[0] = top
        self.ends_smem[1] = _share(total)
        return top, total

    def logits(self, at: Array, head: Array | int) -> Array:
        """[TILE] of one query head of the group."""
        return plgpu.layout_cast(self.kept[at * self.launch.group + head, pl.ds(0, TILE)], PER_ROW)

    def column(self, at: Array) -> Array:
        """[TILE]: the probabilities of a tile's slots, reduced over the group."""
        m, mean = full((TILE,), 0.0, PER_ROW), self.launch.group_reduce == "mean"
        # Unrolled, so that one head's exponentials do not wait for another's.
        for head in range(self.launch.group):
            logits = self.logits(at, head)
            probability = jnp.exp(logits - self.ends_smem[0, head]) * self.ends_smem[1, head]
            probability = jnp.where(logits > NEGATIVE / 2, probability, 0.0)
            m = m + probability if mean else jnp.maximum(m, probability)
        return m * (1.0 / self.launch.group) if mean else m

    def output(self, top: Array, total: Array) -> Array:
        """[rows, D]."""
        launch, shape, share = self.launch, self.shape, _share(total)
        # The query is not needed any more, and its memory takes the weights.
        weights_smem = self.query_smem.at[:, :, pl.ds(0, TILE)]

        def sum_up(into):
            @pl.loop(0, self.count)
            def _(at):
                # Rows beyond the group's hold other tiles' logits, and become rows of the output that are not read.
                logits = plgpu.layout_cast(self.kept[pl.ds(at * launch.group, launch.rows), pl.ds(0, TILE)], MATRIX)
                weight = jnp.exp(logits - along_rows(top, shape)) * along_rows(share, shape)
                weight = jnp.where(logits > NEGATIVE / 2, weight, 0.0)
                for i in range(launch.parts):
                    leading = hopper.leading(weight) if i < launch.parts - 1 else weight
                    self.query_smem[i, :, pl.ds(0, TILE)] = leading.astype(launch.part_dtype)
                    weight = weight - leading
                plgpu.commit_smem()
                self._multiply(into, weights_smem, self.count + at, False)

            return into[...]

        return pl.run_scoped(sum_up, plgpu.ACC((launch.rows, launch.dim), jnp.float32))

    def store(self, output: Array, output_ref: Ref) -> None:
        """Writes the output to [G padded, chunks * WIDE] of global memory, in chunks of features; see `gathered`."""
        launch = self.launch
        for chunk in range(-(-launch.dim // TILE)):
            width = min(TILE, launch.dim - chunk * TILE)
            self.kept[pl.ds(0, launch.rows), pl.ds(0, width)] = output[:, chunk * TILE : chunk * TILE + width]
            plgpu.commit_smem()
            where = output_ref.at[:, pl.ds(chunk * WIDE, WIDE)]
            plgpu.copy_smem_to_gmem(self.kept.at[pl.ds(0, launch.padded)], where)
            plgpu.wait_smem_to_gmem(0)

    def _fetch(self, step: Array) -> None:
        """Starts a copy into the ring: first all tiles of keys, then all tiles of values."""
        slot = lax.rem(step, self.launch.stages)
        for source, tile in ((self.key_ref, step), (self.value_ref, step - self.count)):

            @pl.when((tile >= 0) & (tile < self.count))
            def _(source=source, tile=tile):
                where = source.at[self.pair, pl.ds(self.start(tile), TILE)]
                plgpu.copy_gmem_to_smem(where, self.ring.at[slot], self.ready.at[slot])

    def _multiply(self, into: Ref, left: Ref, step: Array, transposed: bool) -> None:
        """Adds left times a tile, both in 16-bit parts, and frees the tile's place in the ring."""
        launch, slot = self.launch, lax.rem(step, self.launch.stages)

        def turn(ref):
            return ref.transpose((1, 0)) if transposed else ref

        plgpu.barrier_wait(self.ready.at[slot])
        if launch.staged:
            bits = jnp.dtype(launch.dtype).itemsize * 8
            swizzle = plgpu.find_swizzle(launch.dim * bits)
            # From shared memory in plain order to that of tensor cores
            rest = plgpu.layout_cast(
                self.ring[slot], plgpu.Layout.SMEM_GMEM_COPY((TILE, launch.dim), launch.dtype, swizzle)
            )
            for i in range(launch.parts):
                leading = hopper.leading(rest) if i < launch.parts - 1 else rest
                self.part[...] = leading.astype(launch.part_dtype)
                rest = rest - leading
                plgpu.commit_smem()
                for j in range(launch.parts - i):
                    plgpu.wgmma(into, left.at[j], turn(self.part))
                plgpu.wgmma_wait(0)
        else:
            plgpu.wgmma(into, left.at[0], turn(self.ring.at[slot]))
            plgpu.wgmma_wait(0)
        self._fetch(step + launch.stages)


def gathered(output: Array, group: int, dim: int) -> Array:
    """[..., G padded, chunks * WIDE], as `Pass.store` writes it -> [..., G, D]."""
    before = output.shape[:-2]
    output = output.reshape(*before, output.shape[-2], -1, WIDE)[..., :group, :, :TILE]
    return output.reshape(*before, group, -1)[..., :dim]


def _share(total: Array) -> Array:
    return 1.0 / jnp.where(total > 0, total, 1.0)
