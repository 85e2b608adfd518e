"""Integers of 1 to 8 bits with a zero and a scale per group of channels (FlexGen, arXiv:2303.06865, section 4)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import Affine
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.packing import MAX_BITS, over_groups, pack, packed_size, unpack
from kvjax.storage.rounding import as_stored, divide

Array = jax.Array

GROUP = 64  # channels


@functools.lru_cache
def group_size(dim: int, group: int) -> int:
    """Returns the largest divisor of `dim` up to `group`: 40 for 80 channels in groups of 64, 1 for 67."""
    return next(size for size in range(min(dim, group), 0, -1) if dim % size == 0)


def grouped(x: Array, group: int) -> Array:
    """Reshapes [..., D] to [..., groups, g], g of `group_size`."""
    dim = x.shape[-1]
    return x.reshape(*x.shape[:-1], -1, group_size(dim, group))


@dataclasses.dataclass(frozen=True)
class Integer(Codec):
    """Codes numbers uniformly between the smallest and the largest of each group of channels.

    zero = the smallest number, scale = (largest - zero) / (2^bits - 1), code = (x - zero) / scale rounded to nearest.
    A group of equal numbers has scale 0 and codes 0. The range of a group must not exceed the largest float32 number.

    Attributes:
      bits: bits of a code, 1 to 8.
      group: channels that share a zero and a scale; the largest divisor of the head size up to it is used.
    """

    bits: int
    group: int = GROUP

    def __post_init__(self) -> None:
        for field, maximum in (("bits", MAX_BITS), ("group", None)):
            name, given = f"storage integer: {field}", getattr(self, field)
            value = count_argument(name, given, minimum=1, maximum=maximum, error=StorageError)
            object.__setattr__(self, field, value)

    def size(self, dim: int) -> int:
        """Returns the number of channels of a group."""
        return group_size(dim, self.group)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        groups = dim // self.size(dim)
        return {
            "codes": ((packed_size(dim, self.bits),), jnp.dtype(jnp.uint8)),
            "scale": ((groups,), jnp.dtype(dtype)),
            "zero": ((groups,), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # [..., groups, g], and [..., groups, 1] twice
        codes, scale, zero = uniform(self._grouped(x), self.bits, dtype, axis=-1)
        return self._parts(codes, scale, zero)

    def encode_without(self, x: Array, left_out: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        levels = (1 << self.bits) - 1
        # [..., groups, g]
        x, left_out = self._grouped(x), self._grouped(left_out)
        # [..., groups, 1]
        low = jnp.min(jnp.where(left_out, jnp.inf, x), axis=-1, keepdims=True)
        high = jnp.max(jnp.where(left_out, -jnp.inf, x), axis=-1, keepdims=True)
        nothing = jnp.all(left_out, axis=-1, keepdims=True)
        low, high = jnp.where(nothing, 0.0, low), jnp.where(nothing, 0.0, high)
        scale, zero = range_as_stored(low, high, levels, dtype)
        # An entry that is left out has the code of the smallest, 0.
        return self._parts(codes_within(jnp.where(left_out, low, x), scale, zero, levels), scale, zero)

    def _parts(self, codes: Array, scale: Array, zero: Array) -> Parts:
        return {
            "codes": pack(codes.reshape(*codes.shape[:-2], -1), self.bits),
            "scale": scale[..., 0],
            "zero": zero[..., 0],
        }

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D] each
        codes = unpack(parts["codes"], self.bits, dim).astype(jnp.float32)
        scale, zero = (over_groups(parts[name].astype(jnp.float32), dim) for name in ("scale", "zero"))
        return zero + scale * codes

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine:
        return Affine(codes=parts["codes"], scale=parts["scale"], zero=parts["zero"], bits=self.bits, dim=dim)

    def _grouped(self, x: Array) -> Array:
        """Reshapes [..., D] to [..., groups, g]."""
        return grouped(x, self.size(x.shape[-1]))


def uniform(x: Array, bits: int, dtype: DTypeLike, *, axis: int) -> tuple[Array, Array, Array]:
    """Codes numbers uniformly between the smallest and the largest along an axis.

    Args:
      x: float32.
      bits: bits of a code.
      dtype: the model's dtype, in which scale and zero are stored.
      axis: of the numbers that share a scale and a zero.

    Returns:
      Codes uint8 of x's shape; scale and zero in `dtype`, with 1 number along the axis.
    """
    levels = (1 << bits) - 1
    # [..., 1]
    low = jnp.min(x, axis=axis, keepdims=True)
    high = jnp.max(x, axis=axis, keepdims=True)
    scale, zero = range_as_stored(low, high, levels, dtype)
    return codes_within(x, scale, zero, levels), scale, zero


def range_as_stored(low: Array, high: Array, levels: int, dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns the scale and the zero of numbers from `low` to `high`, float32, as they are stored in `dtype`."""
    # The minimum of 0 and -0 depends on the order of comparison; 0 is stored for both.
    zero = as_stored(jnp.where(low == 0, 0.0, low), dtype)
    width = jnp.maximum(high - zero.astype(jnp.float32), 0.0)
    return as_stored(divide(width, levels), dtype), zero


def codes_within(x: Array, scale: Array, zero: Array, levels: int) -> Array:
    """Returns the nearest codes, uint8 from 0 to `levels`, of float32 numbers; 0 where the stored scale is 0."""
    # Decoding multiplies by the rounded scale.
    step = scale.astype(jnp.float32)
    codes = jnp.clip(jnp.round(divide(x - zero.astype(jnp.float32), jnp.where(step == 0, 1.0, step))), 0, levels)
    return jnp.where(step == 0, 0.0, codes).astype(jnp.uint8)


@factory
def integer(
    bits: int,
    group: int = GROUP,
    *,
    residual: int = 0,
    key_bits: int | None = None,
    value_bits: int | None = None,
    memory: Memory = DEVICE,
) -> Storage:
    """Holds keys and values as integers with a zero and a scale per group of channels.

    Args:
      bits: bits of a code, 1 to 8.
      group: channels that share a zero and a scale; the largest divisor of the head size up to it is used.
      residual: the number of newest positions that stay exact.
      key_bits: bits of keys; None = `bits`.
      value_bits: bits of values; None = `bits`.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    key = Integer(bits if key_bits is None else key_bits, group)
    value = Integer(bits if value_bits is None else value_bits, group)
    name = f"int{key.bits}" if key == value else f"int_k{key.bits}v{value.bits}"
    return Storage(key=key, value=value, residual=residual, memory=memory, name=name)


@factory
def int8(group: int = GROUP, *, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values as integers of 8 bits; see `integer`."""
    return integer(8, group, residual=residual, memory=memory)


@factory
def int4(group: int = GROUP, *, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values as integers of 4 bits; see `integer`."""
    return integer(4, group, residual=residual, memory=memory)


@factory
def int2(group: int = GROUP, *, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values as integers of 2 bits; see `integer`."""
    return integer(2, group, residual=residual, memory=memory)
