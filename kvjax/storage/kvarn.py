"""Integers of blocks whose tokens and channels have been scaled to equal deviations (KVarN, arXiv:2606.03458).

What the paper leaves open is as in its authors' code (huawei-csl/KVarN): 16 iterations, limits of deviations and of
factors, and the choice of the best iteration. Their tokens that stay in 16 bits, a text's first ones, are not here.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.storage.base import Parts, Shapes, Storage, factory
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.hadamard import Hadamard, summable
from kvjax.storage.integer import uniform
from kvjax.storage.layouts import Blocks
from kvjax.storage.packing import MAX_BITS, pack, packed_size, unpack
from kvjax.storage.rounding import as_stored, divide

Array = jax.Array

BLOCK = 128  # tokens
ITERATIONS = 16
MIN_DEVIATION, MAX_DEVIATION = 1e-3, 1e3
MIN_LOG, MAX_LOG = -0.3, 10.0  # of a factor
LARGEST = 2 * math.exp(MAX_LOG)  # with room for rounding
SMALLEST = 1e-8  # of the deviations that others are divided by
BASIS = Hadamard()


@dataclasses.dataclass(frozen=True)
class VarianceNormalized(BlockCodec):
    """Codes a block in lines, after a Hadamard rotation of its channels and a division of each line by the factors.

    A line is the tokens of one channel, or the channels of one token. Deviations across lines and along them are made
    equal alternately, `iterations` times; the iteration with the least imbalance is taken, the sum of largest by
    smallest deviation of both directions. Each entry of a line is divided by its factor, which lines share; then zero,
    scale and codes of a line are as in `Integer`. The factor of the line itself is part of its scale and zero.

    Attributes:
      bits: bits of a code, 1 to 8.
      by_channel: whether a line is a channel, as of keys, or a token, as of values.
      iterations: how often both are made equal.
    """

    bits: int
    by_channel: bool
    iterations: int = ITERATIONS

    def __post_init__(self) -> None:
        for field, minimum, maximum in (("bits", 1, MAX_BITS), ("iterations", 0, None)):
            name, given = f"storage kvarn: {field}", getattr(self, field)
            value = count_argument(name, given, minimum=minimum, maximum=maximum, error=StorageError)
            object.__setattr__(self, field, value)

    def check(self, size: int) -> None:
        if size < 2:
            raise StorageError(f"storage kvarn: blocks of {size} token have no standard deviation; use at least 2.")

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        if dim < 2:
            raise StorageError(f"storage kvarn: {dim} channel has no standard deviation; heads need at least 2.")
        lines, length = (dim, tokens) if self.by_channel else (tokens, dim)
        return {
            "codes": ((tokens, packed_size(dim, self.bits)), jnp.dtype(jnp.uint8)),
            "scale": ((lines,), jnp.dtype(dtype)),
            "zero": ((lines,), jnp.dtype(dtype)),
            "factor": ((length,), jnp.dtype(dtype)),
        }

    def encode(self, x: Array, side: object, dtype: DTypeLike) -> Parts:
        # [..., lines, L]
        lines = self._transposed(BASIS.rotate(summable(x)))
        # [..., L]
        factor = as_stored(factors(lines, self.iterations), dtype)
        # [..., lines, L], and [..., lines, 1] twice
        codes, scale, zero = uniform(
            divide(lines, factor.astype(jnp.float32)[..., None, :]), self.bits, dtype, axis=-1
        )  # fmt: skip
        return {
            "codes": pack(self._transposed(codes), self.bits),
            "scale": scale[..., 0],
            "zero": zero[..., 0],
            "factor": factor,
        }

    def decode(self, parts: Parts, side: object, tokens: int, dim: int) -> Array:
        # [..., lines, L]
        codes = self._transposed(unpack(parts["codes"], self.bits, dim)).astype(jnp.float32)
        scale, zero = (parts[name].astype(jnp.float32)[..., None] for name in ("scale", "zero"))
        # An empty slot may hold any number; no factor is larger.
        factor = jnp.minimum(parts["factor"].astype(jnp.float32), LARGEST)[..., None, :]
        return BASIS.rotate_back(summable(self._transposed((zero + scale * codes) * factor)))

    def _transposed(self, x: Array) -> Array:
        """Makes lines [..., lines, L] of a block [..., n, D], and a block of lines."""
        return jnp.swapaxes(x, -1, -2) if self.by_channel else x


def factors(lines: Array, iterations: int) -> Array:
    """Returns what the numbers of each line are divided by, so that deviations are alike in both directions.

    Args:
      lines: [..., lines, L] float32.
      iterations: how often deviations across lines are made equal, and then those along lines.

    Returns:
      [..., L] float32.
    """

    def normalized(across: Array, along: Array) -> Array:
        return lines / jnp.exp(across) / jnp.exp(along)

    def updated(log: Array, deviation: Array) -> Array:
        limited = jnp.clip(deviation, MIN_DEVIATION, MAX_DEVIATION)
        return jnp.clip(log + jnp.log(limited), MIN_LOG, MAX_LOG)

    def iterate(_: int, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        across, along, best, least = state
        across = updated(across, _deviation(normalized(across, along), axis=-2))
        along = updated(along, _deviation(normalized(across, along), axis=-1))
        found = _imbalance(normalized(across, along))
        better = found <= least
        return across, along, jnp.where(better, across, best), jnp.where(better, found, least)

    # Logarithms of factors, [..., 1, L] and [..., lines, 1]
    across, along = jnp.zeros_like(lines[..., :1, :]), jnp.zeros_like(lines[..., :1])
    start = (across, along, across, _imbalance(lines))
    return jnp.exp(jax.lax.fori_loop(0, iterations, iterate, start)[2])[..., 0, :]


def _deviation(x: Array, axis: int) -> Array:
    """Returns the standard deviation of samples, with an axis of size 1."""
    return jnp.std(x, axis=axis, ddof=1, keepdims=True)


def _imbalance(x: Array) -> Array:
    """Returns the sum of largest by smallest deviation of both directions, [..., 1, 1]."""

    def ratio(deviation: Array) -> Array:
        largest, smallest = (each(deviation, axis=(-1, -2), keepdims=True) for each in (jnp.max, jnp.min))
        return largest / jnp.maximum(smallest, SMALLEST)

    return ratio(_deviation(x, axis=-2)) + ratio(_deviation(x, axis=-1))


@factory
def kvarn(key_bits: int = 4, value_bits: int = 2, block: int = BLOCK, iterations: int = ITERATIONS) -> Storage:
    """Holds blocks as integers, keys per channel and values per token, after scaling both dimensions (KVarN).

    Channels are rotated first (`Hadamard`), and a token's scale is then held beside those of channels, or
    a channel's beside those of tokens. The newest tokens stay exact until they fill a block.

    Args:
      key_bits: bits of a key's code, 1 to 8.
      value_bits: bits of a value's code, 1 to 8.
      block: the number of tokens of a block, at least 2.
      iterations: how often the deviations of tokens and of channels are made equal.

    Raises:
      StorageError: an argument out of range.
    """
    block = count_argument("storage kvarn: block", block, minimum=2, error=StorageError)
    key, value = (VarianceNormalized(bits, per, iterations) for bits, per in ((key_bits, True), (value_bits, False)))
    return Storage(key=key, value=value, layout=Blocks(block), name=f"kvarn_k{key.bits}v{value.bits}")
