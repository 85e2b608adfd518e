"""CAOTE: slots by how much their eviction would change the output of attention (arXiv:2504.14051)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.combinators import ranks_each_head
from kvjax.policies.components import Importance, Stats, View

Array = jax.Array
CERTAIN = 1e-6  # a share within this of 1 is all of the attention


@dataclasses.dataclass(frozen=True)
class OutputChange(Importance):
    """Ranks a slot by the change of the output without it: h / (1 - h) · ‖v - Σ h v‖₂ (CAOTE, Theorem 3.2).

    h is another importance, divided by its sum over the live slots. With the attention of one query as the importance,
    this is exactly the distance of its outputs with and without the slot.

    Attributes:
      importance: h before the division; its `amount` must be true, and it must not be negative.
      fast: whether the mean of the live values takes the place of Σ h v.

    Raises:
      PolicyError: an importance that is none, whose `amount` is false, or that can be negative.
    """

    importance: Importance
    fast: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.importance, Importance) or not self.importance.amount or self.importance.signed:
            raise PolicyError(
                f"OutputChange: importance={self.importance!r} is not a share of attention; give an importance with "
                "amounts that are not negative, such as kvjax.policies.mass."
            )

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset(self.importance.needs)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.importance.reads) | {"value"}

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.importance,)

    def score(self, stats: Stats, view: View) -> Array:
        live = view.live
        # [B, K, S]
        base = jnp.where(live, self.importance.amounts(stats, view), 0.0)
        total = jnp.sum(base, axis=2, keepdims=True)
        share = jnp.where(total > 0, base / jnp.where(total > 0, total, 1.0), 0.0)
        value = jnp.where(live[..., None], view.value.astype(jnp.float32), 0.0)
        # [B, K, 1]
        number = jnp.maximum(jnp.sum(live, axis=2, keepdims=True), 1).astype(jnp.float32)
        weight = jnp.where(live, 1 / number, 0.0) if self.fast else share
        # [B, K, 1, D]
        output = jnp.einsum("bks,bksd->bkd", weight, value, precision=jax.lax.Precision.HIGHEST)[:, :, None]
        distance = jnp.sqrt(jnp.sum(jnp.square(value - output), axis=3))
        change = share / jnp.maximum(1 - share, CERTAIN) * distance
        return jnp.where(share > 1 - CERTAIN, jnp.finfo(jnp.float32).max, change)


@factory
def caote(policy: Policy, *, fast: bool = False) -> Evict:
    """Ranks by the change of the output without a slot, by a policy's importance (CAOTE, arXiv:2504.14051).

    The policy's importance is taken as the attention that a slot will receive; see `OutputChange`. The policy's scope
    protects as before; of several slots that are evicted at once, each is ranked as if it were the only one.

    Args:
      policy: made by `evict` or `compress`, such as h2o, tova(share_heads=False) or snapkv.
      fast: whether the mean of all values stands for the output of attention, which saves a sum over slots.

    Raises:
      PolicyError: a policy whose importance only orders the slots or can be negative, whose heads share it (`tova`,
        unless ``share_heads=False``), or that evicts nothing.
    """
    inner = ranks_each_head("caote", policy)
    if not inner.importance.amount or inner.importance.signed:
        raise PolicyError(
            f"caote({inner.name}): its importance is not an amount of attention; give a policy such as h2o, roco or "
            "scissorhands."
        )
    return dataclasses.replace(inner, importance=OutputChange(inner.importance, fast), name=f"caote[{inner.name}]")
