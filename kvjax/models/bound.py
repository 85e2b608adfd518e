"""A decoder with its parameters, and the scores of tokens under its logits."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.planning.layout import Phase
from kvjax.cache.state import Block, KVState
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.parallel.sharding import Params, PyTree

Array = jax.Array
SCORE_ROWS = 512  # tokens per row whose logits exist at the same time when scoring


class BoundDecoder(NamedTuple):
    """A decoder with its parameters, for use in jitted loops.

    Attributes:
      hidden: (tokens [B, n], state, block, phase) -> (hidden states [B, n, E], state).
      step: like `hidden`, with the intermediates of `Decoder.hidden` as a third result.
      logits: hidden states [..., E] -> [..., V] float32.
      dtype: of parameters and cache.
    """

    hidden: Callable[[Array, KVState | None, Block, Phase], tuple[Array, KVState]]
    step: Callable[[Array, KVState, Block, Phase], tuple[Array, KVState, PyTree]]
    logits: Callable[[Array], Array]
    dtype: jnp.dtype


def bind(config: DecoderConfig, params: Params) -> BoundDecoder:
    """Returns the decoder with its parameters.

    Args:
      config: the decoder.
      params: its parameters.
    """
    dtype = params["embed"]["tokens"].dtype
    decoder = Decoder(config, dtype)

    def call(method: str) -> Callable[..., PyTree]:
        return functools.partial(decoder.apply, {"params": params}, method=method)

    def step(tokens: Array, kv: KVState, block: Block, phase: Phase) -> tuple[Array, KVState, PyTree]:
        (x, kv), sown = decoder.apply(
            {"params": params}, tokens, kv, block, phase, method="hidden", mutable="intermediates"
        )  # fmt: skip
        return x, kv, sown

    return BoundDecoder(call("hidden"), step, call("logits"), dtype)


def logprobs_of(decoder: BoundDecoder, hidden: Array, targets: Array) -> Array:
    """Computes the log-probability of a token at each position, with the logits of `SCORE_ROWS` positions at a time.

    Args:
      decoder: the decoder.
      hidden: [B, n, E].
      targets: [B, n] int32.

    Returns:
      [B, n] float32, log p(target).
    """
    return over_logits(decoder, hidden, targets, logprob_of)


def logprob_of(logits: Array, target: Array) -> Array:
    """The log-probability of tokens [...] int32 under logits [..., V] float32: [...] float32."""
    # [...]
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def over_logits(
    decoder: BoundDecoder, hidden: Array, targets: Array, function: Callable[[Array, Array], PyTree]
) -> PyTree:
    """Applies a function to the logits of each position, which exist for `SCORE_ROWS` positions at a time.

    Args:
      decoder: the decoder.
      hidden: [B, n, E].
      targets: [B, n] int32.
      function: (logits [B, m, V] float32, targets [B, m]) -> a tree of arrays [B, m].

    Returns:
      The tree, with arrays [B, n].
    """

    def score(x: Array, target: Array) -> PyTree:
        return function(decoder.logits(x), target)

    n = hidden.shape[1]
    if n <= SCORE_ROWS:
        return score(hidden, targets)
    parts = -(-n // SCORE_ROWS)
    pad = parts * SCORE_ROWS - n
    # [parts, B, SCORE_ROWS, E]
    x = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(hidden.shape[0], parts, SCORE_ROWS, -1).swapaxes(0, 1)
    # [parts, B, SCORE_ROWS]
    y = jnp.pad(targets, ((0, 0), (0, pad))).reshape(hidden.shape[0], parts, SCORE_ROWS).swapaxes(0, 1)
    scores = jax.lax.map(lambda xy: score(*xy), (x, y))
    # [B, n]
    return jax.tree.map(lambda each: each.swapaxes(0, 1).reshape(hidden.shape[0], -1)[:, :n], scores)
