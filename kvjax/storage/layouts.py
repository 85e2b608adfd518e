"""Layouts: how the slots of a store are arranged, where each vector is not held by itself."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.storage.side import Parts, Shapes, Side

Array = jax.Array

slots = "slots"  # the layout in which each vector is held by itself
LOWER, UPPER = "lower", "upper"  # the layers of a pair


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The layout in which blocks of consecutive tokens are encoded together.

    Tokens are counted in order of position. When a row has seen t tokens, the first ⌊t / size⌋ blocks are encoded, and
    the t mod size newest tokens are exact. A key or value whose codec is of one vector is encoded by its age instead;
    see `Storage.residual`.

    Attributes:
      size: the number of tokens of a block.

    Raises:
      StorageError: a size below 1.
    """

    size: int

    def __post_init__(self) -> None:
        size = count_argument("blocks: size", self.size, minimum=1, error=StorageError)
        object.__setattr__(self, "size", size)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The layout in which slots that a policy evicts are encoded into a second tier instead of being dropped.

    The policy's live slots are the high tier, which its budget counts. What it evicts stays in the low tier for ever,
    in the storage's own codecs. Queries attend to both tiers; low slots have no statistics.

    Attributes:
      high: the `Storage` of the high tier, of single slots on the device.
      low_capacity: the number of slots of the low tier, whose oldest entry is lost when it is full; None = there is
        room for all that is evicted.

    Raises:
      StorageError: a capacity below 1.
    """

    high: Any
    low_capacity: int | None = None

    def __post_init__(self) -> None:
        if self.low_capacity is not None:
            low = count_argument("tiers: low_capacity", self.low_capacity, minimum=1, error=StorageError)
            object.__setattr__(self, "low_capacity", low)


@dataclasses.dataclass(frozen=True)
class Segments:
    """The layout in which tokens are encoded when a segment ends, in two tiers by the attention that they were paid.

    The prompt is a segment, and so is every `window` tokens that follow. When a segment ends, the ⌈ratio·n⌉ of its n
    tokens with the largest mean attention go to the high tier, for ever, and the others to the low one, which has the
    storage's own codecs. Until then tokens are exact. Keys of a segment's tier are a block.

    Attributes:
      high: the `Storage` whose codecs hold the high tier; None in that storage itself.
      ratio: the share of a segment that goes to the high tier.
      window: the number of tokens of a segment after the prompt.
    """

    high: Any
    ratio: float
    window: int


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The layout in which two neighbouring layers hold their prompts together.

    Layers from `start` on are taken in pairs, each with the next one. A last one without a partner, and all before
    `start`, hold their tokens exactly, and so does every layer those that follow the prompt.

    Attributes:
      start: the first layer of the first pair; None = half of the model's layers, rounded down.

    Raises:
      StorageError: a start below 0.
    """

    start: int | None = None

    def __post_init__(self) -> None:
        if self.start is not None:
            object.__setattr__(self, "start", count_argument("pairs: start", self.start, error=StorageError))

    def half(self, layer: int, layers: int) -> str | None:
        """Returns whether a layer is the ``lower`` or the ``upper`` one of a pair, or None if it is in none.

        Args:
          layer: its number.
          layers: the number of layers of the model.

        Raises:
          StorageError: the model has no layer `start`.
        """
        start = layers // 2 if self.start is None else self.start
        if start >= layers:
            raise StorageError(f"pairs: start={start} is no layer of this model; give one from 0 to {layers - 1}.")
        if layer < start or layer >= layers - (layers - start) % 2:
            return None
        return UPPER if (layer - start) % 2 else LOWER


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
      by_token: names of the parts that have an entry for each token of a block, first of their axes, if any tokens of
        the block decode by themselves, with the parts that all share; () = a block is decoded as a whole.
    """

    parts: Callable[[int, int, Any], Shapes]
    encode: Callable[[Array, Any, Any], Parts]
    decode: Callable[[Parts, Any, int, int], Array]
    dims: Any = None
    has_gradient: Any = False
    joint_heads: Any = 1
    single: Any = None
    by_token: Any = ()

    @property
    def prompt(self) -> "SegmentCodec | None":
        """The form of the blocks of a prompt, if it is another one."""
        return None

    @property
    def side(self) -> Side | None:
        """What vectors share, or None."""
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
