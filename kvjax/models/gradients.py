"""Gradients of the loss of a text with respect to its keys and values, layer by layer."""

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.cache.planning.layout import Group
from kvjax.cache.state import Block
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder import Decoder
from kvjax.models.decoder_layer import SHIFT, run_layer
from kvjax.models.model import Model
from kvjax.models.stacked_params import unstacked
from kvjax.parallel.sharding import Params
from kvjax.policies.window import full

Array = jax.Array
Slopes = dict[str, np.ndarray]  # ``key`` and ``value`` -> [B, K, T, D] float32

TOKENS = 256  # whose logits exist at the same time


def gradients(model: Model, x: Array, tokens: Array, block: Block, *, rotated: bool) -> list[Slopes]:
    """Returns, for each layer, the gradients of the sum of -log p over the text under full attention.

    What enters each layer is kept, and a layer runs again for its gradient, so that no more than one layer's
    intermediate results are held.

    Args:
      model: the model.
      x: [B, T, hidden], what enters the first layer.
      tokens: [B, T] int32.
      block: positions of the tokens.
      rotated: whether with respect to keys after RoPE, or before it.
    """
    config = model.config
    dtype = x.dtype
    entered = []
    for index in range(config.num_layers):
        entered.append(x)
        own, kind = model.params[f"layer_{index}"], config.kind(index)
        x = _forward(own, x, None, block.of_layer(index), kind, config=config, dtype=dtype)
    # [B, T]: the token after each, and whether there is one
    targets = jnp.roll(tokens, -1, axis=1)
    known = jnp.roll(block.position, -1, axis=1) > 0
    slope = jnp.concatenate(
        [
            _of_loss(model.params, x[:, at], targets[:, at], known[:, at], config=config)
            for at in (slice(start, start + TOKENS) for start in range(0, x.shape[1], TOKENS))
        ],
        axis=1,
    )
    found: list[Slopes] = []
    for index in reversed(range(config.num_layers)):
        own, kind = model.params[f"layer_{index}"], config.kind(index)
        slope, made = _backward(own, entered.pop(), block.of_layer(index), slope, kind, config=config, dtype=dtype)
        if rotated and kind.rope is not None:
            # A rotation keeps products, so that gradients turn as keys do.
            made["key"] = kind.rope.rotate(made["key"], block.position, kind.rope.frequencies(block.total))
        found.append({name: np.asarray(each, np.float32) for name, each in made.items()})
    return found[::-1]


@functools.partial(jax.jit, static_argnames=("config",))
def _of_loss(params: Params, x: Array, targets: Array, known: Array, *, config: DecoderConfig) -> Array:
    """Returns the gradient of the loss with respect to what leaves the last layer, x [B, n, hidden]."""
    decoder = Decoder(config, params["embed"]["tokens"].dtype)

    def loss(x: Array) -> Array:
        hidden = decoder.apply({"params": unstacked(params)}, x, method="leave")
        # [B, n, V], then [B, n]
        logits = cast(Array, decoder.apply({"params": unstacked(params)}, hidden, method="logits"))
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(known, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0))

    return jax.grad(loss)(x)


def _forward(
    params: Params,
    x: Array,
    shift: dict[str, Array] | None,
    block: Block,
    kind: LayerKind,
    *,
    config: DecoderConfig,
    dtype: DTypeLike,
) -> Array:
    """Returns what leaves a layer, [B, T, hidden], whose keys and values are shifted."""
    if shift is not None:
        params = {**params, "attention": {**params["attention"], SHIFT: shift}}
    return run_layer(
        params, x, None, block, None, config=config, kind=kind, dtype=dtype, groups=(Group(policy=full()),)
    ).x


@functools.partial(jax.jit, static_argnames=("kind", "config", "dtype"))
def _backward(
    params: Params, x: Array, block: Block, slope: Array, kind: LayerKind, *, config: DecoderConfig, dtype: DTypeLike
) -> tuple[Array, dict[str, Array]]:
    """Returns the gradients with respect to what enters a layer, and to its keys and values before RoPE."""
    batch, tokens, _ = x.shape
    zeros = jnp.zeros((batch, config.num_kv_heads, tokens, config.head_dim), x.dtype)

    def run(x: Array, shift: dict[str, Array]) -> Array:
        return _forward(params, x, shift, block, kind, config=config, dtype=dtype)

    _, pull = jax.vjp(run, x, {"key": zeros, "value": zeros})
    entered, made = pull(slope)
    return entered, made
