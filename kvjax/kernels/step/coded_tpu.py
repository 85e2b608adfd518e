"""A whole decoding step over a cache of codes in one TPU kernel (Pallas, Mosaic): attend, observe, evict, append.

As `kvjax.kernels.step.tpu`, with attention of `kvjax.kernels.decode.coded_tpu`. The step attends to its own token
exactly: its logit begins the softmax, and XLA adds its value. The token's codes, which XLA makes, are written into the
first empty slot in place, through aliased buffers, a tile of slots per head and part. A part of one number per vector
cannot be written so, and is written by XLA.
"""

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.decode import append_tpu, coded_tpu
from kvjax.kernels.decode.coded_tpu import SUBLANES, Running, add_chunk, in_chunks
from kvjax.kernels.decode.codes_tpu import LANES, PACKED, Side, side_of
from kvjax.kernels.forms import form_of
from kvjax.kernels.softmax import NEGATIVE, transformed
from kvjax.kernels.step.arguments import Step, Stepped
from kvjax.kernels.step.stacks_tpu import in_main_memory
from kvjax.numerics.slices import Slice, from_stacks, to_stacks
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array

TILE_BYTES = 1 << 20  # bytes of a tile of codes of all KV heads, of keys and of values
HELD_BYTES = 15 << 20  # the largest amount of a core's memory that the kernel may use
POLICY_LINES = 12  # [K, S] arrays that the compiler holds for a policy's arithmetic; see `kvjax.kernels.step.tpu`


