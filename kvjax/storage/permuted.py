"""Codes channels in another order, so that channels of like size share a group (arXiv:2403.20137)."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.products.codes import Affine
from kvjax.storage.base import Codec, Parts, Shapes
from kvjax.storage.side import Side
from kvjax.storage.wrapping import Wrapped, Wrapping, check_codec, wrap

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Permuted(Wrapping):
    """Codes the channels of a vector in a given order; decoding restores the original order.

    Attributes:
      codec: of the reordered vector.
      order: a permutation of the channels; the first is coded first.
    """

    codec: Codec
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        check_codec("permuted", self.codec)
        listed = list(self.order) if isinstance(self.order, Sequence | np.ndarray) else []
        order = tuple(count_argument("permuted: a channel", each, error=StorageError) for each in listed)
        if not order or sorted(order) != list(range(len(order))):
            raise StorageError(
                f"permuted: order must be a permutation of the channels 0, 1, ... of a head; got {self.order!r}."
            )
        object.__setattr__(self, "order", order)

    @property
    def side(self) -> Side | None:
        """The part that vectors share, or None: that of `codec`."""
        return self.codec.side

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        if dim != len(self.order):
            raise StorageError(f"permuted: order has {len(self.order)} channels, and a head has {dim}.")
        return self.codec.parts(dim, dtype)

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return self.codec.encode(x[..., np.array(self.order)], side, dtype)

    def encode_without(self, x: Array, left_out: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        order = np.array(self.order)
        return self.codec.encode_without(x[..., order], left_out[..., order], side, dtype)

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return self.codec.decode(parts, side, dim)[..., np.argsort(self.order)]

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine | None:
        made, order = self.codec.affine(parts, side, dim), np.array(self.order)
        return made and made.within(lambda q: q[..., order], lambda a: a[..., np.argsort(order)])


def permuted(codec: Wrapped, order: Sequence[int]) -> Wrapped:
    """Codes channels in another order.

    "Accurate block quantization" orders them by falling norm of a sample's keys, for `bfp`.

    Args:
      codec: a codec, or a storage whose keys and values are both reordered.
      order: a permutation of the channels of a head, the same for all heads and layers.

    Returns:
      A codec, or a storage.

    Raises:
      StorageError: `order` is no permutation; later, a head of another size.
    """
    return wrap("permuted", codec, lambda each: Permuted(each, order))  # type: ignore[arg-type]
