"""How queries × slots are cut into tiles for the GPU's prefill kernels, and which tiles are visited."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels import hopper
from kvjax.kernels.hopper import ROWS, SHARED_BYTES, TILE
from kvjax.kernels.prefill.positions import FAR

Array = jax.Array
LINES = 2  # places of the ring of positions and weights
WORDS = 32  # sums that a program of the second pass keeps in registers
WIDE = 128  # the largest number of slots, or queries, of a tile that passes; it halves the reads of what stays
# Warpgroups that compute, and places of the ring of tiles: the first choice that fits. Two warpgroups share what is
# copied, and one exponentiates while the other's product runs.
CHOICES = [(2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2), (1, 1)]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a problem is cut: static, and what both kernels are made of.

    Attributes:
      group: query heads of a KV head.
      n: queries of a head, a multiple of 8.
      size: slots, a multiple of 8 and at least one tile.
      dim: features of a head.
      dtype: of queries, keys and values.
      windowed: whether slots have a last position that sees them.
      weighted: whether slots have a weight that is added to logits.
      causal: see `Problem`.
      scale: see `Problem`.
      group_reduce: see `Problem`.
    """

    group: int
    n: int
    size: int
    dim: int
    dtype: Any
    windowed: bool
    weighted: bool
    causal: bool = False
    scale: float = 1.0
    group_reduce: str = "mean"

    @property
    def parts(self) -> int:
        return hopper.num_parts(self.dtype)

    @property
    def part_dtype(self) -> Any:
        return hopper.part_dtype(self.dtype)

    @property
    def most(self) -> int:
        """The largest number of slots or queries of a tile that passes."""
        return WIDE if self.parts == 1 and self.dim <= 128 else TILE

    @property
    def slots(self) -> int:
        """The number of slots of a tile that passes in the first pass."""
        return self.most if self.size >= self.most else TILE

    @property
    def slot_lines(self) -> int:
        return 1 + self.windowed + self.weighted

    @property
    def places(self) -> int:
        """The number of tiles of slots that stay in the second pass: one, or an even number for two warpgroups."""
        tiles = -(-self.size // TILE)
        return tiles + tiles % 2 if tiles > 1 else 1

    @property
    def query_tiles(self) -> int:
        """The number of tiles of one head's queries in the second pass."""
        return -(-self.n // self.most)

    @property
    def queries(self) -> int:
        """The number of queries of a tile in the second pass; tiles are of about the same size, with little padding."""
        return -(-self.n // (8 * self.query_tiles)) * 8

    @property
    def rows(self) -> int:
        """The number of rows, all heads' queries in a line, padded for the first pass and to the second's last tile."""
        rows = (self.group - 1) * self.n + self.query_tiles * self.queries
        tile = ROWS * self.first()[0]
        return -(-rows // tile) * tile

    def first(self) -> tuple[int, int]:
        """The number of warpgroups and of places of the ring in the first pass.

        Raises:
          ValueError: where the shared memory of a GPU is too small.
        """
        own = ROWS * (2 * self.parts * (self.dim + self.slots) + 4)
        lines = LINES * self.slot_lines * 4 * self.slots
        return self._choose(own, 2 * self.slots * self.dim, lines, -(-self.group * self.n // ROWS))

    def second(self, query_lines: int) -> tuple[int, int]:
        """The same for the second pass, where queries pass with lines of positions, weights and log-sum-exps.

        Raises:
          ValueError: where the shared memory of a GPU is too small.
        """
        if query_lines > 256:
            raise ValueError(f"it copies at most 256 lines of queries; {self.group} heads need {query_lines}.")
        own = TILE * (2 * self.parts * self.dim + 4 * self.slot_lines)
        return self._choose(own, 2 * self.queries * self.dim, LINES * query_lines * 4 * self.most, self.places)

    def _choose(self, own: int, stage: int, fixed: int, tiles: int) -> tuple[int, int]:
        for warpgroups, stages in CHOICES:
            if warpgroups <= tiles and warpgroups * own + stages * stage + fixed <= SHARED_BYTES[-1]:
                return warpgroups, stages
        raise ValueError(f"{self.group} heads of {self.dim} in {self.dtype} exceed the shared memory of a GPU.")


def slots_of_rows(tiling: Tiling, query_line: Array, slot_lines: Array, window: int | None) -> Array:
    """The tiles of slots in which a tile of rows, the heads' queries in a line, sees anything.

    Args:
      tiling: how the problem is cut.
      query_line: [B, rows padded to whole tiles], of `positions.lines`.
      slot_lines: [B·K, lines, S], of `positions.lines`.
      window: the number of newest positions that a query of a causal block sees; None = all, or some slots are exempt.

    Returns:
      [B·K, tiles of rows, 2] int32, the first and the last; the last is before the first where there is none.
    """
    batch = query_line.shape[0]
    # [rows]
    at = jnp.arange(query_line.shape[1], dtype=jnp.int32) % tiling.n
    # [B, 1, row tiles] and [B, K, 1]
    low, high = (x[:, None] for x in _ends(query_line > -jnp.inf, at, ROWS))
    begin, end = (x.reshape(batch, -1, 1) for x in _ends(slot_lines[:, 0] < jnp.inf, None, tiling.size))
    if tiling.causal:
        end = jnp.minimum(end, high)
        if window is not None:  # positions ascend: a distance in slots is at most that in positions
            begin = jnp.maximum(begin, low - min(window, FAR) + 1)
    end = jnp.where(high < 0, -1, end)
    return _visits(begin // tiling.slots, end // tiling.slots)


def queries_of_slots(tiling: Tiling, active: Array, tiled: Array, window: int | None) -> Array:
    """The tiles of queries, of a head, that see anything in a tile of slots and weigh something.

    Args:
      tiling: how the problem is cut.
      active: [B, n] bool, the queries that weigh something.
      tiled: [B·K, tiles, lines, TILE], lines of slots.
      window: as of `slots_of_rows`.

    Returns:
      [B·K, tiles of slots, 2] int32, as of `slots_of_rows`.
    """
    batch, pairs, tiles = active.shape[0], *tiled.shape[:2]
    begin, end = (x[:, None] for x in _ends(active, None, active.shape[1]))
    # The last tile ends with the last slot.
    start = jnp.minimum(jnp.arange(tiles, dtype=jnp.int32) * TILE, tiling.size - TILE)
    # [tiles * TILE]
    at = (start[:, None] + jnp.arange(TILE, dtype=jnp.int32)).reshape(-1)
    # [B·K, tiles * TILE]
    live = tiled[:, :, 0].reshape(pairs, -1) < jnp.inf
    # [B, K, tiles]
    low, high = (x.reshape(batch, -1, tiles) for x in _ends(live, at, TILE))
    if tiling.causal:
        begin = jnp.maximum(begin, low)
        if window is not None:
            end = jnp.minimum(end, high + min(window, FAR) - 1)
    end = jnp.where(high < 0, -1, end)
    return _visits(begin // tiling.queries, end // tiling.queries)


def _ends(flag: Array, at: Array | None, tile: int) -> tuple[Array, Array]:
    """The least and the largest index with a flag that is set in each tile, [rows, tiles]; without one, FAR and -1."""
    rows, length = flag.shape
    at = jnp.arange(length, dtype=jnp.int32) if at is None else at
    least, most = jnp.where(flag, at, FAR), jnp.where(flag, at, -1)
    return least.reshape(rows, -1, tile).min(axis=2), most.reshape(rows, -1, tile).max(axis=2)


def _visits(begin: Array, end: Array) -> Array:
    """[B, K or 1, tiles] of each -> [B·K, tiles, 2]."""
    begin, end = jnp.broadcast_arrays(begin, end)
    return jnp.stack([begin, end], axis=-1).reshape(-1, begin.shape[-1], 2)
