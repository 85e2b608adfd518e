"""A whole decoding step of one layer in one kernel on a Hopper GPU: append, attend, observe, evict (Mosaic GPU).

A program takes one (row, KV head). It writes the new pair into the free slot, in place, through aliased buffers, and
waits for that write; then keys and values pass through as in `pass_gpu`. Statistics and positions, one line of numbers
each, are read, settled by the policy's own code, and written where they were. Only the output is new. The kernel takes
slots that one program can hold, where there are enough programs to fill the GPU (`launch_of`).

It was interpreted and lowered for CUDA; no GPU has run it.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import hopper
from kvjax.kernels.decode.launch_gpu import PROGRAMS, SPAN, WIDE, Launch
from kvjax.kernels.decode.pass_gpu import Pass, gathered
from kvjax.kernels.hopper import COMPILER, PER_COLUMN, TILE
from kvjax.kernels.rank1 import on_lines
from kvjax.kernels.softmax import NEGATIVE
from kvjax.kernels.step import trace

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
COPY = 256  # numbers that a copy takes at most; a line is padded to whole copies
COPY_BYTES = 128  # a copy moves a multiple of this
MOST_SLOTS = 4096  # 32 numbers of every line per thread, which has some 256 registers


def step(
    query: Array,
    new_key: Array,
    new_value: Array,
    key: Array,
    value: Array,
    position: Array,
    stats: dict[str, Array],
    *,
    newest: Array,
    budget: Array,
    settle: Callable[..., Any],
    transforms: tuple[str, ...],
    scale: float,
    window: int | None,
    group_reduce: str,
) -> tuple[Array, Array, Array, Array, dict[str, Array]]:
    """As `kvjax.kernels.step.tpu.step`.

    Raises:
      ValueError: for slots that `launch_of` has no launch for.
    """
    batch, kv_heads, group, dim = query.shape
    pairs, size = batch * kv_heads, key.shape[2]
    launch = launch_of(pairs, group, size, dim, key.dtype, len(stats), scale=scale, group_reduce=group_reduce)
    names, length = tuple(sorted(stats)), _length(size)
    # [pairs, parts, G padded, D]
    parts = jnp.stack(hopper.parts(query.reshape(pairs, group, dim).astype(key.dtype)), axis=1)
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, launch.padded - group), (0, 0)))
    # Mosaic writes to the arrays that it gets as references.
    # [pairs, S, D]
    kept = [jax.new_ref(x.reshape(pairs, size, dim)) for x in (key, value)]
    # [pairs, S]
    lines = [jax.new_ref(x.reshape(pairs, size)) for x in (position, *(stats[name] for name in names))]
    scratch = launch.scratch() | {
        "pair_smem": plgpu.SMEM((2, _row(dim, key.dtype)), key.dtype),
        "position_smem": plgpu.SMEM((length,), jnp.int32),
        "column_smem": plgpu.SMEM((length,), jnp.float32),
        "stat_smem": [plgpu.SMEM((length,), jnp.float32) for _ in names],
        "begun": plgpu.Barrier(num_arrivals=launch.parts + 2 + len(lines) * (length // COPY)),
    }
    body = functools.partial(_kernel, launch=launch, names=names, settle=settle, transforms=transforms, window=window)
    chunks = -(-dim // TILE)

    # plgpu.kernel does this too, but takes no references before jax 0.11.
    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes=(), **scratch)

    (output,) = pl.kernel(
        kernel,
        [jax.ShapeDtypeStruct((pairs, launch.padded, chunks * WIDE), jnp.float32)],
        mesh=plgpu.Mesh(grid=(pairs,), grid_names=("pair",)),
        compiler_params=COMPILER,
        name="decode_step",
    )(
        parts,
        *(_rows(x.reshape(pairs, dim).astype(key.dtype)) for x in (new_key, new_value)),
        newest,
        budget,
        *kept,
        *lines,
    )
    key, value = (ref[...].reshape(key.shape) for ref in kept)
    position, *found = (ref[...].reshape(position.shape) for ref in lines)
    output = gathered(output, group, dim).astype(value.dtype).reshape(query.shape)
    return output, key, value, position, dict(zip(names, found, strict=True))


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    if reason := trace.refuses(request, "pallas_gpu"):
        return reason
    pairs, dtype, stats = request.batch * request.kv_heads, jnp.dtype(request.dtype), len(request.statistics)
    try:
        launch_of(pairs, request.group, request.slots, request.dim, dtype, stats)
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def launch_of(
    pairs: int,
    group: int,
    size: int,
    dim: int,
    dtype: Any,
    stats: int,
    *,
    scale: float = 1.0,
    group_reduce: str = "mean",
) -> Launch:
    """How a step of `pairs` (row, KV head) pairs is cut: a program takes all slots of a pair.

    Raises:
      ValueError: where a program cannot, or where several that share the slots of a pair are faster.
    """
    if size % 8 or not TILE <= size <= MOST_SLOTS:
        raise ValueError(f"a program takes {TILE} to {MOST_SLOTS} slots, a multiple of 8, not {size}.")
    hopper.check_dim(dim)
    # The new pair, and what pads lines; positions, probabilities and statistics are lines.
    padding, lines, dtype = _length(size) - -(-size // TILE) * TILE, 2 + stats, jnp.dtype(dtype)
    extra = 2 * _row(dim, dtype) * dtype.itemsize + 4 * lines * padding
    launch = Launch(group, dim, size, dtype, True, group_reduce, scale, lines, extra).cut(pairs)
    if launch.spans == 1:
        return launch
    if min(PROGRAMS // pairs, launch.tiles // SPAN) > 1:
        raise ValueError(
            f"{pairs} (row, KV head) pairs do not fill a GPU with one program each, so that several share {size} slots."
        )
    raise ValueError(f"{size} slots of {group} x {dim} in {dtype} with {stats} statistics exceed a program's memory.")


def _row(dim: int, dtype: Any) -> int:
    """The number of features of the new key, padded to what a copy moves."""
    unit = COPY_BYTES // jnp.dtype(dtype).itemsize
    return -(-dim // unit) * unit


def _rows(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, _row(x.shape[1], x.dtype) - x.shape[1])))


def _length(size: int) -> int:
    """The length of a line: the slots, padded with empty ones."""
    return -(-size // COPY) * COPY


def _kernel(
    query_ref, new_key_ref, new_value_ref, newest_ref, budget_ref, key_ref, value_ref, position_ref, *refs,
    query_smem, pair_smem, position_smem, column_smem, stat_smem, begun,
    launch, names, settle, transforms, window, **scratch,
):  # fmt: skip
    """All slots of one (row, KV head)."""
    *stat_refs, output_ref = refs
    size, length = launch.size, _length(launch.size)
    pair = lax.axis_index("pair")
    row = lax.div(pair, jnp.int32(key_ref.shape[0] // newest_ref.shape[0]))
    newest, budget = newest_ref[row], budget_ref[row]
    lines = [(position_ref, position_smem), *zip(stat_refs, stat_smem, strict=True)]
    tiles = Pass(launch, pair, 0, jnp.int32(launch.tiles), key_ref, value_ref, query_smem, **scratch)

    for i in range(launch.parts):
        plgpu.copy_gmem_to_smem(query_ref.at[pair, i], query_smem.at[i, pl.ds(0, launch.padded)], begun)
    for i, new_ref in enumerate((new_key_ref, new_value_ref)):
        plgpu.copy_gmem_to_smem(new_ref.at[pair], pair_smem.at[i], begun)

    @pl.loop(0, length // COPY)
    def _(at):
        # Copies read zeros for slots beyond the last, and do not write these back.
        piece = pl.ds(at * COPY, COPY)
        for line_ref, line_smem in lines:
            plgpu.copy_gmem_to_smem(line_ref.at[pair, piece], line_smem.at[piece], begun)

    plgpu.barrier_wait(begun)

    # Append
    # [length]
    slot = plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=plgpu.Layout.WG_STRIDED((length,), 2))
    inside = slot < size
    position = jnp.where(inside, position_smem[...], -1)
    free = jnp.min(jnp.where(inside & (position < 0), slot, size))
    # Nothing is written if no slot is free. In a row that has ended, newest is -1: the slot stays empty, whatever pair
    # is written there.
    position = jnp.where(inside & (slot == free), newest, position)
    position_smem[...] = position

    @pl.when(free < size)
    def _():
        for i, cache_ref in enumerate((key_ref, value_ref)):
            plgpu.copy_smem_to_gmem(pair_smem.at[i, pl.ds(0, launch.dim)], cache_ref.at[pair, free])

    plgpu.wait_smem_to_gmem(0)
    plgpu.commit_smem()
    tiles.begin()

    # Attend
    def seen(position):
        visible = (position >= 0) & (position <= newest)
        return visible if window is None else visible & (position > newest - window)

    def bias(at):
        start = tiles.start(at)
        at_tile = plgpu.layout_cast(position_smem[pl.ds(start, TILE)], PER_COLUMN)
        index = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=PER_COLUMN)
        # The last tile begins with slots of the one before.
        own = start + index >= at * TILE
        return jnp.where(own & seen(at_tile), 0.0, NEGATIVE)

    top, total = tiles.softmax(bias)

    # From the last tile to the first, so that the slots that the last one repeats are overwritten.
    @pl.loop(0, launch.tiles)
    def _(back):
        at = launch.tiles - 1 - back
        column_smem[pl.ds(tiles.start(at), TILE)] = tiles.column(at)
        plgpu.commit_smem()

    tiles.store(tiles.output(top, total), output_ref.at[pair])

    # Observe and evict
    # [length]
    visible = jnp.where(inside & seen(position), 1.0, 0.0)
    m = jnp.where(visible > 0, column_smem[...], 0.0)
    columns = {transform: _column(transform, m, visible) for transform in transforms}
    stats = {name: line[...] for name, line in zip(names, stat_smem, strict=True)}
    stats, position = on_lines(settle, length)(stats, position, columns, newest, budget)
    position_smem[...] = position
    for name, line_smem in zip(names, stat_smem, strict=True):
        line_smem[...] = stats[name]
    plgpu.commit_smem()

    @pl.loop(0, length // COPY)
    def _(at):
        piece = pl.ds(at * COPY, COPY)
        for line_ref, line_smem in lines:
            plgpu.copy_smem_to_gmem(line_smem.at[piece], line_ref.at[pair, piece])

    plgpu.wait_smem_to_gmem(0)


def _column(transform: str, m: Array, visible: Array) -> Array:
    """f(m) of `Statistic.transform`, on lines."""
    match transform:
        case "identity":
            return m
        case "square":
            return m * m
        case "above":
            count = jnp.maximum(jnp.sum(visible), 1.0)
            return jnp.where(m >= 1.0 / count, visible, 0.0)
        case "one":
            return visible
    raise ValueError(transform)
