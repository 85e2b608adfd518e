"""A program's pass over keys and values on a GPU, which the kernels of decoding share.

A ring of tiles in shared memory receives first all keys and then all values. The pass over the keys stores the logits
in shared memory and computes the maximum and the sum of the softmax. Then all probabilities are known; they are reduced
over the group for statistics, and weight the values. The last tile ends with the last slot and repeats some slots.
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
from kvjax.kernels.decode import codes_gpu
from kvjax.kernels.decode.launch_gpu import MAX_COPY, WIDE, Launch
from kvjax.kernels.hopper import MATRIX, PER_ROW, TILE, along_columns, along_rows, full
from kvjax.kernels.softmax import NEGATIVE

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True)
class Pass:
    """A program's pass over some tiles of one (row, KV head).

    The methods are called in this order: `begin`, `softmax`, `column` for each tile, `output`, `store`.

    Attributes:
      launch: how the problem is cut.
      pair: index of the (row, KV head).
      first: index of the first tile.
      count: the number of tiles.
      key_ref: [pairs, S, D] keys of all pairs, or [pairs, S, bytes] codes.
      value_ref: [pairs, S, D] values of all pairs, or [pairs, S, bytes] codes.
      query_smem: [parts, rows, D] parts of the query, and later the weights of the values.
      ring: [stages, TILE, D] tiles of keys or values.
      part: [TILE, D] part of a tile; None unless tiles pass through registers.
      kept: [span * G + rows, WIDE] logits of all tiles, one row for each tile and query head of the group.
      ends_smem: [2, rows] maximum and reciprocal sum.
      ready: barriers of the ring.
      line_ring: [stages, kinds, TILE * groups] scales and zeros of each group of features; None without any.
      line_columns: [kinds, TILE, groups] those of the tile in hand; None if there is one group.
      key_lines: those of keys of all pairs, see `codes_gpu.operands`.
      value_lines: those of values of all pairs.
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
    line_ring: Ref = None
    line_columns: Ref = None
    key_lines: tuple[Ref, ...] = ()
    value_lines: tuple[Ref, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a tile's logits."""
        return self.launch.rows, TILE

    def start(self, tile: Array | int) -> Array:
        """Returns the first slot of a tile."""
        return jnp.minimum((self.first + tile) * TILE, self.launch.size - TILE)

    def begin(self) -> None:
        """Starts to fill the ring."""
        for step in range(self.launch.stages):
            self._fetch(jnp.int32(step))

    def softmax(self, bias: Callable[[Array], Array], others: Array | None = None) -> tuple[Array, Array]:
        """Computes the logits, and the maximum and the sum of the softmax over all tiles.

        Args:
          bias: tile -> [TILE], added to the logits; `NEGATIVE` hides a slot.
          others: [rows] the log-sum-exps over slots that are not the kernel's, to begin with; `NEGATIVE` for none, and
            None if no row has any.

        Returns:
          The maximum and the sum, [rows] each.
        """
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
            # [rows]
            highest = jnp.maximum(top, jnp.max(logits, axis=1))
            weight = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - along_rows(highest, shape)), 0.0)
            return highest, total * jnp.exp(top - highest) + jnp.sum(weight, axis=1)

        before = full((launch.rows,), NEGATIVE, PER_ROW), full((launch.rows,), 0.0, PER_ROW)
        if others is not None:
            before = others, jnp.where(others > NEGATIVE / 2, 1.0, 0.0)
        top, total = lax.fori_loop(0, self.count, add_keys, before)
        self.ends_smem[0] = top
        self.ends_smem[1] = _share(total)
        return top, total

    def logits(self, at: Array, head: Array | int) -> Array:
        """Returns the logits of one query head of the group for a tile, [TILE]."""
        return plgpu.layout_cast(self.kept[at * self.launch.group + head, pl.ds(0, TILE)], PER_ROW)

    def column(self, at: Array) -> Array:
        """Returns the probabilities of a tile's slots, reduced over the group, [TILE]."""
        m, mean = full((TILE,), 0.0, PER_ROW), self.launch.group_reduce == "mean"
        # Unrolled, so that the exponentials of different heads overlap.
        for head in range(self.launch.group):
            logits = self.logits(at, head)
            probability = jnp.exp(logits - self.ends_smem[0, head]) * self.ends_smem[1, head]
            probability = jnp.where(logits > NEGATIVE / 2, probability, 0.0)
            m = m + probability if mean else jnp.maximum(m, probability)
        return m * (1.0 / self.launch.group) if mean else m

    def output(self, top: Array, total: Array) -> Array:
        """Returns the output [rows, D] from the maximum and the sum of `softmax`."""
        launch, shape, share = self.launch, self.shape, _share(total)
        # The query is no longer needed, so the weights overwrite it.
        weights_smem = self.query_smem.at[:, :, pl.ds(0, TILE)]

        def sum_up(into):
            @pl.loop(0, self.count)
            def _(at):
                # [rows, TILE]. Rows beyond the group hold logits of other tiles; these rows of the output are not read.
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
        """Starts to copy the tile of a step into the ring: first come all tiles of keys, then all tiles of values."""
        slot = lax.rem(step, self.launch.stages)
        ready = self.ready.at[slot]
        for source, lines, tile in (
            (self.key_ref, self.key_lines, step),
            (self.value_ref, self.value_lines, step - self.count),
        ):

            @pl.when((tile >= 0) & (tile < self.count))
            def _(source=source, lines=lines, tile=tile):
                first = self.start(tile)
                plgpu.copy_gmem_to_smem(source.at[self.pair, pl.ds(first, TILE)], self.ring.at[slot], ready)
                length = self.launch.line_shape[1]
                begin = (self.first + tile) * TILE if codes_gpu.cuts_lines(self.launch.size) else first
                for kind, line in enumerate(lines):
                    for piece in range(0, length, MAX_COPY):
                        width = min(MAX_COPY, length - piece)
                        where = pl.ds(begin * (length // TILE) + piece, width)
                        into = self.line_ring.at[slot, kind, pl.ds(piece, width)]
                        plgpu.copy_gmem_to_smem(line.at[self.pair, where], into, ready)

    def _line(self, slot: Array) -> Callable[[int, int], Ref]:
        """Returns (kind, group) -> [TILE], the scales or zeros of a tile in shared memory; see `codes_gpu.decoded`."""
        if self.line_columns is None:
            return lambda kind, group: self.line_ring.at[slot, kind]
        self.line_columns[...] = self.line_ring[slot].reshape(self.line_columns.shape)
        return lambda kind, group: self.line_columns.at[kind, :, group]

    def _multiply(self, into: Ref, left: Ref, step: Array, transposed: bool) -> None:
        """Adds the product of `left` and the tile of a step, both in 16-bit parts, and fetches the next tile.

        Args:
          into: accumulator of the product.
          left: [parts, rows, x] shared memory.
          step: index of the tile among keys and values.
          transposed: whether the tile is transposed.
        """
        launch, slot = self.launch, lax.rem(step, self.launch.stages)

        def turn(ref):
            return ref.transpose((1, 0)) if transposed else ref

        plgpu.barrier_wait(self.ready.at[slot])
        if launch.form is not None:
            rests = codes_gpu.decoded(launch.form, self.ring.at[slot], self._line(slot))
            for i in range(launch.parts):
                for start, rest in rests.items():
                    leading = hopper.leading(rest) if i < launch.parts - 1 else rest
                    self.part[:, pl.ds(start, rest.shape[1])] = leading.astype(launch.part_dtype)
                    rests[start] = rest - leading
                plgpu.commit_smem()
                for j in range(launch.parts - i):
                    plgpu.wgmma(into, left.at[j], turn(self.part))
                plgpu.wgmma_wait(0)
        elif launch.staged:
            bits = jnp.dtype(launch.dtype).itemsize * 8
            swizzle = plgpu.find_swizzle(launch.dim * bits)
            # [TILE, D], to be stored in the order that tensor cores read
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
    """Joins the chunks that `Pass.store` writes: [..., G padded, chunks * WIDE] -> [..., G, D]."""
    before = output.shape[:-2]
    output = output.reshape(*before, output.shape[-2], -1, WIDE)[..., :group, :, :TILE]
    return output.reshape(*before, group, -1)[..., :dim]


def _share(total: Array) -> Array:
    """Returns the reciprocal of the softmax's sum; 1 for a query that sees no slot."""
    return 1.0 / jnp.where(total > 0, total, 1.0)
