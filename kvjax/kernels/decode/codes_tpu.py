"""Operands of the TPU kernels that read a cache of codes: its arrays, and the numbers of a block of codes.

XLA lays an array out so that its tiles have little padding: [B, K, S, n] with n a multiple of 128 as it is written, any
other n as [B, K, n, S], with slots along the lanes. A kernel takes each array as it lies, so that nothing is copied.
Scales and zeros always have slots along the lanes, as logits have, and multiply these. Codes with slots along the lanes
have the bytes of four channels in a 32-bit word, and one code of every word is shifted out at a time. The channels
of all words' first codes are a plane, those of their second codes the next, and so on. Queries and outputs have their
channels in that order.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kvjax.kernels import forms
from kvjax.kernels.coded import Coded
from kvjax.kernels.forms import E4M3, INTEGER, Form, form_of
from kvjax.storage.packing import BYTE

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array
Ref = Any

LANES = 128
WORD = 32  # bits
PACKED = 32  # rows of bytes of a memory tile, four of which fill a word
BYTES = 0x80, 0x88, 0xAA  # the highest bit of each code of a byte, for codes of 8, 4 and 2 bits


@dataclasses.dataclass(frozen=True)
class Side:
    """The keys, or the values, of a kernel's operands.

    Attributes:
      form: how they are decoded.
      slots_last: whether codes have slots along the lanes.
    """

    form: Form
    slots_last: bool

    @property
    def planes(self) -> int:
        """The number of planes, each of which has one code of every word or byte."""
        return (WORD if self.slots_last else BYTE) // self.form.bits

    @property
    def channels(self) -> int:
        """The axis of channels in what `numbers` returns."""
        return 0 if self.slots_last else 1

    def specs(self, pairs: int, tile: int) -> list[pl.BlockSpec]:
        """Returns the blocks of the parts: R (row, KV head) pairs and a tile of slots."""
        across = pl.BlockSpec((pairs, tile, self.form.size), lambda row, at: (row, at, 0))
        along = {"codes": self.form.size, "scale": self.form.groups, "zero": self.form.groups}
        return [
            pl.BlockSpec((pairs, along[name], tile), lambda row, at: (row, 0, at))
            if name != "codes" or self.slots_last
            else across
            for name in self.form.parts
        ]

    def operands(self, coded: Coded) -> list[Array]:
        """Returns the parts as `specs` cuts them, [B * K, S, bytes] or [B * K, numbers, S]."""
        batch, kv_heads, slots, _ = coded.shape
        found = []
        for name in self.form.parts:
            # [B * K, S, numbers]
            part = coded.parts[name].reshape(batch * kv_heads, slots, -1)
            found.append(jnp.swapaxes(part, 1, 2) if name != "codes" or self.slots_last else part)
        return found

    def numbers(self, ref: Ref, pair: Array, here: Any, dtype: DTypeLike) -> Array:
        """Returns the numbers of some slots of a pair, without scale and zero, channels in the order of planes.

        Integers are centred: less than they are by 2^(bits - 1), see `lines`.

        Args:
          ref: a block of codes.
          pair: index of the (row, KV head) in the block.
          here: the slots.
          dtype: of the result.

        Returns:
          [D, slots] with slots along the lanes, or [slots, D].
        """
        form = self.form
        if self.slots_last:
            # [bytes / 4, slots]
            words = pltpu.bitcast(ref[pair, :, here], jnp.int32)
        else:
            # [slots, bytes]
            words = ref[pair, here, :].astype(jnp.int32)
        if form.number != E4M3:
            words = words ^ _centre(form.bits, self.slots_last)
        planes = [_number(form, words, plane).astype(dtype) for plane in range(self.planes)]
        return planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=self.channels)

    def lines(self, refs: dict[str, Ref], pair: Array, here: object, group: int) -> tuple[Array | None, Array | None]:
        """Returns scale and zero of some slots for one group of channels, [1, slots] float32 each; None = 1 and 0.

        The zero is that of centred integers.
        """
        scale, zero = (
            refs[name][pair, group : group + 1, here].astype(jnp.float32) if name in refs else None
            for name in ("scale", "zero")
        )
        if self.form.number == INTEGER:
            assert scale is not None
            assert zero is not None
            zero = zero + scale * (1 << (self.form.bits - 1))
        return scale, zero


def side_of(coded: Coded) -> Side:
    """Returns how keys or values enter a kernel; see `refuses_codecs`."""
    form = form_of(coded.codec, coded.dim)
    assert form is not None
    return Side(form, slots_last=form.size % LANES > 0)


def refuses_codecs(request: "Request") -> str | None:
    """Returns why the kernels cannot read the codes of a request, or None."""
    for codec in request.codecs:
        form = form_of(codec, request.dim)
        if form is None:
            held = f"vectors in {request.dtype}" if codec is None else repr(codec)
            return f"it reads codes of int2, int4, int8, fp8, turboquant(2) and turboquant(4), not {held}"
        if form.size % PACKED:
            return f"it reads vectors of a multiple of {PACKED} bytes of codes, not of {form.size}"
    return None


def _centre(bits: int, words: bool) -> int:
    """Returns an int32 with the highest bit of each code of a word, or of a byte."""
    byte = next(mask for mask, width in zip(BYTES, (8, 4, 2), strict=True) if width == bits)
    return byte * 0x01010101 - (1 << WORD) if words else byte


def _number(form: Form, words: Array, plane: int) -> Array:
    """Returns the numbers of one code of each word, float32."""
    if form.number == E4M3:
        return forms.e4m3(lax.shift_right_logical(words, jnp.int32(form.bits * plane)))
    # Shifted to the highest bits, and back with its sign.
    left = WORD - form.bits * (plane + 1)
    words = words if left == 0 else words << left
    code = words >> (WORD - form.bits)
    return code.astype(jnp.float32) if form.number == INTEGER else forms.level(form.positive, code)
