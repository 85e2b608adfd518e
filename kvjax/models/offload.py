"""Weights in host memory: a model that is larger than its device (FlexGen, arXiv:2303.06865, section 4).

The decoder moves the weights of a layer to the device while the layer before it runs, so that weights of at most two
layers are there at a time. Embeddings, the last norm and the output head stay on the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath

from kvjax.arguments import number_argument
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.models.stacked_params import LAYER, map_with_path
from kvjax.parallel import host_memory, sharding
from kvjax.parallel.sharding import Params

ROUNDING = 1e-9  # a share of 0.1 of 10 layers is one layer, whatever its binary fraction


def host_layers(num_layers: int, share: float) -> frozenset[int]:
    """Chooses the layers whose weights are in host memory, evenly spread so that moves and work alternate.

    Args:
      num_layers: layers of the decoder.
      share: of the layers, from 0 to 1; rounded up to whole layers.

    Raises:
      ConfigError: a share that is not a number from 0 to 1.
    """
    share = number_argument("host_weights", share, minimum=0, maximum=1, error=ConfigError)
    count = -int(-(share * num_layers - ROUNDING) // 1) if share else 0
    return frozenset(i for i in range(num_layers) if (i + 1) * count // num_layers > i * count // num_layers)


def is_on_host(path: Sequence[str], layers: frozenset[int]) -> bool:
    """Returns whether the parameter of a path from the root of the tree belongs to one of the layers."""
    return path[0].startswith(LAYER) and int(path[0].removeprefix(LAYER)) in layers


def in_host_memory(place: Sharding | None) -> Sharding:
    """Returns a sharding with its arrays in host memory; None = a single device."""
    place = place or NamedSharding(sharding.one_device_mesh(), PartitionSpec())
    return place.with_memory_kind(host_memory.PINNED)


def shapes_with_host_layers(params: Params, layers: frozenset[int]) -> Params:
    """Returns a tree of `jax.ShapeDtypeStruct` with the parameters of some layers in host memory."""

    def place(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not is_on_host(sharding.path_names(path), layers):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_host_memory(leaf.sharding))

    return cast(Params, jax.tree_util.tree_map_with_path(place, params))


def offload(model: Model, share: float = 1.0) -> Model:
    """Moves the weights of a share of the layers to host memory. `kvjax.load` can place them there while it reads them.

    Args:
      model: with its weights on the device.
      share: see `host_layers`.

    Raises:
      ConfigError: see `host_layers`.
    """
    layers = host_layers(model.config.num_layers, share)

    def move(path: KeyPath, leaf: jax.Array) -> jax.Array:
        if not is_on_host(sharding.path_names(path), layers):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(host_memory.PINNED))

    return dataclasses.replace(model, params=map_with_path(move, model.params))
