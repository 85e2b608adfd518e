"""Sampling of rows that each have settings of their own: `kvjax.generation.sampling` with settings that are data."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.generation.sampling import Greedy, Sample, penalised
from kvjax.numerics.nucleus import most_probable

Array = jax.Array
Leaf = Any  # an array of JAX, or of NumPy before a program takes it
ALL = np.iinfo(np.int32).max  # `top_k` of a row that may take any token


class Settings(NamedTuple):
    """The settings of each row.

    Attributes:
      penalty: [B] float32, see `kvjax.generation.sampling.penalised`.
      sampled: [B] bool, whether the row is sampled; otherwise it takes the most probable token.
      temperature: [B] float32.
      top_k: [B] int32, `ALL` for all tokens.
      top_p: [B] float32, infinity for all tokens.
      min_logit: [B] float32, the least logit relative to the largest one, -infinity for all tokens.
    """

    penalty: Leaf
    sampled: Leaf
    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_logit: Leaf


def settings(sampler: Greedy | Sample) -> Settings:
    """The settings of one row, as NumPy scalars."""
    own = sampler if isinstance(sampler, Sample) else Sample()
    return Settings(
        penalty=np.float32(sampler.repetition_penalty),
        sampled=np.bool_(isinstance(sampler, Sample)),
        temperature=np.float32(own.temperature),
        top_k=np.int32(ALL if own.top_k is None else min(own.top_k, ALL)),
        top_p=np.float32(np.inf if own.top_p is None else own.top_p),
        min_logit=np.float32(-np.inf if own.min_p is None else math.log(own.min_p)),
    )


def choose(logits: Array, length: Array, key: Array, seen: Array, rows: Settings) -> tuple[Array, Array]:
    """Chooses a token for each row, the one that `kvjax.generate` chooses with the row's sampler.

    Args:
      logits: [B, V] float32.
      length: [B] int32, the position of the token to choose.
      key: [B] random keys, of each row's request.
      seen: [B, V] bool, the tokens that each row has.
      rows: the settings of each row.

    Returns:
      The tokens [B] int32 and their log-probabilities [B] float32.
    """
    # [B, V]
    likely = penalised(logits, seen, rows.penalty[:, None])
    # [B]
    token = _token(likely, lambda: jax.vmap(jax.random.fold_in)(key, length), rows)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def choose_block(rows: Settings, logits: Array, key: Array) -> Array:
    """Chooses the tokens of n positions of each row, by the settings of the row and without penalties.

    Args:
      rows: the settings of each row.
      logits: [B * n, V] float32.
      key: [B * n] random keys, of each position.

    Returns:
      [B * n] int32.
    """
    count = logits.shape[0] // rows.sampled.shape[0]
    return _token(logits, lambda: key, jax.tree.map(lambda each: jnp.repeat(each, count), rows))


def _token(logits: Array, keys: Callable[[], Array], rows: Settings) -> Array:
    """Chooses a token for each row, [B] int32, from logits [B, V] and random keys [B] of positions."""
    # [B]
    best = Greedy()(logits, None)

    def draw() -> Array:
        # [B]
        drawn = jax.vmap(jax.random.categorical)(keys(), _filtered(logits, rows)).astype(jnp.int32)
        return jnp.where(rows.sampled, drawn, best)

    # [B]: nothing is drawn for rows that all take the most probable token
    return jax.lax.cond(jnp.any(rows.sampled), draw, lambda: best)


def _filtered(logits: Array, rows: Settings) -> Array:
    """Applies temperatures and excludes tokens, as `Sample.filter` does: [B, V] float32, -inf for an excluded token."""
    # [B, V]
    logits = logits / rows.temperature[:, None]

    def ranked() -> Array:
        return most_probable(logits, rows.top_k[:, None], rows.top_p[:, None])

    few = rows.sampled & ((rows.top_k < logits.shape[-1]) | (rows.top_p < jnp.inf))
    # [B, V]: tokens are compared only if some row takes few of them.
    kept = jax.lax.cond(jnp.any(few), ranked, lambda: jnp.ones(logits.shape, bool))
    threshold = jnp.max(logits, axis=-1, keepdims=True) + rows.min_logit[:, None]
    return jnp.where(kept & (logits >= threshold), logits, -jnp.inf)
