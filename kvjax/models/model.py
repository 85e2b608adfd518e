"""`Model`: the configuration, the parameters and the tokenizer of a decoder."""

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax.arguments import check_type
from kvjax.models.config import DecoderConfig
from kvjax.models.generation_config import GenerationConfig
from kvjax.parallel import distributed, sharding
from kvjax.parallel.rules import Rules, using
from kvjax.parallel.sharding import Params, PyTree

if TYPE_CHECKING:
    from kvjax.checkpoint.tokenizer import Tokenizer


def check_model(model: object, name: str = "model") -> None:
    """Checks that an argument is a `Model`.

    Raises:
      InputError: it is not.
    """
    check_type(name, model, Model, "a model, as kvjax.load('kvjax-tiny') returns it")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A decoder with its parameters, as `kvjax.load` returns it.

    Attributes:
      config: static description of the decoder.
      params: nested dict of arrays, projections [in, out], see `kvjax.models.parameters.parameter_shapes`; or the same
        with layers in stacks, `kvjax.models.stacked_params.StackedParams`.
      tokenizer: the tokenizer of the checkpoint or None.
      mesh: the mesh that the parameters are sharded over, or None for a single device.
      generation: what the checkpoint's generation_config.json says.
      rules: over which axes of the mesh each dimension is divided.
    """

    config: DecoderConfig
    params: Params
    tokenizer: "Tokenizer | None" = None
    mesh: Mesh | None = None
    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    rules: Rules = dataclasses.field(default_factory=Rules)

    def __repr__(self) -> str:
        """One line: the decoder, its size, and where it is; without the parameters themselves."""
        config, leaves = self.config, jax.tree.leaves(self.params)
        heads = f"{config.num_heads} heads on {config.num_kv_heads} KV heads"
        # Of quantised weights too, whose codes are bytes.
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e6
        dtypes = "/".join(sorted({str(leaf.dtype) for leaf in leaves}))
        where = f"mesh {dict(self.mesh.shape)}" if self.mesh is not None else self.platform
        named = "" if self.tokenizer is None else f", tokenizer of {self.tokenizer.vocab_size:,}"
        return (
            f"Model({config.family}, {config.num_layers} layers of width {config.hidden_size}, {heads}, vocabulary of "
            f"{config.vocab_size:,}, {size:,.1f} MB in {dtypes} on {where}{named})"
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text: of generation_config.json, else of config.json, else the tokenizer's EOS."""
        given = self.generation.eos_token_ids
        ids = self.config.eos_token_ids if given is None else given
        eos = None if self.tokenizer is None else self.tokenizer.eos_id
        return ids or (() if eos is None else (eos,))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parameters that are not codes, of activations and of an exact cache."""
        return np.dtype(self.params["embed"]["tokens"].dtype)

    @property
    def platform(self) -> str:
        """The platform of the parameters: ``cpu``, ``gpu`` or ``tpu``."""
        leaf = jax.tree.leaves(self.params)[0]
        # NumPy arrays and tracers are on no device; they will be on the default one.
        placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        return next(iter(leaf.devices())).platform if placed else jax.default_backend()

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Returns a context manager that applies `mesh` and `rules`; it does nothing if there is no mesh."""
        return sharding.on_mesh(self.mesh, self.rules)

    def rows_on_mesh(self, rows: int) -> int:
        """Returns the number of rows of arrays for a batch of `rows` rows; see `sharding.padded_rows`."""
        return sharding.padded_rows(rows, self.mesh, self.rules)

    def place(self, batch: PyTree) -> PyTree:
        """Moves arrays to the devices, with the rows divided over the mesh axis ``data``.

        Args:
          batch: a tree of NumPy arrays whose first dimension is the batch.

        Returns:
          The tree with JAX arrays.
        """

        def put(x: np.ndarray) -> jax.Array:
            if self.mesh is None:
                # `jax.numpy.asarray` would compile a program for every shape. A CPU's device reads NumPy's own memory,
                # which the caller may write to: a copy.
                return jax.device_put(np.array(x))
            axes = ("batch", *(None,) * (x.ndim - 1))
            with using(self.rules):
                return distributed.put(x, NamedSharding(self.mesh, sharding.spec(axes, x.shape, self.mesh)))

        return jax.tree.map(put, batch)
