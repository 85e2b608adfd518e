"""Integers with exact outliers and a low-rank correction (GEAR, arXiv:2403.05527)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.storage.base import Parts, Shapes, Storage, factory
from kvjax.storage.block_codec import BlockCodec, SegmentCodec
from kvjax.storage.integer import codes_within, group_size, range_as_stored
from kvjax.storage.layouts import Blocks
from kvjax.storage.packing import MAX_BITS, pack, packed_size, unpack
from kvjax.storage.rounding import as_stored

Array = jax.Array

BLOCK, GROUP = 64, 64  # tokens; channels
LEFT, RIGHT = "left", "right"  # the factors A and B of a correction A·Bᵀ
MAX_CHANNELS = 2**16
BYTE = 256  # indices up to here are held in a byte


@dataclasses.dataclass(frozen=True)
class Gear(BlockCodec):
    """Codes uniformly what lies between a few outliers, and holds the error as a product of low rank.

    Outliers are the `outliers` smallest and largest numbers of each channel among a block's tokens, or of each token
    among the channels. They are held exactly, and leave the ranges of the others. The error of a block is corrected by
    its best approximation of rank `rank`, that of the prompt's blocks together by one of rank `prompt_rank`.

    Attributes:
      bits: bits of a code, 1 to 8.
      outliers: the number of smallest, and of largest, numbers that are exact.
      rank: of the correction of a block.
      prompt_rank: of the correction of all blocks of a prompt.
      group: channels of a token that share a zero and a scale; None = the block's tokens share them per channel.
    """

    bits: int
    outliers: int
    rank: int
    prompt_rank: int
    group: int | None = None

    def __post_init__(self) -> None:
        maximum = {"bits": MAX_BITS}
        for field in ("bits", "outliers", "rank", "prompt_rank", *(() if self.group is None else ("group",))):
            name, given = f"storage gear: {field}", getattr(self, field)
            value = count_argument(name, given, minimum=1, maximum=maximum.get(field), error=StorageError)
            object.__setattr__(self, field, value)

    @property
    def prompt(self) -> "GearPrompt":
        """The form of the blocks of a prompt."""
        return GearPrompt(self)

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        factors: Shapes = {LEFT: ((tokens, self.rank), jnp.dtype(dtype)), RIGHT: ((dim, self.rank), jnp.dtype(dtype))}
        return self.backbone_parts(tokens, dim, dtype) | factors

    def encode(self, x: Array, side: object, dtype: DTypeLike) -> Parts:
        parts = self.backbone(x, dtype)
        left, right = low_rank_factors(x - self.restored(parts, *x.shape[-2:]), self.rank, dtype)
        return {**parts, LEFT: left, RIGHT: right}

    def decode(self, parts: Parts, side: object, tokens: int, dim: int) -> Array:
        return self.restored(parts, tokens, dim) + _product(parts[LEFT], parts[RIGHT])

    def backbone_parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        """Returns the parts of a block without its correction.

        Raises:
          StorageError: as many outliers as numbers, or a rank above the number of tokens or channels.
        """
        length, count = (tokens, dim) if self.group is None else (dim, tokens)
        if length <= 2 * self.outliers:
            raise StorageError(
                f"storage gear: outliers={self.outliers} leaves nothing of {length} numbers; use at most "
                f"{(length - 1) // 2}."
            )
        if max(self.rank, self.prompt_rank) > min(tokens, dim):
            raise StorageError(
                f"storage gear: rank={self.prompt_rank} and decode_rank={self.rank} must be at most "
                f"{min(tokens, dim)}, the smaller of the tokens of a block and the channels of a head."
            )
        ranges: tuple[tuple[int, ...], jnp.dtype] = ((dim,), jnp.dtype(dtype))
        if self.group is not None:
            ranges = ((tokens, dim // group_size(dim, self.group)), jnp.dtype(dtype))
        index = jnp.uint8 if length <= BYTE else jnp.uint16
        return {
            "codes": ((tokens, packed_size(dim, self.bits)), jnp.dtype(jnp.uint8)),
            "scale": ranges,
            "zero": ranges,
            "index": ((count, 2 * self.outliers), jnp.dtype(index)),
            "value": ((count, 2 * self.outliers), jnp.dtype(dtype)),
        }

    def backbone(self, x: Array, dtype: DTypeLike) -> dict[str, Array]:
        """Encodes blocks x [..., n, D] without their corrections."""
        tokens, dim = x.shape[-2:]
        levels = (1 << self.bits) - 1
        # [..., lines, L]: a channel's tokens, or a token's channels
        lines = jnp.swapaxes(x, -1, -2) if self.group is None else x
        length = lines.shape[-1]
        size = length if self.group is None else group_size(dim, self.group)
        order = jnp.argsort(lines, axis=-1, stable=True)
        # [..., lines, 2 * outliers]
        index = jnp.sort(jnp.concatenate([order[..., : self.outliers], order[..., -self.outliers :]], axis=-1), axis=-1)
        value = as_stored(jnp.take_along_axis(lines, index, axis=-1), dtype)
        outlier = jnp.any(index[..., None] == jnp.arange(length), axis=-2)

        def grouped(y: Array) -> Array:
            """Reshapes [..., L] to [..., groups, size]."""
            return y.reshape(*y.shape[:-1], length // size, size)

        # [..., lines, groups, 1]
        low = jnp.min(grouped(jnp.where(outlier, jnp.inf, lines)), axis=-1, keepdims=True)
        high = jnp.max(grouped(jnp.where(outlier, -jnp.inf, lines)), axis=-1, keepdims=True)
        # A group of outliers alone has no range.
        low, high = (jnp.where(jnp.isfinite(each), each, 0.0) for each in (low, high))
        scale, zero = range_as_stored(low, high, levels, dtype)
        # [..., lines, L]
        codes = codes_within(grouped(lines), scale, zero, levels).reshape(lines.shape)
        codes = jnp.where(outlier, jnp.zeros((), jnp.uint8), codes)
        codes = jnp.swapaxes(codes, -1, -2) if self.group is None else codes
        scale, zero = (each[..., 0, 0] if self.group is None else each[..., 0] for each in (scale, zero))
        kind = self.backbone_parts(tokens, dim, dtype)["index"][1]
        return {
            "codes": pack(codes, self.bits), "scale": scale, "zero": zero, "index": index.astype(kind), "value": value,
        }  # fmt: skip

    def restored(self, parts: Parts, tokens: int, dim: int) -> Array:
        """Decodes blocks [..., n, D] without their corrections."""
        codes = unpack(parts["codes"], self.bits, dim).astype(jnp.float32)
        scale, zero = (parts[name].astype(jnp.float32) for name in ("scale", "zero"))
        if self.group is None:
            # [..., D, n]
            lines = jnp.swapaxes(zero[..., None, :] + scale[..., None, :] * codes, -1, -2)
        else:
            size = dim // scale.shape[-1]
            lines = jnp.repeat(zero, size, axis=-1) + jnp.repeat(scale, size, axis=-1) * codes
        # [..., lines, 2 * outliers, L]
        here = parts["index"].astype(jnp.int32)[..., None] == jnp.arange(lines.shape[-1])
        exact = jnp.sum(jnp.where(here, parts["value"].astype(jnp.float32)[..., None], 0.0), axis=-2)
        lines = jnp.where(jnp.any(here, axis=-2), exact, lines)
        return jnp.swapaxes(lines, -1, -2) if self.group is None else lines


@dataclasses.dataclass(frozen=True)
class GearPrompt(SegmentCodec):
    """The blocks of a prompt, whose error is corrected by one product of rank `Gear.prompt_rank`.

    Attributes:
      codec: of a block.
    """

    codec: Gear

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        own: Shapes = {LEFT: ((tokens, self.codec.prompt_rank), jnp.dtype(dtype))}
        return self.codec.backbone_parts(tokens, dim, dtype) | own

    def shared(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {RIGHT: ((dim, self.codec.prompt_rank), jnp.dtype(dtype))}

    def encode(self, x: Array, live: Array, dtype: DTypeLike) -> tuple[Parts, Parts]:
        *leading, blocks, tokens, dim = x.shape
        parts = self.codec.backbone(x, dtype)
        error = jnp.where(live[..., None, None], x - self.codec.restored(parts, tokens, dim), 0.0)
        left, right = low_rank_factors(
            error.reshape(*leading, blocks * tokens, dim), self.codec.prompt_rank, dtype
        )  # fmt: skip
        return {**parts, LEFT: left.reshape(*leading, blocks, tokens, -1)}, {RIGHT: right}

    def decode(self, parts: Parts, shared: Parts, tokens: int, dim: int) -> Array:
        return self.codec.restored(parts, tokens, dim) + _product(parts[LEFT], shared[RIGHT][..., None, :, :])


def low_rank_factors(x: Array, rank: int, dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns A [..., n, r] and B [..., D, r] whose product A·Bᵀ is the best approximation of x [..., n, D] of rank r.

    The eigenvectors of the smaller of x·xᵀ and xᵀ·x span the approximation; the other factor is x projected on them.

    Args:
      x: float32.
      rank: r.
      dtype: of the factors.
    """
    tokens, dim = x.shape[-2:]
    wide = tokens < dim
    # [..., m, m] with numbers of about 1, so that nothing underflows
    size = jnp.max(jnp.abs(x), axis=(-1, -2), keepdims=True)
    unit = x / jnp.where(size > 0, size, 1.0)
    unit = jnp.swapaxes(unit, -1, -2) if not wide else unit
    gram = jnp.matmul(unit, jnp.swapaxes(unit, -1, -2), precision=jax.lax.Precision.HIGHEST)
    # By rising eigenvalue.
    basis = jnp.linalg.eigh(gram)[1][..., -rank:]
    if wide:
        other = jnp.matmul(jnp.swapaxes(x, -1, -2), basis, precision=jax.lax.Precision.HIGHEST)
        return as_stored(basis, dtype), as_stored(other, dtype)
    other = jnp.matmul(x, basis, precision=jax.lax.Precision.HIGHEST)
    return as_stored(other, dtype), as_stored(basis, dtype)


