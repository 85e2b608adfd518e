"""How a decoding problem is cut into programs for a GPU, and what each program holds."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper
from kvjax.kernels.hopper import ROWS, SHARED_BYTES, TILE, operand

WIDE = TILE + 8  # length of a stored row of logits, so that rows lie in different banks
STAGES = 4  # tiles of a program's ring
PROGRAMS = 2 * 132  # that fill a GPU
SPAN = 4  # tiles that are worth a program
MOST_TILES = 256  # per program: the number of rows that one copy takes, here of the bias


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a problem is cut: static, and what the kernel is made of.

    Attributes:
      group: query heads of a KV head.
      dim: features of a head.
      size: slots, at least one tile.
      dtype: of keys and values.
      reports: whether statistics are asked for.
      group_reduce: see `Problem`.
      scale: see `Problem`.
      lines: 32-bit numbers that are held for every slot, besides its logits.
      extra: bytes that are held besides.
      stages: tiles of the ring.
      span: tiles of a program.
    """

    group: int
    dim: int
    size: int
    dtype: Any
    reports: bool
    group_reduce: str = "mean"
    scale: float = 1.0
    lines: int = 1
    extra: int = 0
    stages: int = 0
    span: int = 0

    @property
    def parts(self) -> int:
        return hopper.num_parts(self.dtype)

    @property
    def part_dtype(self) -> Any:
        return hopper.part_dtype(self.dtype)

    @property
    def staged(self) -> bool:
        """Whether tiles pass through registers on their way to the tensor cores."""
        return self.parts > 1 or self.size % 8 > 0

    @property
    def rows(self) -> int:
        return -(-self.group // ROWS) * ROWS

    @property
    def padded(self) -> int:
        """The number of query heads, padded to what a copy moves."""
        return -(-self.group // 8) * 8

    @property
    def tiles(self) -> int:
        return -(-self.size // TILE)

    @property
    def spans(self) -> int:
        return -(-self.tiles // self.span)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers that `pass_gpu.Pass` needs."""
        ring = (self.stages, TILE, self.dim)
        return {
            "query_smem": operand((self.parts, self.rows, self.dim), self.part_dtype),
            "ring": plgpu.SMEM(ring, self.dtype) if self.staged else operand(ring, self.dtype),
            "part": operand((TILE, self.dim), self.part_dtype) if self.staged else None,
            # A product has more rows than a group: a tile's own come first, and the next tile's overwrite the others.
            "kept": plgpu.SMEM((self.span * self.group + self.rows, WIDE), jnp.float32),
            "ends_smem": plgpu.SMEM((2, self.rows), jnp.float32),
            "ready": plgpu.Barrier(num_barriers=self.stages),
        }

    def cut(self, pairs: int) -> "Launch":
        """The launch with stages and span for a number of (row, KV head) pairs.

        Raises:
          ValueError: where one tile does not fit.
        """
        tile = TILE * self.dim * jnp.dtype(self.dtype).itemsize
        fixed = 2 * self.dim * (self.parts * self.rows + self.staged * TILE) + 4 * self.rows * (WIDE + 2) + self.extra
        per_tile = 4 * (TILE * self.lines + self.group * WIDE)
        # Spans of about the same length, as many as the GPU has room for
        spans = max(min(PROGRAMS // pairs, self.tiles // SPAN), 1)
        span = -(-self.tiles // spans)
        fit = {
            (shared, stages): min((shared - fixed - stages * tile) // per_tile, MOST_TILES)
            for shared in SHARED_BYTES
            for stages in range(STAGES, 0, -1)
        }
        good = [choice for choice, tiles in fit.items() if choice[1] > 1 and tiles >= span]
        some = [choice for choice, tiles in fit.items() if choice[0] == SHARED_BYTES[-1] and tiles >= 1]
        if not some:
            raise ValueError(f"{self.group} heads of {self.dim} in {self.dtype} exceed the shared memory of a GPU.")
        choice = (good or some)[0]
        spans = -(-self.tiles // min(span, fit[choice]))
        return dataclasses.replace(self, stages=choice[1], span=-(-self.tiles // spans))
