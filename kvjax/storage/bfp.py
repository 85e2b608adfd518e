"""Block floating point: integers with one exponent per group of channels (OCP MX specification, v1.0: MXINT8)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import SIGNED, Affine
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.exponents import LARGEST_EXPONENT, MANTISSA, scaled, shifted, split
from kvjax.storage.integer import group_size, grouped
from kvjax.storage.packing import MAX_BITS, over_groups, pack, packed_size, unpack

Array = jax.Array

GROUP = 32  # channels
MIN_BITS = 2  # a sign and a bit of magnitude


@dataclasses.dataclass(frozen=True)
class Bfp(Codec):
    """Holds integers in two's complement, and the exponent of the largest magnitude of each group of channels.

    E = ⌊log2 max|x|⌋ within ±127, -127 for a group of zeros; mantissa = x / 2^(E - bits + 2) rounded to nearest, at
    most 2^(bits-1) - 1 in magnitude; the exponent is held as E + 127. A group of subnormal numbers decodes to 0.

    Attributes:
      bits: bits of a mantissa with its sign, 2 to 8.
      group: channels that share an exponent; the largest divisor of the head size up to it is used.
    """

    bits: int = 8
    group: int = GROUP

    def __post_init__(self) -> None:
        for field, minimum, maximum in (("bits", MIN_BITS, MAX_BITS), ("group", 1, None)):
            name, given = f"storage bfp: {field}", getattr(self, field)
            value = count_argument(name, given, minimum=minimum, maximum=maximum, error=StorageError)
            object.__setattr__(self, field, value)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {
            "codes": ((packed_size(dim, self.bits),), jnp.dtype(jnp.uint8)),
            "exponent": ((dim // group_size(dim, self.group),), jnp.dtype(jnp.uint8)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # [..., groups, g]
        negative, exponent, mantissa = split(grouped(x, self.group))
        # [..., groups, 1]
        shared = jnp.max(exponent, axis=-1, keepdims=True)
        # |x| / 2^(E - bits + 2) = mantissa / 2^shift
        shift = shared - jnp.maximum(exponent, 1) + MANTISSA + 2 - self.bits
        # [..., groups, g]
        codes = jnp.minimum(shifted(mantissa, shift), (1 << (self.bits - 1)) - 1)
        codes = jnp.where(negative, -codes, codes)
        codes = codes.reshape(*codes.shape[:-2], -1)
        return {"codes": pack(codes, self.bits), "exponent": shared[..., 0].astype(jnp.uint8)}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        sign = 1 << (self.bits - 1)
        # [..., D]
        codes = unpack(parts["codes"], self.bits, dim).astype(jnp.int32)
        mantissa = ((codes ^ sign) - sign).astype(jnp.float32)
        return scaled(mantissa, over_groups(self._exponent(parts), dim))

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine:
        scale = scaled(jnp.float32(1), self._exponent(parts))
        return Affine(codes=parts["codes"], scale=scale, bits=self.bits, levels=SIGNED, dim=dim)

    def _exponent(self, parts: Parts) -> Array:
        """Returns the exponents of the last bits of mantissas, with the bias, [..., groups] int32."""
        # An empty slot may hold an exponent that no number has.
        return jnp.minimum(parts["exponent"], LARGEST_EXPONENT).astype(jnp.int32) - self.bits + 2


@factory
def bfp(bits: int = 8, group: int = GROUP, *, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values as integers with one exponent per group of channels; `bfp(8, 32)` is MXINT8.

    Args:
      bits: bits of a mantissa with its sign, 2 to 8.
      group: channels that share an exponent; the largest divisor of the head size up to it is used.
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    codec = Bfp(bits, group)
    return Storage(key=codec, value=codec, residual=residual, memory=memory, name=f"bfp{codec.bits}")
