"""Floating-point numbers of 4 bits with one exponent per group of channels (OCP MX specification, v1.0: MXFP4)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import Affine
from kvjax.storage import e2m1
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.exponents import LARGEST_EXPONENT, MANTISSA, MAX_SHIFT, scaled, split
from kvjax.storage.integer import group_size, grouped
from kvjax.storage.packing import over_groups, pack, packed_size, unpack
from kvjax.storage.tables import lookup

Array = jax.Array

GROUP = 32  # channels
SPREAD = 2  # ⌊log2⌋ of the largest magnitude
_EIGHTHS = 3  # magnitudes are compared in units of 2^-3


@dataclasses.dataclass(frozen=True)
class Mxfp4(Codec):
    """Holds e2m1 numbers (sign, 2 bits of exponent, 1 of mantissa) and an exponent per group of channels.

    E = ⌊log2 max|x|⌋ - 2, at least -127, -127 for a group of zeros; a magnitude is that of 0, 0.5, 1, 1.5, 2, 3, 4, 6
    nearest to min(|x| / 2^E, 6), ties to the even code; the exponent is held as E + 127.

    Attributes:
      group: channels that share an exponent; the largest divisor of the head size up to it is used.
    """

    group: int = GROUP

    def __post_init__(self) -> None:
        group = count_argument("storage mxfp4: group", self.group, minimum=1, error=StorageError)
        object.__setattr__(self, "group", group)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {
            "codes": ((packed_size(dim, e2m1.BITS),), jnp.dtype(jnp.uint8)),
            "exponent": ((dim // group_size(dim, self.group),), jnp.dtype(jnp.uint8)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # [..., groups, g]
        negative, exponent, mantissa = split(grouped(x, self.group))
        # [..., groups, 1]
        shared = jnp.maximum(jnp.max(exponent, axis=-1, keepdims=True) - SPREAD, 0)
        # 8 |x| / 2^E = mantissa / 2^shift, and 16 times |x| / 2^E with a last bit for what is cut off.
        shift = jnp.clip(shared - jnp.maximum(exponent, 1) + MANTISSA - _EIGHTHS, 0, MAX_SHIFT)
        eighths = jnp.right_shift(mantissa, shift)
        doubled = 2 * eighths + (jnp.left_shift(eighths, shift) != mantissa).astype(jnp.int32)
        codes = e2m1.nearest_codes(doubled, negative, 2 << _EIGHTHS)
        codes = codes.reshape(*codes.shape[:-2], -1)
        return {"codes": pack(codes, e2m1.BITS), "exponent": shared[..., 0].astype(jnp.uint8)}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D]
        codes = unpack(parts["codes"], e2m1.BITS, dim)
        return scaled(lookup(e2m1.LEVELS, codes), over_groups(_exponent(parts), dim))

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine:
        scale = scaled(jnp.float32(1), _exponent(parts))
        return Affine(codes=parts["codes"], scale=scale, bits=e2m1.BITS, levels=e2m1.LEVELS, dim=dim)


def _exponent(parts: Parts) -> Array:
    """Returns the exponents of groups, with the bias, [..., groups] int32."""
    # An empty slot may hold an exponent that no number has.
    return jnp.minimum(parts["exponent"], LARGEST_EXPONENT - SPREAD).astype(jnp.int32)


@factory
def mxfp4(group: int = GROUP, *, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values as e2m1 numbers of 4 bits with one exponent per group of channels.

    Args:
      group: channels that share an exponent; the largest divisor of the head size up to it is used.
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    return Storage(key=Mxfp4(group), value=Mxfp4(group), residual=residual, memory=memory, name="mxfp4")
