"""The parameters of a decoder: their shapes, their number, and random ones."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.parallel.sharding import Params
from kvjax.products import MAX_ROWS

Array = jax.Array


def parameter_shapes(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns the parameter tree with `jax.ShapeDtypeStruct` leaves, without allocating it.

    Args:
      config: the decoder.
      dtype: of the parameters.
    """
    # All layers have the same shapes, so that tracing one of them suffices.
    traced = _traced_shapes(config.one_layer(), jnp.dtype(dtype))
    layers = {f"layer_{index}": traced["layer_0"] for index in range(config.num_layers)}
    # Every node is a new one, the caller's own.
    found: Params = jax.tree.map(lambda leaf: leaf, {**traced, **layers})
    return found


@functools.lru_cache(maxsize=16)
def _traced_shapes(config: DecoderConfig, dtype: jnp.dtype) -> Params:
    """Traces the initialisation, for too many tokens for a form of products to be timed or divided into parts."""
    tokens = jax.ShapeDtypeStruct((1, MAX_ROWS + 1), jnp.int32)
    init = Decoder(config, dtype).init
    return jax.eval_shape(lambda key, x: init(key, x)["params"], jax.random.key(0), tokens)


def parameter_count(config: DecoderConfig) -> int:
    """Returns the total number of elements of the parameters.

    Args:
      config: the decoder.
    """
    tree = parameter_shapes(config.one_layer())
    sizes = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(node)) for name, node in tree.items()}
    return sum(sizes.values()) + (config.num_layers - 1) * sizes["layer_0"]


def active_parameter_count(config: DecoderConfig) -> int:
    """Returns the number of elements of the parameters that a token is multiplied by: all, but for other experts'.

    Args:
      config: the decoder.
    """
    if not config.num_experts:
        return parameter_count(config)
    layer = parameter_shapes(config.one_layer())["layer_0"]["mlp"]
    # Matrices of all experts have an axis more.
    experts = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layer) if len(leaf.shape) > 2)
    idle = 1 - config.experts_per_token / config.num_experts
    return parameter_count(config) - round(config.num_layers * experts * idle)


def random_parameters(config: DecoderConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Initialises parameters at random, for training, tests and benchmarks.

    Args:
      config: the decoder.
      key: random key.
      dtype: of the parameters.
    """
    return Decoder(config, dtype).init(key, jnp.zeros((1, 1), jnp.int32))["params"]
