"""Codes vectors in a basis in which no channel is much larger than the others (QuaRot, arXiv:2404.00456, section 4).

llama.cpp does so with caches of few bits (ggml-org/llama.cpp #21038).
"""

import dataclasses

import jax
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.products.codes import Affine
from kvjax.storage.base import Codec, Exact, Parts, Shapes, Storage, factory
from kvjax.storage.hadamard import MAX_SEED, Hadamard, block_size, summable
from kvjax.storage.layouts import Layout
from kvjax.storage.turboquant import TurboQuant
from kvjax.storage.wrapping import Wrapped, Wrapping, check_codec, wrap

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Rotated(Wrapping):
    """Codes M x for a Hadamard rotation M; decoding restores the original basis.

    Keys are rotated after RoPE, where they are held after RoPE. Products with codes rotate queries instead of keys, and
    the sum of values once.

    Attributes:
      codec: of the rotated vector; it has no side, and does not turn vectors itself.
      seed: of the signs of M, see `Hadamard`; None = M has none.
    """

    codec: Codec
    seed: int | None = None

    def __post_init__(self) -> None:
        check_codec("rotated", self.codec)
        if isinstance(self.codec, Exact):
            raise StorageError(
                f"rotated: codec={self.codec!r} stores vectors exactly, so that a rotation changes nothing; give one "
                "with few bits, such as kvjax.storage.Integer(4)."
            )
        if (inner := _turning(self.codec)) is not None:
            raise StorageError(f"rotated: codec={inner!r} already rotates vectors; leave out rotated.")
        if self.codec.side is not None:
            raise StorageError(
                f"rotated: codec={self.codec!r} has parameters for each channel, which a rotation mixes; give a codec "
                "without a side, such as kvjax.storage.Integer(4)."
            )
        if self.seed is not None:
            seed = count_argument("rotated: seed", self.seed, maximum=MAX_SEED, error=StorageError)
            object.__setattr__(self, "seed", seed)

    @property
    def basis(self) -> Hadamard:
        """The rotation."""
        return Hadamard(self.seed)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        if block_size(dim) == 1:
            raise StorageError(
                "rotated: blocks of channels are the largest power of two that divides the head size, which for "
                f"{dim} is 1, so that a rotation changes nothing; leave out rotated."
            )
        return self.codec.parts(dim, dtype)

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return self.codec.encode(self.basis.rotate(summable(x)), None, dtype)

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return self.basis.rotate_back(summable(self.codec.decode(parts, None, dim)))

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine | None:
        made = self.codec.affine(parts, None, dim)
        # M is orthonormal: q · Mᵀa = Mq · a.
        return made and made.within(self.basis.rotate, self.basis.rotate_back)


def _turning(codec: Codec) -> Codec | None:
    """Returns the codec that turns vectors, if `codec` is one or holds one."""
    while not isinstance(codec, Rotated | TurboQuant):
        if not isinstance(codec, Wrapping):
            return None
        codec = codec.codec
    return codec


@factory
def rotated(codec: Wrapped, seed: int | None = None) -> Wrapped:
    """Codes vectors after a Hadamard rotation of their channels, so that a few large channels do not widen all ranges.

    The rotation has blocks of the largest power of two that divides the head size: one of 128 channels, or five of 16
    for 80. Groups of channels that share a scale are of rotated channels. It takes no bytes.

    Args:
      codec: a codec of single vectors, or a storage whose keys and values are both rotated, those of a high tier too.
        Keys or values in the model's dtype stay as they are.
      seed: of random signs of channels before the rotation, 0 to 2^32 - 1; None = no signs, as in llama.cpp.

    Returns:
      A codec, or a storage.

    Raises:
      StorageError: a storage that holds blocks of tokens, pairs of layers, several heads or shorter vectors, that has
        numbers for each channel, that turns vectors already, or that codes nothing; later, a head of an odd size.
    """
    if not isinstance(codec, Storage):
        return wrap("rotated", codec, lambda each: Rotated(each, seed))
    if codec.exact:
        raise StorageError(
            f"rotated: storage {codec.name} stores keys and values exactly, so that a rotation changes nothing; give "
            "one with few bits, such as kvjax.storage.int4()."
        )
    made = wrap("rotated", codec, lambda each: each if isinstance(each, Exact) else Rotated(each, seed))
    layout = made.layout
    if isinstance(layout, Layout):
        layout = layout.with_nested(lambda high: high if high.exact else rotated(high, seed))
    return dataclasses.replace(made, layout=layout)
