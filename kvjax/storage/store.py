"""Arrays in which slots hold keys and values: a tree {"key": {part: [B, K, S, ...]}, "value": {...}}."""

import warnings

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.parallel import host_memory
from kvjax.storage.base import Codec, Exact, Parts, Storage
from kvjax.storage.dims import Chain
from kvjax.storage.rounding import within
from kvjax.storage.side import PROMPT, PromptView, Shapes, Sides

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
            part: host_memory.zeros((*shape, *own), each, storage.memories[name])
            for part, (own, each) in codec.parts(dim, dtype).items()
        }
        for name, codec in _codecs(storage).items()
    }


def place(storage: Storage, store: Store) -> Store:
    """Moves keys and values to the memory in which a storage holds them."""
    return {
        name: host_memory.to_host(parts) if storage.memories[name] == host_memory.HOST else parts
        for name, parts in store.items()
    }


def empty_sides(storage: Storage, shape: tuple[int, int], dim: int, dtype: DTypeLike) -> Sides:
    """Makes arrays for the sides that prompts will have: zeros.

    Args:
      storage: how keys and values are held.
      shape: (B, K).
      dim: size of a head.
      dtype: the model's dtype.
    """
    return {name: _zeros(side.parts(dim, dtype), shape) for name, side in storage.sides_of(PROMPT).items()}


def prompt_sides(storage: Storage, view: PromptView, dtype: DTypeLike) -> Sides:
    """Makes the sides of prompts that have ended.

    Args:
      storage: how keys and values are held.
      view: the prompts, float32; its `own` is ignored.
      dtype: the model's dtype.
    """
    view = jax.lax.stop_gradient(view)
    given = {"key": view.key, "value": view.value}
    dim = view.key.shape[-1]
    return {
        name: side.prepared(view._replace(own=given[name]), dim, dtype)
        for name, side in storage.sides_of(PROMPT).items()
    }


def aligned(storage: Storage, sides: Sides, name: str, ndim: int) -> Parts | None:
    """Returns the side of keys or values for vectors with `ndim` axes, [B, K, ..., dim]; None without a side."""
    side = storage.codecs[name].side
    return None if side is None else side.aligned(sides[name], ndim)


def encode(storage: Storage, key: Array, value: Array, dtype: DTypeLike, sides: Sides | None = None) -> Store:
    """Encodes the keys and values of n slots.

    Args:
      storage: how keys and values are held.
      key: [B, K, n, D] float.
      value: [B, K, n, D] float.
      dtype: the model's dtype.
      sides: what vectors share; None for a storage without sides.
    """
    given = {"key": key, "value": value}
    # Exact vectors are not converted to float32.
    return {
        name: codec.encode(
            given[name] if isinstance(codec, Exact) else given[name].astype(jnp.float32),
            aligned(storage, sides or {}, name, given[name].ndim),
            dtype,
        )
        for name, codec in _codecs(storage).items()
    }


def decode(
    storage: Storage, store: Store, dim: int, dtype: DTypeLike, sides: Sides | None = None
) -> tuple[Array, Array]:
    """Decodes keys and values, [B, K, S, D] each, in `dtype`, on the device.

    Args:
      storage: how keys and values are held.
      store: arrays of `empty` or `encode`, with slots moved or not.
      dim: size of a head.
      dtype: the model's dtype.
      sides: what vectors share; None for a storage without sides.
    """
    key, value = (decode_side(storage, store, name, dim, dtype, sides) for name in ("key", "value"))
    return key, value


def decode_side(
    storage: Storage, store: Store, side: str, dim: int, dtype: DTypeLike, sides: Sides | None = None
) -> Array:
    """Decodes keys or values alone, `side` of which is ``key`` or ``value``; see `decode`."""
    codec, parts = _codecs(storage)[side], host_memory.to_device(store[side])
    if isinstance(codec, Exact):
        return parts["exact"]
    return within(codec.decode(parts, aligned(storage, sides or {}, side, 4), dim), dtype)


def attended_side(
    storage: Storage, store: Store, side: str, dim: int, dtype: DTypeLike, sides: Sides | None = None
) -> Array:
    """Decodes keys or values to what attention runs on: as `decode_side`, or shorter vectors [B, K, S, D']."""
    codec = _codecs(storage)[side]
    if isinstance(codec, Chain):
        return codec.held(host_memory.to_device(store[side]), dim).astype(dtype)
    return decode_side(storage, store, side, dim, dtype, sides)


def nbytes(storage: Storage, slots: int, dim: int, dtype: DTypeLike) -> int:
    """Returns the number of bytes of `slots` slots of one row and head."""
    return slots * storage.bytes_per_slot(dim, dtype)


def warn_if_larger(storage: Storage, dim: int, dtype: DTypeLike) -> None:
    """Warns if a codec takes more bytes than the model's dtype."""
    exact = Exact().bytes(dim, dtype)
    for name, codec in storage.codecs.items():
        if (size := storage.bytes_of(name, dim, dtype)) > exact:
            warnings.warn(
                f"storage {storage.name}: a {name} of {dim} channels takes {size} bytes as {codec!r}, more than the "
                f"{exact} bytes in {jnp.dtype(dtype).name}.",
                stacklevel=3,
            )


def _codecs(storage: Storage) -> dict[str, Codec]:
    """Returns the codecs of single vectors."""
    return {name: codec for name, codec in storage.codecs.items() if isinstance(codec, Codec)}


def _zeros(parts: Shapes, shape: tuple[int, ...]) -> Parts:
    return {part: jnp.zeros((*shape, *own), each) for part, (own, each) in parts.items()}
