"""Writes one slot per head of a cache of codes in place on a TPU (Pallas, Mosaic).

XLA's scatter takes bytes in other tiles than a kernel's operands have, and would copy the codes twice in each step.
This kernel takes every array as `codes_tpu` does, and reads and writes the one tile of each head that holds its slot.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.decode.codes_tpu import LANES, PACKED
from kvjax.parallel import host_memory
from kvjax.storage.packing import BYTE

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array

WORD_BYTES = 4


def write(arrays: list[Array], slots: Array, new: list[Array]) -> list[Array]:
    """Writes one slot of each head.

    Args:
      arrays: [B, K, S, ...] each, donated.
      slots: [B, K, 1] int32; S, for which nothing is written.
      new: [B, K, 1, ...] each.

    Returns:
      The arrays. XLA writes those whose numbers of a slot do not fill words of 32 bits, a scale per vector for example,
      and all of them if the slots do not fill tiles.
    """
    taken = [i for i, x in enumerate(arrays) if takes(x)]
    found = dict(zip(taken, _write([arrays[i] for i in taken], slots, [new[i] for i in taken]), strict=True))
    return [found[i] if i in found else host_memory.write(x, slots, new[i]) for i, x in enumerate(arrays)]


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    return None


def takes(x: Array) -> bool:
    """Returns whether the kernel writes an array, and not XLA."""
    return x.ndim == 4 and x.shape[2] % LANES == 0 and x.shape[3] * x.dtype.itemsize % WORD_BYTES == 0


def _write(arrays: list[Array], slots: Array, new: list[Array]) -> list[Array]:
    """`write` for arrays [B, K, S, n] whose n numbers fill words."""
    if not arrays:
        return []
    batch, kv_heads, size = arrays[0].shape[:3]
    rows = batch * kv_heads
    operands, values, blocks, value_blocks, along = [], [], [], [], []
    for x, one in zip(arrays, new, strict=True):
        n, lanes = x.shape[3], along_lanes(x)
        words = words_of(one, lanes)
        # [rows, words, 1] or [rows, 1, n]
        words = words.reshape(rows, *words.shape[2:])
        x = x.reshape(rows, size, n)
        if lanes:
            operands.append(jnp.swapaxes(x, 1, 2))
            blocks.append(pl.BlockSpec((1, n, LANES), lambda row, slots: (row, 0, _block(slots[row], size, LANES))))
        else:
            operands.append(x)
            blocks.append(pl.BlockSpec((1, PACKED, n), lambda row, slots: (row, _block(slots[row], size, PACKED), 0)))
        values.append(words)
        value_blocks.append(pl.BlockSpec((1, *words.shape[1:]), lambda row, _: (row, 0, 0)))
        along.append(lanes)
    written = pl.pallas_call(
        functools.partial(_kernel, along=tuple(along), size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(rows,), in_specs=[*value_blocks, *blocks], out_specs=blocks
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands],
        # Including the prefetched slots.
        input_output_aliases={1 + len(values) + i: i for i in range(len(operands))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="append_codes",
    )(slots.reshape(rows), *values, *operands)
    return [
        (jnp.swapaxes(x, 1, 2) if lanes else x).reshape(old.shape)
        for x, lanes, old in zip(written, along, arrays, strict=True)
    ]


def _block(slot: Array, size: int, width: int) -> Array:
    """Returns the index of the block of `width` slots that holds a slot; of the last one for `size`."""
    return lax.div(jnp.minimum(slot, size - 1), width)


def _kernel(slots_ref, *refs, along, size):
    """Writes the slot of one (row, KV head).

    Blocks: values [1, words, 1] of arrays with slots along the lanes, whose blocks are [1, n, LANES], or [1, 1, n] of
    arrays of bytes whose blocks are [1, PACKED, n].
    """
    slot, count = slots_ref[pl.program_id(0)], len(along)
    for lanes, new_ref, old_ref, out_ref in zip(
        along, refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True
    ):
        # [words, lanes]; in words, whose bytes are those of neighbouring rows
        # `width` for a slot of no block
        width = LANES if lanes else PACKED
        out_ref[0] = placed(old_ref[0], new_ref[0], slot - _block(slot, size, width) * width, lanes)


def placed(block: Array, new: Array, slot: Array, lanes: bool) -> Array:
    """Returns a block of slots with one of them replaced.

    Args:
      block: [n, LANES], or [PACKED, n] of bytes.
      new: from `words_of`, of one head.
      slot: index of the slot in the block; none for one after the last.
      lanes: whether slots are along the lanes.
    """
    # [words, lanes]; in words, whose bytes are those of neighbouring rows
    words = pltpu.bitcast(block, jnp.int32)
    if lanes:
        here = lax.broadcasted_iota(jnp.int32, words.shape, 1) == slot
        words = jnp.where(here, new, words)
    else:
        here = lax.broadcasted_iota(jnp.int32, words.shape, 0) == lax.div(slot, WORD_BYTES)
        shift = lax.rem(slot, WORD_BYTES) * BYTE
        words = jnp.where(here, words & ~(0xFF << shift) | (new << shift), words)
    return pltpu.bitcast(words, block.dtype)


def along_lanes(x: Array) -> bool:
    """Returns whether slots of an array [..., S, n] are along the lanes."""
    return x.shape[-1] % LANES > 0 or x.dtype.itemsize != 1


def words_of(new: Array, lanes: bool) -> Array:
    """Returns the numbers of a slot [B, K, 1, n] as words: [B, K, words, 1] int32, or bytes [B, K, 1, n] as int32."""
    if not lanes:
        return new.astype(jnp.int32)
    per_word = WORD_BYTES // new.dtype.itemsize
    split = new.reshape(*new.shape[:2], new.shape[3] // per_word, *((per_word,) if per_word > 1 else ()))
    return lax.bitcast_convert_type(split, jnp.int32)[..., None]
