"""How queries × slots are cut into tiles for the GPU's prefill kernels, which tiles are visited, what that costs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels import hopper
from kvjax.kernels.hopper import ROWS, SHARED_BYTES, TILE
from kvjax.kernels.prefill.positions import FAR

Array = jax.Array
LINES = 2  # tiles whose positions and weights are under way
WORDS = 32  # sums that a program of the second pass keeps in registers
WIDE = 128  # most slots, or queries, of a tile that passes: half the reads of shared memory for what stays
# Warpgroups that compute, and parts of tiles under way to them: the first choice that fits. Two warpgroups share what
# is copied, and one exponentiates while the other's product runs.
CHOICES = [(2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2), (1, 1)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a problem is cut: static, and what both kernels are made of.

    Attributes:
      group: query heads of a KV head; n: queries of a head, a multiple of 8; size: slots, a multiple of 8 and a tile at
        least; dim: of a head; dtype: of queries, keys and values.
      windowed, weighted: whether slots have a last position that sees them, and a weight added to logits.
      causal, scale, group_reduce: as of `attend`.
    """

    group: int
    n: int
    size: int
    dim: int
    dtype: Any
    windowed: bool
    weighted: bool
    causal: bool
    scale: float
    group_reduce: str

    @property
    def parts(self) -> int:
        return hopper.num_parts(self.dtype)

    @property
    def part_dtype(self) -> Any:
        return hopper.part_dtype(self.dtype)

    @property
    def most(self) -> int:
        """Of a tile that passes, as far as registers and shared memory go."""
        return WIDE if self.parts == 1 and self.dim <= 128 else TILE

    @property
    def slots(self) -> int:
        """Of a tile that passes in the first pass."""
        return self.most if self.size >= self.most else TILE

    @property
    def slot_lines(self) -> int:
        return 1 + self.windowed + self.weighted

    @property
    def places(self) -> int:
        """Tiles of slots that stay in the second pass; of several, an even number for warpgroups to share."""
        tiles = -(-self.size // TILE)
        return tiles + tiles % 2 if tiles > 1 else 1

    @property
    def query_tiles(self) -> int:
        """Of the second pass, of one head."""
        return -(-self.n // self.most)

    @property
    def queries(self) -> int:
        """Of a tile that passes in the second pass: tiles of like size, so that few are in vain."""
        return -(-self.n // (8 * self.query_tiles)) * 8

    @property
    def rows(self) -> int:
        """All heads' queries in a line, filled up for the first pass; the second reads whole tiles of a head."""
        rows = (self.group - 1) * self.n + self.query_tiles * self.queries
        tile = ROWS * self.first()[0]
        return -(-rows // tile) * tile

    def first(self) -> tuple[int, int]:
        """Warpgroups and stages of the first pass.

        Raises:
          ValueError: where the shared memory of a GPU is too small.
        """
        own = ROWS * (2 * self.parts * (self.dim + self.slots) + 4)
        lines = LINES * self.slot_lines * 4 * self.slots
        return self._choose(own, 2 * self.slots * self.dim, lines, -(-self.group * self.n // ROWS))

    def second(self, query_lines: int) -> tuple[int, int]:
        """The same of the second, where queries pass with so many lines: positions, weights, log-sum-exps.

        Raises:
          ValueError: where the shared memory of a GPU is too small.
        """
        if query_lines > 256:
            raise ValueError(
                f"the GPU's prefill kernel copies at most 256 lines of queries; {self.group} heads need more."
            )
        own = TILE * (2 * self.parts * self.dim + 4 * self.slot_lines)
        return self._choose(own, 2 * self.queries * self.dim, LINES * query_lines * 4 * self.most, self.places)

    def _choose(self, own: int, stage: int, fixed: int, tiles: int) -> tuple[int, int]:
        for warpgroups, stages in CHOICES:
            if warpgroups <= tiles and warpgroups * own + stages * stage + fixed <= SHARED_BYTES[-1]:
                return warpgroups, stages
        raise ValueError(f"{self.group} heads of {self.dim} in {self.dtype} exceed the shared memory of a GPU.")


def slots_of_rows(plan: Plan, query_line: Array, slot_lines: Array, window: Any) -> Array:
    """Which tiles of slots hold anything that a tile of rows, the heads' queries in a line, sees.

    Args:
      query_line: [B, rows up to whole tiles] and slot_lines: [B·K, lines, S], of `positions.lines`.
      window: if the block is causal and no slot is exempt, an int or [B]; None = all are seen.

    Returns:
      [B·K, tiles of rows, 2] int32, the first and the last; the last is before the first where there is none.
    """
    batch = query_line.shape[0]
    at = jnp.arange(query_line.shape[1], dtype=jnp.int32) % plan.n
    # [B, 1, row tiles], [B, K, 1]
    low, high = (x[:, None] for x in _ends(query_line > -jnp.inf, at, ROWS))
    begin, end = (x.reshape(batch, -1, 1) for x in _ends(slot_lines[:, 0] < jnp.inf, None, plan.size))
    if plan.causal:
        end = jnp.minimum(end, high)
        if window is not None:  # positions ascend, so as many slots back is at least as many positions
            begin = jnp.maximum(begin, low - _wide(window) + 1)
    end = jnp.where(high < 0, -1, end)
    return _pairs(begin // plan.slots, end // plan.slots)


def queries_of_slots(plan: Plan, active: Array, tiled: Array, window: Any) -> Array:
    """Which tiles of queries, of a head, see anything of a tile of slots and weigh something.

    Args:
      active: [B, n] bool, queries that do; tiled: slot lines, [B·K, tiles, lines, TILE]; window: as above.

    Returns:
      [B·K, tiles of slots, 2] int32, as above.
    """
    batch, pairs, tiles = active.shape[0], *tiled.shape[:2]
    begin, end = (x[:, None] for x in _ends(active, None, active.shape[1]))
    # The last tile ends with the last slot.
    start = jnp.minimum(jnp.arange(tiles, dtype=jnp.int32) * TILE, plan.size - TILE)
    at = (start[:, None] + jnp.arange(TILE, dtype=jnp.int32)).reshape(-1)
    live = tiled[:, :, 0].reshape(pairs, -1) < jnp.inf
    low, high = (x.reshape(batch, -1, tiles) for x in _ends(live, at, TILE))
    if plan.causal:
        begin = jnp.maximum(begin, low)
        if window is not None:
            end = jnp.minimum(end, high + _wide(window) - 1)
    end = jnp.where(high < 0, -1, end)
    return _pairs(begin // plan.queries, end // plan.queries)


def _wide(window: Any) -> Array:
    return jnp.minimum(jnp.asarray(window, jnp.int32), FAR).reshape(-1, 1, 1)


def _ends(flag: Array, at: Array | None, tile: int) -> tuple[Array, Array]:
    """Least and largest index of those with a flag, of each tile, [rows, tiles]; where there are none, FAR and −1."""
    rows, length = flag.shape
    at = jnp.arange(length, dtype=jnp.int32) if at is None else at
    least, most = jnp.where(flag, at, FAR), jnp.where(flag, at, -1)
    return least.reshape(rows, -1, tile).min(axis=2), most.reshape(rows, -1, tile).max(axis=2)


def _pairs(begin: Array, end: Array) -> Array:
    begin, end = jnp.broadcast_arrays(begin, end)
    return jnp.stack([begin, end], axis=-1).reshape(-1, begin.shape[-1], 2)
