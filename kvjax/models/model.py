"""A decoder's configuration, parameters and tokenizer, and the mesh they lie on."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax import sharding
from kvjax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `kvjax.load` returns.

    Attributes:
      config: static description of the decoder.
      params: nested dict of arrays, projections [in, out]; see `kvjax.models.decoder.parameter_shapes`.
      tokenizer: the folder's tokenizer, or None if it has none.
      mesh: where the parameters lie, or None for a single device.
    """

    config: DecoderConfig
    params: Any
    tokenizer: Any = None
    mesh: Mesh | None = None

    @property
    def platform(self) -> str:
        """``cpu``, ``gpu`` or ``tpu``: where the parameters are."""
        leaf = jax.tree.leaves(self.params)[0]
        # NumPy's arrays are nowhere yet, nor are those of a gradient that is being traced.
        placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        return next(iter(leaf.devices())).platform if placed else jax.default_backend()

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Puts the mesh in force for the calls inside; nothing without one."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def place(self, batch: Any) -> Any:
        """Arrays whose first dimension is the batch, on the devices: rows over the `data` axis."""

        def put(x: np.ndarray) -> jax.Array:
            if self.mesh is None:
                return jax.numpy.asarray(x)
            axes = ("batch", *(None,) * (x.ndim - 1))
            return jax.device_put(x, NamedSharding(self.mesh, sharding.spec(axes, x.shape, self.mesh)))

        return jax.tree.map(put, batch)
