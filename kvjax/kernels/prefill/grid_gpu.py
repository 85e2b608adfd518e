"""Cuts queries × slots into tiles for the GPU's prefill kernels, and determines which tiles are visited."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels.hopper import ROWS, SHARED_BYTES, TILE, InParts
from kvjax.kernels.prefill.positions import FAR

Array = jax.Array
LINES = 2  # places of the ring of positions and weights
WORDS = 32  # the number of sums that a program of the second pass keeps in registers
WIDE = 128  # the largest number of slots, or queries, of a passing tile; it halves the reads of the tile that stays
# Pairs of (warpgroups that compute, places of the ring of tiles); the first that fits is used. Two warpgroups share the
# copied tiles, and one computes exponentials while the product of the other runs.
CHOICES = [(2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2), (1, 1)]


@dataclasses.dataclass(frozen=True)
class Tiling(InParts):
    """The static description of how a problem is cut into tiles.

    A program keeps one tile per warpgroup in place, of queries in the first pass and of slots in the second; the tiles
    of the other kind pass.

    Attributes:
      group: the number of query heads per KV head.
      n: the number of queries of a head, a multiple of 8.
      size: the number of slots, a multiple of 8 and at least one tile.
      dim: the number of features of a head.
      dtype: of queries, keys and values.
      windowed: whether there is a window, so that a line gives the last position that sees each slot.
      weighted: whether there is `log_weight`.
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
    def largest_tile(self) -> int:
        """The largest number of slots or queries of a passing tile."""
        return WIDE if self.parts == 1 and self.dim <= 128 else TILE

    @property
    def slots(self) -> int:
        """The number of slots of a passing tile in the first pass."""
        return self.largest_tile if self.size >= self.largest_tile else TILE

    @property
    def slot_lines(self) -> int:
        """The number of lines of the slots; see `positions.lines`."""
        return 1 + self.windowed + self.weighted

    @property
    def places(self) -> int:
        """The number of tiles of slots in the second pass: one, or an even number for two warpgroups."""
        tiles = -(-self.size // TILE)
        return tiles + tiles % 2 if tiles > 1 else 1

    @property
    def query_tiles(self) -> int:
        """The number of tiles of one head's queries in the second pass."""
        return -(-self.n // self.largest_tile)

    @property
    def queries(self) -> int:
        """The number of queries of a tile in the second pass, chosen so that there is little padding."""
        return -(-self.n // (8 * self.query_tiles)) * 8

    @property
    def rows(self) -> int:
        """The number of rows: the queries of all heads, padded to whole tiles of the first and of the second pass."""
        rows = (self.group - 1) * self.n + self.query_tiles * self.queries
        tile = ROWS * self.first()[0]
        return -(-rows // tile) * tile

    def first(self) -> tuple[int, int]:
        """Returns the number of warpgroups and of places of the ring in the first pass.

        Raises:
          ValueError: if the shared memory of a GPU is too small.
        """
        own = ROWS * (2 * self.parts * (self.dim + self.slots) + 4)
        lines = LINES * self.slot_lines * 4 * self.slots
        return self._choose(own, 2 * self.slots * self.dim, lines, -(-self.group * self.n // ROWS))

    def second(self, query_lines: int) -> tuple[int, int]:
        """Returns the number of warpgroups and of places of the ring in the second pass.

        Args:
          query_lines: the number of lines of the queries: positions, weights and log-sum-exps.

        Raises:
          ValueError: if the shared memory of a GPU is too small.
        """
        if query_lines > 256:
            raise ValueError(f"it copies at most 256 lines of queries; {self.group} heads need {query_lines}.")
        own = TILE * (2 * self.parts * self.dim + 4 * self.slot_lines)
        return self._choose(own, 2 * self.queries * self.dim, LINES * query_lines * 4 * self.largest_tile, self.places)

    def _choose(self, own: int, stage: int, fixed: int, tiles: int) -> tuple[int, int]:
        """Returns the first of `CHOICES` that fits.

        Args:
          own: bytes per warpgroup.
          stage: bytes per place of the ring.
          fixed: other bytes.
          tiles: the number of tiles that stay, which limits the number of warpgroups.
        """
        for warpgroups, stages in CHOICES:
            if warpgroups <= tiles and warpgroups * own + stages * stage + fixed <= SHARED_BYTES[-1]:
                return warpgroups, stages
        raise ValueError(f"{self.group} heads of {self.dim} in {self.dtype} exceed the shared memory of a GPU.")


def slots_of_rows(tiling: Tiling, query_line: Array, slot_lines: Array, window: int | None) -> Array:
    """Returns the tiles of slots that each tile of rows can see; rows are the queries of all heads.

    Args:
      tiling: how the problem is cut.
      query_line: [B, rows padded to whole tiles], from `positions.lines`.
      slot_lines: [B·K, lines, S], from `positions.lines`.
      window: see `Problem`; None if some slots are exempt.

    Returns:
      The first and the last tile, [B·K, tiles of rows, 2] int32; the last is before the first if there is none.
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
    """Returns the tiles of a head's queries that can see slots of each tile and have a weight other than 0.

    Args:
      tiling: how the problem is cut.
      active: [B, n] bool, whether a query has a weight other than 0.
      tiled: [B·K, tiles, lines, TILE], lines of slots.
      window: see `slots_of_rows`.

    Returns:
      The first and the last tile, [B·K, tiles of slots, 2] int32; the last is before the first if there is none.
    """
    batch, pairs, tiles = active.shape[0], *tiled.shape[:2]
    # [B, 1, 1]
    begin, end = (x[:, None] for x in _ends(active, None, active.shape[1]))
    # [tiles]: the first slot of each tile; the last tile ends with the last slot
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
    """Returns the smallest and the largest index at which a flag is set in each tile.

    Args:
      flag: [rows, length] bool.
      at: [length] int32, the indices; None = 0, 1, 2, ...
      tile: the number of flags of a tile.

    Returns:
      [rows, tiles] int32 each; `FAR` and -1 if no flag is set.
    """
    rows, length = flag.shape
    at = jnp.arange(length, dtype=jnp.int32) if at is None else at
    least, largest_tile = jnp.where(flag, at, FAR), jnp.where(flag, at, -1)
    return least.reshape(rows, -1, tile).min(axis=2), largest_tile.reshape(rows, -1, tile).max(axis=2)


def _visits(begin: Array, end: Array) -> Array:
    """Stacks first and last tiles, [B, K or 1, tiles] each -> [B·K, tiles, 2]."""
    begin, end = jnp.broadcast_arrays(begin, end)
    return jnp.stack([begin, end], axis=-1).reshape(-1, begin.shape[-1], 2)
