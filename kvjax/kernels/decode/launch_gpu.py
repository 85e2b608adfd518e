"""Cuts a decoding problem into programs for a GPU, and determines what each program holds."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.forms import Form
from kvjax.kernels.hopper import ROWS, SHARED_BYTES, TILE, InParts, operand
from kvjax.storage.packing import BYTE
from kvjax.typing import Ref

WIDE = TILE + 8  # length of a stored row of logits, so that rows lie in different banks
STAGES = 4  # the largest number of tiles of a program's ring
PROGRAMS = 2 * 132  # the number of programs that fill a GPU
SPAN = 4  # the smallest number of tiles for which an additional program pays off
MAX_COPY = 256  # the largest number of numbers along an axis of a copy
MAX_TILES = MAX_COPY  # the largest number of tiles of a program: one copy moves the bias


@dataclasses.dataclass(frozen=True)
class Launch(InParts):
    """The static description of how a problem is cut into programs.

    Attributes:
      group: the number of query heads per KV head.
      dim: the number of features of a head.
      size: the number of slots, at least one tile.
      dtype: of keys and values, as they are or as they are decoded.
      reports: whether there are statistics to report.
      group_reduce: see `Problem`.
      scale: see `Problem`.
      lines: the number of 32-bit numbers that a program holds for each slot, besides its logits.
      extra: the number of bytes that a program holds in addition.
      stages: the number of tiles of the ring.
      span: the number of tiles of a program.
      form: how keys and values are decoded; None = they are in `dtype`.
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
    form: Form | None = None

    @property
    def staged(self) -> bool:
        """Whether tiles pass through registers on their way to the tensor cores."""
        return self.parts > 1 or self.size % 8 > 0 or self.form is not None

    @property
    def planes(self) -> int:
        """The number of codes of a byte."""
        return 1 if self.form is None else BYTE // self.form.bits

    @property
    def columns(self) -> int | None:
        """The number of features that are decoded to neighbouring columns, and lie apart otherwise; None = all."""
        return None if self.planes == 1 else TILE // self.planes

    @property
    def line_shape(self) -> tuple[int, int]:
        """The number of lines of a tile (scales, zeros), and of their numbers.

        There is an additional line if numbers that pass through registers would not fill these otherwise.
        """
        if self.form is None:
            return 0, 0
        kinds, groups = len(self.form.parts) - 1, self.form.groups
        return kinds + (groups > 1 and kinds * groups % 2), TILE * groups

    @property
    def line_copies(self) -> int:
        """The number of copies of the scales and zeros of a tile."""
        return 0 if self.form is None else (len(self.form.parts) - 1) * -(-self.line_shape[1] // MAX_COPY)

    @property
    def rows(self) -> int:
        """The number of query heads, padded to the rows of a tensor core's product."""
        return -(-self.group // ROWS) * ROWS

    @property
    def padded(self) -> int:
        """The number of query heads, padded to the multiple of 8 that a copy moves."""
        return -(-self.group // 8) * 8

    @property
    def tiles(self) -> int:
        """The number of tiles of a (row, KV head)."""
        return -(-self.size // TILE)

    @property
    def spans(self) -> int:
        """The number of programs of a (row, KV head)."""
        return -(-self.tiles // self.span)

    def scratch(self) -> dict[str, Ref]:
        """Returns the shared memory and barriers that `pass_gpu.Pass` needs."""
        ring = (self.stages, TILE, self.dim)
        held: Any = plgpu.SMEM(ring, self.dtype) if self.staged else operand(ring, self.dtype)
        lines = columns = None
        if self.form is not None:
            held = plgpu.SMEM((self.stages, TILE, self.form.size), jnp.uint8)
        if self.form is not None and self.line_copies:
            lines = plgpu.SMEM((self.stages, *self.line_shape), self.dtype)
            kinds, groups = self.line_shape[0], self.form.groups
            columns = plgpu.SMEM((kinds, TILE, groups), self.dtype) if groups > 1 else None
        return {
            "query_smem": operand((self.parts, self.rows, self.dim), self.part_dtype, self.columns),
            "ring": held,
            "line_ring": lines,
            "line_columns": columns,
            "part": operand((TILE, self.dim), self.part_dtype, self.columns) if self.staged else None,
            # A product may have more rows than a group has heads. The rows of the next tile overwrite the surplus.
            "kept": plgpu.SMEM((self.span * self.group + self.rows, WIDE), jnp.float32),
            "ends_smem": plgpu.SMEM((2, self.rows), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=1 + self.line_copies, num_barriers=self.stages),
        }

    def cut(self, pairs: int) -> "Launch":
        """Returns the launch with stages and span for the given number of (row, KV head) pairs.

        Raises:
          ValueError: if one tile does not fit.
        """
        item = jnp.dtype(self.dtype).itemsize
        lines = item * math.prod(self.line_shape)
        tile = TILE * (self.dim * item if self.form is None else self.form.size) + lines
        fixed = 2 * self.dim * (self.parts * self.rows + self.staged * TILE) + 4 * self.rows * (WIDE + 2) + self.extra
        fixed += lines
        per_tile = 4 * (TILE * self.lines + self.group * WIDE)
        # As many spans as fill the GPU, of about the same length.
        spans = max(min(PROGRAMS // pairs, self.tiles // SPAN), 1)
        span = -(-self.tiles // spans)
        fit = {
            (shared, stages): min((shared - fixed - stages * tile) // per_tile, MAX_TILES)
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
