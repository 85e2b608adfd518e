"""Skewing: rotates the columns of queries and keys so that few of them suffice to guess their products.

A is an orthogonal matrix for each KV head. Since (q A)·(k A) = q·k, a skewed model computes the same; but if the
columns of A are the right singular vectors of the queries of a sample text, a few columns of q A and k A have most of
the product (InfiniGen, arXiv:2406.19707, section 4.2).

Where nothing stands between the projections and the product, A is folded into their weights. Otherwise (RoPE, or norms
of queries and keys) it becomes a parameter ``skew`` of each attention, which only selections that guess use.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache import shared_prefix
from kvjax.cache.state import Block
from kvjax.errors import InputError
from kvjax.inputs import check_batch
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.decoder_layer import SKEW
from kvjax.models.model import Model
from kvjax.models.stacked_params import layer_part, unstacked, with_attention
from kvjax.parallel import distributed, host_memory
from kvjax.parallel.sharding import Params
from kvjax.products.quantized import is_quantized

Array = jax.Array
ORTHOGONAL = 1e-3  # largest error of AᵀA = 1, for matrices that were stored in a narrow dtype


@plain_signature
def find_skew(model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None) -> np.ndarray:
    """Computes the right singular vectors of the queries of a sample text, as they enter the product with keys.

    The queries of the heads that share a KV head are stacked.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      lengths: [B] int, the number of real tokens of each row; None for T.

    Returns:
      [L, K, D, D] float32, columns by falling singular value. Signs of columns are arbitrary.

    Raises:
      InputError: invalid tokens, or fewer queries than features of a head.
      ConfigError: a model that is spread over several processes.
    """
    distributed.check_alone(model.params, "find_skew")
    shared_prefix.refuse(model.params, "find_skew")
    config = model.config
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    group = config.num_heads // config.num_kv_heads
    if int(batch.lengths.sum()) * group < config.head_dim:
        raise InputError(
            f"the sample has {int(batch.lengths.sum())} tokens and {group} query heads for each KV head, fewer than "
            f"the {config.head_dim} features of a head; give a longer sample."
        )
    with model.on_mesh():
        factors = _query_factors(model.params, *model.place((batch.tokens, batch.lengths)), config=config)
    # The right singular vectors of R are those of the queries Q R.
    _, _, vectors = np.linalg.svd(np.asarray(factors, np.float64))
    return vectors.swapaxes(2, 3).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("config",))
def _query_factors(params: Params, tokens: Array, lengths: Array, *, config: DecoderConfig) -> Array:
    """Returns R of the QR decomposition of the queries of each KV head, [L, K, D, D] float32."""
    decoder = Decoder(config, params["embed"]["tokens"].dtype)
    # [B, T]
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, -1)
    block = Block(position=position, prompt=lengths, total=lengths, budget=((None,),) * config.num_layers)
    _, sown = decoder.apply(
        {"params": unstacked(params)}, tokens, None, block, method="hidden", mutable="intermediates"
    )
    factors = []
    for index in range(config.num_layers):
        ((seen,),) = sown["intermediates"][f"attention_{index}"]
        # [B, H, T, D]; rows of zeros change nothing
        query = jnp.where((position >= 0)[:, None, :, None], seen.query.astype(jnp.float32), 0.0)
        # [K, B * G * T, D]
        stacked = query.reshape(query.shape[0], config.num_kv_heads, -1, config.head_dim)
        stacked = jnp.moveaxis(stacked, 1, 0).reshape(config.num_kv_heads, -1, config.head_dim)
        factors.append(jnp.linalg.qr(stacked, mode="r"))
    return jnp.stack(factors)


def can_fold(config: DecoderConfig) -> bool:
    """Returns whether queries and keys are multiplied exactly as their projections compute them."""
    return not config.rotates and not config.qk_norm


def skewed(model: Model, skew: ArrayLike, *, fold: bool | None = None) -> Model:
    """Returns an equivalent model with skewed queries and keys.

    Args:
      model: from `kvjax.load`.
      skew: [L, K, D, D] orthogonal matrices, from `find_skew`.
      fold: whether to fold them into the projections; None = where possible, see `can_fold`. If not, selections apply
        them at run time.

    Raises:
      InputError: matrices of another shape, or that are not orthogonal; a model that cannot be folded, as those with
        quantised weights cannot.
      ConfigError: a model that is spread over several processes.
    """
    distributed.check_alone(model.params, "a skew")
    config = model.config
    matrices = np.asarray(skew, np.float32)
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, config.head_dim)
    if matrices.shape != shape:
        raise InputError(f"skew has shape {list(matrices.shape)}; this model needs {list(shape)}, [L, K, D, D].")
    error = np.abs(matrices.swapaxes(2, 3) @ matrices - np.eye(config.head_dim)).max()
    if not error < ORTHOGONAL:
        raise InputError(f"skew is not orthogonal: AᵀA differs from 1 by {error:.2g}; give matrices of find_skew().")
    fold = can_fold(config) if fold is None else fold
    if fold and not can_fold(config):
        raise InputError(
            "skew cannot be folded: this model rotates or normalises queries and keys after their projections; leave "
            "out fold=True."
        )
    if fold and any(map(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized))):
        raise InputError("skew cannot be folded into quantized weights; skew the model first, or give fold=False.")
    layers: list[Params] = [{SKEW: own} for own in jnp.asarray(matrices)]
    if fold:
        attentions = (layer_part(model.params, index, "attention") for index in range(config.num_layers))
        layers = [_folded(own, layer[SKEW], config) for own, layer in zip(attentions, layers, strict=True)]
    return dataclasses.replace(model, params=with_attention(model.params, layers))


def _folded(attention: Params, skew: Array, config: DecoderConfig) -> Params:
    """Multiplies the projections of queries and keys by the skew [K, D, D] of their KV head."""

    def multiplied(x: Array, heads: int) -> Array:
        # [..., K, G, D]
        columns = host_memory.to_device(x).reshape(
            *x.shape[:-1], config.num_kv_heads, heads // config.num_kv_heads, config.head_dim
        )
        made = jnp.einsum("...kgd,kde->...kge", columns.astype(jnp.float32), skew, precision=jax.lax.Precision.HIGHEST)
        made = made.reshape(x.shape).astype(x.dtype)
        return jax.device_put(made, x.sharding) if host_memory.on_host(x) else made

    heads = {"query": config.num_heads, "key": config.num_kv_heads}
    changed = {
        name: {part: multiplied(x, count) for part, x in attention[name].items()} for name, count in heads.items()
    }
    return {**attention, **changed}
