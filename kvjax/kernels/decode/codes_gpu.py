"""Operands of the GPU kernels that read a cache of codes: its arrays as operands, and the decoded numbers of a tile.

A tile of codes is decoded in registers and stored as 16-bit numbers in the order that tensor cores read. Codes of one
byte belong to neighbouring features, but lie in different registers after they are taken apart: those at the same place
of their bytes become neighbouring columns, within each block of TILE features, and queries have the same order.

A cache holds the scales of a vector one after the other, a few bytes, fewer than a copy into shared memory moves. Those
of a tile are neighbours in memory, and are copied as one line. If there are several groups of features, the line passes
through registers once more, and the scales of a group become a column. A copy begins at a multiple of 16 bytes: if the
last tile does not, as the number of slots is not a multiple of 8, the lines are cut into tiles beforehand.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvjax.kernels import forms, hopper
from kvjax.kernels.coded import Coded
from kvjax.kernels.forms import Form, form_of
from kvjax.kernels.hopper import MATRIX, PER_ROW, TILE, along_rows
from kvjax.storage.packing import BYTE

if TYPE_CHECKING:
    from kvjax.kernels.decode.launch_gpu import Launch
    from kvjax.kernels.registry import Request

Array = jax.Array
Ref = Any

COPY = 8  # numbers of 16 bits in the 16 bytes at whose multiples copies begin


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
    """Returns keys or values [pairs, S, D]; or codes [pairs, S, bytes], scales and zeros, [pairs, S * groups] each.

    Scales and zeros are cut into tiles, [pairs, tiles * TILE * groups], if `cuts_lines`.

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
    codes, *lines = (flat(x.parts[name]) for name in form.parts)
    # [pairs, S * groups]
    lines = [line.reshape(pairs, -1) for line in lines]
    if cuts_lines(codes.shape[1]):
        lines = [hopper.tiled(line, TILE * form.groups, 0.0).reshape(pairs, -1) for line in lines]
    return [codes, *lines]


def cuts_lines(size: int) -> bool:
    """Returns whether scales and zeros are cut into tiles, since the last tile of S slots begins in between copies."""
    return size % COPY > 0


def queries(query: Array, launch: "Launch") -> Array:
    """Returns 16-bit parts of queries as `Pass` takes them: [pairs, G, D] -> [pairs, parts, G padded, D]."""
    form, group = launch.form, query.shape[1]
    if form is not None:
        query = in_blocks(form.query(query.astype(jnp.float32)), launch.planes)
    parts = jnp.stack(hopper.parts(query.astype(launch.dtype)), axis=1)
    return jnp.pad(parts, ((0, 0), (0, 0), (0, launch.padded - group), (0, 0)))


def outputs(output: Array, launch: "Launch") -> Array:
    """Returns sums of decoded vectors, [..., D] float32, with their features in order."""
    form = launch.form
    return output if form is None else form.output(from_blocks(output, launch.planes))


def in_blocks(x: Array, planes: int) -> Array:
    """Orders features [..., D] as `decoded` does codes of `planes` per byte: in each TILE by their place in a byte."""
    split = x.reshape(*x.shape[:-1], -1, TILE // planes, planes)
    return jnp.swapaxes(split, -1, -2).reshape(x.shape)


def from_blocks(x: Array, planes: int) -> Array:
    """Inverts `in_blocks`."""
    return in_blocks(x, TILE // planes)


def decoded(form: Form, codes_smem: Ref, line: Callable[[int, int], Ref]) -> dict[int, Array]:
    """Decodes a tile in shared memory.

    Args:
      form: how codes are decoded.
      codes_smem: [TILE, bytes].
      line: (which of scale and zero, group of features) -> [TILE].

    Returns:
      The first of some columns -> [TILE, columns] float32.
    """
    planes, found = BYTE // form.bits, {}
    width = TILE // planes

    def numbers(name: str, group: int) -> Array | None:
        if name not in form.parts:
            return None
        # [TILE], along the rows of [TILE, width]
        own = hopper.load(line(form.parts.index(name) - 1, group), PER_ROW).astype(jnp.float32)
        return along_rows(own, (TILE, width))

    for start in range(0, form.size, width):
        # [TILE, width]
        codes = hopper.load(codes_smem.at[:, pl.ds(start, width)], MATRIX).astype(jnp.int32)
        group = start * planes // form.group
        scale, zero = numbers("scale", group), numbers("zero", group)
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
