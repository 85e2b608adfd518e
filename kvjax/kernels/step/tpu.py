"""A whole decoding step of one layer in one TPU kernel (Pallas, Mosaic): append, attend, observe, evict.

Keys and values are read once. The new pair is written into its slot in place, through aliased buffers, by writing one
aligned group of slots per head. Statistics and positions are small, and are read and written whole. The policy's own
code, which updates them, is traced into the kernel on [1, K, S] arrays. Keys and values may be slices of the stacks of
a loop over layers: the kernel has the whole stacks, of which it moves what is of its layer.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import codes_tpu
from kvjax.kernels.decode.pallas_tpu import LANES, TILE_BYTES, add_tile, product
from kvjax.kernels.registry import GROUP_BYTES
from kvjax.kernels.softmax import NEGATIVE, transformed
from kvjax.kernels.step import coded_tpu, trace
from kvjax.kernels.step.arguments import Step, Stepped, takes_step
from kvjax.kernels.step.stacks_tpu import in_main_memory
from kvjax.numerics.slices import from_stacks, to_stacks

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
HELD_BYTES = 16 << 20  # the largest amount of a core's memory that the kernel may use
POLICY_LINES = 12  # [K, S] arrays that the compiler holds for a policy's arithmetic; measured: at most 11, for roco


@takes_step
def step(given: Step) -> Stepped:
    """Runs one decoding step of one layer: one token per row."""
    if isinstance(given.key, Coded):
        return coded_tpu.step(given)
    query, new_key, new_value, key, value, position, stats, newest, budget, *_ = given
    batch, kv_heads, group, dim = query.shape
    size, item = key.shape[2], key.dtype.itemsize
    names = tuple(sorted(stats))
    # [B, L, K, S, D] twice
    (keys, values), index = to_stacks([key, value])
    # [B, K, S] each
    columns = [position, *(stats[name] for name in names)]
    tile = tile_slots(kv_heads, size, dim, item)
    tiles, shared = -(-size // tile), GROUP_BYTES // item
    # An incomplete last group of slots cannot be copied; then the pair is written after the kernel, also in place.
    inside = size % shared == 0

    def rowwise(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape[1:]), lambda row, *_: (row, *[0] * (len(shape) - 1)))

    tiled = pl.BlockSpec(
        (1, None, kv_heads, tile, dim), lambda row, at, newest, budget, layer: (row, layer[0], 0, at, 0)
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    small = [rowwise(x.shape) for x in (query, new_key, new_value)]
    lines = [rowwise(position.shape)] * len(columns)
    padded = tiles * (tile if tiles > 1 else -(-tile // LANES) * LANES)
    returned = [*([keys, values] if inside else []), *columns]
    output, *returned = pl.pallas_call(
        functools.partial(
            _kernel,
            names=names,
            inside=inside,
            observe_and_evict=given.observe_and_evict,
            transforms=given.transforms,
            scale=given.scale,
            window=given.window,
            size=size,
            tile=tile,
            shared=shared,
            group_reduce=given.group_reduce,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, tiles),
            in_specs=[*small, tiled, tiled, *lines],
            out_specs=[small[0], *([anywhere] * 2 if inside else []), *lines],
            scratch_shapes=[
                pltpu.VMEM((kv_heads, group, padded), jnp.float32),
                pltpu.VMEM((kv_heads, padded), jnp.int32),
                *[pltpu.VMEM((kv_heads, group, LANES), jnp.float32)] * 3,
                pltpu.VMEM((kv_heads, group, dim), jnp.float32),
                pltpu.VMEM((2, kv_heads, shared, dim), key.dtype),
                pltpu.SMEM((kv_heads,), jnp.int32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, value.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in returned),
        ],
        # Including the three prefetched arrays, input 6 is the keys and input 8 is the positions.
        input_output_aliases={(6 if inside else 8) + i: 1 + i for i in range(len(returned))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="decode_step",
    )(newest, budget, index, query, new_key, new_value, *in_main_memory([keys, values]), *columns)
    if inside:
        keys, values, *columns = returned
    else:
        columns = returned
        # [B, K]: the first empty slot
        slot = jnp.min(jnp.where(position < 0, jnp.arange(size, dtype=jnp.int32), size), axis=2)
        # [B, K]: out of bounds in rows that have ended, so that writes are dropped
        slot = jnp.where(newest[:, None] >= 0, slot, size)
        at = (jnp.arange(batch)[:, None], index[0], jnp.arange(kv_heads), slot)
        keys, values = (
            stack.at[at].set(new[:, :, 0], mode="drop") for stack, new in ((keys, new_key), (values, new_value))
        )
    key, value = from_stacks([keys, values], [key, value])
    position, *columns = columns
    return output, key, value, position, dict(zip(names, columns, strict=True))


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    if reason := trace.refuses(request, "pallas_tpu"):
        return reason
    if any(request.codecs):
        if reason := codes_tpu.refuses_codecs(request):
            return reason
        if request.slots % LANES:
            return f"it takes codes of a multiple of {LANES} slots, not of {request.slots}"
    held, maximum = held_bytes(request), HELD_BYTES
    if any(request.codecs):
        held, maximum = coded_tpu.held_bytes(request), coded_tpu.HELD_BYTES
    if held > maximum:
        return (
            f"{request.slots} slots of {request.kv_heads} heads of {request.dim} would hold {held / 2**20:.1f} MiB of "
            f"a TPU core's memory, more than {maximum >> 20} MiB"
        )
    return None


def held_bytes(request: "Request") -> int:
    """Returns the bytes of a core's memory that the kernel needs per row, in tiles of at least 8 rows by 128 lanes."""
    heads, item = request.kv_heads, jnp.dtype(request.dtype).itemsize
    tile = tile_slots(heads, request.slots, request.dim, item)
    slots, dim = (-(-x // LANES) * LANES for x in (request.slots, request.dim))
    rows, group = -(-heads // 8) * 8, request.group if request.group == 1 else -(-request.group // 8) * 8
    # Logits, and probabilities while they are summed; visibility; two buffers each for positions and statistics on the
    # way in and on the way out; and the policy's arithmetic.
    lines = 2 * heads * group + rows * (1 + 4 * (1 + len(request.statistics)) + POLICY_LINES)
    # Two tiles of keys and two of values.
    tiles = 4 * tile * heads * dim * item
    # Query, output and sums of every query head; the new pair; and the group of slots that is written.
    small = heads * dim * (4 * 6 * group + 4 * 32 * 4 + 2 * 32)
    return 4 * slots * lines + tiles + small


def tile_slots(kv_heads: int, size: int, dim: int, itemsize: int) -> int:
    """Returns the number of slots of a tile for all KV heads of a row: all slots, or a multiple of the lanes."""
    fit = TILE_BYTES // (kv_heads * -(-dim // LANES) * LANES * itemsize)
    return size if size <= fit else max(fit // LANES, 1) * LANES


def _kernel(
    newest_ref, budget_ref, index_ref, query_ref, new_key_ref, new_value_ref, key_ref, value_ref, position_ref, *refs,
    names, inside, observe_and_evict, transforms, scale, window, size, tile, shared, group_reduce,
):  # fmt: skip
    """Processes one tile of slots of all KV heads of one row.

    Blocks: query and output [1, K, G, D], new key and value [1, K, 1, D], key and value [1, K, tile, D], positions and
    statistics [1, K, S].
    """
    stat_refs = refs[: len(names)]
    output_ref, *rest = refs[len(names) :]
    key_out, value_out, *rest = rest if inside else [None, None, *rest]
    position_out, *rest = rest
    stat_outs = rest[: len(names)]
    logits_ref, seen_ref, own_ref, top_ref, total_ref, sum_ref, pair_ref, slot_ref, semaphore = rest[len(names) :]
    row, at, tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    kv_heads = query_ref.shape[1]
    newest = newest_ref[row]
    alive = newest >= 0
    here = slice(0, tile) if tile >= size else pl.ds(pl.multiple_of(at * tile, LANES), tile)

    def free(position: Array, slot: Array) -> Array:
        """Returns the first empty slot of each head, [K, 1]; `size` if there is none."""
        return jnp.min(jnp.where(position < 0, slot, size), axis=1, keepdims=True)

    @pl.when(at == 0)
    def _():
        # [K, S]
        position = position_ref[0]
        slot = jax.lax.broadcasted_iota(jnp.int32, position.shape, 1)
        visible = (position >= 0) & (position <= newest)
        visible = visible if window is None else visible & (position > newest - window)
        seen_ref[...] = jnp.full(seen_ref.shape, -1, jnp.int32)
        seen_ref[:, :size] = jnp.where(visible, position, -1)
        for head in range(kv_heads):
            slot_ref[head] = jnp.min(free(position[head : head + 1], slot[:1]))
        # [K, G, 1]: the logit of the new token, which is processed first and so is the maximum so far. A row that has
        # ended has no new token.
        own = jnp.sum(query_ref[0].astype(jnp.float32) * new_key_ref[0].astype(jnp.float32), axis=2, keepdims=True)
        own_ref[...] = jnp.broadcast_to(jnp.where(alive, own * scale, NEGATIVE), own_ref.shape)
        top_ref[...] = own_ref[...]
        total_ref[...] = jnp.where(alive, jnp.ones(total_ref.shape, jnp.float32), 0.0)
        value = jnp.broadcast_to(new_value_ref[0].astype(jnp.float32), sum_ref.shape)
        sum_ref[...] = jnp.where(alive, value, 0.0)

    # [K, tile, D]
    value = value_ref[0]
    # [K, G, tile]
    logits = product(query_ref[0], key_ref[0], 2) * scale
    logits = jnp.where((seen_ref[:, here] >= 0)[:, None, :], logits, NEGATIVE)
    logits_ref[:, :, here] = logits
    top, total = add_tile(logits, value, at, size, top_ref, total_ref, sum_ref)

    def write(head: int) -> None:
        """Writes the group of slots that contains the new pair back to memory."""
        start = pl.multiple_of(slot_ref[head] // shared * shared, shared)
        for which, (block, new, out) in enumerate(
            ((key_ref, new_key_ref, key_out), (value_ref, new_value_ref, value_out))
        ):
            # [shared, D]
            group = block[0, head, pl.ds(pl.multiple_of(start - at * tile, shared), shared), :]
            index = jax.lax.broadcasted_iota(jnp.int32, group.shape, 0)
            pair_ref[which, head] = jnp.where(index == slot_ref[head] - start, new[0, head], group)
            slots = out.at[row, index_ref[0], head, pl.ds(start, shared)]
            copy = pltpu.make_async_copy(pair_ref.at[which, head], slots, semaphore)
            copy.start()
            copy.wait()

    if inside:
        for head in range(kv_heads):
            free_here = (slot_ref[head] < size) & (slot_ref[head] // tile == at)
            pl.when(alive & free_here)(functools.partial(write, head))

    @pl.when(at == tiles - 1)
    def _():
        # [K, G, 1]
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        output_ref[0] = (sum_ref[...] * share).astype(output_ref.dtype)
        # [1, K, S]
        position = position_ref[...]
        slot = jax.lax.broadcasted_iota(jnp.int32, position.shape, 2)
        # [1, K, S]
        new = (slot == free(position[0], slot[0])[None]) & alive
        # [K, G, S]
        logits = jnp.where(new[0][:, None, :], own_ref[:, :, :1], logits_ref[:, :, :size])
        # [1, K, S]
        seen = (jnp.max(logits, axis=1) > NEGATIVE / 2).astype(jnp.float32)[None]
        # [K, G, S]
        probability = jnp.where(logits > NEGATIVE / 2, jnp.exp(logits - top), 0.0) * share
        # [1, K, S]
        if group_reduce == "mean":
            m = jnp.sum(probability, axis=1)[None] * (1.0 / probability.shape[1])
        else:
            m = jnp.max(probability, axis=1)[None]

        def uniform() -> Array:
            # [1, K, 1]
            return 1.0 / jnp.maximum(jnp.sum(seen, axis=2, keepdims=True), 1.0)

        columns = {each: seen if each == "one" else transformed(each, m, uniform) for each in transforms}
        stats = {name: ref[...] for name, ref in zip(names, stat_refs, strict=True)}
        stats, position = observe_and_evict(
            stats, jnp.where(new, newest, position), columns, jnp.full((1,), newest), jnp.full((1,), budget_ref[row])
        )
        position_out[...] = position
        for name, ref in zip(names, stat_outs, strict=True):
            ref[...] = stats[name]
