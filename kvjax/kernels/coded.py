"""Keys or values as a cache holds them: an operand of attention in place of an array."""

from collections.abc import Callable
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.storage.base import Codec
from kvjax.storage.rounding import within
from kvjax.storage.side import Parts

Array = jax.Array
T = TypeVar("T")


class Coded(flax.struct.PyTreeNode, kw_only=True):
    """Vectors [B, K, S, D] in the form in which slots hold them, each by itself.

    Kernels read the parts where they lie, or `decode`.

    Attributes:
      parts: of the codec, name -> [B, K, S, ...].
      side: what vectors share, with axes of size 1 that broadcast against [B, K, S, D]; None = nothing.
      codec: decodes.
      dim: D.
      dtype: that vectors are decoded to.
    """

    parts: Parts
    side: Parts | None = None
    codec: Codec = flax.struct.field(pytree_node=False)
    dim: int = flax.struct.field(pytree_node=False)
    dtype: jnp.dtype = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, K, S, D)."""
        batch, kv_heads, slots = next(iter(self.parts.values())).shape[:3]
        return batch, kv_heads, slots, self.dim

    @property
    def ndim(self) -> int:
        """The number of axes, 4."""
        return len(self.shape)

    def decode(self) -> Array:
        """Returns the vectors, [B, K, S, D] in `dtype`."""
        return within(self.codec.decode(self.parts, self.side, self.dim), self.dtype)

    def floats(self) -> Array | None:
        """Returns the vectors [B, K, S, D] as the floating-point array that the cache holds; None if it is no such."""
        return self.codec.floats(self.parts)

    def of_slots(self, take: Callable[[Array], Array]) -> "Coded":
        """Returns some of the slots; `take` is given each part, [B, K, S, ...]."""
        return self.replace(parts={name: take(part) for name, part in self.parts.items()})


def as_array(x: T | Coded) -> T | Array:
    """Decodes what is coded, and returns anything else as it is."""
    return x.decode() if isinstance(x, Coded) else x


def floats_of(x: Array | Coded) -> Array | None:
    """Returns vectors as a floating-point array of any dtype, or None if they must be decoded."""
    return x.floats() if isinstance(x, Coded) else x
