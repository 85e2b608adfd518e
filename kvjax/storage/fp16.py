"""Floating-point numbers of 16 bits: sign, 5 bits of exponent, 10 of mantissa (IEEE 754's binary16)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.parallel.host_memory import DEVICE
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.rounding import as_stored

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Fp16(Codec):
    """Holds the vector itself in float16. Subnormal numbers are kept; numbers beyond ±65,504 saturate."""

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {"numbers": ((dim,), jnp.dtype(jnp.float16))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return {"numbers": as_stored(x, jnp.float16)}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return parts["numbers"].astype(jnp.float32)

    def floats(self, parts: Parts) -> Array:
        return parts["numbers"]


@factory
def fp16(*, residual: int = 0, memory: Memory = DEVICE) -> Storage:
    """Holds keys and values in float16, whatever the model's dtype.

    It is for models in float32. There is no such storage in bfloat16: XLA's CPU compiler (jax 0.10.2) would convert the
    whole cache to float32 and back in each step.

    Args:
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument that is not valid.
    """
    return Storage(key=Fp16(), value=Fp16(), residual=residual, memory=memory, name="fp16")
