"""Arrays in which slots hold keys and values: a tree {"key": {part: [B, K, S, ...]}, "value": {...}}."""

import warnings

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax import memory
from kvjax.storage.base import Codec, Exact, Parts, Storage

Array = jax.Array
Store = dict[str, Parts]


def empty(storage: Storage, shape: tuple[int, ...], dim: int, dtype: DTypeLike) -> Store:
    """Makes arrays for empty slots: zeros, which decode to finite numbers.

    Args:
      storage: how keys and values are held.
      shape: (B, K, S).
      dim: size of a head.
      dtype: the model's dtype.
    """
    warn_if_larger(storage, dim, dtype)
    return {
        name: {
            part: memory.zeros((*shape, *own), each, storage.memories[name])
            for part, (own, each) in codec.parts(dim, dtype).items()
        }
        for name, codec in _codecs(storage).items()
    }


def place(storage: Storage, store: Store) -> Store:
    """Moves keys and values to the memory in which a storage holds them."""
    return {
        name: memory.to_host(parts) if storage.memories[name] == memory.HOST else parts for name, parts in store.items()
    }


def encode(storage: Storage, key: Array, value: Array, dtype: DTypeLike) -> Store:
    """Encodes the keys and values of n slots.

    Args:
      storage: how keys and values are held.
      key: [B, K, n, D] float.
      value: [B, K, n, D] float.
      dtype: the model's dtype.
    """
    given = {"key": key, "value": value}
    # Exact vectors are not converted to float32.
    return {
        name: codec.encode(given[name] if isinstance(codec, Exact) else given[name].astype(jnp.float32), None, dtype)
        for name, codec in _codecs(storage).items()
    }


def decode(storage: Storage, store: Store, dim: int, dtype: DTypeLike) -> tuple[Array, Array]:
    """Decodes keys and values, [B, K, S, D] each, in `dtype`, on the device.

    Args:
      storage: how keys and values are held.
      store: arrays of `empty` or `encode`, with slots moved or not.
      dim: size of a head.
      dtype: the model's dtype.
    """
    return decode_side(storage, store, "key", dim, dtype), decode_side(storage, store, "value", dim, dtype)


def decode_side(storage: Storage, store: Store, side: str, dim: int, dtype: DTypeLike) -> Array:
    """Decodes keys or values alone, `side` of which is ``key`` or ``value``; see `decode`."""
    return _decode(_codecs(storage)[side], memory.to_device(store[side]), dim, dtype)


def nbytes(storage: Storage, slots: int, dim: int, dtype: DTypeLike) -> int:
    """Returns the number of bytes of `slots` slots of one row and head."""
    return slots * storage.bytes_per_slot(dim, dtype)


def warn_if_larger(storage: Storage, dim: int, dtype: DTypeLike) -> None:
    """Warns if a codec takes more bytes than the model's dtype."""
    exact = Exact().bytes(dim, dtype)
    for name, codec in _codecs(storage).items():
        if (size := codec.bytes(dim, dtype)) > exact:
            warnings.warn(
                f"storage {storage.name}: a {name} of {dim} channels takes {size} bytes as {codec!r}, more than the "
                f"{exact} bytes in {jnp.dtype(dtype).name}.",
                stacklevel=3,
            )


def _codecs(storage: Storage) -> dict[str, Codec]:
    return {"key": storage.key, "value": storage.value}


def _decode(codec: Codec, parts: Parts, dim: int, dtype: DTypeLike) -> Array:
    if isinstance(codec, Exact):
        return parts["exact"]
    return codec.decode(parts, None, dim).astype(dtype)
