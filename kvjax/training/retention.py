"""The slots that learned retention keeps for all queries of a text, and attention whose gradients reach scores.

The score of a token does not change, so the live slots of a step are those of the best ranks so far. Training therefore
needs no scan over tokens.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import choice_argument, count_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict
from kvjax.policies.gates import Gate
from kvjax.policies.learned import LARGEST, learned

Array = jax.Array
RELAXATIONS = ("st", "soft")
#: Logits of evicted slots are clipped to the largest visible logit plus this, so that squares of sums stay above 0.
FARTHEST = 30.0
SMALLEST = -1e30  # the logit of a slot that is not seen


@dataclasses.dataclass(frozen=True)
class Retention:
    """The slots that a policy `learned` keeps.

    Attributes:
      slots: b, slots per KV head.
      recent: the number of newest positions that are protected.
      sinks: the number of first positions that are protected.
      threshold: slots of lower scores are evicted even if the head is within its budget; None = no threshold.
      every: the number of slots that are evicted at once.
      prompt: the number of tokens of the prompt, for a compressor, which evicts once, after these tokens; None = evicts
        after every token.

    Raises:
      PolicyError: an attribute that is not valid, more protected positions than slots, or `every` > 1 with a threshold
        or a compressor.
    """

    slots: int
    recent: int = 0
    sinks: int = 0
    threshold: float | None = None
    every: int = 1
    prompt: int | None = None

    def __post_init__(self) -> None:
        for field, minimum in (("slots", 1), ("recent", 0), ("sinks", 0), ("every", 1)):
            object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))
        if self.threshold is not None:
            found = number_argument("threshold", self.threshold, minimum=-LARGEST, maximum=LARGEST)
            object.__setattr__(self, "threshold", found)
            if self.every > 1:
                raise PolicyError(
                    f"every={self.every} is not valid with threshold={self.threshold}: heads would evict at "
                    "different steps; leave out one of the two."
                )
        if self.prompt is not None:
            object.__setattr__(self, "prompt", count_argument("prompt", self.prompt, minimum=1))
            if self.every > 1:
                raise PolicyError(
                    f"every={self.every} is not valid with prompt={self.prompt}: a compressor evicts once, when the "
                    "prompt ends; leave out one of the two."
                )
        if self.recent + self.sinks > self.slots:
            raise PolicyError(
                f"recent={self.recent} and sinks={self.sinks} protect more than slots={self.slots}; lower them."
            )

    def policy(self, gate: Gate, *, age: bool = False) -> Evict:
        """Returns the policy that keeps these slots token by token.

        Args:
          gate: scores each token.
          age: see `kvjax.policies.learned`.
        """
        return learned(
            self.slots, gate=gate, every=self.every if self.prompt is None else None, recent=self.recent,
            threshold=self.threshold, age=age, sinks=self.sinks,
        )  # fmt: skip


class _Ranks(NamedTuple):
    """The ranks of slots for each query.

    Attributes:
      competes: [n, n] bool, query × slot: whether the slot existed at the last eviction and was not protected.
      rank: [..., n, n] int32, the number of competing slots that are better; of equal scores, later tokens are better.
      room: [n] int, the number of slots that compete and stay.
      number: [n] int, the number of slots that compete.
    """

    competes: np.ndarray
    rank: Array
    room: np.ndarray
    number: np.ndarray


def visible(score: Array, retention: Retention) -> Array:
    """Returns the slots that each query sees when eviction runs token by token, [..., n, n] bool, query × slot.

    Query t sees its own token, and the tokens before it that have not been evicted.

    Args:
      score: [..., n], the scores of the tokens of a text.
      retention: the slots that stay.
    """
    n = score.shape[-1]
    causal = np.tri(n, dtype=bool)
    ranks = _ranks(score, retention)
    kept = ranks.rank < ranks.room[:, None]
    if retention.threshold is not None:
        kept &= (score >= retention.threshold)[..., None, :]
    return jnp.asarray(causal) & (~ranks.competes | kept)


def soft_gates(score: Array, retention: Retention, *, temperature: float | Array) -> Array:
    """Returns a relaxation of `visible`, [..., n, n] float32: σ((score - θ) / temperature).

    For each query, θ is the midpoint between the lowest kept and the highest evicted score, a constant to the gradient.
    If no unprotected slot is kept, θ is the largest score + 1. θ is never below the threshold. A gate is 1 for
    protected slots and where nothing is evicted, and 0 for later tokens.

    Args:
      score: [..., n] float32.
      retention: the slots that stay.
      temperature: greater than 0; a number or [] float32.
    """
    gates = jnp.exp(_log_gates(score, retention, temperature))
    return jnp.where(np.tri(score.shape[-1], dtype=bool), gates, 0.0)


def gated_weights(
    logits: Array,
    score: Array,
    retention: Retention,
    *,
    temperature: float | Array,
    relax: str = "st",
) -> Array:
    """Returns attention weights whose gradients reach the scores, [..., n, n] float32.

    Args:
      logits: [..., n, n] float32, query × slot.
      score: [..., n] float32, whose leading axes are broadcast against those of `logits`.
      retention: the slots that stay.
      temperature: the temperature of the gates; see `soft_gates`.
      relax: ``st`` (straight through): the weights are those of attention over `visible` slots, and the backward pass
        is that of soft gates; ``soft``: soft gates multiply the weights in both passes.

    Raises:
      PolicyError: an unknown `relax`.
    """
    choice_argument("relax", relax, RELAXATIONS)
    seen = np.tri(score.shape[-1], dtype=bool)
    log_gates = _log_gates(score, retention, temperature)
    if relax == "soft":
        return jax.nn.softmax(jnp.where(seen, logits + log_gates, SMALLEST), axis=-1)
    soft, hard = jnp.exp(log_gates), visible(score, retention)
    gates = hard.astype(jnp.float32) + jnp.where(seen, soft - jax.lax.stop_gradient(soft), 0.0)
    # Evicted slots carry gradients, so their exponentials must be finite, and that of a visible slot must not be 0.
    most, own = (jnp.max(jnp.where(mask, logits, -jnp.inf), axis=-1, keepdims=True) for mask in (seen, hard))
    largest = jax.lax.stop_gradient(jnp.minimum(most, own + FARTHEST))
    # [..., n, n]
    weights = gates * jnp.exp(jnp.where(seen, jnp.where(logits > largest, 0.0, logits - largest), SMALLEST))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def decayed_weights(logits: Array, score: Array) -> Array:
    """Returns attention weights that decay with a token's age (TRIM-KV, arXiv:2512.03324), [..., n, n] float32.

    The weights are the softmax of logit + age · score. The score is log β, and the age is the query's position less the
    token's.

    Args:
      logits: [..., n, n] float32, query × slot.
      score: [..., n] float32 of at most 0, whose leading axes are broadcast against those of `logits`.
    """
    n = score.shape[-1]
    seen = np.tri(n, dtype=bool)
    return jax.nn.softmax(jnp.where(seen, logits + ages(n) * score[..., None, :], SMALLEST), axis=-1)


def masked_weights(logits: Array, log_keep: Array, retention: Retention) -> Array:
    """Returns attention weights to tokens that each stay with some probability, [..., n, n] float32.

    The weights are the softmax of logit + log p, with p of the token, for slots that a threshold may have evicted
    before the query; see `may_evict`. The logits of other slots are unchanged (DMS, arXiv:2506.05345).

    Args:
      logits: [..., n, n] float32, query × slot.
      log_keep: [..., n] float32 of at most 0, log p, whose leading axes are broadcast against those of `logits`.
      retention: the protected positions.
    """
    n = log_keep.shape[-1]
    masked = logits + jnp.where(may_evict(n, retention), log_keep[..., None, :], 0.0)
    return jax.nn.softmax(jnp.where(np.tri(n, dtype=bool), masked, SMALLEST), axis=-1)


def may_evict(n: int, retention: Retention) -> np.ndarray:
    """Returns the slots that a threshold may have evicted before each query, [n, n] bool, query × slot.

    A slot is protected while it is among the newest `recent` after a step, so that query t sees the tokens from
    t - recent on.
    """
    at = np.arange(n)
    return (at >= retention.sinks) & (at <= _last_before(n, retention)[:, None] - retention.recent)


def _last_before(n: int, retention: Retention) -> np.ndarray:
    """Returns the newest token at the last eviction before each query, [n] int, with `every` = 1; -1 = there was none.

    Evictions follow every token, or the prompt.
    """
    at = np.arange(n)
    return at - 1 if retention.prompt is None else np.where(at >= retention.prompt, retention.prompt - 1, -1)


def ages(n: int) -> np.ndarray:
    """Returns the age of each token at each query, [n, n] float32, query × token; 0 for later tokens."""
    at = np.arange(n, dtype=np.float32)
    return np.maximum(at[:, None] - at, 0)


def _ranks(score: Array, retention: Retention) -> _Ranks:
    """See `_Ranks`."""
    n, recent, sinks = score.shape[-1], retention.recent, retention.sinks
    at = np.arange(n)
    # [n]: the last token before the last eviction that precedes each query; -1 = there was none
    before = _last_before(n, retention)
    if retention.threshold is None and retention.prompt is None:
        first = retention.slots + retention.every - 1
        before = np.where(before < first, -1, before - (before - first) % retention.every)
    last = before - recent
    competes = (at >= sinks) & (at <= last[:, None])
    guarded = np.minimum(recent, before + 1) + np.clip(last + 1, 0, sinks)
    # [..., n, n]: whether the first is better than the second
    one, two = score[..., :, None], score[..., None, :]
    better = ((one > two) | ((one == two) & (at[:, None] > at))) & (at >= sinks)[:, None]
    # [..., n + 1, n]: among the first tokens
    among = jnp.cumsum(better, axis=-2, dtype=jnp.int32)
    among = jnp.concatenate([jnp.zeros_like(among[..., :1, :]), among], axis=-2)
    rank = jnp.take(among, np.maximum(last + 1, 0), axis=-2)
    return _Ranks(competes, rank, np.maximum(retention.slots - guarded, 0), competes.sum(axis=1))


def _log_gates(score: Array, retention: Retention, temperature: float | Array) -> Array:
    """Returns the logarithms of `soft_gates` [..., n, n], and any numbers for later tokens."""
    ranks, fixed = _ranks(score, retention), jax.lax.stop_gradient(score)[..., None, :]

    def largest(mask: Array | np.ndarray) -> Array:
        """[..., n, 1], -inf where there is none."""
        return jnp.max(jnp.where(mask, fixed, -jnp.inf), axis=-1, keepdims=True)

    room = ranks.room[:, None]
    lowest, highest = (largest(ranks.competes & (ranks.rank == place)) for place in (room - 1, room))
    border = jnp.where(room > 0, (lowest + highest) / 2, largest(ranks.competes) + 1)
    full = ranks.number[:, None] > room
    border = jnp.where(full, border, -jnp.inf)
    gated = ranks.competes & full
    if retention.threshold is not None:
        border, gated = jnp.maximum(border, retention.threshold), ranks.competes
    # Slots that are not gated have no gradient; where the border is infinite, it must not enter the difference.
    margin = score[..., None, :] - jnp.where(gated, border, 0.0)
    return jnp.where(gated, jax.nn.log_sigmoid(margin / temperature), 0.0)
