"""Measures of a model's attention under the full cache, in memory linear in the text."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.errors import InputError
from kvjax.inputs import check_batch
from kvjax.models.model import Model
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array


def sparsity(
    model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None, threshold: float = 0.01
) -> np.ndarray:
    """Share of attention that is below `threshold` of its row's maximum (H2O, arXiv:2306.14048, section 3, Fig. 2 a).

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      lengths: [B] real tokens of each row; None = all T.
      threshold: a fraction of the largest probability of the same query.

    Returns:
      [L, B, H] float32 in [0, 1]: the share of all pairs of a query and a token that it sees (itself and those before)
      whose probability is smaller.

    Raises:
      InputError: tokens or lengths that do not fit the model, or a threshold outside (0, 1].
    """
    threshold = _fraction("threshold", threshold)
    counts = over_tiles(model, tokens, lengths, _count_kept, lambda *shape: (), jnp.float32(threshold))
    kept, seen = (count.astype(np.float64).sum(axis=-1) for count in counts.queries)
    # [L, B, H] and [L, B, K]; under the full cache all heads see the same tokens.
    return np.asarray(1 - kept / seen[:, :, :1], np.float32)


def _count_kept(carry: PyTree, attention: tuple[Rows], threshold: Array) -> tuple[PyTree, tuple[Array, Array]]:
    """Keys at or above the threshold, [B, K, G, n], and keys that are seen, [B, K, 1, n]; 0 for padding."""
    (rows,) = attention
    top = jnp.max(rows.probability, axis=-1, keepdims=True)
    kept = rows.seen & (rows.probability >= threshold * top)
    return carry, (_count(kept), _count(rows.seen))


def keys_for_mass(
    model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None, share: float = 0.9
) -> np.ndarray:
    """The number of keys, the largest first, that hold `share` of a query's attention (InfiniGen, 2406.19707, Fig. 5).

    Args:
      model: see `sparsity`.
      tokens: see `sparsity`.
      lengths: see `sparsity`.
      share: a fraction of each query's attention, in (0, 1].

    Returns:
      [L, B, H, T] int32: entry t is of query t, between 1 and t + 1; 0 past a row's end.

    Raises:
      InputError: tokens or lengths that do not fit the model, or a share outside (0, 1].
    """
    share = _fraction("share", share)
    return over_tiles(model, tokens, lengths, _keys_needed, lambda *shape: (), jnp.float32(share)).queries


def _keys_needed(carry: PyTree, attention: tuple[Rows], share: Array) -> tuple[PyTree, Array]:
    (rows,) = attention
    held = jnp.cumsum(jnp.sort(rows.probability, axis=-1, descending=True), axis=-1)
    # A row may add up to a little less than 1; all tokens that the query sees are always enough.
    return carry, jnp.minimum(_count(held < share) + 1, _count(rows.seen))


class AccumulatedAttention(NamedTuple):
    """The result of `accumulated_attention`.

    Attributes:
      mass: [L, B, H, T] float32 attention that each token received from all queries, the largest first; 0 past a row's
        end. Each row adds up to its number of tokens.
      exponent: [L, B, H] float32 a of the power law mass ~ rank^-a, by least squares over the logarithms of all
        tokens' masses and ranks (1, 2, ...); NaN for a row of one token.
    """

    mass: np.ndarray
    exponent: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def accumulated_attention(model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None) -> AccumulatedAttention:
    """Computes the sorted accumulated attention of each layer and head: a few heavy hitters (H2O, section 3, Fig. 2 b).

    Args:
      model: see `sparsity`.
      tokens: see `sparsity`.
      lengths: see `sparsity`.

    Raises:
      InputError: tokens or lengths that do not fit the model.
    """
    run = over_tiles(model, tokens, lengths, _add_mass, lambda *shape: jnp.zeros(shape, jnp.float32))
    mass = -np.sort(-run.carried, axis=-1)
    exponent = np.full(mass.shape[:3], np.nan, np.float32)
    for row, length in enumerate(run.lengths):
        if length > 1:
            x = np.log(np.arange(1, length + 1))
            x -= x.mean()
            # [L, H, T]; a probability may underflow to 0
            y = np.log(np.maximum(mass[:, row, :, :length], np.finfo(np.float32).tiny).astype(np.float64))
            exponent[:, row] = -(y @ x) / (x @ x)
    return AccumulatedAttention(mass, exponent)


def _add_mass(carry: Array, attention: tuple[Rows]) -> tuple[Array, PyTree]:
    (rows,) = attention
    return carry + jnp.sum(rows.probability, axis=-2), ()


class AttentionStd(NamedTuple):
    """The result of `attention_std`.

    Attributes:
      positions: [P] int32 tokens that are followed.
      trajectory: [L, B, H, P, T] float32: entry t is the standard deviation of the attention that the token received
        from the queries up to t; NaN before the token's own position and past a row's end.
      final: [L, B, H, T] float32 standard deviation for every token, over all queries; NaN past a row's end.
    """

    positions: np.ndarray
    trajectory: np.ndarray
    final: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def attention_std(
    model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None, positions: Any = None
) -> AttentionStd:
    """Measures how much the attention that a token receives varies between queries (RoCo, arXiv:2402.06262, Fig. 3).

    std = sqrt(Q / N - (S / N)^2) over the N queries so far, the token's own included, as in RoCo's scope, which takes
    the mean over the query heads that share a KV head; here it is of each head.

    Args:
      model: see `sparsity`.
      tokens: see `sparsity`.
      lengths: see `sparsity`.
      positions: [P] tokens to follow; None = eight (or fewer), evenly spread over the longest row. The result has P
        numbers per layer, head and query.

    Raises:
      InputError: tokens or lengths that do not fit the model, or positions outside the text.
    """
    width = check_batch(model.config, tokens, lengths, new_tokens=0).tokens.shape[1]
    followed = np.unique(np.linspace(0, width - 1, 9, dtype=np.int32)[:8] if positions is None else positions)
    if not followed.size or not np.issubdtype(followed.dtype, np.integer) or followed[0] < 0 or followed[-1] >= width:
        raise InputError(f"positions must be whole numbers from 0 to {width - 1}; got {positions!r}.")

    def start(*shape: int) -> tuple[Array, Array, Array]:
        return (jnp.zeros(shape, jnp.float32),) * 3

    followed = followed.astype(np.int32)
    run = over_tiles(model, tokens, lengths, _follow, start, jnp.asarray(followed))
    count, _, squares = run.carried
    ended = np.arange(width) >= run.lengths[:, None]
    return AttentionStd(
        followed,
        np.where(ended[:, None, None], np.float32(np.nan), run.queries),
        np.where(ended[:, None], np.float32(np.nan), np.sqrt(np.maximum(squares, 0) / np.maximum(count, 1))),
    )


def _follow(carry: tuple[Array, Array, Array], attention: tuple[Rows], followed: Array) -> tuple[PyTree, Array]:
    """Count, mean and squared deviations of all tokens, and the deviation of the followed ones after each query.

    Query by query (Welford's recurrence): a sink's attention is near 1 and hardly varies, so that a difference of
    float32 sums of squares would lose its deviation.
    """
    (rows,) = attention

    def add(carry, query):
        # [B, K, G, T], but seen [B, K, 1, T]
        (count, mean, squares), (probability, seen) = carry, query
        count = count + seen
        change = seen * (probability - mean)
        mean = mean + change / jnp.maximum(count, 1)
        squares = squares + change * (probability - mean)
        n = count[..., followed]
        std = jnp.sqrt(jnp.maximum(squares[..., followed], 0) / jnp.maximum(n, 1))
        return (count, mean, squares), jnp.where(n > 0, std, jnp.nan)

    queries = (jnp.moveaxis(each, -2, 0) for each in (rows.probability, rows.seen.astype(jnp.float32)))
    carry, std = jax.lax.scan(add, carry, tuple(queries))
    # [n, B, K, G, P] -> [B, K, G, P, n]
    return carry, jnp.moveaxis(std, 0, -1)


def _count(marks: Array) -> Array:
    return jnp.sum(marks, axis=-1, dtype=jnp.int32)


def _fraction(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InputError(f"{name} must be a number above 0 and at most 1; got {value!r}.")
    return float(value)
