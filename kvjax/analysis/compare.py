"""Measures of a policy against the full cache, query by query, in memory linear in the text.

Both runs see the same text: the prompt goes in at once, the rest token by token. A query is measured before what it
sees is evicted.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.rows import Rows, over_steps
from kvjax.cache import LayerKV
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.models.model import Model
from kvjax.policies.base import Importance, Policy, evict, keep
from kvjax.policies.window import full
from kvjax.selection import largest

Array = jax.Array
#: The full cache, counting what its tokens receive.
COUNTING = evict(importance=Importance(frozenset({"mass", "count"}), keep.score), budget=None, name="full")


def attention_cosine(
    model: Model, tokens: Any, policy: Policy, *, prompt_length: Any, lengths: Any = None
) -> np.ndarray:
    """Cosine similarity of a policy's attention rows with the full cache's (InfiniGen, arXiv:2406.19707, Fig. 4).

    A row holds the weight of every token so far; what a policy has evicted has weight 0 there.

    Args:
      tokens: [B, T] or [T] int, rows padded at the end; lengths: [B] real tokens of each row, None = all T.
      policy: what the cache keeps; `full()` gives 1.
      prompt_length: int or [B]: so many tokens of each row are its prompt; the queries after it are measured.

    Returns:
      [L, B, H, T] float32 in [0, 1]: entry t is of query t; NaN in the prompt and past a row's end.

    Raises:
      InputError: tokens, lengths or a prompt_length that do not fit, or leave no query to measure.
      PolicyError: a policy or budget that cannot work.
    """
    return over_steps(
        model, tokens, (full(), policy), _cosine, lambda *_: (), prompt_length=prompt_length, lengths=lengths
    ).queries


def _cosine(carry: Any, attention: tuple[Rows, Rows]) -> tuple[Any, Array]:
    one, two = (rows.probability for rows in attention)
    squares = jnp.sum(jnp.square(one), axis=-1) * jnp.sum(jnp.square(two), axis=-1)
    dot = jnp.sum(one * two, axis=-1)
    return carry, dot / jnp.sqrt(jnp.where(squares > 0, squares, 1))


class MissRate(NamedTuple):
    """What `miss_rate` returns; both [L, B, H, T] float32 in [0, 1], NaN in the prompt and past a row's end.

    Attributes:
      tokens: of the `top` tokens to which the full cache's query pays most attention, the share that is gone.
      mass: the share of the full cache's attention that is on tokens that are gone.
    """

    tokens: np.ndarray
    mass: np.ndarray


def miss_rate(
    model: Model, tokens: Any, policy: Policy, *, prompt_length: Any, top: int, lengths: Any = None
) -> MissRate:
    """How much of what a query of the full cache attends to, a policy has evicted (or hidden) before that query.

    Args:
      tokens, policy, prompt_length, lengths: as in `attention_cosine`.
      top: how many tokens count as the most attended, of equal ones the newer; all where a query sees fewer.

    Raises:
      InputError, PolicyError: as `attention_cosine`; a `top` below 1.
    """
    check_count("top", top)
    run = over_steps(
        model, tokens, (full(), policy), _missed, lambda *_: (), jnp.int32(top), prompt_length=prompt_length,
        lengths=lengths,
    )  # fmt: skip
    return MissRate(*run.queries)


def _missed(carry: Any, attention: tuple[Rows, Rows], top: Array) -> tuple[Any, tuple[Array, Array]]:
    reference, own = attention
    heavy = _largest(reference.probability, reference.seen, top)
    tokens = _count(heavy & ~own.seen) / jnp.maximum(_count(heavy), 1)
    return carry, (tokens, jnp.sum(jnp.where(own.seen, 0, reference.probability), axis=-1))


def jaccard(
    model: Model,
    tokens: Any,
    policy: Policy,
    *,
    prompt_length: Any,
    top: int,
    importance: Literal["mass", "mean"] = "mass",
    lengths: Any = None,
) -> np.ndarray:
    """Jaccard similarity of a policy's top tokens with the full cache's (RoCo, arXiv:2402.06262, Fig. 2).

    Each run ranks what it sees by the attention it has paid it itself, this query included; a token that is evicted
    (or hidden) is forgotten. The similarity is the tokens in both sets over those in either.

    Args:
      tokens, policy, prompt_length, lengths: as in `attention_cosine`.
      top: tokens of each set, of equal ones the newer; all where there are fewer.
      importance: ``mass`` ranks by accumulated attention, ``mean`` by its mean over the queries that saw the token;
        of the mean over the query heads that share a KV head.

    Returns:
      [L, B, K, T] float32 in [0, 1]: entry t is after query t; NaN in the prompt and past a row's end.

    Raises:
      InputError, PolicyError: as `attention_cosine`; a `top` below 1 or an unknown importance.
    """
    check_count("top", top)
    if importance not in ("mass", "mean"):
        raise InputError(f"importance must be 'mass' or 'mean'; got {importance!r}.")
    return over_steps(
        model, tokens, (COUNTING, policy), _similarity, _after_prompt, jnp.int32(top), jnp.bool(importance == "mean"),
        prompt_length=prompt_length, lengths=lengths,
    ).queries  # fmt: skip


def _after_prompt(runs: tuple[LayerKV, ...], width: int) -> tuple[tuple[Array, Array], ...]:
    """Mass and count [B, K, 1, T] of every prompt token, in both runs: policies evict after the prompt has attended."""
    # The full cache's slots are in the order of the text, and as many as its tokens.
    stats = runs[0].stats
    return ((stats["mass"][:, :, None], stats["count"][:, :, None]),) * len(runs)


def _similarity(carry: Any, attention: tuple[Rows, Rows], top: Array, mean: Array) -> tuple[Any, Array]:
    sums, sets = [], []
    for (mass, count), rows in zip(carry, attention, strict=True):
        # [B, K, 1, T]: of a single query
        seen = rows.seen[..., 0, :]
        mass = jnp.where(seen, mass + jnp.mean(rows.probability[..., 0, :], axis=2, keepdims=True), 0)
        count = jnp.where(seen, count + 1, 0)
        sums.append((mass, count))
        sets.append(_largest(jnp.where(mean, mass / jnp.maximum(count, 1), mass), seen, top))
    either = _count(sets[0] | sets[1])
    return tuple(sums), (_count(sets[0] & sets[1]) / jnp.maximum(either, 1))[..., None]


class Retained(NamedTuple):
    """What `retained` returns: which tokens were there for which queries, as one number a token.

    Query t saw token j where j <= t <= last_seen[j]: a map of any size can be drawn from that.

    Attributes:
      last_seen: [L, B, K, T] int32 position of the newest query that saw the token, at least the prompt's last for the
        prompt's own; -1 past a row's end. What a model's own sliding window leaves behind is not seen; a policy that
        hides tokens may show one again, and what lies between is not told.
      lengths, prompt: [B] int32 tokens of each row, and of its prompt.
    """

    last_seen: np.ndarray
    lengths: np.ndarray
    prompt: np.ndarray


def retained(model: Model, tokens: Any, policy: Policy, *, prompt_length: Any, lengths: Any = None) -> Retained:
    """How long a policy keeps every token: a retained-position map in linear memory.

    Args:
      tokens, policy, prompt_length, lengths: as in `attention_cosine`.

    Raises:
      InputError, PolicyError: as `attention_cosine`.
    """

    def start(runs: tuple[LayerKV, ...], width: int) -> Array:
        return jnp.full((*runs[0].position.shape[:2], 1, width), -1, jnp.int32)

    run = over_steps(model, tokens, (policy,), _seen_by, start, prompt_length=prompt_length, lengths=lengths)
    last = run.prompt[:, None] - 1
    # Nothing is evicted before the prompt has attended.
    in_prompt = np.where(np.arange(run.carried.shape[-1]) <= last, last, -1)
    return Retained(np.maximum(run.carried, in_prompt[:, None]).astype(np.int32), run.lengths, run.prompt)


def _seen_by(carry: Array, attention: tuple[Rows]) -> tuple[Array, Any]:
    (rows,) = attention
    # [B, 1, 1, 1]: a single query
    at = rows.query[:, :, None, None]
    return jnp.where(rows.seen[..., 0, :], at, carry), ()


def _largest(score: Array, seen: Array, count: Array) -> Array:
    """[..., T] bool: the `count` largest of the tokens that are seen."""
    position = jnp.arange(score.shape[-1], dtype=jnp.int32)
    return largest(score, jnp.broadcast_to(jnp.where(seen, position, -1), score.shape), count)


def _count(marks: Array) -> Array:
    return jnp.sum(marks, axis=-1, dtype=jnp.float32)
