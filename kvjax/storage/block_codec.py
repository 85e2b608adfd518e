"""Codecs of blocks of consecutive tokens, and of all blocks of a prompt together."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.storage.side import Parts, Shapes, Side

Array = jax.Array


class BlockCodec:
    """The form in which a block of n consecutive tokens is held.

    Write a frozen dataclass that inherits from this class, as for a `Codec`, or call
    ``BlockCodec(parts, encode, decode, side)``.

    Attributes:
      parts: (n, dim, dtype) -> {name: (shape, dtype)} of one block, all that is held of it.
      encode: (x [..., n, dim] float32, side, dtype) -> {name: [..., *shape]}; `dtype` is the model's.
      decode: (parts, side, n, dim) -> [..., n, dim] float32; finite where all parts are 0.
      side: what vectors share, or None; see `Codec`.
      dims: None; vectors of a block are held whole.
      has_gradient: see `Codec`.
      joint_heads: see `Codec`.
      prompt: the `SegmentCodec` of the blocks of a prompt, if these are held in another form; or None.
      single: the codec of one vector that holds the same of each, or None.
    """

    parts: Callable[[int, int, Any], Shapes]
    encode: Callable[[Array, Any, Any], Parts]
    decode: Callable[[Parts, Any, int, int], Array]
    dims: Any = None
    has_gradient: Any = False
    joint_heads: Any = 1
    single: Any = None

    @property
    def prompt(self) -> "SegmentCodec | None":
        """The form of the blocks of a prompt, if it is another one."""
        return None

    @property
    def side(self) -> Side | None:
        """The part that vectors share, or None."""
        return None

    def __new__(cls, *args: Any, **kwargs: Any) -> "BlockCodec":
        return super().__new__(BlockFunctions if cls is BlockCodec else cls)

    def bound(self, kv_heads: int) -> "BlockCodec":
        """Returns the codec for a layer of `kv_heads` KV heads; see `Codec.bound`."""
        return self

    def of_layer(self, layer: int, layers: int | None = None) -> "BlockCodec":
        """Returns the codec of one layer, if layers differ; see `Codec.of_layer`."""
        return self

    def of_head(self, head: int, kv_heads: int | None = None) -> "BlockCodec":
        """Returns the codec of one KV head of a layer, if heads differ; see `Codec.of_head`."""
        return self

    def bytes(self, tokens: int, dim: int, dtype: DTypeLike) -> int:
        """Returns the number of bytes of a block of `tokens` vectors of `dim` numbers."""
        shapes = self.parts(tokens, dim, dtype).values()
        return sum(math.prod(shape) * jnp.dtype(each).itemsize for shape, each in shapes)

    def check(self, size: int) -> None:
        """Checks a number of tokens of a block.

        Raises:
          StorageError: the codec does not take blocks of this size.
        """


@dataclasses.dataclass(frozen=True)
class BlockFunctions(BlockCodec):
    """A codec of blocks made of functions; ``BlockCodec(parts, encode, decode, side)`` returns one."""

    parts: Callable[[int, int, Any], Shapes]
    encode: Callable[[Array, Any, Any], Parts]
    decode: Callable[[Parts, Any, int, int], Array]
    side: Side | None = None

    def __post_init__(self) -> None:
        for field in ("parts", "encode", "decode"):
            if not callable(given := getattr(self, field)):
                raise StorageError(f"BlockCodec: {field}={given!r} must be a function; see kvjax.storage.BlockCodec.")


class SegmentCodec:
    """The form in which all blocks of a prompt are held, which share some of their parts.

    Write a frozen dataclass that inherits from this class.

    Attributes:
      parts: (n, dim, dtype) -> {name: (shape, dtype)} of one block of n tokens.
      shared: (dim, dtype) -> {name: (shape, dtype)} of all blocks of a prompt.
      encode: (x [..., blocks, n, dim] float32, live [..., blocks] bool, dtype) -> parts {name: [..., blocks, *shape]}
        and shared parts {name: [..., *shape]}, which do not depend on blocks that are not live.
      decode: (parts, shared, n, dim) -> [..., blocks, n, dim] float32.
    """

    parts: Callable[[int, int, Any], Shapes]
    shared: Callable[[int, Any], Shapes]
    encode: Callable[[Array, Array, Any], tuple[Parts, Parts]]
    decode: Callable[[Parts, Parts, int, int], Array]
