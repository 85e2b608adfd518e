"""A whole decoding step of one layer in one kernel on a Hopper GPU: append, attend, observe, evict (Mosaic GPU).

A program processes one (row, KV head). It writes the new pair into the free slot in place, through aliased buffers, and
waits for that write; then it reads keys and values tile by tile, see `pass_gpu`. Statistics and positions, one line
each, are read, updated by the policy's own code, and written in place. The kernel runs if one program can hold all
slots of a head and if there are enough programs to fill the GPU (`launch_of`).

The kernel was interpreted and lowered for CUDA, but has not run on a GPU.
"""

import functools
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
from kvjax.kernels.softmax import NEGATIVE, transformed
from kvjax.kernels.step import trace
from kvjax.kernels.step.arguments import Step, Stepped, takes_step

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
COPY = 256  # the largest number of numbers of a copy; a line is padded to whole copies
COPY_BYTES = 128  # the bytes of a copy are a multiple of this
MOST_SLOTS = 4096  # 32 numbers of every line per thread, which has about 256 registers


@takes_step
def step(given: Step) -> Stepped:
    """Runs one decoding step of one layer: one token per row.

    Raises:
      ValueError: see `launch_of`.
    """
    query, new_key, new_value, key, value, position, stats, newest, budget, *_ = given
    batch, kv_heads, group, dim = query.shape
    pairs, size = batch * kv_heads, key.shape[2]
    launch = launch_of(
        pairs, group, size, dim, key.dtype, len(stats), scale=given.scale, group_reduce=given.group_reduce
    )
    names, length = tuple(sorted(stats)), _length(size)
    # [pairs, parts, G padded, D]
    parts = jnp.stack(hopper.parts(query.reshape(pairs, group, dim).astype(key.dtype)), axis=1)
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, launch.padded - group), (0, 0)))
    # [pairs, S, D], as references, to which Mosaic writes in place
    kept = [jax.new_ref(x.reshape(pairs, size, dim)) for x in (key, value)]
    # [pairs, S], positions first
    lines = [jax.new_ref(x.reshape(pairs, size)) for x in (position, *(stats[name] for name in names))]
    scratch = launch.scratch() | {
        "pair_smem": plgpu.SMEM((2, _row(dim, key.dtype)), key.dtype),
        "position_smem": plgpu.SMEM((length,), jnp.int32),
        "column_smem": plgpu.SMEM((length,), jnp.float32),
        "stat_smem": [plgpu.SMEM((length,), jnp.float32) for _ in names],
        "begun": plgpu.Barrier(num_arrivals=launch.parts + 2 + len(lines) * (length // COPY)),
    }
    body = functools.partial(
        _kernel, launch=launch, names=names, settle=given.settle, transforms=given.transforms, window=given.window
    )
    chunks = -(-dim // TILE)

    # plgpu.kernel does the same, but does not accept references before jax 0.11.
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
    if any(request.codecs):
        return f"it reads keys and values in {request.dtype}, not codes"
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
    """Returns the launch of a step in which each program processes all slots of a (row, KV head) pair.

    Args:
      pairs: the number of (row, KV head) pairs.
      group: see `Launch`.
      size: see `Launch`.
      dim: see `Launch`.
      dtype: see `Launch`.
      stats: the number of statistics.
      scale: see `Problem`.
      group_reduce: see `Problem`.

    Raises:
      ValueError: if a program cannot hold the slots, or if it is faster to share the slots of a pair among programs.
    """
    if size % 8 or not TILE <= size <= MOST_SLOTS:
        raise ValueError(f"a program takes {TILE} to {MOST_SLOTS} slots, a multiple of 8, not {size}.")
    hopper.check_dim(dim)
    # Lines: positions, probabilities and statistics. Extra bytes: the new pair, and the padding of the lines.
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
    """Returns the number of features, padded to whole copies."""
    unit = COPY_BYTES // jnp.dtype(dtype).itemsize
    return -(-dim // unit) * unit


def _rows(x: Array) -> Array:
    """Pads features to whole copies: [pairs, D] -> [pairs, D padded]."""
    return jnp.pad(x, ((0, 0), (0, _row(x.shape[1], x.dtype) - x.shape[1])))


def _length(size: int) -> int:
    """Returns the length of a line: the number of slots, padded to whole copies."""
    return -(-size // COPY) * COPY


def _kernel(
    query_ref, new_key_ref, new_value_ref, newest_ref, budget_ref, key_ref, value_ref, position_ref, *refs,
    query_smem, pair_smem, position_smem, column_smem, stat_smem, begun,
    launch, names, settle, transforms, window, **scratch,
):  # fmt: skip
    """Processes all slots of one (row, KV head)."""
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
        # For slots beyond the last, copies read zeros and write nothing.
        piece = pl.ds(at * COPY, COPY)
        for line_ref, line_smem in lines:
            plgpu.copy_gmem_to_smem(line_ref.at[pair, piece], line_smem.at[piece], begun)

    plgpu.barrier_wait(begun)

    # Append
    # [length]
    slot = plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=plgpu.Layout.WG_STRIDED((length,), 2))
    inside = slot < size
    position = jnp.where(inside, position_smem[...], -1)
    # []: `size` if no slot is free; then nothing is written
    free = jnp.min(jnp.where(inside & (position < 0), slot, size))
    # In a row that has ended, newest is -1 and the slot stays empty, although the pair is written into it.
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
        # [TILE]
        at_tile = plgpu.layout_cast(position_smem[pl.ds(start, TILE)], PER_COLUMN)
        index = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=PER_COLUMN)
        # The last tile repeats slots of the tile before it; they are hidden.
        own = start + index >= at * TILE
        return jnp.where(own & seen(at_tile), 0.0, NEGATIVE)

    top, total = tiles.softmax(bias)

    # Backwards, so that the slots that the last tile repeats are overwritten by their own tile.
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

    def uniform() -> Array:
        return 1.0 / jnp.maximum(jnp.sum(visible), 1.0)

    columns = {each: visible if each == "one" else transformed(each, m, uniform) for each in transforms}
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