def _product(left: Array, right: Array) -> Array:
    """Returns A·Bᵀ [..., n, D] in float32."""
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.matmul(left, jnp.swapaxes(right, -1, -2), precision=jax.lax.Precision.HIGHEST)


@factory
def gear(
    bits: int = 4,
    block: int = BLOCK,
    group: int = GROUP,
    outliers: int = 1,
    rank: int = 4,
    decode_rank: int = 2,
) -> Storage:
    """Holds blocks as integers, with exact outliers and a low-rank correction (GEAR, arXiv:2403.05527, section 3).

    Keys are coded per channel, values per token; the newest tokens stay exact until they fill a block.

    Args:
      bits: bits of a code, 1 to 8.
      block: the number of tokens of a block.
      group: channels of a value that share a zero and a scale; the largest divisor of the head size up to it is used.
      outliers: the number of smallest, and of largest, numbers that are exact: of a key's channel in a block, and of a
        value.
      rank: of the correction of the prompt's blocks together.
      decode_rank: of the correction of each later block.

    Raises:
      StorageError: an argument out of range.
    """
    block = count_argument("storage gear: block", block, minimum=1, error=StorageError)
    key = Gear(bits, outliers, decode_rank, rank)
    value = Gear(bits, outliers, decode_rank, rank, group)
    # Raises what is wrong with such a block of any number of channels.
    key.backbone_parts(block, MAX_CHANNELS, "float32")
    return Storage(key=key, value=value, layout=Blocks(block), name=f"gear{key.bits}")
