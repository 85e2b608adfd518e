"""Positions and statistics of one (row, KV head) in a program of a GPU: one line each, read and written whole."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kvjax.kernels.decode.pass_gpu import Pass
from kvjax.kernels.hopper import COMPILER, PER_COLUMN, TILE
from kvjax.kernels.rank1 import on_lines, signed
from kvjax.kernels.softmax import NEGATIVE, transformed
from kvjax.kernels.step.arguments import ObserveAndEvict
from kvjax.typing import PyTree

Array = jax.Array
Ref = Any

COPY = 256  # the largest number of numbers of a copy; a line is padded to whole copies
COPY_BYTES = 128  # rows are padded to a multiple of this


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of one (row, KV head).

    The methods are called in this order: `read`, `append`, `bias` for each tile, `observe`, `observe_and_evict`.

    Attributes:
      pair: index of the (row, KV head).
      size: the number of slots.
      newest: [] int32 position of the row's token; -1 = a row that has ended.
      window: see `Problem`.
      refs: [pairs, S] each: the positions and the statistics of all pairs.
      position_smem: [length] int32.
      column_smem: [length] float32 probabilities, reduced over the group.
      stat_smem: [length] float32 each.
    """

    pair: Array
    size: int
    newest: Array
    window: int | None
    refs: tuple[Ref, ...]
    position_smem: Ref
    column_smem: Ref
    stat_smem: tuple[Ref, ...]

    @property
    def length(self) -> int:
        """The length of a line; see `length_of`."""
        return length_of(self.size)

    @property
    def slot(self) -> Array:
        """The index of each slot, [length] int32."""
        return plgpu.broadcasted_iota(jnp.int32, (self.length,), 0, layout=plgpu.Layout.WG_STRIDED((self.length,), 2))

    def read(self, begun: Ref) -> None:
        """Starts the copies of all lines, `copies` arrivals at a barrier."""

        @pl.loop(0, self.length // COPY)
        def _(at):
            # For slots beyond the last, copies read zeros.
            piece = pl.ds(at * COPY, COPY)
            for line_ref, line_smem in self._lines():
                plgpu.copy_gmem_to_smem(line_ref.at[self.pair, piece], line_smem.at[piece], begun)

    def append(self) -> tuple[Array, Array]:
        """Gives the new token the first empty slot.

        Returns:
          The slot, [] int32, which is the number of slots if none is empty; and the positions, [length] int32. The slot
          of a row that has ended stays empty.
        """
        # [length]
        slot = self.slot
        inside = slot < self.size
        position = jnp.where(inside, self.position_smem[...], -1)
        # []
        free = jnp.min(jnp.where(inside & (position < 0), slot, self.size))
        position = signed(jnp.where(inside & (slot == free), self.newest, position))
        self.position_smem[...] = position
        return free, position

    def bias(self, tiles: Pass, at: Array, hidden: Array | None = None) -> Array:
        """Returns what is added to the logits of a tile, [TILE]: `NEGATIVE` for slots that are not seen.

        Args:
          tiles: the pass over keys and values.
          at: index of the tile.
          hidden: a slot that is not read; None = every slot is.
        """
        start = tiles.start(at)
        # [TILE]
        position = plgpu.layout_cast(self.position_smem[pl.ds(start, TILE)], PER_COLUMN)
        slot = start + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=PER_COLUMN)
        # The last tile repeats slots of the tile before it; they are hidden.
        seen = (slot >= at * TILE) & self._seen(position)
        return jnp.where(seen if hidden is None else seen & (slot != hidden), 0.0, NEGATIVE)

    def observe(self, tiles: Pass) -> None:
        """Notes the probabilities of all slots that were read."""

        # Backwards, so that the slots that the last tile repeats are overwritten by their own tile.
        @pl.loop(0, tiles.launch.tiles)
        def _(back):
            at = tiles.launch.tiles - 1 - back
            self.column_smem[pl.ds(tiles.start(at), TILE)] = tiles.column(at)
            plgpu.commit_smem()

    def observe_and_evict(
        self,
        observe_and_evict: ObserveAndEvict,
        names: tuple[str, ...],
        transforms: tuple[str, ...],
        position: Array,
        budget: Array,
        own: Callable[[Array], Array] = lambda column: column,
    ) -> None:
        """Observes and evicts by the policy's own code, and writes all lines; the copies must be waited for.

        Args:
          observe_and_evict: see `Step`.
          names: of the statistics.
          transforms: see `Step`.
          position: from `append`.
          budget: [] int32.
          own: adds the probability of the new token, if its slot was not read: [length] -> [length].
        """
        # [length]
        visible = jnp.where((self.slot < self.size) & self._seen(position), 1.0, 0.0)
        m = jnp.where(visible > 0, own(self.column_smem[...]), 0.0)

        def uniform() -> Array:
            return 1.0 / jnp.maximum(jnp.sum(visible), 1.0)

        columns = {each: visible if each == "one" else transformed(each, m, uniform) for each in transforms}
        stats = {name: line[...] for name, line in zip(names, self.stat_smem, strict=True)}
        stats, position = on_lines(observe_and_evict, self.length)(stats, position, columns, self.newest, budget)
        self.position_smem[...] = position
        for name, line_smem in zip(names, self.stat_smem, strict=True):
            line_smem[...] = stats[name]
        plgpu.commit_smem()

        def write(start: Array | int, numbers: int) -> None:
            piece = pl.ds(start, numbers)
            for line_ref, line_smem in self._lines():
                plgpu.copy_smem_to_gmem(line_smem.at[piece], line_ref.at[self.pair, piece])

        # A copy that went beyond the last slot would write into the line of the next (row, KV head).
        whole, rest = divmod(self.size, COPY)
        pl.loop(0, whole)(lambda at: write(at * COPY, COPY))
        if rest:
            write(whole * COPY, rest)

    def _lines(self) -> list[tuple[Ref, Ref]]:
        return list(zip(self.refs, (self.position_smem, *self.stat_smem), strict=True))

    def _seen(self, position: Array) -> Array:
        """Returns whether the row's token sees slots by their positions."""
        visible = (position >= 0) & (position <= self.newest)
        return visible if self.window is None else visible & (position > self.newest - self.window)