def step(given: Step) -> Stepped:
    """Runs one decoding step of one layer whose keys and values are `Coded`; see `refuses`."""
    query, new_key, new_value, _, _, position, stats, newest, budget, *_ = given
    assert given.encoded is not None
    batch, kv_heads, group, dim = query.shape
    held = {"key": given.key, "value": given.value}
    sides = {name: side_of(coded) for name, coded in held.items()}
    size, heads = position.shape[2], -(-group // SUBLANES) * SUBLANES
    tile = tile_slots(kv_heads, size, sides["key"], sides["value"])
    tiles = -(-size // tile)
    names = tuple(sorted(stats))
    # (side, part) of all arrays, and of those that the kernel writes
    parts = [(name, part) for name, side in sides.items() for part in side.form.parts]
    written = [each for each in parts if append_tpu.takes(held[each[0]].parts[each[1]])]
    slices = [held[name].parts[part] for name, part in parts]
    # [B, L, K, S, ...] each
    stacks, index = to_stacks(slices)
    # [B, K, S] each
    columns = [position, *(stats[name] for name in names)]
    arrays = {each: _placed(stack, own) for each, stack, own in zip(parts, stacks, slices, strict=True)}
    new = dict(zip(("key", "value"), given.encoded, strict=True))
    words = [
        append_tpu.words_of(new[name][part], append_tpu.along_lanes(held[name].parts[part])) for name, part in written
    ]
    # [B, K, heads, lanes]: the logit of the own token, of which a row that has ended has none
    own = jnp.sum(query.astype(jnp.float32) * new_key.astype(jnp.float32), axis=3) * given.scale
    own = jnp.where((newest >= 0)[:, None, None], own, NEGATIVE)
    own = jnp.pad(own, ((0, 0), (0, 0), (0, heads - group)), constant_values=NEGATIVE)
    own = jnp.broadcast_to(own[..., None], (*own.shape, LANES))
    # [B, K, groups * heads, D]
    queries = coded_tpu.queries(query.reshape(-1, group, dim), sides["key"], heads, given.key.dtype)
    queries = queries.reshape(batch, kv_heads, -1, dim)

    def rowwise(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda row, *_: (row, *[0] * (len(shape) - 1)))

    def tiled(each: tuple[str, str]) -> pl.BlockSpec:
        numbers = arrays[each].shape[3:]
        if _lanes(each, sides):
            return pl.BlockSpec(
                (None, None, kv_heads, numbers[0], tile),
                lambda row, at, newest, budget, layer: (row, layer[0], 0, 0, at),
            )
        return pl.BlockSpec(
            (None, None, kv_heads, tile, numbers[1]), lambda row, at, newest, budget, layer: (row, layer[0], 0, at, 0)
        )

    out = jax.ShapeDtypeStruct((batch, kv_heads, sides["value"].form.groups * heads, dim), jnp.float32)
    share = jax.ShapeDtypeStruct(own.shape, jnp.float32)
    lines = [rowwise(position.shape)] * len(columns)
    small = [rowwise(x.shape) for x in (queries, own, *words)]
    returned = [*(arrays[each] for each in written), *columns]
    # Aliased inputs follow three prefetched arrays, the query, the own logits and the words.
    first = 5 + len(words)
    aliases = {first + parts.index(each): 2 + i for i, each in enumerate(written)}
    aliases |= {first + len(parts) + i: 2 + len(written) + i for i in range(len(columns))}
    padded = tiles * tile
    output, own_share, *returned = pl.pallas_call(
        functools.partial(
            _kernel,
            parts=parts,
            written=written,
            sides=sides,
            names=names,
            observe_and_evict=given.observe_and_evict,
            transforms=given.transforms,
            factor=given.scale * sides["key"].form.factor,
            window=given.window,
            size=size,
            tile=tile,
            group=group,
            group_reduce=given.group_reduce,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, tiles),
            in_specs=[*small, *(tiled(each) for each in parts), *lines],
            out_specs=[
                rowwise(out.shape),
                rowwise(share.shape),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(written),
                *lines,
            ],
            scratch_shapes=[
                pltpu.VMEM((kv_heads, group, padded), jnp.float32),
                pltpu.VMEM((kv_heads, 1, padded), jnp.float32),
                pltpu.VMEM((kv_heads, heads, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, heads, LANES), jnp.float32),
                pltpu.VMEM(out.shape[1:], jnp.float32),
                pltpu.VMEM((*out.shape[1:3], LANES), jnp.float32),
                pltpu.SMEM((kv_heads,), jnp.int32),
                *[
                    pltpu.VMEM(
                        (arrays[each].shape[3], LANES) if _lanes(each, sides) else (PACKED, arrays[each].shape[4]),
                        arrays[each].dtype,
                    )
                    for each in written
                ],
                pltpu.SemaphoreType.DMA((max(len(written), 1),)),
            ],
        ),
        out_shape=[out, share, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in returned)],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="decode_step_of_codes",
    )(newest, budget, index, queries, own, *words, *in_main_memory([arrays[each] for each in parts]), *columns)
    # [B, K]: the first empty slot; out of bounds in rows that have ended, so that writes are dropped
    slot = jnp.min(jnp.where(position < 0, jnp.arange(size, dtype=jnp.int32), size), axis=2)
    slot = jnp.where((newest >= 0)[:, None], slot, size)
    at = (jnp.arange(batch)[:, None], index[0], jnp.arange(kv_heads), slot)
    for i, (name, part) in enumerate(parts):
        if (name, part) in written:
            x = returned[written.index((name, part))]
            x = jnp.swapaxes(x, 3, 4) if _lanes((name, part), sides) else x
            stacks[i] = x.reshape(stacks[i].shape)
        else:
            stacks[i] = stacks[i].at[at].set(new[name][part][:, :, 0], mode="drop")
    after: list[Any] = from_stacks(stacks, slices)
    flat = output.reshape(batch * kv_heads, *output.shape[2:])
    # [B, K, G, D]
    found = coded_tpu.outputs(flat, sides["value"], heads, group).reshape(query.shape)
    found = found + own_share[:, :, :group, :1] * new_value.astype(jnp.float32)
    key, value = (
        coded.replace(parts={part: x for (own, part), x in zip(parts, after, strict=True) if own == name})
        for name, coded in held.items()
    )
    position, *columns = returned[len(written) :]
    return found.astype(new_value.dtype), key, value, position, dict(zip(names, columns, strict=True))


