"""Forms of codecs for kernels that decode on chip: numbers of a few bits, groups of which have a scale and a zero.

A vector is x = scale · number(code) + zero, group by group of its channels. Attention needs no decoded vector: its
logits are scale · (q · numbers) + zero · Σ q of a group, and its output is the sum of numbers weighted by
probability · scale, plus the sum of probability · zero (FlexGen's codes, arXiv:2303.06865; TurboQuant's, whose numbers
are of a vector that was turned, arXiv:2504.19874). Where vectors were rotated before they were coded, queries are
rotated and outputs rotated back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.storage.base import Codec
from kvjax.storage.fp8 import Fp8
from kvjax.storage.hadamard import Hadamard
from kvjax.storage.integer import Integer
from kvjax.storage.packing import BYTE
from kvjax.storage.rotated import Rotated
from kvjax.storage.turboquant import POSITIVE, TurboQuant, turn, turn_back

Array = jax.Array

WIDTHS = (2, 4, 8)  # bits of a code, so that whole codes fill a byte
INTEGER, E4M3, LEVEL = "integer", "e4m3", "level"  # what a code stands for
# e4m3: sign, 4 bits of exponent, 3 of mantissa
MANTISSA_SHIFT = 23 - 3  # from e4m3's bits to float32's
REBIAS = (127 - 7) << 23  # the difference of the exponents' biases, in float32's bits
SUBNORMAL = 2.0**-6  # the smallest normal number; codes below 8 are multiples of an eighth of it


@dataclasses.dataclass(frozen=True)
class Form:
    """How the vectors of a codec are decoded.

    Attributes:
      bits: of a code, one of `WIDTHS`.
      dim: D, the number of channels.
      group: channels that share a scale and a zero.
      number: what a code stands for, one of `INTEGER`, `E4M3` and `LEVEL`: itself, a float, or an entry of a table.
      parts: names of the arrays of the codec, codes first, then those of ``scale`` and ``zero`` that it has.
      positive: the upper half of the table of `LEVEL`, ascending; the lower half is its mirror image.
      seed: of the orthogonal matrix that vectors were turned by (see `kvjax.storage.turboquant`); None = they were not.
      constant: the scale of all vectors, if the codec has no array of scales.
      basis: the rotation of vectors before they were coded; None = they were not rotated.
    """

    bits: int
    dim: int
    group: int
    number: str = INTEGER
    parts: tuple[str, ...] = ("codes", "scale", "zero")
    positive: tuple[float, ...] = ()
    seed: int | None = None
    constant: float = 1.0
    basis: Hadamard | None = None

    @property
    def groups(self) -> int:
        """The number of groups of channels."""
        return self.dim // self.group

    @property
    def size(self) -> int:
        """Bytes of the codes of a vector."""
        return self.dim * self.bits // BYTE

    @property
    def has_scale(self) -> bool:
        """Whether there is an array of scales."""
        return "scale" in self.parts

    @property
    def has_zero(self) -> bool:
        """Whether there is an array of zeros."""
        return "zero" in self.parts

    @property
    def factor(self) -> float:
        """The factor of the logits of `query`."""
        return self.constant if self.seed is None else 1 / self.dim

    def query(self, query: Array) -> Array:
        """Returns the queries [..., D] float32 whose products with numbers, scaled, are the logits over `factor`."""
        if self.basis is not None:
            query = self.basis.rotate(query)
        return query if self.seed is None else turn(query, self.seed)

    def output(self, output: Array) -> Array:
        """Returns the sum of vectors [..., D] float32 from the sum of scaled numbers."""
        output = output * self.constant if self.seed is None else turn_back(output, self.seed)
        return output if self.basis is None else self.basis.rotate_back(output)

    def in_planes(self, x: Array, planes: int) -> Array:
        """Reorders channels [..., D] plane by plane.

        First come the channels whose code is the first of its word of `planes` codes, then those whose code is the
        second, and so on.
        """
        # [..., D / planes, planes]
        split = x.reshape(*x.shape[:-1], -1, planes)
        return jnp.swapaxes(split, -1, -2).reshape(x.shape)

    def from_planes(self, x: Array, planes: int) -> Array:
        """Inverts `in_planes`: the reordering with as many planes as there are words undoes it."""
        return self.in_planes(x, self.dim // planes)

    def members(self, planes: int) -> np.ndarray:
        """Returns which channels, in the order of `in_planes`, belong to each group, [groups, D] bool."""
        channel = np.arange(self.dim).reshape(-1, planes).T.reshape(-1)
        return channel // self.group == np.arange(self.groups)[:, None]


@functools.lru_cache
def form_of(codec: Codec | None, dim: int) -> Form | None:
    """Returns how the vectors of a codec are decoded, or None if no kernel can.

    Args:
      codec: None = vectors in the model's dtype.
      dim: D.
    """
    # A class of a user's own may decode otherwise.
    if type(codec) is Rotated:
        inner = form_of(codec.codec, dim)
        return inner and dataclasses.replace(inner, basis=codec.basis)
    if type(codec) is Integer and codec.bits in WIDTHS and dim * codec.bits % BYTE == 0:
        return Form(codec.bits, dim, codec.size(dim))
    if type(codec) is Fp8:
        if codec.scale is None:
            return Form(BYTE, dim, dim, E4M3, ("codes", "scale"))
        return Form(BYTE, dim, dim, E4M3, ("codes",), constant=codec.scale)
    if type(codec) is TurboQuant and codec.bits in WIDTHS and dim * codec.bits % BYTE == 0:
        return Form(codec.bits, dim, dim, LEVEL, ("codes", "scale"), POSITIVE[codec.bits], codec.seed)
    return None


def e4m3(code: Array) -> Array:
    """Returns the e4m3 numbers, float32, of the lowest bytes of int32; the bits of NaN become ±480."""
    magnitude = code & 0x7F
    y = lax.bitcast_convert_type((magnitude << MANTISSA_SHIFT) + REBIAS, jnp.float32)
    # A processor may take subnormal numbers of float32 for 0, so those of e4m3 are made of normal ones.
    y = jnp.where(magnitude < 8, 2.0 * y - SUBNORMAL, y)
    return jnp.where((code & 0x80) == 0, y, -y)


def level(positive: tuple[float, ...], code: Array) -> Array:
    """Returns entries of a symmetric table, float32.

    Args:
      positive: its upper half, ascending.
      code: int32 from -len(positive), of the lowest entry, to len(positive) - 1.
    """
    index = jnp.where(code < 0, -1 - code, code)
    found = [jnp.full(code.shape, each, jnp.float32) for each in positive]
    bit = 1
    while len(found) > 1:
        odd = (index & bit) != 0
        found = [jnp.where(odd, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        bit *= 2
    return jnp.where(code < 0, -found[0], found[0])
