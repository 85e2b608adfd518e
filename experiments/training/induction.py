"""Random parameters in which an induction head is drawn in: a decoder that looks things up before its first step.

A head that finds "A B ... A" and answers "B" (Olsson et al., arXiv:2209.11895) takes two layers that are of no use one
without the other, so that training comes upon it late: with random parameters not within 2.4 M tokens, although a third
to 60 % of the windows could be predicted by nothing else. Its weights are known, though, and an initialisation that
imitates them (as Trockman and Kolter, arXiv:2305.09828, do for other heads) is learned from at once. Every parameter is
trained all the same, and a learning rate that rises too fast destroys the head: 6e-3 after a warm-up of 60 steps did,
2e-3 after one of 30 did not.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import random_parameters
from kvjax.typing import JsonObject, PyTree

CONSTANT = 1.0  # feature 0 of every token: what a head reads that goes by position alone
SHARPNESS = 8.0  # of the head that looks one back, times the square root of its size
MATCH = 8.0  # likewise of the head that compares tokens
COPY, NOTE = 1.0, 0.2  # what a layer adds to the residual stream, of the norm it reads
FAST, FASTEST = 12, 6  # pairs of features by which RoPE tells one position from the next
SLOW = 3.0  # radians over the whole context up to which a pair still compares tokens


def initial_parameters(config: DecoderConfig, key: jax.Array) -> Any:
    """Random parameters whose layers are the identity, but for an induction head on KV head 0 of the first two.

    Layer 0: query head 0 looks one token back, by RoPE alone, and notes that token in a subspace of its own.
    Layer 1: query head 0 compares its own token with what is noted at every slot, and adds the token that it finds.
    """
    dim, width = config.head_dim, config.hidden_size
    if config.num_layers < 2 or config.rope is None or width <= 3 * dim:
        raise ValueError(f"an induction head does not fit in {config}")
    params = jax.tree.map(np.array, random_parameters(config, key))
    for layer in range(config.num_layers):
        _make_identity(params[f"layer_{layer}"])
    tokens = params["embed"]["tokens"]
    tokens[:, 0] = CONSTANT
    # Three subspaces without feature 0: what is compared, what is copied, where the previous token is noted.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    basis = np.linalg.qr(rng.normal(size=(width - 1, width - 1)))[0]
    compared, copied, noted = (
        np.concatenate([np.zeros((1, dim)), basis[:, i * dim : (i + 1) * dim]]) for i in range(3)
    )
    half = dim // 2
    radians = np.asarray(config.rope.frequencies(jnp.zeros((1,), jnp.int32)))[0].astype(np.float64)

    first = params["layer_0"]["attention"]
    # What the constant feature is after the norm: the same for every token, up to the length of its embedding.
    constant = CONSTANT * np.sqrt(width / np.mean(np.sum(np.square(tokens), axis=1)))
    band = np.where(np.arange(half) < FASTEST, 1.0, 0.5) * (np.arange(half) < FAST)
    scale = np.sqrt(SHARPNESS * np.sqrt(dim)) / constant * band
    first["query"]["kernel"][:, :dim] = 0.0
    first["key"]["kernel"][:, :dim] = 0.0
    # Turned forward by one position, a key agrees best with the query right after it.
    first["query"]["kernel"][0, :half] = scale
    first["key"]["kernel"][0, :half] = scale * np.cos(radians)
    first["key"]["kernel"][0, half:dim] = scale * np.sin(radians)
    first["value"]["kernel"][:, :dim] = compared
    first["out"]["kernel"][:dim] = NOTE * noted.T

    second = params["layer_1"]["attention"]
    # Only pairs that RoPE hardly turns within the context compare tokens far apart.
    slow = np.sqrt(MATCH) * np.tile(radians * config.max_positions < SLOW, 2)
    second["query"]["kernel"][:, :dim] = compared * slow
    second["key"]["kernel"][:, :dim] = noted * slow
    second["value"]["kernel"][:, :dim] = copied
    second["out"]["kernel"][:dim] = COPY * copied.T
    return jax.tree.map(jnp.asarray, params)


def grown(params: PyTree, config: DecoderConfig, new_layers: Sequence[int], key: jax.Array) -> PyTree:
    """The same function in more layers: the new ones add nothing yet, but learn at once (LLaMA Pro, arXiv:2401.02415).

    Args:
      params: of a decoder without the new layers.
      config: of the decoder with them.
      new_layers: which of its layers are new.
    """
    fresh = random_parameters(config, key)
    old = iter(range(config.num_layers))
    layers = {}
    for layer in range(config.num_layers):
        name = f"layer_{layer}"
        layers[name] = _make_identity(fresh[name]) if layer in new_layers else params[f"layer_{next(old)}"]
    return {**params, **layers}


def _make_identity(layer: JsonObject) -> JsonObject:
    """Sets the block's output to zero, in place; everything else stays as drawn."""
    for module, name in (("attention", "out"), ("mlp", "down")):
        layer[module][name]["kernel"] = np.zeros_like(layer[module][name]["kernel"])
    return layer