def held_bytes(request: "Request") -> int:
    """Returns the bytes of a core's memory that the kernel needs per row."""
    key, value = (Side(form, form.size % LANES > 0) for form in _forms(request))
    heads, slots = request.kv_heads, -(-request.slots // LANES) * LANES
    group, rows = -(-request.group // SUBLANES) * SUBLANES, -(-heads // SUBLANES) * SUBLANES
    tile = tile_slots(heads, request.slots, key, value)
    # As in `kvjax.kernels.step.tpu`.
    lines = 2 * heads * (1 if request.group == 1 else group) + rows * (
        1 + 4 * (1 + len(request.statistics)) + POLICY_LINES
    )
    parameters = sum(8 * max(side.form.groups, 2) for side in (key, value))
    tiles = 2 * tile * heads * (key.form.size + value.form.size + parameters)
    # Queries, outputs and sums of every group of channels; words of the new token, a lane each.
    small = 4 * heads * group * request.dim * (2 * key.form.groups + 4 * value.form.groups)
    words = 2 * 4 * LANES * heads * (key.form.size + value.form.size) // 4
    # A chunk of numbers, as integers and as floats.
    return 4 * slots * lines + tiles + small + words + 8 * request.dim * coded_tpu.CHUNK


def tile_slots(kv_heads: int, size: int, key: Side, value: Side) -> int:
    """Returns the number of slots of a tile for all KV heads of a row: all slots, or a multiple of the lanes."""
    fit = TILE_BYTES // (kv_heads * max(key.form.size, value.form.size))
    return size if size <= fit else max(fit // LANES, 1) * LANES


def _forms(request: "Request") -> list[PyTree]:
    return [form_of(codec, request.dim) for codec in request.codecs]


def _lanes(each: tuple[str, str], sides: dict[str, Side]) -> bool:
    """Returns whether a part enters the kernel with slots along the lanes."""
    return each[1] != "codes" or sides[each[0]].slots_last


def _placed(stack: Array, part: Array | Slice) -> Array:
    """Returns a part as it enters the kernel.

    Args:
      stack: of the parts of all layers, [B, L, K, S, numbers] or [B, L, K, S].
      part: of one layer.

    Returns:
      [B, L, K, S, bytes] if these fill the lanes, or else [B, L, K, numbers, S].
    """
    stack = stack[..., None] if part.ndim == 3 else stack
    return jnp.swapaxes(stack, 3, 4) if append_tpu.along_lanes(stack) else stack


def _kernel(
    newest_ref, budget_ref, index_ref, query_ref, own_ref, *refs,
    parts, written, sides, names, observe_and_evict, transforms, factor, window, size, tile, group, group_reduce,
):  # fmt: skip
    """Processes one tile of slots of all KV heads of one row.

    Blocks: query [K, groups * heads, D], own logits [K, heads, lanes], words of the new token, parts [K, numbers, tile]
    or [K, tile, bytes], positions and statistics [K, S].
    """
    rest = iter(refs)

    def take(count: int) -> list[PyTree]:
        return list(itertools.islice(rest, count))

    word_refs, part_refs = take(len(written)), dict(zip(parts, take(len(parts)), strict=True))
    (position_ref,), stat_refs = take(1), take(len(names))
    output_ref, share_ref = take(2)
    out_refs, (position_out,), stat_outs = take(len(written)), take(1), take(len(names))
    logits_ref, bias_ref, top_ref, total_ref, sum_ref, zero_ref, slot_ref = take(7)
    staged_refs, (semaphores,) = take(len(written)), take(1)
    row, at, tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    kv_heads = query_ref.shape[0]
    newest = newest_ref[row]
    alive = newest >= 0

    def free(position: Array, slot: Array) -> Array:
        """Returns the first empty slot of each head, [K, 1]; `size` if there is none."""
        return jnp.min(jnp.where(position < 0, slot, size), axis=1, keepdims=True)

    @pl.when(at == 0)
    def _():
        # [K, S]
        position = position_ref[...]
        slot = lax.broadcasted_iota(jnp.int32, position.shape, 1)
        visible = (position >= 0) & (position <= newest)
        visible = visible if window is None else visible & (position > newest - window)
        bias_ref[...] = jnp.full(bias_ref.shape, NEGATIVE, jnp.float32)
        bias_ref[:, 0, :size] = jnp.where(visible, 0.0, NEGATIVE)
        for head in range(kv_heads):
            slot_ref[head] = jnp.min(free(position[head : head + 1], slot[:1]))
        own = own_ref[...]
        top_ref[...] = own
        total_ref[...] = jnp.where(own > NEGATIVE / 2, 1.0, 0.0)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        zero_ref[...] = jnp.zeros(zero_ref.shape, jnp.float32)

    running = Running(top_ref, total_ref, sum_ref, zero_ref)
    keys, values = (
        (sides[name], {part: ref for (own, part), ref in part_refs.items() if own == name}) for name in ("key", "value")
    )

    @pl.loop(0, kv_heads)
    def _(head):
        def chunk(start: Array | int, width: int) -> None:
            first = at * tile + start if tile < size else start
            line = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), width)
            # [1, width]: a dimension of its own, as heads that are no multiple of 8 cannot be indexed in rows of tiles.
            bias = bias_ref[head, :, line]
            logits = add_chunk(query_ref, keys, values, running, head, pl.ds(start, width), bias, factor)
            logits_ref[head, :, line] = logits[:group]

        in_chunks(tile, chunk)

        @pl.when(alive & (slot_ref[head] < size) & (lax.div(slot_ref[head], tile) == at))
        def _():
            copies = []
            for i, each in enumerate(written):
                lanes = _lanes(each, sides)
                width = LANES if lanes else PACKED
                start = pl.multiple_of(lax.div(slot_ref[head], width) * width, width)
                here = pl.ds(pl.multiple_of(start - at * tile, width), width)
                ref = part_refs[each]
                block = ref[head, :, here] if lanes else ref[head, here, :]
                staged_refs[i][...] = append_tpu.placed(block, word_refs[i][head], slot_ref[head] - start, lanes)
                there = pl.ds(start, width)
                slots = out_refs[i].at[row, index_ref[0], head]
                out = slots.at[:, there] if lanes else slots.at[there, :]
                copies.append(pltpu.make_async_copy(staged_refs[i], out, semaphores.at[i]))
                copies[-1].start()
            for copy in copies:
                copy.wait()

    @pl.when(at == tiles - 1)
    def _():
        # [K, heads, 1]
        own, top, total = own_ref[:, :, :1], top_ref[:, :, :1], total_ref[:, :, :1]
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        mine = jnp.where(own > NEGATIVE / 2, jnp.exp(own - top), 0.0) * share
        share_ref[...] = jnp.broadcast_to(mine, share_ref.shape)
        shares = jnp.concatenate([share] * sides["value"].form.groups, axis=1)
        output_ref[...] = (sum_ref[...] + zero_ref[:, :, :1]) * shares
        # [1, K, S]
        position = position_ref[...][None]
        slot = lax.broadcasted_iota(jnp.int32, position.shape, 2)
        # [1, K, S]
        new = (slot == free(position[0], slot[0])[None]) & alive
        # [K, G, S]
        logits = jnp.where(new[0][:, None, :], own[:, :group], logits_ref[:, :, :size])
        # [1, K, S]
        seen = (jnp.max(logits, axis=1) > NEGATIVE / 2).astype(jnp.float32)[None]
        # [K, G, S]
        probability = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top[:, :group]), 0.0) * share[:, :group]
        # [1, K, S]
        if group_reduce == "mean":
            m = jnp.sum(probability, axis=1)[None] * (1.0 / group)
        else:
            m = jnp.max(probability, axis=1)[None]

        def uniform() -> Array:
            # [1, K, 1]
            return 1.0 / jnp.maximum(jnp.sum(seen, axis=2, keepdims=True), 1.0)

        columns = {each: seen if each == "one" else transformed(each, m, uniform) for each in transforms}
        stats = {name: ref[...][None] for name, ref in zip(names, stat_refs, strict=True)}
        stats, position = observe_and_evict(
            stats, jnp.where(new, newest, position), columns, jnp.full((1,), newest), jnp.full((1,), budget_ref[row])
        )
        position_out[...] = position[0]
        for name, ref in zip(names, stat_outs, strict=True):
            ref[...] = stats[name][0]
