"""Cuts queries × slots into tiles for the TPU's prefill kernels; which tiles are visited, and their cost."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kvjax.kernels.decode.pallas_tpu import LANES
from kvjax.typing import PyTree

TILE = 512  # the largest number of slots of a tile, and of queries of a tile over all heads of a program
TILE_BYTES = 1 << 20  # bytes of a tile of queries of all heads in the second pass; Pallas holds two such tiles


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tiles of queries × slots, and which tiles can contain slots that are seen.

    Attributes:
      n: the number of queries.
      size: the number of slots.
      queries: the number of queries of a tile.
      slots: the number of slots of a tile.
      heads: the number of query heads of a program.
      causal: see `Problem`.
      window: if causal, the number of newest slots that a query can see; None = all.
    """

    n: int
    size: int
    queries: int
    slots: int
    heads: int
    causal: bool
    window: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of tiles of queries, and of tiles of slots."""
        return pl.cdiv(self.n, self.queries), pl.cdiv(self.size, self.slots)

    def slot_tiles(self, at: Any) -> tuple[Any, Any]:
        """Returns the first and the last tile of slots that queries of the tile `at`, an int or traced, can see."""
        first, last = 0, self.shape[1] - 1
        if self.causal:
            last = clip(((at + 1) * self.queries - 1) // self.slots, 0, last)
            if self.window is not None:  # positions ascend: a distance in slots is at most that in positions
                first = clip((at * self.queries - self.window + 1) // self.slots, 0, last)
        return first, last

    def query_tiles(self, at: Any) -> tuple[Any, Any]:
        """Returns the first and the last tile of queries that can see slots of the tile `at`, an int or traced."""
        first, last = 0, self.shape[0] - 1
        if self.causal:
            first = clip(at * self.slots // self.queries, 0, last)
            if self.window is not None:
                last = clip(((at + 1) * self.slots + self.window - 2) // self.queries, 0, last)
        return first, last

    @property
    def pairs(self) -> int:
        """The number of (query, slot) pairs in all visited tiles."""
        tiles = (self.slot_tiles(at) for at in range(self.shape[0]))
        return sum(last - first + 1 for first, last in tiles) * self.queries * self.slots


def grids(
    group: int, n: int, size: int, dim: int, itemsize: int, causal: bool, window: int | None
) -> tuple[Grid, Grid]:
    """Returns the grids of the first and of the second pass.

    Args:
      group: the number of query heads per KV head.
      n: the number of queries.
      size: the number of slots.
      dim: the number of features of a head.
      itemsize: bytes of a number of queries and keys.
      causal: see `Problem`.
      window: see `Problem`; None if some slots are exempt.
    """
    queries, slots = _tile(n, TILE, 16), _tile(size, TILE, LANES)
    heads = next(c for c in range(group, 0, -1) if group % c == 0 and (c == 1 or c * queries <= TILE))
    # A program of the second pass processes all heads of a group, since f applies to their mean or maximum.
    fit = TILE_BYTES // (group * pl.cdiv(dim, LANES) * LANES * itemsize)
    parts = [queries // c for c in range(1, queries // LANES + 1) if queries % (c * LANES) == 0]
    few = next((part for part in parts if part <= fit), min(queries, LANES))
    return Grid(n, size, queries, slots, heads, causal, window), Grid(n, size, few, slots, group, causal, window)


def costs(
    first: Grid, second: Grid, rows: int, group: int, dim: int, itemsize: int, words: int
) -> tuple[pl.CostEstimate, pl.CostEstimate]:
    """Returns the cost of the first and of the second pass.

    The FLOPs are those of products and weighted sums in the visited tiles, including masked pairs. A pair (query, slot)
    takes 4·D FLOPs per head in the first pass (Q Kᵀ and P V), and in the second pass 2·D per head (Q Kᵀ) and 2 per word
    for all heads together. So statistics cost (½ + words / (2·G·D)) of attention.

    Args:
      first: the grid of the first pass.
      second: the grid of the second pass.
      rows: the number of (row, KV head) pairs.
      group: the number of query heads per KV head.
      dim: the number of features of a head.
      itemsize: bytes of a number of queries, keys and values.
      words: the number of words of all statistics.
    """
    tiles = first.pairs // (first.queries * first.slots) * (group // first.heads)
    slot_bytes, query_bytes = 2 * first.slots * dim * itemsize, 2 * group * first.n * dim * itemsize
    attention = pl.CostEstimate(
        flops=rows * group * first.pairs * 4 * dim,
        transcendentals=rows * group * first.pairs,
        bytes_accessed=rows * (tiles * slot_bytes + query_bytes),
    )
    tiles = second.pairs // (second.queries * second.slots)
    query_bytes = second.queries * (group * (dim * itemsize + 4) + 4 * words)
    slot_bytes = second.size * (dim * itemsize + 4 * words)
    columns = pl.CostEstimate(
        flops=rows * second.pairs * (group * 2 * dim + 2 * words),
        transcendentals=rows * group * second.pairs,
        bytes_accessed=rows * (tiles * query_bytes + slot_bytes),
    )
    return attention, columns


def _tile(length: int, maximum: int, minimum: int) -> int:
    """Returns the size of equal tiles, at most `maximum`: a multiple of `minimum`, or of the lanes for longer ones."""
    unit = LANES if length > LANES else minimum
    return pl.cdiv(pl.cdiv(length, pl.cdiv(length, maximum)), unit) * unit


def clip(x: Array, low: Array | int, high: Array | int) -> PyTree:
    """Clips an int or a traced number; an int remains an int."""
    return min(max(x, low), high) if isinstance(x, int) else jnp.clip(x, low, high)
