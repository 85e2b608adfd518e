"""What the GPU kernels need to read a cache of codes: its arrays as operands, and the decoded numbers of a tile.

A tile of codes is decoded in registers and stored as 16-bit numbers in the order that tensor cores read. Codes of one
byte belong to neighbouring features, but lie in different registers after they are taken apart: those at the same place
of their bytes become neighbouring columns, within each block of TILE features, and queries have the same order.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import forms, hopper
from kvjax.kernels.coded import Coded
from kvjax.kernels.forms import Form, form_of
from kvjax.kernels.hopper import MATRIX, PER_ROW, TILE, along_rows
from kvjax.storage.packing import BYTE

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
Ref = Any

COPY = 8  # the number of slots of scales and zeros is padded to a multiple, so that a line has whole 16 bytes


def refuses_codecs(request: "Request") -> str | None:
    """Returns why the kernels cannot read the codes of a request, or None."""
    key, value = request.codecs
    form = form_of(key, request.dim)
    if key != value:
        return f"it reads keys and values of one codec, not {key!r} and {value!r}"
    if form is None:
        return f"it reads codes of int2, int4, int8, fp8, turboquant(2) and turboquant(4), not {key!r}"
    if form.group % TILE:
        return f"it reads codes whose groups have a multiple of {TILE} channels, not {form.group}"
    return None


def operands(x: Array | Coded, pairs: int, front: int, form: Form | None) -> list[Array]:
    """Returns keys or values [pairs, S, D]; or codes [pairs, S, bytes], and scales and zeros [pairs, lines, S].

    Args:
      x: [B, K, S, D].
      pairs: B * K.
      front: the number of slots to insert before the first.
      form: how codes are decoded.
    """

    def flat(array: Array) -> Array:
        # [pairs, S, ...]
        array = array.reshape(pairs, array.shape[2], -1)
        return jnp.pad(array, ((0, 0), (front, 0), (0, 0))) if front else array

    if not isinstance(x, Coded):
        return [flat(x)]
    assert form is not None
    names = form.parts[1:]
    if not names:
        return [flat(x.parts["codes"])]
    # [pairs, lines, S]
    lines = jnp.swapaxes(jnp.concatenate([flat(x.parts[name]) for name in names], axis=2), 1, 2)
    return [flat(x.parts["codes"]), jnp.pad(lines, ((0, 0), (0, 0), (0, -lines.shape[2] % COPY)))]


def in_blocks(x: Array, planes: int) -> Array:
    """Orders features [..., D] as `decoded` does codes of `planes` per byte: in each TILE by their place in a byte."""
    split = x.reshape(*x.shape[:-1], -1, TILE // planes, planes)
    return jnp.swapaxes(split, -1, -2).reshape(x.shape)


def from_blocks(x: Array, planes: int) -> Array:
    """Inverts `in_blocks`."""
    return in_blocks(x, TILE // planes)


def decoded(form: Form, codes_smem: Ref, lines_smem: Ref) -> dict[int, Array]:
    """Decodes a tile in shared memory.

    Args:
      form: how codes are decoded.
      codes_smem: [TILE, bytes].
      lines_smem: [lines, TILE] scales, then zeros, of each group; None if there are none.

    Returns:
      The first of some columns -> [TILE, columns] float32.
    """
    planes, found = BYTE // form.bits, {}
    width = TILE // planes

    def line(index: int) -> Array:
        # [TILE], along the rows of [TILE, width]
        own = plgpu.layout_cast(lines_smem[index], PER_ROW).astype(jnp.float32)
        return along_rows(own, (TILE, width))

    for start in range(0, form.size, width):
        # [TILE, width]
        codes = hopper.load(codes_smem.at[:, pl.ds(start, width)], MATRIX).astype(jnp.int32)
        group = start * planes // form.group
        scale = line(group) if form.has_scale else None
        zero = line(form.groups + group) if form.has_zero else None
        for plane in range(planes):
            number = _number(form, (codes if plane == 0 else codes >> (form.bits * plane)) & ((1 << form.bits) - 1))
            number = number if scale is None else number * scale
            found[start * planes + plane * width] = number if zero is None else number + zero
    return found


def _number(form: Form, code: Array) -> Array:
    """Returns what codes stand for, float32, without scale and zero."""
    if form.number == forms.E4M3:
        return forms.e4m3(code)
    if form.number == forms.LEVEL:
        return forms.level(form.positive, code - (1 << (form.bits - 1)))
    return code.astype(jnp.float32)
