"""Floating-point numbers of 4 bits with an e4m3 scale per 16 channels (NVIDIA's NVFP4).

NVIDIA, "Introducing NVFP4 for efficient and accurate low-precision inference", 2025.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.parallel.host_memory import DEVICE
from kvjax.products.codes import Affine
from kvjax.storage import e2m1
from kvjax.storage.base import Codec, Memory, Parts, Shapes, Storage, factory
from kvjax.storage.fp8 import FLOAT8
from kvjax.storage.fp8 import LARGEST as LARGEST_SCALE
from kvjax.storage.integer import group_size, grouped
from kvjax.storage.packing import over_groups, pack, packed_size, unpack
from kvjax.storage.rounding import FLOAT32, as_stored, divide, nearest
from kvjax.storage.tables import lookup

Array = jax.Array

GROUP = 16  # channels
LARGEST = LARGEST_SCALE * e2m1.LARGEST  # 2688


@dataclasses.dataclass(frozen=True)
class Nvfp4(Codec):
    """Holds e2m1 numbers, an e4m3 scale per group of channels, and a scale per vector.

    scale = max|x| / 2688 of the vector, 1 where that is 0; the scale of a group is the e4m3 number nearest to its
    max|x| / (6 · scale), at most 448; a magnitude is that of 0, 0.5, 1, 1.5, 2, 3, 4, 6 nearest to |x| / (scale · that
    of the group), ties to the even code. A group whose scale is 0 decodes to zeros.

    NVIDIA's second scale is a float32 number per tensor, 1 / 2688 of its largest magnitude, so that the scales of
    groups use all of e4m3's range. A cache grows, and what is encoded is not encoded again, so that its largest number
    is not known: either each vector has its own scale, of 2 bytes in bfloat16 beside 72 of 128 channels, or, as in
    TensorRT-LLM and vLLM, it is a constant that a calibration found. Without any, groups below 6 · 2^-6 = 0.09 would
    have subnormal scales, which are coarse.

    Attributes:
      group: channels that share a scale; the largest divisor of the head size up to it is used.
      scale: the scale of all vectors, a constant, 1 = none; None = each vector has its own.
    """

    group: int = GROUP
    scale: float | None = None

    def __post_init__(self) -> None:
        group = count_argument("storage nvfp4: group", self.group, minimum=1, error=StorageError)
        object.__setattr__(self, "group", group)
        if self.scale is not None:
            minimum, maximum = float(FLOAT32.smallest_normal), float(FLOAT32.max) / LARGEST
            scale = number_argument(
                "storage nvfp4: scale", self.scale, minimum=minimum, maximum=maximum, error=StorageError
            )
            object.__setattr__(self, "scale", scale)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        own: Shapes = {
            "codes": ((packed_size(dim, e2m1.BITS),), jnp.dtype(jnp.uint8)),
            "group_scale": ((dim // group_size(dim, self.group),), jnp.dtype(jnp.uint8)),
        }
        return own if self.scale is not None else own | {"scale": ((), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        # [..., groups, g]
        numbers = grouped(x, self.group)
        # [..., groups, 1]
        largest = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True)
        if self.scale is None:
            # [...]
            own = as_stored(divide(jnp.max(jnp.abs(x), axis=-1), LARGEST), dtype)
            own = jnp.where(own == 0, jnp.ones((), dtype), own)
            # [..., 1, 1]
            scale = own.astype(jnp.float32)[..., None, None]
        else:
            scale = jnp.float32(self.scale)
        # [..., groups, 1]
        of_group = nearest(jnp.minimum(divide(largest, e2m1.LARGEST * scale), LARGEST_SCALE), FLOAT8)
        step = scale * of_group
        # [..., groups, g]; a step may be too small for a normal number of float32, and is then taken as 0
        magnitude = jnp.where(step > 0, divide(jnp.abs(numbers), jnp.where(step > 0, step, 1.0)), 0.0)
        codes = e2m1.nearest_codes(magnitude, numbers < 0)
        parts = {
            "codes": pack(codes.reshape(x.shape), e2m1.BITS),
            "group_scale": jax.lax.bitcast_convert_type(of_group[..., 0].astype(FLOAT8), jnp.uint8),
        }
        return parts if self.scale is not None else parts | {"scale": own}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        # [..., D]
        numbers = lookup(e2m1.LEVELS, unpack(parts["codes"], e2m1.BITS, dim))
        return over_groups(self._steps(parts), dim) * numbers

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine:
        return Affine(
            codes=parts["codes"], scale=self._steps(parts), bits=e2m1.BITS, levels=e2m1.LEVELS, dim=dim
        )  # fmt: skip

    def _steps(self, parts: Parts) -> Array:
        """Returns what multiplies the e2m1 numbers of each group, [..., groups] float32."""
        of_group = jax.lax.bitcast_convert_type(parts["group_scale"], FLOAT8).astype(jnp.float32)
        # No scale is NaN or below 0; an empty slot may hold any bits.
        of_group = jnp.where(jnp.isnan(of_group), 0.0, of_group)
        scale = jnp.float32(self.scale) if self.scale is not None else parts["scale"].astype(jnp.float32)[..., None]
        return scale * of_group


@factory
def nvfp4(
    group: int = GROUP, scale: float | None = None, *, residual: int = 0, memory: Memory = DEVICE
) -> Storage:  # fmt: skip
    """Holds keys and values as e2m1 numbers of 4 bits with an e4m3 scale per group of channels (NVFP4).

    Args:
      group: channels that share a scale; the largest divisor of the head size up to it is used.
      scale: a second scale of all vectors, a constant (k_scale and v_scale of serving stacks; 1 = none); None = each
        vector has its own, in the model's dtype.
      residual: the number of newest positions that stay exact.
      memory: ``device``, ``host``, or a pair of these for keys and for values.

    Raises:
      StorageError: an argument out of range.
    """
    codec = Nvfp4(group, scale)
    return Storage(key=codec, value=codec, residual=residual, memory=memory, name="nvfp4")
