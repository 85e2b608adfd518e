"""Attention of one query per head over a cache of codes, with column statistics, on a TPU (Pallas, Mosaic).

As `kvjax.kernels.decode.pallas_tpu`, but keys and values are codes, which are decoded a chunk of slots at a time, on
chip. Codes of integers are exact in bfloat16 and enter the matrix products as they are. Each query is repeated once
per group of channels that share a scale, with the channels of all other groups set to 0; scales and zeros then multiply
logits and probabilities, one number per slot.

The slots are one part of what a query attends to; the tokens of the step, and exact slots, are others. The kernel is
given the log-sum-exps of these, begins its softmax with them, and reports statistics under the final one.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kvjax.kernels import softmax
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode.codes_tpu import LANES, Side, side_of
from kvjax.kernels.forms import form_of
from kvjax.kernels.problem import Attended, Problem
from kvjax.kernels.softmax import NEGATIVE, transformed

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
Ref = Any

TILE_BYTES = 1 << 20  # bytes of a tile of codes of keys, and of values; Pallas holds two tiles of each
CHUNK = 512  # the number of slots that are decoded at once
HELD_BYTES = 14 << 20  # the largest amount of a core's 16 MiB of memory that is held besides what is computed
SUBLANES = 8  # rows of a memory tile of float32


def attend_and_reduce(
    problem: Problem, lse: Array | None = None, seen: Array | None = None
) -> tuple[Attended, dict[str, Array]]:
    """Attends to coded slots, which may be one part of several.

    Args:
      problem: whose keys and values are `Coded`, with one query per head.
      lse: [B, K, G, 1] float32, the log-sum-exps over all other parts; -inf where none of their slots is seen.
      seen: [B, K, 1] float32, the number of slots that each query sees in all other parts.

    Returns:
      What `kvjax.kernels.decode.xla.attend_and_reduce` returns, float32, under the softmax over all parts: the output
      is the sum over this part alone, and the log-sum-exps are those of all parts.
    """
    query, keys, values = problem.query, problem.key, problem.value
    assert isinstance(keys, Coded)
    assert isinstance(values, Coded)
    batch, kv_heads, group, _, dim = query.shape
    size, rows = problem.slots, batch * kv_heads
    key, value = side_of(keys), side_of(values)
    heads = -(-group // SUBLANES) * SUBLANES
    tile, pairs = tiling(rows, size, max(key.form.size, value.form.size))
    tiles = -(-size // tile)
    # [B, K, 1, S]
    mask = softmax.visible(problem)
    # [B, K, S]
    bias = jnp.where(mask[:, :, 0], 0.0 if problem.log_weight is None else problem.log_weight, NEGATIVE)
    # [B * K, 1, slots], padded to whole tiles with slots that no query sees
    bias = bias.astype(jnp.float32).reshape(rows, 1, size)
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, tiles * tile - size)), constant_values=NEGATIVE)
    # [B * K, heads, lanes]
    other = jnp.full((rows, group), -jnp.inf) if lse is None else lse.reshape(rows, group)
    other = jnp.pad(jnp.maximum(other, NEGATIVE), ((0, 0), (0, heads - group)), constant_values=NEGATIVE)
    other = jnp.broadcast_to(other[..., None], (rows, heads, LANES))
    # [B * K, 1, lanes]
    count = softmax.count_seen(mask)[:, :, 0] + (0.0 if seen is None else seen[:, :, 0])
    uniform = jnp.broadcast_to((1 / jnp.maximum(count, 1)).reshape(rows, 1, 1), (rows, 1, LANES))
    transforms = tuple(dict.fromkeys(statistic.transform for statistic in problem.statistics))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((pairs, *shape), lambda row, _: (row, 0, 0))

    line = whole(1, tiles * tile)
    out = value.form.groups * heads
    output, total, *columns = pl.pallas_call(
        functools.partial(
            _kernel, key=key, value=value, transforms=transforms, factor=problem.scale * key.form.factor, tile=tile,
            group=group, heads=heads, group_reduce=problem.group_reduce,
        ),
        grid=(rows // pairs, tiles),
        in_specs=[
            whole(key.form.groups * heads, dim), whole(heads, LANES), whole(1, LANES), line,
            *key.specs(pairs, tile), *value.specs(pairs, tile),
        ],
        out_specs=[whole(out, dim), whole(heads, LANES), *[line] * len(transforms)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, out, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads, LANES), jnp.float32),
            *[jax.ShapeDtypeStruct((rows, 1, tiles * tile), jnp.float32)] * len(transforms),
        ],
        scratch_shapes=[
            pltpu.VMEM((pairs, heads, tiles * tile), jnp.float32),
            pltpu.VMEM((pairs, heads, LANES), jnp.float32),
            pltpu.VMEM((pairs, heads, LANES), jnp.float32),
            pltpu.VMEM((pairs, out, dim), jnp.float32),
            pltpu.VMEM((pairs, out, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="attend_one_query_to_codes",
    )(
        queries(query.reshape(rows, group, dim), key, heads, keys.dtype), other, uniform, bias,
        *key.operands(keys), *value.operands(values),
    )  # fmt: skip
    # Transform -> [B, K, S]
    found: dict[str, Array] = {
        name: column[:, 0, :size].reshape(batch, kv_heads, size)
        for name, column in zip(transforms, columns, strict=True)
    }
    attended = Attended(
        outputs(output, value, heads, group).reshape(query.shape), total[:, :group, 0].reshape(query.shape[:4])
    )
    return attended, weighted(problem, found)


def weighted(problem: Problem, columns: dict[str, Array]) -> dict[str, Array]:
    """Weights the columns [B, K, S] of each transform by the one query: statistic name -> [B, K, S] or [..., words]."""
    sums = {}
    for statistic, weight in zip(problem.statistics, problem.weights, strict=True):
        # [B, 1, 1] or [B, 1, 1, words]: the weight of the one query
        own = weight[:, 0].reshape(weight.shape[0], 1, 1, *weight.shape[2:])
        column = columns[statistic.transform]
        sums[statistic.name] = (column if own.ndim == 3 else column[..., None]) * own
    return sums


def tiling(rows: int, size: int, slot_bytes: int) -> tuple[int, int]:
    """Returns the number of slots of a tile, and the number of (row, KV head) pairs of a program; see `pallas_tpu`."""
    fit = TILE_BYTES // slot_bytes
    if size > fit:
        return max(fit // CHUNK, 1) * CHUNK, 1
    maximum = min(max(fit // size, 1), rows)
    return size, next(count for count in range(maximum, 0, -1) if rows % count == 0)


def held_bytes(request: "Request") -> int:
    """Returns the bytes of a core's memory that a program holds: whole lines, and two buffers of tiles."""
    key, value = (form_of(codec, request.dim) for codec in request.codecs)
    assert key is not None
    assert value is not None
    rows, slot_bytes = request.batch * request.kv_heads, max(key.size, value.size)
    tile, pairs = tiling(rows, request.slots, slot_bytes)
    heads, slots = -(-request.group // SUBLANES) * SUBLANES, -(-request.slots // tile) * tile
    transforms = len({statistic.transform for statistic in request.statistics if statistic.needs_attention})
    # Logits; and two buffers of visibility and of each column.
    lines = 4 * slots * (heads + 2 * (1 + transforms))
    # Scales and zeros have at least two rows of 4 bytes each.
    parameters = sum(8 * max(form.groups, 2) for form in (key, value))
    return pairs * (lines + 2 * tile * (key.size + value.size + parameters))


def queries(query: Array, key: Side, heads: int, dtype: DTypeLike) -> Array:
    """Returns the queries of each group of channels: [rows, G, D] -> [rows, groups * heads, D], in planes."""
    form = key.form
    # [rows, G, D]
    turned = form.in_planes(form.query(query.astype(jnp.float32)), key.planes).astype(dtype)
    turned = jnp.pad(turned, ((0, 0), (0, heads - turned.shape[1]), (0, 0)))
    # [groups, 1, D]
    mine = form.members(key.planes)[:, None]
    # [rows, groups, heads, D]
    masked = jnp.where(mine, turned[:, None], jnp.zeros((), dtype))
    return masked.reshape(masked.shape[0], -1, form.dim)


def outputs(output: Array, value: Side, heads: int, group: int) -> Array:
    """Returns each channel of its own group: [rows, groups * heads, D] float32, in planes -> [rows, G, D]."""
    form = value.form
    # [rows, groups, G, D]
    split = output.reshape(output.shape[0], form.groups, heads, form.dim)[:, :, :group]
    # [rows, G, D]
    mine = jnp.sum(jnp.where(form.members(value.planes)[:, None], split, 0.0), axis=1)
    return form.output(form.from_planes(mine, value.planes))


def _kernel(
    query_ref, other_ref, uniform_ref, bias_ref, *refs, key, value, transforms, factor, tile, group, heads, group_reduce
):  # fmt: skip
    """Processes one tile of slots of R (row, KV head) pairs.

    Blocks: query [R, groups * heads, D], others' log-sum-exps [R, heads, lanes], uniform share [R, 1, lanes], bias and
    columns [R, 1, slots], output [R, groups * heads, D]; see `Side.specs` for keys and values.
    """
    names = [*key.form.parts, *value.form.parts]
    parts, refs = refs[: len(names)], refs[len(names) :]
    keys = dict(zip(key.form.parts, parts[: len(key.form.parts)], strict=True))
    values = dict(zip(value.form.parts, parts[len(key.form.parts) :], strict=True))
    output_ref, lse_ref, *column_refs = refs[: 2 + len(transforms)]
    logits_ref, top_ref, total_ref, sum_ref, zero_ref = refs[2 + len(transforms) :]
    pairs, at, tiles = query_ref.shape[0], pl.program_id(1), pl.num_programs(1)

    @pl.when(at == 0)
    def _():
        other = other_ref[...]
        top_ref[...] = other
        total_ref[...] = jnp.where(other > NEGATIVE / 2, 1.0, 0.0)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        zero_ref[...] = jnp.zeros(zero_ref.shape, jnp.float32)

    running = Running(top_ref, total_ref, sum_ref, zero_ref)

    def chunk(pair: Array, start: Array | int, width: int) -> None:
        """Adds some slots of a tile to the running softmax of a pair."""
        first = at * tile + start if tile < bias_ref.shape[2] else start
        line = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), width)
        operands = (key, keys), (value, values)
        bias = bias_ref[pair, :, line]
        logits_ref[pair, :, line] = add_chunk(query_ref, *operands, running, pair, pl.ds(start, width), bias, factor)

    @pl.loop(0, pairs)
    def _(pair):
        in_chunks(tile, functools.partial(chunk, pair))

    @pl.when(at == tiles - 1)
    def _():
        @pl.loop(0, pairs)
        def _(pair):
            # [heads, 1]
            top, total = top_ref[pair][:, :1], total_ref[pair][:, :1]
            share = 1.0 / jnp.where(total > 0, total, 1.0)
            lse = jnp.where(total > 0, top + jnp.log(1.0 / share), -jnp.inf)
            lse_ref[pair] = jnp.broadcast_to(lse, (heads, LANES))
            shares = jnp.concatenate([share] * value.form.groups, axis=0)
            output_ref[pair] = (sum_ref[pair] + zero_ref[pair][:, :1]) * shares

            def report(start: Array | int, width: int) -> None:
                """Writes the columns of some slots."""
                line = pl.ds(start, width)
                # [G, chunk]
                logits = logits_ref[pair, :, line][:group]
                probability = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top[:group]), 0.0) * share[:group]
                reduce = jnp.sum if group_reduce == "mean" else jnp.max
                # [1, chunk]
                m = reduce(probability, axis=0, keepdims=True)
                m = m * (1.0 / group) if group_reduce == "mean" else m
                for transform, column_ref in zip(transforms, column_refs, strict=True):
                    column_ref[pair, :, line] = transformed(transform, m, lambda: uniform_ref[pair][:, :1])

            if transforms:
                in_chunks(bias_ref.shape[2], report)


