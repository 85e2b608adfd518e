"""Codecs: the form in which one vector is held."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.products.codes import Affine
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.rounding import as_stored
from kvjax.storage.side import Parts, Shapes, Side

Array = jax.Array
T = TypeVar("T")


class Codec:
    """The form in which one vector is held.

    Write a frozen dataclass that inherits from this class, with the parameters as its fields and these functions as its
    methods, or call ``Codec(parts, encode, decode, side)``.

    Attributes:
      parts: (dim, dtype) -> {name: (shape, dtype)} of one vector, all that is held of it.
      encode: (x [..., dim] float32, side, dtype) -> {name: [..., *shape]}; `dtype` is the model's.
      decode: (parts, side, dim) -> [..., dim] float32; finite where all parts are 0.
      side: what vectors share, or None. Its parts are given to `encode` and `decode` with axes of size 1, so that they
        broadcast against vectors.
      dims: the `kvjax.storage.Dims` that shorten vectors, over which attention runs as they are held; or None.
      has_gradient: whether a gradient passes through `encode` and `decode`; otherwise it passes straight through both.
      joint_heads: the number of KV heads whose vectors are held together, and which hold the same positions.
      of_pairs: whether the vectors of two layers are held together; only for the layout `Pairs`.
    """

    parts: Callable[[int, Any], Shapes]
    encode: Callable[[Array, Any, Any], Parts]
    decode: Callable[[Parts, Any, int], Array]
    dims: Any = None
    has_gradient: Any = False
    joint_heads: Any = 1
    of_pairs: Any = False

    def __new__(cls, *args: Any, **kwargs: Any) -> "Codec":
        return super().__new__(CodecFunctions if cls is Codec else cls)

    @property
    def side(self) -> Side | None:
        """The part that vectors share, or None."""
        return None

    def encode_without(self, x: Array, left_out: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        """Encodes a vector some of whose entries are held elsewhere, so that they should not widen a range.

        Args:
          x: [..., dim] float32.
          left_out: [..., dim] bool; what these entries decode to does not matter. They are taken as 0.
          side: as in `encode`, leaves [..., *shape].
          dtype: the model's.
        """
        return self.encode(jnp.where(left_out, 0.0, x), side, dtype)

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine | None:
        """Returns vectors as levels of their codes, for products that read codes; None = they can only be decoded.

        Args:
          parts: [..., *shape] of the vectors.
          side: as in `decode`, leaves [..., *shape]; may be None while a program is planned, when only shapes matter: a
            map that needs it reads it when it is called.
          dim: channels of a vector.
        """
        return None

    def floats(self, parts: Parts) -> Array | None:
        """Returns vectors as the floating-point array that holds them, of any dtype; None = they are not held so.

        Args:
          parts: [..., *shape] of the vectors.

        Returns:
          [..., dim], whose numbers are those of `decode`.
        """
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "decode" in vars(cls):
            # What is inherited describes how another class decodes.
            for name in ("affine", "floats"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Codec, name))

    def bound(self, kv_heads: int) -> "Codec":
        """Returns the codec for a layer of `kv_heads` KV heads; parts of a joint one depend on it.

        Raises:
          StorageError: the codec does not take so many heads.
        """
        return self

    def of_layer(self, layer: int, layers: int | None = None) -> "Codec":
        """Returns the codec of one layer, if layers differ.

        Args:
          layer: its number.
          layers: the number of layers of the model; None = not known.

        Raises:
          StorageError: the codec is for another number of layers.
        """
        return self

    def of_head(self, head: int, kv_heads: int | None = None) -> "Codec":
        """Returns the codec of one KV head of a layer, if heads differ; see `of_layer`, which comes first.

        Args:
          head: its number.
          kv_heads: the number of KV heads of a layer; None = not known.

        Raises:
          StorageError: the codec is for another number of heads.
        """
        return self

    def bytes(self, dim: int, dtype: DTypeLike) -> int:
        """Returns the number of bytes of one vector of `dim` numbers."""
        return sum(math.prod(shape) * jnp.dtype(each).itemsize for shape, each in self.parts(dim, dtype).values())


@dataclasses.dataclass(frozen=True)
class CodecFunctions(Codec):
    """A codec made of functions; ``Codec(parts, encode, decode, side)`` returns one."""

    parts: Any = None
    encode: Any = None
    decode: Any = None
    side: Side | None = None

    def __post_init__(self) -> None:
        for field in ("parts", "encode", "decode"):
            if not callable(given := getattr(self, field)):
                raise StorageError(f"Codec: {field}={given!r} must be a function; see kvjax.storage.Codec.")
        if not (self.side is None or isinstance(self.side, Side)):
            raise StorageError(f"Codec: side={self.side!r} must be a kvjax.storage.Side, or None.")


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """Holds the vector itself, in the model's dtype."""

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {"exact": ((dim,), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # A vector in the model's dtype is held as it is.
        return {"exact": x if x.dtype == dtype else as_stored(x.astype(jnp.float32), dtype)}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return parts["exact"].astype(jnp.float32)


def entry_of(name: str, entries: Sequence[T], index: int, count: int | None, noun: str = "layers") -> T:
    """Returns the entry of a layer, or of a KV head, where each has one; see `Codec.of_layer` and `Codec.of_head`.

    Raises:
      StorageError: there are more entries than layers, or fewer. The message says `name` and `noun`.
    """
    if count not in (None, len(entries)) or index >= len(entries):
        raise StorageError(
            f"storage {name}: {tuple(entries)} is for {len(entries)} {noun}, but the model has {count or 'more'}; "
            f"give one for all {noun}, or one for each."
        )
    return entries[index]


def round_trip(codec: Codec | BlockCodec, x: Array, side: Parts | None, dtype: DTypeLike) -> Array:
    """Encodes and decodes; the gradient passes straight through.

    Args:
      codec: see `Codec` and `BlockCodec`.
      x: [..., dim] float; [..., n, dim] of a codec of blocks.
      side: what vectors share, leaves [..., *shape], a constant to a gradient; None for codecs without any.
      dtype: the model's dtype.

    Returns:
      float32 of x's shape.
    """
    x = x.astype(jnp.float32)
    parts = codec.encode(jax.lax.stop_gradient(x), side, dtype)
    sizes = x.shape[-2:] if isinstance(codec, BlockCodec) else x.shape[-1:]
    return straight_through(x, jax.lax.stop_gradient(codec.decode(parts, side, *sizes)))


@jax.custom_jvp
def straight_through(x: Array, decoded: Array) -> Array:
    """Returns what `x` decodes to; the gradient is that of `x`."""
    return decoded


@straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0]
