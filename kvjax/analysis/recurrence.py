"""Tokens that receive attention again after a long time, and whether a policy still holds them by then."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.rows import Rows, in_text_order
from kvjax.analysis.scan import over_steps
from kvjax.arguments import number_argument
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.policies.window import full
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array
NEVER = jnp.iinfo(jnp.int32).max  # the last attention of a token that is not counted


class Recurrences(NamedTuple):
    """The result of `recurrences`; all [L, B, K, T] float32, NaN in the prompt and past a row's end.

    Attributes:
      tokens: the number of tokens that recur at each query.
      lost: the number of these that the policy has evicted, or hides.
      mass: the attention of the full cache to the tokens that recur, the mean over the query heads of a KV head.
      mass_lost: the same to the lost ones.
    """

    tokens: np.ndarray
    lost: np.ndarray
    mass: np.ndarray
    mass_lost: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def recurrences(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    gap: int,
    threshold: float = 0.01,
    lengths: ArrayLike | None = None,
) -> Recurrences:
    """Counts tokens that recur, and those of them that a policy has evicted (LazyEviction, arXiv:2506.15969).

    A query attends to a token if one of the query heads that share a KV head gives it at least `threshold`, under the
    full cache. A token after the prompt recurs at a query that attends to it, if no query of the `gap` positions before
    did. A token counts as attended at its own position.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      policy: what the cache keeps, or a `CacheSpec`.
      prompt_length: int or [B], the number of tokens of each row's prompt. The queries after it are measured.
      gap: the number of positions, at least 1.
      threshold: the smallest attention that counts, in (0, 1]; the paper has 0.0001 to 0.0005.
      lengths: [B] real tokens of each row; None = all T.

    Raises:
      InputError: a gap or a threshold that is not valid; tokens, lengths or a prompt_length that do not fit, or leave
        no query to measure.
      PolicyError: a policy or budget that cannot work.
    """
    check_count("gap", gap)
    threshold = number_argument("threshold", threshold, minimum=1e-9, maximum=1.0, error=InputError)
    run = over_steps(
        model, tokens, (full(), policy), _recur, _birth, jnp.int32(gap), jnp.float32(threshold),
        prompt_length=prompt_length, lengths=lengths,
    )  # fmt: skip
    return Recurrences(*run.queries)


def _birth(runs: tuple[Layer, ...], batch: int, kv_heads: int, group: int, width: int) -> Array:
    """Returns the last query that attended to each token, [B, K, 1, T]: its own position; `NEVER` in the prompt."""
    position = runs[0].position
    # [B, K, T]
    prompt = in_text_order(jnp.ones_like(position), position, width) > 0
    return jnp.where(prompt, NEVER, jnp.arange(width, dtype=jnp.int32))[:, :, None]


def _recur(
    last: Array, attention: tuple[Rows, Rows], gap: Array, threshold: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    reference, own = attention
    # [B, 1, 1, 1], of the single query
    at = reference.query[:, :, None, None]
    # [B, K, G, T]
    paid = reference.probability[..., 0, :]
    # [B, K, 1, T]
    attended = jnp.any(paid >= threshold, axis=2, keepdims=True) & (last != NEVER)
    again = attended & (at - last > gap)
    lost = again & ~own.seen[..., 0, :]
    mean = jnp.mean(paid, axis=2, keepdims=True)

    def total(marks: Array, of: PyTree = 1.0) -> Array:
        # [B, K, 1, 1]
        return jnp.sum(jnp.where(marks, of, 0.0), axis=-1, keepdims=True, dtype=jnp.float32)

    return jnp.where(attended, at, last), (total(again), total(lost), total(again, mean), total(lost, mean))
