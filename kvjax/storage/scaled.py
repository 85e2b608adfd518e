"""Scales the channels of a vector before another codec holds it, so that channels of any size share a range."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.products.codes import Affine
from kvjax.storage.base import Codec, Parts, Shapes
from kvjax.storage.side import Side
from kvjax.storage.wrapping import Wrapping, check_codec

Array = jax.Array

SCALE = "scale"  # the part of a side that multiplies


@dataclasses.dataclass(frozen=True)
class Scaled(Wrapping):
    """Encodes x·b and decodes to y/b; see `scaled`.

    Attributes:
      codec: holds the scaled vector; it has no side.
      side: has a part ``scale``, b, with an entry for each channel, none of which is 0.
    """

    codec: Codec
    side: Side | None = None

    def __post_init__(self) -> None:
        check_codec("scaled", self.codec)
        if self.codec.side is not None:
            raise StorageError(
                f"scaled: codec={self.codec!r} must be a codec without a side, such as kvjax.storage.Integer(4)."
            )
        if not isinstance(self.side, Side):
            raise StorageError(f"scaled: side={self.side!r} must be a kvjax.storage.Side.")

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return self.codec.parts(dim, dtype)

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return self.codec.encode(x * _scale(side), None, dtype)

    def encode_without(self, x: Array, left_out: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return self.codec.encode_without(x * _scale(side), left_out, None, dtype)

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return self.codec.decode(parts, None, dim) / _scale(side)

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine | None:
        made = self.codec.affine(parts, None, dim)
        return made and made.within(lambda q: q / _scale(side), lambda a: a / _scale(side))


def _scale(side: Parts | None) -> Array:
    assert side is not None
    scale = side[SCALE].astype(jnp.float32)
    # In float16 a small one is rounded to 0.
    return jnp.where(scale == 0, 1.0, scale)


def scaled(codec: Codec, side: Side) -> Scaled:
    """Returns a codec that encodes x·b and decodes to y/b, where b is a side with an entry for each channel.

    Args:
      codec: holds the scaled vector.
      side: has one part, ``scale``, [dim], none of whose entries is 0.

    Raises:
      StorageError: a codec that has a side of its own, or an argument of another type.
    """
    return Scaled(codec, side)
