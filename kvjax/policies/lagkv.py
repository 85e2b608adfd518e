"""LagKV: slots that stand out from the part of the text that follows them (arXiv:2504.04704)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.policies.base import Evict, compress_or_evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.slot_order import FirstSlots, by_slot_order, in_slot_order, slot_ranks

Array = jax.Array
SIDES = ("key", "value")


@dataclasses.dataclass(frozen=True)
class LagRelative(Importance):
    """Ranks a slot by its spread over features, relative to the next part of the text (arXiv:2504.04704, eq. 4).

    After the first `sinks` slots, slots in the order of their positions form parts of `lag`. Part i is normalised by
    the minimum and the maximum of each feature in part i + 1; a slot's standard deviation over features, as a softmax
    over its part, is added up for keys and values. Importance is the rank of the sum in its part, divided by `lag`; the
    last full part and the slots after it have importance 1. With fewer than two full parts, newer slots rank higher.

    Attributes:
      lag: the number of slots of a part.
      sinks: the number of slots before the first part.
    """

    lag: int
    sinks: int
    needs = frozenset()
    amount = False
    reads = frozenset(SIDES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lag", count_argument("lag", self.lag, minimum=1))
        object.__setattr__(self, "sinks", count_argument("sinks", self.sinks))

    def score(self, stats: Stats, view: View) -> Array:
        batch, kv_heads, size = view.position.shape
        # [B, K, S]
        order = in_slot_order(view.position)
        # [B, K, 1]
        live = jnp.sum(view.live, axis=2, keepdims=True, dtype=jnp.int32)
        parts = max(-(-(size - self.sinks) // self.lag), 1)
        # [B, K, P, lag]
        spread = sum(self._spread(by_slot_order(getattr(view, side), order), parts) for side in SIDES)
        # [B, K, P, lag]: of equal slots, the older ranks lower
        rank = jnp.argsort(jnp.argsort(spread, axis=3, stable=True), axis=3, stable=True)
        # [B, K, 1]
        full = jnp.maximum(live - self.sinks, 0) // self.lag
        # [1, 1, P * lag]
        part = (jnp.arange(parts * self.lag, dtype=jnp.int32) // self.lag)[None, None]
        relative = rank.reshape(batch, kv_heads, -1).astype(jnp.float32) / self.lag
        relative = jnp.where(part < full - 1, relative, 1.0)
        # [B, K, S], in the order of positions; sinks are protected by the scope
        relative = jnp.concatenate([jnp.ones((batch, kv_heads, self.sinks)), relative], axis=2)[:, :, :size]
        ranks = slot_ranks(view.position, order)
        found = jnp.take_along_axis(relative, ranks, axis=2)
        return jnp.where(full < 2, ranks.astype(jnp.float32), found)

    def _spread(self, x: Array, parts: int) -> Array:
        """Returns the softmax over each part of the standard deviation of its slots, [B, K, P, lag].

        Args:
          x: [B, K, S, D] keys or values in the order of positions.
          parts: P.
        """
        batch, kv_heads, size, dim = x.shape
        end = self.sinks + parts * self.lag
        padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, max(end - size, 0)), (0, 0)))
        # [B, K, P, lag, D]
        parted = padded[:, :, self.sinks : end].reshape(batch, kv_heads, parts, self.lag, dim)
        # [B, K, P, 1, D], of the part that follows; of the last part its own, which is not used
        following = jnp.concatenate([parted[:, :, 1:], parted[:, :, -1:]], axis=2)
        low, high = (f(following, axis=3, keepdims=True) for f in (jnp.min, jnp.max))
        width = high - low
        relative = jnp.where(width > 0, (parted - low) / jnp.where(width > 0, width, 1.0), 0.0)
        # [B, K, P, lag]
        return jax.nn.softmax(jnp.std(relative, axis=4, ddof=1), axis=3)


@factory
def lagkv(
    budget: BudgetLike, *, every: int | None = None, lag: int = 128, sinks: int = 4, positions: str = "original"
) -> Evict:
    """Keeps the slots that vary most over features, relative to the next part of the text (LagKV, arXiv:2504.04704).

    The text is divided into parts of `lag` slots, and each is normalized by the range of the part after it. In a part,
    slots whose keys and values vary most over features rank highest; see `LagRelative`. The first `sinks` slots are
    protected. Attention is not used.

    Args:
      budget: slots per KV head; see `evict`.
      every: None compresses the prompt once, when it ends, as the authors do; a number evicts at every step in which a
        head has that many slots more than its budget.
      lag: the number of slots of a part.
      sinks: the number of slots before the first part, which are protected.
      positions: see `evict`.
    """
    scope: Scope = FirstSlots(sinks)
    return compress_or_evict(
        every, importance=LagRelative(lag, sinks), scope=scope, budget=budget, positions=positions, name="lagkv"
    )
