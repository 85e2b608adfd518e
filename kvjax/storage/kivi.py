"""Keys in integers per channel and values in integers per token (KIVI, arXiv:2402.02750).

The newest tokens stay exact until their block is full: `kvjax.cache.arrangements.blocks_with_residual`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.storage.base import Parts, Shapes, Storage, factory
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.integer import Integer, uniform
from kvjax.storage.layouts import Blocks
from kvjax.storage.packing import MAX_BITS, pack, packed_size, unpack

Array = jax.Array

GROUP = 32  # tokens, or channels
RESIDUAL = 128  # tokens


@dataclasses.dataclass(frozen=True)
class Channels(BlockCodec):
    """Codes each channel uniformly between its smallest and its largest number in each group of tokens.

    zero, scale and codes are as in `Integer`. The codes of one token are packed along its channels.

    Attributes:
      bits: bits of a code, 1 to 8.
      group: consecutive tokens that share a zero and a scale per channel; it divides the number of tokens of a block.
        None = all tokens of a block.
    """

    bits: int
    group: int | None = GROUP

    def __post_init__(self) -> None:
        fields: dict[str, int | None] = {"bits": MAX_BITS, **({} if self.group is None else {"group": None})}
        for field, maximum in fields.items():
            name, given = f"storage channels: {field}", getattr(self, field)
            value = count_argument(name, given, minimum=1, maximum=maximum, error=StorageError)
            object.__setattr__(self, field, value)

    def check(self, size: int) -> None:
        if self.group is not None and size % self.group:
            raise StorageError(
                f"storage channels: blocks of {size} tokens cannot be divided into groups of {self.group}; give a "
                "size that is a multiple of group."
            )

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        groups = () if self.group is None else (tokens // self.group,)
        parameters = ((*groups, dim), jnp.dtype(dtype))
        codes = ((tokens, packed_size(dim, self.bits)), jnp.dtype(jnp.uint8))
        return {"codes": codes, "scale": parameters, "zero": parameters}

    def encode(self, x: Array, side: object, dtype: DTypeLike) -> Parts:
        # [..., groups, g, D], and [..., groups, 1, D] twice
        codes, scale, zero = uniform(self._grouped(x), self.bits, dtype, axis=-2)
        packed = pack(codes.reshape(x.shape), self.bits)
        if self.group is None:
            scale, zero = scale[..., 0, :], zero[..., 0, :]
        return {"codes": packed, "scale": scale[..., 0, :], "zero": zero[..., 0, :]}

    def decode(self, parts: Parts, side: object, tokens: int, dim: int) -> Array:
        # [..., n, D]
        codes = unpack(parts["codes"], self.bits, dim)
        # [..., groups, 1, D]
        scale, zero = (parts[name].astype(jnp.float32)[..., None, :] for name in ("scale", "zero"))
        if self.group is None:
            scale, zero = scale[..., None, :], zero[..., None, :]
        return (zero + scale * self._grouped(codes).astype(jnp.float32)).reshape(codes.shape)

    def _grouped(self, x: Array) -> Array:
        """Reshapes [..., n, D] to [..., groups, g, D]."""
        *leading, tokens, dim = x.shape
        group = tokens if self.group is None else self.group
        return x.reshape(*leading, tokens // group, group, dim)


@factory
def kivi(
    bits: int = 2,
    group: int = GROUP,
    residual: int = RESIDUAL,
    *,
    key_bits: int | None = None,
    value_bits: int | None = None,
) -> Storage:
    """Holds keys as integers per channel and values as integers per token (KIVI, arXiv:2402.02750, section 3.3).

    Keys are encoded in blocks of `residual` tokens, each as soon as it is full, values one by one when they are no
    longer among the `residual` newest positions. The released code attends before it encodes, and so does a step here.

    Args:
      bits: bits of a code, 1 to 8.
      group: tokens of a key's channel, or channels of a value, that share a zero and a scale. Of values the largest
        divisor of the head size up to it is used.
      residual: the most tokens that stay exact, a multiple of `group`.
      key_bits: bits of keys; None = `bits`.
      value_bits: bits of values; None = `bits`.

    Raises:
      StorageError: an argument out of range, or a residual that is no multiple of the group.
    """
    residual = count_argument("storage kivi: residual", residual, minimum=1, error=StorageError)
    group = count_argument("storage kivi: group", group, minimum=1, error=StorageError)
    key = Channels(bits if key_bits is None else key_bits, group)
    value = Integer(bits if value_bits is None else value_bits, group)
    if residual % group:
        raise StorageError(
            f"storage kivi: residual={residual} must be a multiple of group={group}; use "
            f"{-(-residual // group) * group}."
        )
    bits_of = f"{key.bits}" if key.bits == value.bits else f"_k{key.bits}v{value.bits}"
    return Storage(key=key, value=value, layout=Blocks(residual), residual=residual, name=f"kivi{bits_of}")
