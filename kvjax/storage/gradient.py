"""Codecs whose gradient passes straight through, for scores that are differentiated (STORAGE.md)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.storage.base import Codec, Exact, Parts, Shapes, Storage, round_trip, straight_through
from kvjax.storage.block_codec import BlockCodec, SegmentCodec
from kvjax.storage.dims import Chain
from kvjax.storage.layouts import Layout
from kvjax.storage.minicache import Merged
from kvjax.storage.side import Side
from kvjax.storage.wrapping import Wrapping

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class StraightThrough(Wrapping):
    """Holds the numbers that another codec decodes to, in the model's dtype; their gradient is that of the vector.

    Codes are integers, through which no gradient passes. What is decoded later is the same number.

    Attributes:
      codec: encodes and decodes.
    """

    codec: Codec

    @property
    def side(self) -> Side | None:
        return self.codec.side

    @property
    def joint_heads(self) -> int:
        """See `Codec`."""
        return int(self.codec.joint_heads)

    def bound(self, kv_heads: int) -> "StraightThrough":
        return StraightThrough(self.codec.bound(kv_heads))

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {"decoded": ((dim,), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return {"decoded": round_trip(self.codec, x, side, dtype).astype(dtype)}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return parts["decoded"].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class StraightThroughBlocks(BlockCodec):
    """Holds what another codec of blocks decodes to, as `StraightThrough` does.

    Attributes:
      codec: encodes and decodes.
    """

    codec: BlockCodec

    @property
    def side(self) -> Side | None:
        return self.codec.side

    @property
    def joint_heads(self) -> int:
        """See `Codec`."""
        return int(self.codec.joint_heads)

    def bound(self, kv_heads: int) -> "StraightThroughBlocks":
        return StraightThroughBlocks(self.codec.bound(kv_heads))

    def of_layer(self, layer: int, layers: int | None = None) -> "StraightThroughBlocks":
        return StraightThroughBlocks(self.codec.of_layer(layer, layers))

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        return {"decoded": ((tokens, dim), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return {"decoded": round_trip(self.codec, x, side, dtype).astype(dtype)}

    def decode(self, parts: Parts, side: Parts | None, tokens: int, dim: int) -> Array:
        return parts["decoded"].astype(jnp.float32)

    def check(self, size: int) -> None:
        self.codec.check(size)

    @property
    def prompt(self) -> SegmentCodec | None:
        return None if self.codec.prompt is None else StraightThroughSegment(self.codec.prompt)


@dataclasses.dataclass(frozen=True)
class StraightThroughSegment(SegmentCodec):
    """Holds what another codec of a prompt's blocks decodes to, as `StraightThrough` does.

    Attributes:
      codec: encodes and decodes.
    """

    codec: SegmentCodec

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        return {"decoded": ((tokens, dim), jnp.dtype(dtype))}

    def shared(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {}

    def encode(self, x: Array, live: Array, dtype: DTypeLike) -> tuple[Parts, Parts]:
        parts = self.codec.encode(jax.lax.stop_gradient(x), live, dtype)
        decoded = jax.lax.stop_gradient(self.codec.decode(*parts, *x.shape[-2:]))
        return {"decoded": straight_through(x, decoded).astype(dtype)}, {}

    def decode(self, parts: Parts, shared: Parts, tokens: int, dim: int) -> Array:
        return parts["decoded"].astype(jnp.float32)


def differentiable(storage: Storage) -> Storage:
    """The storage with gradients that pass straight through its codecs; it takes as many bytes as a dense one.

    It is on the device, where the intermediate results of a gradient are.
    """
    storage = storage.on_device()
    if storage.exact:
        return storage
    key, value = (
        (codec if codec.has_gradient else StraightThroughBlocks(codec))
        if isinstance(codec, BlockCodec)
        else _straight_through(codec)
        for codec in (storage.key, storage.value)
    )
    layout = storage.layout
    if isinstance(layout, Layout):
        layout = layout.with_nested(differentiable)
    return dataclasses.replace(storage, key=key, value=value, layout=layout)


def _straight_through(codec: Codec) -> Codec:
    if isinstance(codec, Merged):
        return dataclasses.replace(codec, straight=True)
    if isinstance(codec, Chain):
        # The map to shorter vectors has a gradient of its own.
        return dataclasses.replace(codec, codec=_straight_through(codec.codec))
    return codec if isinstance(codec, Exact) or codec.has_gradient else StraightThrough(codec)