class Running(NamedTuple):
    """A running softmax of R pairs of a row and a KV head, in memory.

    Attributes:
      top: [R, heads, lanes] the maximum so far.
      total: [R, heads, lanes] the sum so far.
      sum: [R, groups * heads, D] the output times the sum so far, without zeros.
      zero: [R, groups * heads, lanes] the zeros in the output, times the sum so far.
    """

    top: Ref
    total: Ref
    sum: Ref
    zero: Ref


def add_chunk(
    query_ref: Ref,
    keys: tuple[Side, dict[str, Ref]],
    values: tuple[Side, dict[str, Ref]],
    running: Running,
    pair: Array,
    here: object,
    bias: Array,
    factor: float,
) -> Array:
    """Adds some slots to the running softmax of a pair.

    Args:
      query_ref: [R, groups * heads, D] from `queries`.
      keys: how keys are decoded, and the blocks of their parts.
      values: the same of values.
      running: updated.
      pair: index of the pair.
      here: the slots, in the blocks of parts.
      bias: [1, slots] added to the logits; `NEGATIVE` for slots that are not seen.
      factor: of the products.

    Returns:
      The logits [heads, slots] float32.
    """
    (key, key_refs), (value, value_refs) = keys, values
    heads, lanes = running.top.shape[1:]
    # [groups * heads, D]
    query = query_ref[pair]
    # [groups * heads, chunk]
    products = _product(query, key.numbers(key_refs["codes"], pair, here, query.dtype), key.channels)
    total = jnp.sum(query.astype(jnp.float32), axis=1, keepdims=True) if key.form.has_zero else None
    # [heads, chunk]
    logits = jnp.zeros((heads, bias.shape[1]), jnp.float32)
    for i in range(key.form.groups):
        own = slice(i * heads, (i + 1) * heads)
        scale, zero = key.lines(key_refs, pair, here, i)
        logits += products[own] if scale is None else products[own] * scale
        if zero is not None:
            assert total is not None
            logits += zero * total[own]
    visible = bias > NEGATIVE / 2
    # Memory after the last slot may contain NaN.
    logits = jnp.where(visible, logits * factor + bias, NEGATIVE)
    # [heads, 1]
    before = running.top[pair][:, :1]
    top = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    # [heads, chunk]
    weight = jnp.where(visible, jnp.exp(logits - top), 0.0)
    # [heads, 1]
    shrink = jnp.exp(before - top)
    running.total[pair] = running.total[pair] * shrink + jnp.sum(weight, axis=1, keepdims=True)
    running.top[pair] = jnp.broadcast_to(top, (heads, lanes))
    weights, zeros = [], []
    for i in range(value.form.groups):
        scale, zero = value.lines(value_refs, pair, here, i)
        weights.append(weight if scale is None else jnp.where(visible, weight * scale, 0.0))
        if zero is not None:
            zeros.append(jnp.sum(jnp.where(visible, weight * zero, 0.0), axis=1, keepdims=True))
    # [groups * heads, chunk], then [groups * heads, D] and [groups * heads, 1]
    stacked = jnp.concatenate(weights, axis=0).astype(query.dtype)
    numbers = value.numbers(value_refs["codes"], pair, here, query.dtype)
    shrink = jnp.concatenate([shrink] * value.form.groups, axis=0)
    running.sum[pair] = running.sum[pair] * shrink + _product(stacked, numbers, 1 - value.channels)
    if zeros:
        running.zero[pair] = running.zero[pair] * shrink + jnp.concatenate(zeros, axis=0)
    return logits


def in_chunks(size: int, run: Callable[[Array | int, int], None]) -> None:
    """Calls a function of the first slot and the number of slots, for each chunk of `size` slots."""
    whole = size // CHUNK * CHUNK
    if whole:

        @pl.loop(0, whole // CHUNK)
        def _(index):
            run(pl.multiple_of(index * CHUNK, LANES), CHUNK)

    if whole < size:
        run(whole, size - whole)


def _product(one: Array, two: Array, axis: int) -> Array:
    """Multiplies two matrices [m, x] and [x, n] or [n, x], with axis x of `two`; float32."""
    # In full float32: by default, the matrix unit multiplies bfloat16.
    exact = jax.lax.Precision.HIGHEST if two.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        one, two, (((1,), (axis,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )
