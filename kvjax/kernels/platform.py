"""Whether Pallas kernels run on a platform, or are interpreted there."""

import jax
import jax.numpy as jnp

PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}


def refuses(implementation: str, platform: str) -> str | None:
    """Returns why an implementation cannot run on a platform, or None.

    Args:
      implementation: ``xla``, ``pallas_tpu`` or ``pallas_gpu``.
      platform: ``cpu``, ``gpu`` or ``tpu``.
    """
    needed = PLATFORMS.get(implementation, platform)
    if needed == platform or _interpreted(implementation):
        return None
    return f"its kernels run on a {needed.upper()}, and this is a {platform.upper()}"


def _interpreted(implementation: str) -> bool:
    """Returns whether Pallas interprets kernels here, by lowering one; jax has no other way to ask."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def copy(x, y):
        y[...] = x[...]

    if implementation == "pallas_gpu":
        call = plgpu.kernel(copy, out_type=shape)
    else:
        call = pl.pallas_call(copy, out_shape=shape)
    try:
        jax.jit(call).lower(shape)
    except (ValueError, NotImplementedError):
        return False
    return True
