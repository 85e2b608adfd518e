"""Expected Attention: the attention that future queries are expected to pay (arXiv:2510.00636)."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, compress_or_evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, KeyFrame, Stats, View
from kvjax.policies.row_memory import QueryMoments, RowMemory
from kvjax.policies.window import First

Array = jax.Array
FAINT = -60.0  # logarithm of the attention below which it is not represented by its amount


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Importance):
    """Ranks a slot by the attention that later queries are expected to pay (arXiv:2510.00636, eq. 7).

    Queries before rotation are taken as normal, with the mean μ and the covariance Σ of those that were seen. Rotated
    by the mean rotation over the next `future` positions, a slot's expected logit is s·μ'·k + s²·kᵀΣ'k / 2; attention
    is its softmax over the slots after the first `sinks` positions, averaged over the query heads that share a KV head.

    An attention below e⁻⁶⁰ is represented by its logarithm plus 60, which is negative: as an amount, float32 would
    round much of it to 0, and its order would be lost.

    Attributes:
      future: the number of positions.
      sinks: the number of first positions whose queries and slots do not count.
      covariance: whether Σ counts, for which D² float32 numbers are kept for each query head.
      value_norm: whether the attention is multiplied by ‖v‖₂.
      epsilon: added to the attention before that.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "future", count_argument("future", self.future, minimum=1))
        object.__setattr__(self, "sinks", count_argument("sinks", self.sinks))
        object.__setattr__(self, "epsilon", number_argument("epsilon", self.epsilon, minimum=0.0, maximum=1.0))
        for field in ("covariance", "value_norm"):
            if not isinstance(getattr(self, field), bool):
                raise PolicyError(f"{field}={getattr(self, field)!r} is not valid; give True or False.")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"key", "value"} if self.value_norm else {"key"})

    @property
    def _moments(self) -> QueryMoments:
        return QueryMoments(self.sinks, self.covariance)

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (self._moments,)

    def score(self, stats: Stats, view: View) -> Array:
        share, factor = self._expected(view)
        if self.epsilon:
            return (jnp.exp(share) + self.epsilon) * factor
        log = share + jnp.log(factor)
        return jnp.where(log > FAINT, jnp.exp(log), jnp.maximum(log - FAINT, -jnp.finfo(jnp.float32).max))

    def amounts(self, stats: Stats, view: View) -> Array:
        share, factor = self._expected(view)
        return (jnp.exp(share) + self.epsilon) * factor

    def _expected(self, view: View) -> tuple[Array, Array]:
        """Returns the logarithm of the expected attention, and its factor, both [B, K, S] float32."""
        memory = view.memory[self._moments.name]
        key = view.rotated().astype(jnp.float32)
        exact = jax.lax.Precision.HIGHEST

        def turned(x: Array) -> Array:
            """Rotates the last axis of [B, K, ...] by the mean rotation over the next positions."""
            return mean_rotation(x, view.newest + 1, self.future, view.frame)

        # [B, K, G, S]
        logit = view.scale * jnp.einsum("bkgd,bksd->bkgs", turned(memory["mean"]), key, precision=exact)
        if self.covariance:
            count = jnp.maximum(memory["count"], 1.0)[..., None, None]
            # [B, K, G, D, D]: R Σ Rᵀ, one axis after the other
            spread = turned(jnp.swapaxes(turned(memory["scatter"] / count), 3, 4))
            paired = jnp.einsum("bkgde,bkse->bkgsd", spread, key, precision=exact)
            logit += 0.5 * view.scale**2 * jnp.sum(paired * key[:, :, None], axis=4)
        counted = (view.live & (view.position >= self.sinks))[:, :, None]
        # [B, K, S]: the logarithm of the mean over G of a softmax over slots
        logit = jnp.where(counted, logit, -jnp.inf)
        share = logit - jax.nn.logsumexp(logit, axis=3, keepdims=True)
        log = jax.nn.logsumexp(jnp.where(counted, share, -jnp.inf), axis=2) - math.log(logit.shape[2])
        factor = jnp.ones_like(log)
        if self.value_norm:
            factor = jnp.sqrt(jnp.sum(jnp.square(view.value.astype(jnp.float32)), axis=3))
        return log, factor


def mean_rotation(x: Array, start: Array, number: int, frame: KeyFrame | None) -> Array:
    """Returns vectors rotated by the mean of the rotations by `number` positions from `start` on.

    Args:
      x: [B, K, ..., D] float32.
      start: [B] int32.
      number: of positions.
      frame: has the rotary embedding; without one, x is returned.
    """
    if frame is None or frame.rope is None or frame.frequencies is None:
        return x
    rope = frame.rope
    # [B or 1, dim / 2]: of the offsets, and of the start
    offset = jnp.arange(number, dtype=jnp.float32)[:, None, None] * frame.frequencies
    mean_cos, mean_sin = jnp.mean(jnp.cos(offset), axis=0), jnp.mean(jnp.sin(offset), axis=0)
    angle = start[:, None].astype(jnp.float32) * frame.frequencies
    # [B, dim / 2]: the mean of e^(iωt) is that of the offsets times e^(iω·start)
    cos = (jnp.cos(angle) * mean_cos - jnp.sin(angle) * mean_sin) * rope.attention_factor
    sin = (jnp.sin(angle) * mean_cos + jnp.cos(angle) * mean_sin) * rope.attention_factor
    cos, sin = (each.reshape(each.shape[0], *(1,) * (x.ndim - 2), each.shape[1]) for each in (cos, sin))
    half = rope.dim // 2
    first, second, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@factory
def expected_attention(
    budget: BudgetLike,
    *,
    every: int | None = None,
    future: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
    positions: str = "original",
) -> Evict:
    """Keeps the slots that future queries are expected to attend to (Expected Attention, arXiv:2510.00636).

    Importance is the attention that queries of the next `future` positions are expected to pay, times ‖v‖₂; see
    `ExpectedAttention`. The first `sinks` positions are protected.

    Args:
      budget: slots per KV head; see `evict`.
      every: see `lagkv`.
      future: the number of positions.
      sinks: the number of first positions that are protected, and whose queries do not count.
      covariance: whether the covariance of queries counts, for which D² float32 numbers are kept per query head.
      value_norm: whether the attention is multiplied by ‖v‖₂.
      epsilon: added to the attention before that, 0 to 1.
      positions: see `evict`.

    The paper weighs attention by the norm of the value's contribution to the output; its code, as this, by ‖v‖₂.
    kvpress takes moments of the last 256 hidden states while decoding; here they are of all queries.
    """
    return compress_or_evict(
        every,
        importance=ExpectedAttention(future, sinks, covariance, value_norm, epsilon),
        scope=First(sinks),
        budget=budget,
        positions=positions,
        name="expected_attention",
    )
