"""A whole decoding step of one layer in one kernel on a Hopper GPU: append, attend, observe, evict (Mosaic GPU).

A program processes one (row, KV head). It writes the new pair into the free slot in place, through aliased buffers, and
waits for that write; then it reads keys and values tile by tile, see `pass_gpu`. Statistics and positions, one line
each, are read, updated by the policy's own code, and written in place. The kernel runs if one program can hold all
slots of a head and if there are enough programs to fill the GPU (`launch_of`). For 1,024 heads of 128 features and
2,048 slots in bfloat16, it reads at 91 % of a copy's bandwidth on an H200 (experiments/measured).
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kvjax.kernels import hopper
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import codes_gpu
from kvjax.kernels.decode.launch_gpu import PROGRAMS, SPAN, WIDE, Launch
from kvjax.kernels.decode.pass_gpu import Pass, gathered
from kvjax.kernels.forms import Form, form_of
from kvjax.kernels.hopper import TILE
from kvjax.kernels.step import coded_gpu, lines_gpu, trace
from kvjax.kernels.step.arguments import Step, Stepped, takes_step
from kvjax.kernels.step.lines_gpu import Lines, length_of, row_of

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
MAX_SLOTS = 4096  # 32 numbers of every line per thread, which has about 256 registers


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
        pairs, group, size, dim, key.dtype, len(stats), scale=given.scale, group_reduce=given.group_reduce,
        form=form_of(key.codec, dim) if isinstance(key, Coded) else None,
    )  # fmt: skip
    if isinstance(key, Coded):
        return coded_gpu.step(given, launch)
    names = tuple(sorted(stats))
    # [pairs, parts, G padded, D]
    parts = codes_gpu.queries(query.reshape(pairs, group, dim), launch)
    # [pairs, S, D], as references, to which Mosaic writes in place
    kept = [jax.new_ref(x.reshape(pairs, size, dim)) for x in (key, value)]
    # [pairs, S], positions first
    lines = [jax.new_ref(x.reshape(pairs, size)) for x in (position, *(stats[name] for name in names))]
    scratch = launch.scratch() | lines_gpu.scratch(size, len(names)) | {
        "pair_smem": plgpu.SMEM((2, row_of(dim, key.dtype)), key.dtype),
        "begun": plgpu.Barrier(num_arrivals=launch.parts + 2 + lines_gpu.copies(size, len(names))),
    }  # fmt: skip
    body = functools.partial(
        _kernel,
        launch=launch,
        names=names,
        observe_and_evict=given.observe_and_evict,
        transforms=given.transforms,
        window=given.window,
    )
    outputs = [jax.ShapeDtypeStruct((pairs, launch.padded, -(-dim // TILE) * WIDE), jnp.float32)]
    (output,) = lines_gpu.run(body, pairs, outputs, scratch)(
        parts, *(lines_gpu.rows(x.reshape(pairs, dim).astype(key.dtype)) for x in (new_key, new_value)), newest, budget,
        *kept, *lines,
    )  # fmt: skip
    key, value = (ref[...].reshape(key.shape) for ref in kept)
    position, *found = (ref[...].reshape(position.shape) for ref in lines)
    output = gathered(output, group, dim).astype(value.dtype).reshape(query.shape)
    return output, key, value, position, dict(zip(names, found, strict=True))


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    if reason := trace.refuses(request, "pallas_gpu"):
        return reason
    form = None
    if any(request.codecs):
        if reason := codes_gpu.refuses_codecs(request):
            return reason
        form = form_of(request.codecs[0], request.dim)
    pairs, dtype, stats = request.batch * request.kv_heads, jnp.dtype(request.dtype), len(request.statistics)
    try:
        launch_of(pairs, request.group, request.slots, request.dim, dtype, stats, form=form)
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def launch_of(
    pairs: int,
    group: int,
    size: int,
    dim: int,
    dtype: DTypeLike,
    stats: int,
    *,
    scale: float = 1.0,
    group_reduce: str = "mean",
    form: Form | None = None,
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
      form: see `Launch`.

    Raises:
      ValueError: if a program cannot hold the slots, or if it is faster to share the slots of a pair among programs.
    """
    if size % 8 or not TILE <= size <= MAX_SLOTS:
        raise ValueError(f"a program takes {TILE} to {MAX_SLOTS} slots, a multiple of 8, not {size}.")
    hopper.check_dim(dim)
    # Lines: positions, probabilities and statistics. Extra bytes: the new pair, and the padding of the lines.
    padding, lines, dtype = length_of(size) - -(-size // TILE) * TILE, 2 + stats, jnp.dtype(dtype)
    pair = row_of(dim, dtype) * dtype.itemsize if form is None else row_of(form.size, jnp.uint8)
    extra = 2 * pair + 4 * lines * padding
    scale = scale if form is None else scale * form.factor
    launch = Launch(group, dim, size, dtype, True, group_reduce, scale, lines, extra, form=form).cut(pairs)
    if launch.spans == 1:
        return launch
    if min(PROGRAMS // pairs, launch.tiles // SPAN) > 1:
        raise ValueError(
            f"{pairs} (row, KV head) pairs do not fill a GPU with one program each, so that several share {size} slots."
        )
    raise ValueError(f"{size} slots of {group} x {dim} in {dtype} with {stats} statistics exceed a program's memory.")


def _kernel(
    query_ref, new_key_ref, new_value_ref, newest_ref, budget_ref, key_ref, value_ref, *refs,
    query_smem, pair_smem, position_smem, column_smem, stat_smem, begun,
    launch, names, observe_and_evict, transforms, window, **scratch,
):  # fmt: skip
    """Processes all slots of one (row, KV head)."""
    *line_refs, output_ref = refs
    pair = lax.axis_index("pair")
    row = lax.div(pair, jnp.int32(key_ref.shape[0] // newest_ref.shape[0]))
    lines = Lines(
        pair, launch.size, newest_ref[row], window, tuple(line_refs), position_smem, column_smem, tuple(stat_smem)
    )
    tiles = Pass(launch, pair, 0, jnp.int32(launch.tiles), key_ref, value_ref, query_smem, **scratch)
    for i in range(launch.parts):
        plgpu.copy_gmem_to_smem(query_ref.at[pair, i], query_smem.at[i, pl.ds(0, launch.padded)], begun)
    for i, new_ref in enumerate((new_key_ref, new_value_ref)):
        plgpu.copy_gmem_to_smem(new_ref.at[pair], pair_smem.at[i], begun)
    lines.read(begun)
    plgpu.barrier_wait(begun)

    # Append; into the slot of a row that has ended too, which stays empty
    free, position = lines.append()

    @pl.when(free < launch.size)
    def _():
        for i, cache_ref in enumerate((key_ref, value_ref)):
            plgpu.copy_smem_to_gmem(pair_smem.at[i, pl.ds(0, launch.dim)], cache_ref.at[pair, free])

    plgpu.wait_smem_to_gmem(0)
    plgpu.commit_smem()
    tiles.begin()

    # Attend
    top, total = tiles.softmax(lambda at: lines.bias(tiles, at))
    lines.observe(tiles)
    tiles.store(tiles.output(top, total), output_ref.at[pair])

    lines.observe_and_evict(observe_and_evict, names, transforms, position, budget_ref[row])
    plgpu.wait_smem_to_gmem(0)
