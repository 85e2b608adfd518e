"""Products with codes by kvjax's own code for CPUs, which decodes in registers; see codes.cc and weights.cc."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.products import native

Array = jax.Array
Map = Callable[[Array], Array]

BYTE = 8  # bits
WIDTHS = (2, 4, 8)  # bits of the codes that codes.cc and weights.cc read
#: Levels of codes of 8 bits: numbers from 0 to 255, in two's complement, or floats (e4m3fn).
INTEGER, SIGNED, E4M3 = "integer", "signed", "e4m3"
TABLE = "table"  # levels of codes of fewer bits that are not numbers from 0 on
# Bytes of codes that share a scale; with fewer, scales are most of what is read, and most of the work.
MIN_GROUP = 4


def same(x: Array) -> Array:
    """Returns its argument."""
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Affine:
    """Vectors x = back(a), where a = scale · level(code) + zero, with a scale and a zero for each group of channels.

    Attributes:
      codes: [..., bytes] uint8, codes of `bits` bits along the channels, lowest bits first.
      scale: [..., groups] float; None = 1.
      zero: [..., groups] float; None = 0.
      bits: of a code.
      levels: `INTEGER`, `SIGNED`, `E4M3`, or the 2^bits levels.
      dim: channels of a vector.
      into: maps vectors q [..., dim] float32 so that the products of q and x are those of into(q) and a.
      back: maps a [..., dim] float32 to x; linear.
    """

    codes: Array
    scale: Array | None = None
    zero: Array | None = None
    bits: int
    levels: str | tuple[float, ...] = INTEGER
    dim: int
    into: Map = same
    back: Map = same

    @property
    def groups(self) -> int:
        """The number of groups of channels."""
        numbers = self.zero if self.scale is None else self.scale
        return 1 if numbers is None else int(numbers.shape[-1])

    def within(self, into: Map, back: Map) -> "Affine":
        """Returns vectors back(x), for these vectors x; `into` is the transpose of `back`."""
        return dataclasses.replace(self, into=lambda q: self.into(into(q)), back=lambda a: back(self.back(a)))


def refuses(vectors: Affine) -> str | None:
    """Returns why `codes_product` cannot read vectors, or None; arrays may be shapes."""
    if vectors.bits not in WIDTHS:
        return f"its codes have {vectors.bits} bits, not {', '.join(map(str, WIDTHS))}"
    if vectors.bits == BYTE and not isinstance(vectors.levels, str):
        return f"its codes have {len(vectors.levels)} levels"
    size, groups = vectors.dim * vectors.bits, vectors.groups
    if groups > 1 and size % (BYTE * groups):
        return f"groups of {vectors.dim // groups} channels do not fill bytes"
    if size // groups < BYTE * MIN_GROUP:
        return f"groups of {vectors.dim // groups} channels have a scale for less than {MIN_GROUP} bytes"
    return None


def codes_product(x: Array, vectors: Affine, *, transposed: bool, used: Array | None = None) -> Array:
    """Multiplies rows by vectors that are held as codes. Sums are float32.

    The result is the same, bit for bit, for any number of slots, of caches and of threads.

    Args:
      x: [*batch, rows, D] if transposed, else [*batch, rows, S]; at most 64 rows.
      vectors: [*batch, S, D].
      transposed: whether the result has an entry for each vector.
      used: [*batch] int32, the number of slots, the first ones, whose products matter. If transposed, the result for
        others may be any finite number; otherwise x is 0 for them. None = all slots.

    Returns:
      [*batch, rows, S] float32 if transposed, else [*batch, rows, D].
    """
    *batch, slots, _ = vectors.codes.shape
    count, (rows, inputs) = math.prod(batch), x.shape[-2:]
    x = x.astype(jnp.float32)
    x = (vectors.into(x) if transposed else x).reshape(count, rows, inputs)

    def numbers(given: Array | None) -> Array:
        # [*batch, S, groups] or [0]
        if given is None:
            return jnp.zeros((0,), jnp.float32)
        return given.astype(jnp.float32)

    result = jax.ShapeDtypeStruct((count, rows, slots if transposed else vectors.dim), jnp.float32)
    call = jax.ffi.ffi_call(native.CODED_VECTORS, result, vmap_method="sequential")
    kind = vectors.levels if vectors.levels == INTEGER or vectors.bits == BYTE else TABLE
    y = call(
        x, vectors.codes, numbers(vectors.scale), numbers(vectors.zero),
        jnp.asarray(level_table(vectors.bits, vectors.levels)),
        jnp.zeros((0,), jnp.int32) if used is None else used.reshape(count),
        bits=np.int64(vectors.bits), kind=kind, groups=np.int64(vectors.groups), transposed=transposed,
    )  # fmt: skip
    # [*batch, rows, S or D]
    y = y.reshape(*batch, rows, y.shape[-1])
    return y if transposed else vectors.back(y)


def weights_product(x: Array, codes: Array, scale: Array, zero: Array, bits: int) -> Array:
    """Multiplies rows by weights that are held as codes. Sums are float32.

    Args:
      x: [rows, in], at most 64 rows.
      codes: [G, g · bits / 8, out] uint8; see `kvjax.products.quantized.QuantizedMatrix`.
      scale: [G, out] float.
      zero: [G, out] uint8 or float32, the code of 0.
      bits: of a code, one of `WIDTHS`.

    Returns:
      [rows, out] float32.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], codes.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(native.CODED_WEIGHTS, result, vmap_method="sequential")
    y: Array = call(x.astype(jnp.float32), codes, scale.astype(jnp.float32), zero, bits=np.int64(bits))
    return y


def indexed_weights_product(
    x: Array, index: Array, codes: Sequence[Array], scales: Sequence[Array], zeros: Sequence[Array], bits: int
) -> Array:
    """Multiplies rows by one of several matrices of one shape; see `weights_product`.

    Args:
      x: [rows, in], at most 64 rows.
      index: int32, of the matrix.
      codes: of each matrix.
      scales: float32, of each.
      zeros: of each.
      bits: of a code.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], codes[0].shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(native.INDEXED_CODED_WEIGHTS, result, vmap_method="sequential")
    y: Array = call(x.astype(jnp.float32), index, *codes, *scales, *zeros, bits=np.int64(bits))
    return y


@functools.lru_cache
def level_table(bits: int, levels: str | tuple[float, ...]) -> Any:
    """Returns the levels of codes of less than 8 bits, [2^bits] float32; [0] for those of 8 bits."""
    if bits == BYTE:
        return np.zeros((0,), np.float32)
    if not isinstance(levels, str):
        return np.asarray(levels, np.float32)
    codes = np.arange(1 << bits)
    half = 1 << (bits - 1)
    return np.asarray((codes ^ half) - half if levels == SIGNED else codes, np.float32)
