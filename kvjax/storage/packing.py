"""Packs codes of 1 to 8 bits into bytes.

The codes of one vector form one bit stream along its channels, lowest bit first: code i fills bits b·i to b·i + b - 1,
and bit j is bit j mod 8 of byte j // 8. The unused bits of the last byte are 0. Any number of bits needs only shifts of
strided slices: 8 / gcd(8, b) codes fill b / gcd(8, b) bytes, and all such periods are alike.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.errors import StorageError

Array = jax.Array
FEW_GROUPS = 8  # of a vector, up to which their numbers are spread by comparisons

BYTE = 8  # bits
MAX_BITS = 8


def packed_size(dim: int, bits: int) -> int:
    """Returns the number of bytes of `dim` codes."""
    return -(-dim * bits // BYTE)


def pack(codes: Array, bits: int) -> Array:
    """Packs each vector of codes into one bit stream.

    Args:
      codes: [..., D] integers or bool; only their lowest `bits` bits are kept.
      bits: bits of a code, 1 to 8.

    Returns:
      [..., ⌈D·bits/8⌉] uint8.

    Raises:
      StorageError: `bits` is out of range.
    """
    count, size = _period(bits)
    *leading, dim = codes.shape
    # [..., D] uint8
    codes = codes.astype(jnp.uint8) & jnp.uint8((1 << bits) - 1)
    # [..., periods, count]
    codes = _split(codes, count)
    packed = []
    for byte in range(size):
        # The codes of a period that have a bit in this byte, and how far each is shifted left.
        shifts = [(i, bits * i - BYTE * byte) for i in range(count) if -bits < bits * i - BYTE * byte < BYTE]
        # [..., periods] each
        parts = [codes[..., i] << shift if shift >= 0 else codes[..., i] >> -shift for i, shift in shifts]
        packed.append(_union(parts))
    # [..., periods * size]
    stream = jnp.stack(packed, axis=-1).reshape(*leading, -1)
    return stream[..., : packed_size(dim, bits)]


def unpack(packed: Array, bits: int, dim: int) -> Array:
    """Unpacks each bit stream of `pack` into a vector of codes.

    Args:
      packed: [..., ⌈dim·bits/8⌉] uint8.
      bits: bits of a code, 1 to 8.
      dim: codes of a vector.

    Returns:
      [..., dim] uint8.

    Raises:
      StorageError: `bits` is out of range, or `packed` does not have the number of bytes of `dim` codes.
    """
    count, size = _period(bits)
    if packed.shape[-1] != packed_size(dim, bits):
        raise StorageError(
            f"{dim} codes of {bits} bits are {packed_size(dim, bits)} bytes; got an array of shape {packed.shape}."
        )
    # [..., periods, size]
    stream = _split(packed, size)
    codes = []
    for i in range(count):
        byte, shift = divmod(bits * i, BYTE)
        # [..., periods] each; a code may straddle two bytes
        parts = [stream[..., byte] >> shift]
        if shift + bits > BYTE:
            parts.append(stream[..., byte + 1] << (BYTE - shift))
        codes.append(_union(parts) & jnp.uint8((1 << bits) - 1))
    # [..., periods * count]
    return jnp.stack(codes, axis=-1).reshape(*packed.shape[:-1], -1)[..., :dim]


def over_groups(x: Array, dim: int) -> Array:
    """Repeats the number of each group of channels, [..., groups], for its channels: [..., D], or [..., 1] for all."""
    groups = x.shape[-1]
    if groups == 1:
        return x
    if groups > FEW_GROUPS:
        return jnp.repeat(x, dim // groups, axis=-1)
    # Comparisons, which are fused with what follows. A reshape is not: XLA's TPU compiler writes its result to memory,
    # and did so for the slots of all layers at the same time.
    group = jnp.arange(dim, dtype=jnp.int32) // (dim // groups)
    found = x[..., :1]
    for number in range(1, groups):
        found = jnp.where(group >= number, x[..., number : number + 1], found)
    return found


def _period(bits: Any) -> tuple[int, int]:
    """Returns the smallest number of codes that fill whole bytes, and the number of these bytes."""
    common = math.gcd(count_argument("bits", bits, minimum=1, maximum=MAX_BITS, error=StorageError), BYTE)
    return BYTE // common, bits // common


def _split(x: Array, size: int) -> Array:
    """Reshapes [..., n] to [..., ⌈n/size⌉, size], padded with 0."""
    missing = -x.shape[-1] % size
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], -1, size)


def _union(parts: list[Array]) -> Array:
    """Returns the bitwise or of all `parts`."""
    union = parts[0]
    for part in parts[1:]:
        union = union | part
    return union
