"""Floating-point numbers of 8 bits: sign, 4 bits of exponent, 3 of mantissa (e4m3fn, arXiv:2209.05433)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import number_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import BYTE, E4M3, Affine
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, entry_of, factory
from kvjax.storage.rounding import FLOAT32, as_stored, divide, nearest

Array = jax.Array

Scale = float | tuple[float, ...] | None  # of all layers, or one for each

FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)  # 448


@dataclasses.dataclass(frozen=True)
class Fp8(Codec):
    """Holds one e4m3fn number per channel, as uint8, and a scale.

    Subnormal numbers are kept; numbers beyond ±448 after division by the scale saturate.

    Attributes:
      scale: the scale of all vectors, a constant; None = each vector has its own, its largest magnitude / 448.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", _checked(self.scale))

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        codes: Shapes = {"codes": ((dim,), jnp.dtype(jnp.uint8))}
        return codes if self.scale is not None else codes | {"scale": ((), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        if self.scale is not None:
            return {"codes": _codes(divide(x, self.scale))}
        # [...]
        scale = as_stored(divide(jnp.max(jnp.abs(x), axis=-1), LARGEST), dtype)
        scale = jnp.where(scale == 0, jnp.ones((), dtype), scale)
        return {"codes": _codes(divide(x, scale.astype(jnp.float32)[..., None])), "scale": scale}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D]
        y = jax.lax.bitcast_convert_type(parts["codes"], FLOAT8).astype(jnp.float32)
        # No number is encoded as NaN; an empty slot may hold any bits.
        y = jnp.where(jnp.isnan(y), 0.0, y)
        scale = jnp.float32(self.scale) if self.scale is not None else parts["scale"].astype(jnp.float32)[..., None]
        return scale * y

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine:
        scale = parts["scale"][..., None] if self.scale is None else None
        made = Affine(codes=parts["codes"], scale=scale, bits=BYTE, levels=E4M3, dim=dim)
        constant = self.scale
        return made if constant is None else made.within(lambda q: q * constant, lambda a: a * constant)


@dataclasses.dataclass(frozen=True)
class Fp8Layers(Codec):
    """`Fp8` with a constant scale of its own for each layer.

    Attributes:
      scales: of the layers.
    """

    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", tuple(map(_checked, self.scales)))

    def of_layer(self, layer: int, layers: int | None = None) -> Codec:
        return Fp8(entry_of("fp8", self.scales, layer, layers))

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return Fp8(1.0).parts(dim, dtype)

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        raise StorageError(f"storage fp8: scales {self.scales} are per layer; select a layer with Storage.of_layer.")

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        raise StorageError(f"storage fp8: scales {self.scales} are per layer; select a layer with Storage.of_layer.")


def _checked(scale: object) -> float:
    minimum, maximum = float(FLOAT32.smallest_normal), float(FLOAT32.max) / LARGEST
    return number_argument("storage fp8: scale", scale, minimum=minimum, maximum=maximum, error=StorageError)


def _codes(y: Array) -> Array:
    """Returns the bits of the nearest e4m3fn numbers, uint8."""
    y = nearest(jnp.clip(y, -LARGEST, LARGEST), FLOAT8)
    return jax.lax.bitcast_convert_type(y.astype(FLOAT8), jnp.uint8)


def _codec(scale: Any) -> Codec:
    """Returns the codec for a scale of all layers, or one for each."""
    if isinstance(scale, jax.Array | np.ndarray):
        scale = np.asarray(scale).tolist()
    if not isinstance(scale, list | tuple):
        return Fp8(scale)
    if not scale or any(isinstance(each, list | tuple) for each in scale):
        raise StorageError(f"storage fp8: scale must be a number, or one for each layer; got {scale!r}.")
    return Fp8Layers(tuple(scale))


@factory
def fp8(
    scale: Scale = None, *, value_scale: Scale = None, residual: int = 0, memory: Memory = DEVICE
) -> Storage:  # fmt: skip
    """Holds keys and values as e4m3fn numbers of 8 bits.

    Args:
      scale: the scale of all keys, a constant or a tuple with one for each layer (k_scale of serving stacks; 1 = none);
        None = each vector has its own.
      value_scale: the same of values (v_scale); None = `scale`.
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    key = _codec(scale)
    value = key if value_scale is None else _codec(value_scale)
    return Storage(key=key, value=value, residual=residual, memory=memory, name="fp8")
