"""Fewer KV heads: keys and values of a group of heads become one head's (arXiv:2406.07056)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import count_argument
from kvjax.cache import shared_prefix
from kvjax.errors import StorageError
from kvjax.models.calibrate import calibrated
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import SIDES, SKEW
from kvjax.models.model import Model, check_model
from kvjax.models.skew import can_fold
from kvjax.models.stacked_params import layer_part, with_attention
from kvjax.parallel import distributed, host_memory
from kvjax.parallel.sharding import Params
from kvjax.products.quantized import is_quantized
from kvjax.storage.calibration import Calibration
from kvjax.storage.joint import kv_heads

Array = jax.Array


def compress_kv_heads(model: Model, calibration: Calibration, heads: int) -> Model:
    """Returns a model in which each group of KV heads is compressed to one head, by changing the projections.

    Query heads keep their number. The model computes the same as far as the keys and values of a group lie in as many
    directions as a head has features.

    Args:
      model: from `kvjax.load`, without rotary embedding and without norms of queries and keys.
      calibration: of the model, from ``kvjax.calibrate(model, tokens, kvjax.storage.kv_heads(heads))``.
      heads: KV heads of a group, a divisor of the model's.

    Raises:
      StorageError: a number of heads that does not divide the model's, a calibration that does not fit, a model whose
        keys are rotated or normalised after their projection, or one whose weights are codes.
      ConfigError: a model that is spread over several processes.
    """
    check_model(model)
    distributed.check_alone(model.params, "compress_kv_heads")
    shared_prefix.refuse(model.params, "compress_kv_heads")
    config = model.config
    heads = count_argument("compress_kv_heads: heads", heads, minimum=1, error=StorageError)
    held = kv_heads(heads).bound(config.num_kv_heads)
    if not can_fold(config):
        raise StorageError(
            "compress_kv_heads: this model rotates or normalises keys after their projection, into which nothing can "
            f"be folded; generate with storage=kvjax.storage.kv_heads({heads}), which holds one latent of each group."
        )
    if calibration is None:
        raise StorageError("compress_kv_heads needs a calibration: kvjax.calibrate(model, tokens, kv_heads(heads)).")
    calibrated(model, held, calibration)  # raises where it does not fit
    params, layers = model.params, []
    if any(map(is_quantized, layer_part(params, 0, "attention")["key"].values())):
        raise StorageError(
            "compress_kv_heads: the model's weights are codes, into which nothing can be folded; load exact weights, "
            "and quantize the result with kvjax.quantize_weights."
        )
    for index, sides in enumerate(calibration.layers):
        basis = {name: np.asarray(sides[name]["basis"], np.float64) for name in ("key", "value")}
        layers.append(_folded(layer_part(params, index, "attention"), basis, config, heads))
    fewer = dataclasses.replace(config, num_kv_heads=config.num_kv_heads // heads)
    return dataclasses.replace(model, config=fewer, params=with_attention(params, layers))


def _folded(attention: Params, basis: dict[str, np.ndarray], config: DecoderConfig, heads: int) -> Params:
    """Folds the directions of keys and values, [K, D, D] each, into the projections of one layer."""
    kv, dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv

    def array(name: str, part: str) -> np.ndarray:
        return np.asarray(host_memory.to_device(attention[name][part]), np.float64)

    def joined(name: str, part: str) -> np.ndarray:
        """Keys or values of the new heads: the sum over a group of what each head has in the directions."""
        # [..., K, D], [..., K, D'] and [..., K / heads, D']
        x = array(name, part).reshape(*attention[name][part].shape[:-1], kv, dim)
        x = np.einsum("...kd,kde->...ke", x, basis[name])
        x = x.reshape(*x.shape[:-2], kv // heads, heads, dim).sum(axis=-2)
        return x.reshape(*x.shape[:-2], -1)

    def turned(part: str) -> np.ndarray:
        """Queries in the directions of the keys of their group."""
        # [..., K, G, D]
        x = array("query", part).reshape(*attention["query"][part].shape[:-1], kv, group, dim)
        x = np.einsum("...kgd,kde->...kge", x, basis["key"])
        return x.reshape(*x.shape[:-3], -1)

    made = {name: {part: joined(name, part) for part in attention[name]} for name in ("key", "value")}
    made["query"] = {part: turned(part) for part in attention["query"]}
    # [K, G, D, hidden]: what a head reads of the new values goes back through the directions
    out = array("out", "kernel").reshape(kv, group, dim, -1)
    out = np.einsum("kde,kgdh->kgeh", basis["value"], out).reshape(attention["out"]["kernel"].shape)
    made["out"] = {"kernel": out}
    changed = {
        name: {**attention[name], **{part: jnp.asarray(x, attention[name][part].dtype) for part, x in parts.items()}}
        for name, parts in made.items()
    }
    kept = {name: x for name, x in attention.items() if name not in (SIDES, SKEW)}
    return {**kept, **changed}
