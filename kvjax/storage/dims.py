"""Changed dimensions: vectors that are held as shorter ones, over which attention runs as they are held."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.storage.base import Codec, Exact, Parts, Shapes
from kvjax.storage.side import Side
from kvjax.storage.wrapping import check_codec

Array = jax.Array

EXACT = Exact()
LATENT = "latent"  # the part of a shorter vector that is held in the model's dtype


class Dims:
    """A linear map to shorter vectors, and attention over these.

    Write a frozen dataclass that inherits from this class, with these functions as its methods, or call
    ``Dims(dim, forward, query, output, side)``. Sides are given with axes of size 1, so that their parts broadcast
    against vectors.

    Attributes:
      dim: D -> the number D' of features that are held.
      forward: (x [..., D] float32, side) -> [..., D'] float32.
      query: (q [..., D] float32, side) -> [..., D'] float32, whose products with held keys are the logits, and what is
        added to the logits of all of these, [...] float32, before they are scaled; None = not for keys.
      output: (Σ p·held [..., D'] float32, Σ p [...] float32, side) -> Σ p·value [..., D] float32; None = not for
        values.
      side: what the map is made of, or None.
    """

    dim: Callable[[int], int]
    forward: Callable[[Array, Any], Array]
    query: Callable[[Array, Any], tuple[Array, Array]] | None = None
    output: Callable[[Array, Array, Any], Array] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "Dims":
        return super().__new__(DimsFunctions if cls is Dims else cls)

    @property
    def side(self) -> Side | None:
        """The part that the map is made of, or None."""
        return None

    def of_layer(self, layer: int, layers: int | None = None) -> "Dims":
        """Returns the map of one layer, if layers differ; see `kvjax.storage.Codec.of_layer`."""
        return self

    def of_head(self, head: int, kv_heads: int | None = None) -> "Dims":
        """Returns the map of one KV head of a layer, if heads differ; see `kvjax.storage.Codec.of_head`."""
        return self


@dataclasses.dataclass(frozen=True)
class DimsFunctions(Dims):
    """Dims made of functions; ``Dims(dim, forward, query, output, side)`` returns one."""

    dim: Callable[[int], int]
    forward: Callable[[Array, Any], Array]
    query: Callable[[Array, Any], tuple[Array, Array]] | None = None
    output: Callable[[Array, Array, Any], Array] | None = None
    side: Side | None = None

    def __post_init__(self) -> None:
        for field in ("dim", "forward", "query", "output"):
            given = getattr(self, field)
            if not callable(given) and (given is not None or field in ("dim", "forward")):
                raise StorageError(f"Dims: {field}={given!r} must be a function; see kvjax.storage.Dims.")


@dataclasses.dataclass(frozen=True)
class Chain(Codec):
    """Holds the shorter vectors of `dims` in another codec; see `chain`.

    Attributes:
      dims: shortens vectors.
      codec: holds the shorter vectors; it has no side.
    """

    dims: Dims
    codec: Codec = EXACT

    def __post_init__(self) -> None:
        if not isinstance(self.dims, Dims):
            raise StorageError(f"chain: dims={self.dims!r} must be a kvjax.storage.Dims.")
        check_codec("chain", self.codec)
        if self.codec.side is not None:
            raise StorageError(
                f"chain: codec={self.codec!r} must be a codec without a side, such as kvjax.storage.Integer(4): it "
                "holds vectors that have been shortened already."
            )

    @property
    def side(self) -> Side | None:
        return self.dims.side

    def of_layer(self, layer: int, layers: int | None = None) -> "Chain":
        return self._with_codec(self.dims.of_layer(layer, layers), self.codec.of_layer(layer, layers))

    def of_head(self, head: int, kv_heads: int | None = None) -> "Chain":
        return self._with_codec(self.dims.of_head(head, kv_heads), self.codec.of_head(head, kv_heads))

    def _with_codec(self, dims: Dims, codec: Codec) -> "Chain":
        return self if (dims, codec) == (self.dims, self.codec) else Chain(dims, codec)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        short = self.dims.dim(dim)
        if not 1 <= short <= dim:
            raise StorageError(f"{self.dims!r}: it would keep {short} of {dim} features; it must keep 1 to {dim}.")
        if isinstance(self.codec, Exact):
            # Exact slots are those that hold a vector itself.
            return {LATENT: ((short,), jnp.dtype(dtype))}
        return self.codec.parts(short, dtype)

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        made = self.codec.encode(self.dims.forward(x, side), None, dtype)
        return {LATENT: made["exact"]} if isinstance(self.codec, Exact) else made

    def held(self, parts: Parts, dim: int) -> Array:
        """Decodes to the shorter vectors, [..., D'] float32 or the model's dtype."""
        return parts[LATENT] if isinstance(self.codec, Exact) else self.codec.decode(parts, None, self.dims.dim(dim))

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        """Decodes [..., n, dim]; attention does not need it."""
        # [..., n, D']
        short = self.held(parts, dim).astype(jnp.float32)
        if self.dims.output is not None:
            return self.dims.output(short, jnp.ones(short.shape[:-1], jnp.float32), side)
        assert self.dims.query is not None
        # The logits of a query e_c are feature c of the keys.
        basis = jnp.eye(dim, dtype=jnp.float32).reshape(*(1,) * (short.ndim - 2), dim, dim)
        # [..., D, D'] and [..., D]
        features, added = self.dims.query(basis, side)
        full = jnp.einsum("...nr,...dr->...nd", short, features, precision=jax.lax.Precision.HIGHEST)
        return full + added[..., None, :]


def chain(dims: Dims, codec: Codec = EXACT) -> Chain:
    """Returns a codec that shortens vectors and holds the shorter ones in another codec.

    Args:
      dims: shortens vectors.
      codec: holds the shorter vectors; it has no side.

    Raises:
      StorageError: an argument of another type, or a codec that has a side.
    """
    return Chain(dims, codec)
