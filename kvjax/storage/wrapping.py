"""The base of codecs that are made of codecs."""

import dataclasses
from collections.abc import Callable
from typing import Self, TypeVar

from kvjax.errors import StorageError
from kvjax.storage.base import Codec, Storage
from kvjax.storage.block_codec import BlockCodec

Wrapped = TypeVar("Wrapped", Codec, Storage)


class Wrapping(Codec):
    """A codec of a codec, from which frozen dataclasses inherit.

    Attributes:
      codec: see `check_codec`.
    """

    codec: Codec

    def of_layer(self, layer: int, layers: int | None = None) -> Self:
        return self._with_codec(self.codec.of_layer(layer, layers))

    def of_head(self, head: int, kv_heads: int | None = None) -> Self:
        return self._with_codec(self.codec.of_head(head, kv_heads))

    def _with_codec(self, codec: Codec) -> Self:
        return self if codec is self.codec else dataclasses.replace(self, codec=codec)  # type: ignore[type-var]


def check_codec(name: str, given: object) -> None:
    """Refuses anything but a codec of one vector, of one head, that holds all its channels.

    Raises:
      StorageError: `given` is none. The message says `name`.
    """
    if not isinstance(given, Codec) or given.dims is not None:
        raise StorageError(
            f"{name}: codec={given!r} must be a codec of one vector and all its channels, such as "
            "kvjax.storage.Integer(4)."
        )
    if given.of_pairs or type(given).bound is not Codec.bound:
        held_jointly = "two layers" if given.of_pairs else "several KV heads"
        raise StorageError(
            f"{name}: codec={given!r} holds the vectors of {held_jointly} together, and each of them has channels of "
            "its own; give a codec of one vector, such as kvjax.storage.Integer(4)."
        )


def wrap(name: str, given: Wrapped, made: Callable[[Codec], Codec]) -> Wrapped:
    """Returns the codec that `made` makes of a codec; or a storage, in which it makes those of keys and of values.

    Raises:
      StorageError: `given` is neither. The message says `name`.
    """
    if isinstance(given, Storage):
        if isinstance(given.key, BlockCodec) or isinstance(given.value, BlockCodec):
            raise StorageError(f"{name}: storage {given.name} holds blocks of tokens; give one that holds each vector.")
        key, value = made(given.key), made(given.value)
        return dataclasses.replace(given, key=key, value=value, name=f"{name}({given.name})")
    if isinstance(given, Codec):
        return made(given)
    raise StorageError(
        f"{name}: {given!r} must be a codec or a storage, such as kvjax.storage.Integer(4) or kvjax.storage.int4()."
    )
