"""Attention of one query a head over the slots of a cache, with column statistics, on a Hopper GPU (Mosaic GPU).

A program takes the slots, or a span of them, of one (row, KV head). Tile by tile, first all keys and then all values
come once through a ring in shared memory. The keys leave logits in shared memory, and the softmax's maximum and sum;
then every probability is known: it is reduced over the group to what statistics need, and weighs the values. Spans
are joined by XLA: where there are too few rows to fill the GPU, or too many slots for a program's shared memory.

What should bind, and no GPU has confirmed it: memory, at 18 bytes a clock for each of an H200's 132 processors.
Products have 64 rows at least, of which a group fills some, and in 16 bits take a third of the tensor cores' time
whatever the group; on CUDA cores a group of 8 would need all of them. float32, in three parts, is slower. Slots that
are no multiple of 8 cannot be copied into the order that tensor cores read: they pass through registers, as float32
does. The last tile ends with the last slot and reads some again.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper, softmax
from kvjax.kernels.hopper import ROWS, SHARED_BYTES, TILE, operand
from kvjax.kernels.softmax import NEGATIVE
from kvjax.statistics import Statistic

Array = jax.Array
WIDE = TILE + 8  # of a stored row of logits, so that rows lie in different banks
STAGES = 4  # tiles under way to a program
PROGRAMS = 2 * 132  # that fill a GPU
SPAN = 4  # tiles that are worth a program
MOST = 256  # tiles of a program: as many rows as one copy takes, here of the bias


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a problem is cut: static, and what the kernel is made of.

    Attributes:
      group: query heads of a KV head; dim: of a head; size: slots, a tile at least; dtype: of keys and values.
      told: whether statistics are asked for; group_reduce, scale: as of `attend`.
      stages: tiles of the ring; span: tiles of a program.
    """

    group: int
    dim: int
    size: int
    dtype: Any
    told: bool
    group_reduce: str
    scale: float
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
        """Query heads, filled up to what a copy moves."""
        return -(-self.group // 8) * 8

    @property
    def tiles(self) -> int:
        return -(-self.size // TILE)

    @property
    def spans(self) -> int:
        return -(-self.tiles // self.span)

    def cut(self, pairs: int) -> "Plan":
        """Chooses stages and span for so many (row, KV head) pairs.

        Raises:
          ValueError: where not even one tile fits.
        """
        tile = TILE * self.dim * jnp.dtype(self.dtype).itemsize
        fixed = 2 * self.dim * (self.parts * self.rows + self.staged * TILE) + 4 * self.rows * (WIDE + 2)
        per_tile = 4 * (TILE + self.group * WIDE)
        # Spans of like length, as many as the GPU has room for
        spans = max(min(PROGRAMS // pairs, self.tiles // SPAN), 1)
        span = -(-self.tiles // spans)
        fit = {
            (shared, stages): min((shared - fixed - stages * tile) // per_tile, MOST)
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


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_position: Array,
    key_position: Array,
    statistics: Sequence[Statistic],
    weights: Sequence[Array],
    scale: float,
    window: int | Array | None,
    exempt: Array | None,
    log_weight: Array | None,
    group_reduce: str,
) -> tuple[Array, dict[str, Array]]:
    """As `kernels.decode.xla.attend`, for one query a head (n = 1), head sizes of 64 to 256, a multiple of 16."""
    batch, kv_heads, group, n, dim = query.shape
    if n != 1:
        raise ValueError(f"the decode kernel takes one query a head; got {n}.")
    if dim % 16 or not TILE <= dim <= 256:
        raise ValueError(f"the GPU's decode kernel takes head sizes of 64 to 256, a multiple of 16; got {dim}.")
    pairs, size = batch * kv_heads, key.shape[2]
    # Fewer slots than a tile get others before them that nobody sees.
    front = max(TILE - size, 0)
    key, value = (
        jnp.pad(x.reshape(pairs, size, dim), ((0, 0), (front, 0), (0, 0))) if front else x.reshape(pairs, size, dim)
        for x in (key, value)
    )
    plan = Plan(group, dim, size + front, key.dtype, bool(statistics), group_reduce, scale).cut(pairs)
    mask = softmax.visible(query_position, key_position, window, exempt)
    bias = jnp.where(mask[:, :, 0], 0.0 if log_weight is None else log_weight, NEGATIVE).astype(jnp.float32)
    # [pairs, parts, G filled up, D]
    parts = jnp.stack(hopper.parts(query.reshape(pairs, group, dim).astype(key.dtype)), axis=1)
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, plan.padded - group), (0, 0)))
    output, ends, *columns = _call(plan, pairs)(parts, key, value, _tiled(bias.reshape(pairs, size), plan))
    # [pairs, spans, G, D] from chunks of a tile's width; [pairs, spans, G] maximum and sum
    output = output.reshape(*output.shape[:3], -1, WIDE)[:, :, :group, :, :TILE]
    output = output.reshape(pairs, plan.spans, group, -1)[..., :dim]
    top, total = ends[:, :, 0, :group], ends[:, :, 1, :group]
    highest = jnp.max(top, axis=1, keepdims=True)
    share = total * jnp.exp(top - highest)
    sums = jnp.sum(share, axis=1, keepdims=True)
    share = share / jnp.where(sums > 0, sums, 1.0)
    output = jnp.sum(output * share[..., None], axis=1).astype(value.dtype).reshape(query.shape)
    if not statistics:
        return output, {}
    # [pairs, 1 or G, slots]
    column = _untiled(columns[0], size)
    if plan.spans > 1:
        weight = jnp.where(column > NEGATIVE / 2, jnp.exp(column - highest[:, 0, :, None]), 0.0)
        column = weight / jnp.where(sums > 0, sums, 1.0)[:, 0, :, None]
    probability = column.reshape(batch, kv_heads, -1, 1, size)
    return output, softmax.column_sums(statistics, weights, probability, mask, group_reduce)


def _tiled(bias: Array, plan: Plan) -> Array:
    """[pairs, slots] -> [pairs, spans, tiles, TILE]; the last tile ends with the last slot, repeats hidden."""
    pairs, size = bias.shape
    whole = size // TILE * TILE
    hidden = jnp.full((pairs, -size % TILE), NEGATIVE)
    rest = jnp.full((pairs, (plan.spans * plan.span - plan.tiles) * TILE), NEGATIVE)
    tiled = jnp.concatenate([bias[:, :whole], hidden, bias[:, whole:], rest], axis=1)
    return tiled.reshape(pairs, plan.spans, plan.span, TILE)


def _untiled(column: Array, size: int) -> Array:
    """[..., tiles * TILE and more] -> [..., slots]: the inverse."""
    whole = size // TILE * TILE
    last = column[..., whole + -size % TILE : -(-size // TILE) * TILE]
    return jnp.concatenate([column[..., :whole], last], axis=-1)


def _call(plan: Plan, pairs: int) -> Any:
    chunks = -(-plan.dim // TILE)
    out_type = [
        jax.ShapeDtypeStruct((pairs, plan.spans, plan.padded, chunks * WIDE), jnp.float32),
        jax.ShapeDtypeStruct((pairs, plan.spans, 2, plan.rows), jnp.float32),
    ]
    if plan.told:
        rows = 1 if plan.spans == 1 else plan.group
        out_type.append(jax.ShapeDtypeStruct((pairs, rows, plan.spans * plan.span * TILE), jnp.float32))
    ring = (plan.stages, TILE, plan.dim)
    scratch: dict[str, Any] = {
        "query_smem": operand((plan.parts, plan.rows, plan.dim), plan.part_dtype),
        "ring": plgpu.SMEM(ring, plan.dtype) if plan.staged else operand(ring, plan.dtype),
        "part": operand((TILE, plan.dim), plan.part_dtype) if plan.staged else None,
        "bias_smem": plgpu.SMEM((plan.span, TILE), jnp.float32),
        # A product has more rows than a group: a tile's own come first, the next tile's cover the others.
        "kept": plgpu.SMEM((plan.span * plan.group + plan.rows, WIDE), jnp.float32),
        "ends_smem": plgpu.SMEM((2, plan.rows), jnp.float32),
        "ready": plgpu.Barrier(num_barriers=plan.stages),
        "begun": plgpu.Barrier(num_arrivals=plan.parts + 1),
    }
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        scratch_types=scratch,
        grid=(pairs, plan.spans),
        grid_names=("pair", "span"),
        # Lane: layouts are those written here; inferring them, the default of newer jax, fails for this kernel.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="attend_one_query",
    )


def _copying(plan: Plan) -> Any:
    """Layout of a tile in registers, from shared memory in plain order to that of tensor cores."""
    bits = jnp.dtype(plan.dtype).itemsize * 8
    return plgpu.Layout.SMEM_GMEM_COPY((TILE, plan.dim), plan.dtype, plgpu.find_swizzle(plan.dim * bits))


def _kernel(
    query_ref, key_ref, value_ref, bias_ref, output_ref, ends_ref, *column_refs,
    query_smem, ring, part, bias_smem, kept, ends_smem, ready, begun, plan,
):  # fmt: skip
    """One span of the slots of one (row, KV head)."""
    pair, span = lax.axis_index("pair"), lax.axis_index("span")
    first = span * plan.span
    count = jnp.minimum(plan.span, plan.tiles - first)
    matrix, shape = plgpu.Layout.WGMMA, (plan.rows, TILE)
    # Layouts of what a matrix has per row, and per column
    per_row, per_column = matrix.reduce(1), matrix.reduce(0)

    def full(shape, fill, layout):
        return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)

    def along(row, shape):
        """[rows] -> [rows, columns]."""
        return lax.broadcast_in_dim(row, shape, (0,))

    def fetch(step):
        """Starts a copy into the ring: first all tiles of keys, then all of values."""
        slot = lax.rem(step, plan.stages)
        for source, tile in ((key_ref, step), (value_ref, step - count)):

            @pl.when((tile >= 0) & (tile < count))
            def _(source=source, tile=tile):
                start = jnp.minimum((first + tile) * TILE, plan.size - TILE)
                plgpu.copy_gmem_to_smem(source.at[pair, pl.ds(start, TILE)], ring.at[slot], ready.at[slot])

    def multiply(into, left, step, transposed):
        """Adds left times a tile and frees its place; left holds 16-bit parts, as the tile does once it is split."""
        slot = lax.rem(step, plan.stages)
        turn = (lambda ref: ref.transpose((1, 0))) if transposed else (lambda ref: ref)
        plgpu.barrier_wait(ready.at[slot])
        if plan.staged:
            rest = plgpu.layout_cast(ring[slot], _copying(plan))
            for i in range(plan.parts):
                leading = hopper.leading(rest) if i < plan.parts - 1 else rest
                part[...] = leading.astype(plan.part_dtype)
                rest = rest - leading
                plgpu.commit_smem()
                for j in range(plan.parts - i):
                    plgpu.wgmma(into, left.at[j], turn(part))
                plgpu.wgmma_wait(0)
        else:
            plgpu.wgmma(into, left.at[0], turn(ring.at[slot]))
            plgpu.wgmma_wait(0)
        fetch(step + plan.stages)

    for i in range(plan.parts):
        plgpu.copy_gmem_to_smem(query_ref.at[pair, i], query_smem.at[i, pl.ds(0, plan.padded)], begun)
    plgpu.copy_gmem_to_smem(bias_ref.at[pair, span], bias_smem, begun)
    for step in range(plan.stages):
        fetch(jnp.int32(step))
    plgpu.barrier_wait(begun)

    def add_keys(at, carry):
        top, total = carry

        def dot(into):
            multiply(into, query_smem, at, True)
            return into[...]

        # [rows, TILE]
        logits = pl.run_scoped(dot, plgpu.ACC(shape, jnp.float32))
        bias = lax.broadcast_in_dim(plgpu.layout_cast(bias_smem[at], per_column), shape, (1,))
        logits = jnp.where(bias > NEGATIVE / 2, logits * plan.scale + bias, NEGATIVE)
        kept[pl.ds(at * plan.group, plan.rows), pl.ds(0, TILE)] = logits
        highest = jnp.maximum(top, jnp.max(logits, axis=1))
        weight = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - along(highest, shape)), 0.0)
        return highest, total * jnp.exp(top - highest) + jnp.sum(weight, axis=1)

    nothing = full((plan.rows,), NEGATIVE, per_row), full((plan.rows,), 0.0, per_row)
    top, total = lax.fori_loop(0, count, add_keys, nothing)
    share = 1.0 / jnp.where(total > 0, total, 1.0)
    ends_ref[pair, span, 0] = top
    ends_ref[pair, span, 1] = total
    ends_smem[0] = top
    ends_smem[1] = share

    def tell(at):
        """Writes what statistics are made of: m of a tile's slots or, for a later softmax over all spans, logits."""
        (column_ref,) = column_refs
        here = pl.ds((first + at) * TILE, TILE)

        def row(head):
            return plgpu.layout_cast(kept[at * plan.group + head, pl.ds(0, TILE)], per_row)

        if plan.spans > 1:

            @pl.loop(0, plan.group)
            def _(head):
                column_ref[pair, head, here] = row(head)

            return
        m, mean = full((TILE,), 0.0, per_row), plan.group_reduce == "mean"
        # Unrolled: one head's exponentials wait for nothing of another's.
        for head in range(plan.group):
            logits = row(head)
            probability = jnp.exp(logits - ends_smem[0, head]) * ends_smem[1, head]
            probability = jnp.where(logits > NEGATIVE / 2, probability, 0.0)
            m = m + probability if mean else jnp.maximum(m, probability)
        column_ref[pair, 0, here] = m * (1.0 / plan.group) if mean else m

    if plan.told:
        pl.loop(0, count)(tell)

    # The query has done its work, and makes room for the weights.
    weights_smem = query_smem.at[:, :, pl.ds(0, TILE)]

    def sum_up(into):
        @pl.loop(0, count)
        def _(at):
            # Rows beyond the group's hold other tiles' logits; they end in rows of the output that nobody reads.
            logits = plgpu.layout_cast(kept[pl.ds(at * plan.group, plan.rows), pl.ds(0, TILE)], matrix)
            weight = jnp.exp(logits - along(top, shape)) * along(share, shape)
            weight = jnp.where(logits > NEGATIVE / 2, weight, 0.0)
            for i in range(plan.parts):
                leading = hopper.leading(weight) if i < plan.parts - 1 else weight
                query_smem[i, :, pl.ds(0, TILE)] = leading.astype(plan.part_dtype)
                weight = weight - leading
            plgpu.commit_smem()
            multiply(into, weights_smem, count + at, False)

        return into[...]

    output = pl.run_scoped(sum_up, plgpu.ACC((plan.rows, plan.dim), jnp.float32))
    for chunk in range(-(-plan.dim // TILE)):
        width = min(TILE, plan.dim - chunk * TILE)
        kept[pl.ds(0, plan.rows), pl.ds(0, width)] = output[:, chunk * TILE : chunk * TILE + width]
        plgpu.commit_smem()
        where = output_ref.at[pair, span, :, pl.ds(chunk * WIDE, WIDE)]
        plgpu.copy_smem_to_gmem(kept.at[pl.ds(0, plan.padded)], where)
        plgpu.wait_smem_to_gmem(0)