def length_of(size: int) -> int:
    """Returns the length of a line: the number of slots, padded to whole copies."""
    return -(-size // COPY) * COPY


def copies(size: int, stats: int) -> int:
    """Returns the number of copies of the positions and of a number of statistics."""
    return (1 + stats) * (length_of(size) // COPY)


def scratch(size: int, stats: int) -> dict[str, Ref]:
    """Returns the shared memory of `Lines`."""
    length = length_of(size)
    return {
        "position_smem": plgpu.SMEM((length,), jnp.int32),
        "column_smem": plgpu.SMEM((length,), jnp.float32),
        "stat_smem": [plgpu.SMEM((length,), jnp.float32) for _ in range(stats)],
    }


def run(body: Callable[..., None], pairs: int, outputs: list[jax.ShapeDtypeStruct], scratch: dict[str, Ref]) -> PyTree:
    """Returns a kernel, with a program for each (row, KV head), as a function of arrays and references.

    Args:
      body: takes the references of what the function is given, those of the outputs, and the scratch by its names.
      pairs: the number of programs.
      outputs: of the function.
      scratch: name -> shared memory or barrier.
    """

    # plgpu.kernel does the same, but does not accept references before jax 0.11.
    def kernel(*refs: Ref) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes=(), **scratch)

    mesh = plgpu.Mesh(grid=(pairs,), grid_names=("pair",))
    return pl.kernel(kernel, outputs, mesh=mesh, compiler_params=COMPILER, name="decode_step")


def row_of(numbers: int, dtype: DTypeLike) -> int:
    """Returns the length of a row of numbers, padded to whole copies."""
    unit = COPY_BYTES // jnp.dtype(dtype).itemsize
    return -(-numbers // unit) * unit


def rows(x: Array) -> Array:
    """Pads rows to whole copies: [pairs, numbers] -> [pairs, numbers padded]."""
    return jnp.pad(x, ((0, 0), (0, row_of(x.shape[1], x.dtype) - x.shape[1])))
