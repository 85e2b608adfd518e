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

from kvjax import memory
from kvjax.kernels.decode.codes_tpu import LANES, PACKED
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
    taken = [i for i, x in enumerate(arrays) if _takes(x)]
    found = dict(zip(taken, _write([arrays[i] for i in taken], slots, [new[i] for i in taken]), strict=True))
    return [found[i] if i in found else memory.write(x, slots, new[i]) for i, x in enumerate(arrays)]


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    return None


def _takes(x: Array) -> bool:
    return x.ndim == 4 and x.shape[2] % LANES == 0 and x.shape[3] * x.dtype.itemsize % WORD_BYTES == 0


def _write(arrays: list[Array], slots: Array, new: list[Array]) -> list[Array]:
    """`write` for arrays [B, K, S, n] whose n numbers fill words."""
    if not arrays:
        return []
    batch, kv_heads, size = arrays[0].shape[:3]
    rows = batch * kv_heads
    operands, values, blocks, value_blocks, along = [], [], [], [], []
    for x, one in zip(arrays, new, strict=True):
        n = x.shape[3]
        lanes = n % LANES > 0 or x.dtype.itemsize != 1
        x = x.reshape(rows, size, n)
        if lanes:
            per_word = WORD_BYTES // x.dtype.itemsize
            # [rows, words, 1]
            words = one.reshape(rows, n // per_word, *((per_word,) if per_word > 1 else ()))
            words = lax.bitcast_convert_type(words, jnp.int32)[..., None]
            operands.append(jnp.swapaxes(x, 1, 2))
            blocks.append(pl.BlockSpec((1, n, LANES), lambda row, slots: (row, 0, _block(slots[row], size, LANES))))
        else:
            # [rows, 1, n]
            words = one.reshape(rows, 1, n).astype(jnp.int32)
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
        old, width = old_ref[0], LANES if lanes else PACKED
        # `width` for a slot of no block
        own = slot - _block(slot, size, width) * width
        words = pltpu.bitcast(old, jnp.int32)
        if lanes:
            here = lax.broadcasted_iota(jnp.int32, words.shape, 1) == own
            words = jnp.where(here, new_ref[0], words)
        else:
            here = lax.broadcasted_iota(jnp.int32, words.shape, 0) == lax.div(own, WORD_BYTES)
            shift = lax.rem(own, WORD_BYTES) * BYTE
            words = jnp.where(here, words & ~(0xFF << shift) | (new_ref[0] << shift), words)
        out_ref[0] = pltpu.bitcast(words, old.dtype)
