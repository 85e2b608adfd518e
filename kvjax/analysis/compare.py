"""Measures of a policy against the full cache, query by query, in memory linear in the text.

Both runs see the same text: the prompt goes in at once, the rest token by token. A query is measured before the
eviction that follows it.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.rows import Rows, in_text_order
from kvjax.analysis.scan import over_steps
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.models.model import Model
from kvjax.numerics.top_k import largest
from kvjax.policies.base import Evict, Keep, Policy
from kvjax.policies.window import full
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Counted(Keep):
    """Evicts nothing, and has attention report what each token receives."""

    needs = frozenset({"mass", "count"})


#: The full cache, with the attention that its tokens receive.
COUNTING = Evict(importance=Counted(), budget=None, name="full")


def attention_cosine(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    lengths: ArrayLike | None = None,
) -> np.ndarray:
    """Cosine similarity of a policy's attention rows with the full cache's (InfiniGen, arXiv:2406.19707, Fig. 4).

    A row holds the weight of every token so far, 0 for a token that the policy has evicted.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      policy: what the cache keeps, or a `CacheSpec`; `full()` gives 1.
      prompt_length: int or [B], tokens of each row's prompt; the queries after it are measured.
      lengths: [B] real tokens of each row; None = all T.

    Returns:
      [L, B, H, T] float32 in [0, 1]: entry t is of query t; NaN in the prompt and past a row's end.

    Raises:
      InputError: tokens, lengths or a prompt_length that do not fit, or leave no query to measure.
      PolicyError: a policy or budget that cannot work.
    """
    return over_steps(
        model, tokens, (full(), policy), _cosine, lambda *_: (), prompt_length=prompt_length, lengths=lengths
    ).queries


def _cosine(carry: PyTree, attention: tuple[Rows, Rows]) -> tuple[PyTree, Array]:
    # [B, K, G, 1, T]
    one, two = (rows.probability for rows in attention)
    # [B, K, G, 1]
    squares = jnp.sum(jnp.square(one), axis=-1) * jnp.sum(jnp.square(two), axis=-1)
    dot = jnp.sum(one * two, axis=-1)
    return carry, dot / jnp.sqrt(jnp.where(squares > 0, squares, 1))


class MissRate(NamedTuple):
    """The result of `miss_rate`; both [L, B, H, T] float32 in [0, 1], NaN in the prompt and past a row's end.

    Attributes:
      tokens: the share of the `top` tokens to which the full cache's query pays most attention that are not seen.
      mass: the share of the full cache's attention that is on tokens that are not seen.
    """

    tokens: np.ndarray
    mass: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def miss_rate(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    top: int,
    lengths: ArrayLike | None = None,
) -> MissRate:
    """Measures how much of the full cache's attention goes to slots that a policy has evicted, or hides.

    Args:
      model: see `attention_cosine`.
      tokens: see `attention_cosine`.
      policy: see `attention_cosine`.
      prompt_length: see `attention_cosine`.
      top: the number of tokens that count as the most attended, of equal ones the newer; all where a query sees fewer.
      lengths: see `attention_cosine`.

    Raises:
      InputError: a `top` below 1, and as `attention_cosine`.
      PolicyError: as `attention_cosine`.
    """
    check_count("top", top)
    run = over_steps(
        model, tokens, (full(), policy), _missed, lambda *_: (), jnp.int32(top), prompt_length=prompt_length,
        lengths=lengths,
    )  # fmt: skip
    return MissRate(*run.queries)


def _missed(carry: PyTree, attention: tuple[Rows, Rows], top: Array) -> tuple[PyTree, tuple[Array, Array]]:
    reference, own = attention
    # [B, K, G, 1, T]
    heavy = _largest(reference.probability, reference.seen, top)
    # [B, K, G, 1]
    tokens = _count(heavy & ~own.seen) / jnp.maximum(_count(heavy), 1)
    return carry, (tokens, jnp.sum(jnp.where(own.seen, 0, reference.probability), axis=-1))


def jaccard(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    top: int,
    importance: Literal["mass", "mean"] = "mass",
    lengths: ArrayLike | None = None,
) -> np.ndarray:
    """Jaccard similarity of a policy's top tokens with the full cache's (RoCo, arXiv:2402.06262, Fig. 2).

    Each run ranks the tokens that it sees by the attention that its own queries have paid them, this query included; a
    token that is evicted or hidden loses what it had. The similarity is the number of tokens in both sets divided by
    the number in either.

    Args:
      model: see `attention_cosine`.
      tokens: see `attention_cosine`.
      policy: see `attention_cosine`.
      prompt_length: see `attention_cosine`.
      top: the number of tokens of each set, of equal ones the newer; all where there are fewer.
      importance: ``mass`` ranks by accumulated attention, ``mean`` by its mean over the queries that saw the token;
        both of the mean over the query heads that share a KV head.
      lengths: see `attention_cosine`.

    Returns:
      [L, B, K, T] float32 in [0, 1]: entry t is after query t; NaN in the prompt and past a row's end.

    Raises:
      InputError: a `top` below 1 or an unknown importance, and as `attention_cosine`.
      PolicyError: as `attention_cosine`.
    """
    check_count("top", top)
    if importance not in ("mass", "mean"):
        raise InputError(f"importance must be 'mass' or 'mean'; got {importance!r}.")
    return over_steps(
        model, tokens, (COUNTING, policy), _similarity, _after_prompt, jnp.int32(top), jnp.bool(importance == "mean"),
        prompt_length=prompt_length, lengths=lengths,
    ).queries  # fmt: skip


def _after_prompt(runs: tuple[Layer, ...], *shape: int) -> tuple[tuple[Array, Array], ...]:
    """Mass and count [B, K, 1, T] of every token of the prompt, for both runs."""
    # Policies evict after the prompt has attended, so that all have seen the same.
    counting = runs[0]
    mass, count = (
        in_text_order(counting.stats[name], counting.position, shape[-1])[:, :, None] for name in ("mass", "count")
    )
    return ((mass, count),) * len(runs)


def _similarity(carry: PyTree, attention: tuple[Rows, Rows], top: Array, mean: Array) -> tuple[PyTree, Array]:
    sums, sets = [], []
    for (mass, count), rows in zip(carry, attention, strict=True):
        # [B, K, 1, T], of the single query
        seen = rows.seen[..., 0, :]
        mass = jnp.where(seen, mass + jnp.mean(rows.probability[..., 0, :], axis=2, keepdims=True), 0)
        count = jnp.where(seen, count + 1, 0)
        sums.append((mass, count))
        sets.append(_largest(jnp.where(mean, mass / jnp.maximum(count, 1), mass), seen, top))
    # [B, K, 1]
    either = _count(sets[0] | sets[1])
    return tuple(sums), (_count(sets[0] & sets[1]) / jnp.maximum(either, 1))[..., None]


class Retained(NamedTuple):
    """The result of `retained`: for each token the newest query that saw it.

    Query t saw token j where j <= t <= last_seen[j], from which a map of any size can be drawn. A token that a
    selection hides for a while and then shows again counts as seen in between.

    Attributes:
      last_seen: [L, B, K, T] int32 position of the newest query that saw the token, for tokens of the prompt at least
        the prompt's last position; -1 past a row's end. A token outside the model's own sliding window is not seen.
      lengths: [B] int32 tokens of each row.
      prompt: [B] int32 tokens of each row's prompt.
    """

    last_seen: np.ndarray
    lengths: np.ndarray
    prompt: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def retained(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    lengths: ArrayLike | None = None,
) -> Retained:
    """Measures how long a policy keeps every token: a map of retained positions in linear memory.

    Args:
      model: see `attention_cosine`.
      tokens: see `attention_cosine`.
      policy: see `attention_cosine`.
      prompt_length: see `attention_cosine`.
      lengths: see `attention_cosine`.

    Raises:
      InputError: as `attention_cosine`.
      PolicyError: as `attention_cosine`.
    """

    def start(runs: tuple[Layer, ...], batch: int, kv_heads: int, group: int, width: int) -> Array:
        return jnp.full((batch, kv_heads, 1, width), -1, jnp.int32)

    run = over_steps(model, tokens, (policy,), _seen_by, start, prompt_length=prompt_length, lengths=lengths)
    # [B, 1]
    last = run.prompt[:, None] - 1
    # [B, T]; nothing is evicted before the prompt has attended
    in_prompt = np.where(np.arange(run.carried.shape[-1]) <= last, last, -1)
    return Retained(np.maximum(run.carried, in_prompt[:, None]).astype(np.int32), run.lengths, run.prompt)


def _seen_by(carry: Array, attention: tuple[Rows]) -> tuple[Array, PyTree]:
    (rows,) = attention
    # [B, 1, 1, 1], of the single query
    at = rows.query[:, :, None, None]
    return jnp.where(rows.seen[..., 0, :], at, carry), ()


def _largest(score: Array, seen: Array, count: Array) -> Array:
    """[..., T] bool: the `count` largest scores of the tokens that are seen."""
    position = jnp.arange(score.shape[-1], dtype=jnp.int32)
    return largest(score, jnp.broadcast_to(jnp.where(seen, position, -1), score.shape), count)


def _count(marks: Array) -> Array:
    return jnp.sum(marks, axis=-1, dtype=jnp.float32)
