"""Weights as integers: which matrices of a decoder become codes, and a function that makes them so.

The projections of every layer are quantised by groups of inputs, as FlexGen does (arXiv:2303.06865, section 4), for the
rows with 4-bit weights of H2O (arXiv:2306.14048, Table 7). Embeddings, norms, biases and the routers of experts stay as
they are, and so does the output head unless it is asked for.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.cache import shared_prefix
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import POLICY
from kvjax.models.experts import ROUTER
from kvjax.models.model import Model, check_model
from kvjax.models.offload import in_host_memory
from kvjax.models.parameters import parameter_shapes
from kvjax.models.stacked_params import LAYER, map_with_path
from kvjax.parallel import distributed, host_memory, sharding
from kvjax.parallel.sharding import Params, PyTree
from kvjax.products.quantized import (
    PARTS,
    WIDTHS,
    QuantizedMatrix,
    group_size,
    is_quantized,
    quantize,
    quantized_shape,
)

Array = jax.Array

GROUP = 64  # inputs
HEAD = ("head", "kernel")


@dataclasses.dataclass(frozen=True)
class WeightCodes:
    """Describes how weights are quantized.

    Attributes:
      bits: of a weight, 2, 4 or 8.
      group: inputs that share a scale and a zero; the largest divisor of a matrix's inputs up to it that fills whole
        bytes is used. None = all inputs.
      head: whether the output head is quantised too; only of models whose head is not tied to the embedding.
      name: in reports; by default ``int`` and the bits.
    """

    bits: int = 4
    group: int | None = GROUP
    head: bool = False
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS or isinstance(self.bits, bool):
            raise ConfigError(f"weights: bits must be one of {', '.join(map(str, WIDTHS))}; got {self.bits!r}.")
        if self.group is not None:
            count_argument("weights: group", self.group, minimum=1, error=ConfigError)
        if not isinstance(self.head, bool):
            raise ConfigError(f"weights: head must be true or false; got {self.head!r}.")
        object.__setattr__(self, "name", self.name or f"int{self.bits}")

    def takes(self, path: Sequence[str]) -> bool:
        """Returns whether the parameter of a path from the root of the tree becomes codes."""
        in_layer = path[0].startswith(LAYER) and path[-1] == "kernel" and path[-2] != ROUTER
        # Parameters of policies, such as a gate's, are part of a calibration and stay float32.
        in_layer = in_layer and POLICY not in path
        return in_layer or (self.head and tuple(path) == HEAD)

    def group_of(self, path: Sequence[str], inputs: int) -> int:
        """Returns the size of the groups of a matrix.

        Raises:
          ConfigError: if codes of no group of the matrix fill whole bytes.
        """
        size = group_size(inputs, self.group, self.bits)
        if size is None:
            raise ConfigError(
                f"weights of {self.bits} bits cannot hold {'/'.join(path)}: no group of up to {self.group or inputs} "
                f"of its {inputs} inputs fills whole bytes; use more bits or a larger group."
            )
        return size


def int8(group: int | None = GROUP, *, head: bool = False) -> WeightCodes:
    """Quantises weights to 8 bits; see `WeightCodes`."""
    return WeightCodes(8, group, head)


def int4(group: int | None = GROUP, *, head: bool = False) -> WeightCodes:
    """Quantises weights to 4 bits; see `WeightCodes`."""
    return WeightCodes(4, group, head)


def int2(group: int | None = GROUP, *, head: bool = False) -> WeightCodes:
    """Quantises weights to 2 bits; see `WeightCodes`."""
    return WeightCodes(2, group, head)


#: Factories by name, for `kvjax.load` and the command line.
WEIGHTS: dict[str, Callable[..., WeightCodes]] = {"int8": int8, "int4": int4, "int2": int2}


def as_weight_codes(weights: WeightCodes | str | None) -> WeightCodes | None:
    """Converts ``int8``, ``int4`` or ``int2`` to a `WeightCodes`; returns others as they are.

    Raises:
      ConfigError: an unknown name.
    """
    if weights is None or isinstance(weights, WeightCodes):
        return weights
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ConfigError(
            f"weights={weights!r} is unknown; valid: {', '.join(WEIGHTS)}, a kvjax.WeightCodes, or None for exact ones."
        )
    return WEIGHTS[weights]()


def quantize_weights(model: Model, bits: int = 4, group: int | None = GROUP, *, head: bool = False) -> Model:
    """Returns the model with its projections quantized to integers; it can be used like any other model.

    The leaves ``kernel`` of the parameters, except those of policies, become `kvjax.products.QuantizedMatrix`, with
    scales in the dtype of the model. At most one matrix more than before is held at a time if the caller keeps no
    reference to the exact ones; `kvjax.load` with ``weights=`` never holds more than one exact matrix.

    Args:
      model: with exact weights.
      bits: of a weight, 2, 4 or 8.
      group: inputs that share a scale and a zero; see `WeightCodes`.
      head: whether the output head is quantised too.

    Raises:
      ConfigError: an argument out of range, weights that are quantised already, or a tied output head.
    """
    check_model(model)
    weights = WeightCodes(bits, group, head)
    check(model.config, weights)
    shared_prefix.refuse(model.params, "kvjax.quantize_weights")
    if any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized))):
        raise ConfigError("the weights of this model are already quantized; load exact ones.")

    def code(path: KeyPath, leaf: Array) -> PyTree:
        names = sharding.path_names(path)
        if not weights.takes(names):
            return leaf
        return quantized(leaf, names, weights, model.mesh, leaf.dtype, on_host=host_memory.on_host(leaf))

    return dataclasses.replace(model, params=map_with_path(code, model.params))


def check(config: DecoderConfig, weights: WeightCodes | None) -> None:
    """Raises ConfigError if the output head is to be quantised and tied to the embedding."""
    if weights is not None and weights.head and config.tie_embeddings:
        raise ConfigError(
            "the output head of this model is tied to its embedding, which is used to look up tokens and is not "
            "quantized; leave out head=True."
        )


def quantized(
    kernel: Array,
    path: Sequence[str],
    weights: WeightCodes,
    mesh: Mesh | None,
    dtype: DTypeLike,
    *,
    on_host: bool = False,
) -> QuantizedMatrix:
    """Quantises one matrix.

    Args:
      kernel: [in, out], or [E, in, out] of experts.
      path: its path from the root of the parameter tree.
      weights: how it is quantised.
      mesh: the mesh that it is sharded over.
      dtype: of the scales.
      on_host: whether the result is in host memory.

    Raises:
      ConfigError: see `WeightCodes.group_of`.
    """
    group = weights.group_of(path, kernel.shape[-2])
    made = quantize(host_memory.to_device(kernel), weights.bits, group, dtype)
    return placed(made, path, mesh, on_host=on_host)


def placed(
    matrix: QuantizedMatrix, path: Sequence[str], mesh: Mesh | None, *, on_host: bool = False
) -> QuantizedMatrix:
    """Moves the parts of a quantised matrix to where they lie on a mesh.

    Args:
      matrix: the matrix; its parts may be NumPy arrays.
      path: its path from the root of the parameter tree.
      mesh: the mesh, or None for a single device.
      on_host: whether they lie in host memory.
    """
    parts: dict[str, Any] = {}
    for name in PARTS:
        if (part := getattr(matrix, name)) is None:
            continue
        where: Sharding | None = None
        if mesh is not None:
            where = NamedSharding(mesh, sharding.parameter_spec((*path, name), part.shape, mesh))
        parts[name] = distributed.put(part, in_host_memory(where) if on_host else where)
    return jax.block_until_ready(QuantizedMatrix(bits=matrix.bits, **parts))


def can_be_codes(path: Sequence[str]) -> bool:
    """Returns whether a parameter may be the codes of a checkpoint: projections, the output head, the embedding."""
    return WeightCodes(head=True).takes(path) or tuple(path) == sharding.EMBEDDING


def held_shapes(config: DecoderConfig, dtype: DTypeLike = jnp.float32, weights: WeightCodes | None = None) -> Params:
    """Returns the parameter tree with `jax.ShapeDtypeStruct` leaves, quantised as `quantize_weights` would.

    Args:
      config: the decoder.
      dtype: of exact parameters, and of scales.
      weights: how weights are quantised; None = all are exact.

    Raises:
      ConfigError: see `quantize_weights`.
    """
    check(config, weights)
    params = parameter_shapes(config, dtype)
    if weights is None:
        return params

    def code(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PyTree:
        names = sharding.path_names(path)
        if not weights.takes(names):
            return leaf
        return quantized_shape(leaf.shape, weights.bits, weights.group_of(names, leaf.shape[-2]), dtype)

    found: Params = jax.tree_util.tree_map_with_path(code, params)
    return found


def parameter_bytes(config: DecoderConfig, dtype: DTypeLike, weights: WeightCodes | None = None) -> int:
    """Returns the bytes of the parameters.

    Args:
      config: the decoder.
      dtype: see `held_shapes`.
      weights: see `held_shapes`.
    """
    # All layers have the same shapes, so that tracing one of them suffices.
    tree = held_shapes(config.one_layer(), dtype, weights)
    sizes = {
        name: sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(node))
        for name, node in tree.items()
    }
    return sum(sizes.values()) + (config.num_layers - 1) * sizes[f"{LAYER}0"]
