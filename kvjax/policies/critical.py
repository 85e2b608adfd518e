"""CriticalKV: ranks slots by attention times the norm of the projected value (arXiv:2502.03805)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import number_argument
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.numerics.top_k import largest
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.budget import exact
from kvjax.policies.combinators import ranks_each_head
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.parameters import Parts
from kvjax.policies.written import Token, Written

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class OutputNorm(Written):
    """The norm of a value after the output projection, ‖v W_o‖₁; the mean over the query heads of a KV head."""

    name = "output_norm"
    projects = True

    def write(self, token: Token, params: Mapping[str, Parts]) -> Array:
        assert token.out_kernel is not None
        value, kernel = (x.astype(jnp.float32) for x in (token.value, token.out_kernel))
        groups = kernel.shape[1]

        def add(total: Array, one: Array) -> tuple[Array, None]:
            # [B, K, n, E]: one query head of each KV head
            output = jnp.einsum("bknd,kde->bkne", value, one, precision=jax.lax.Precision.HIGHEST)
            return total + jnp.sum(jnp.abs(output), axis=3), None

        total, _ = jax.lax.scan(add, jnp.zeros(value.shape[:3], jnp.float32), jnp.swapaxes(kernel, 0, 1))
        return total / groups


@dataclasses.dataclass(frozen=True)
class TwoStages(Importance):
    """Ranks in two stages: first by attention, then by attention times `OutputNorm` (arXiv:2502.03805, Algorithm 1).

    With m slots of the budget left after the scope, the ⌊first_stage·m⌋ slots of the largest importance rank first; of
    equal ones, the newer. The other slots are ranked by (importance + ε)·‖v W_o‖₁.

    Attributes:
      importance: the attention; its `amount` must be true, and it must not be negative.
      scope: the slots that the policy protects.
      first_stage: the share of the budget that is chosen by the importance alone, 0 to 1.
      epsilon: added to the importance.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    importance: Importance
    scope: Scope
    first_stage: float = 0.5
    epsilon: float = 1e-4
    amount, of_budget = False, True

    def __post_init__(self) -> None:
        if not isinstance(self.importance, Importance) or not self.importance.amount or self.importance.signed:
            raise PolicyError(
                f"TwoStages: importance={self.importance!r} is not a share of attention; give an importance with "
                "amounts that are not negative, such as kvjax.policies.mass."
            )
        for field, most in (("first_stage", 1.0), ("epsilon", 1.0)):
            object.__setattr__(self, field, number_argument(field, getattr(self, field), minimum=0.0, maximum=most))

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset(self.importance.needs) | frozenset(self.scope.needs)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.importance.reads) | frozenset(self.scope.reads)

    @property
    def made_of(self) -> tuple[Any, ...]:
        return self.importance, self.scope

    @property
    def writes(self) -> tuple[Written, ...]:
        return (*self.importance.writes, *self.scope.writes, OutputNorm())

    def score(self, stats: Stats, view: View) -> Array:
        held = view.live & self.scope.protected(stats, view)
        # [B, K, 1]
        room = view.budget[:, None, None] - jnp.sum(held, axis=2, keepdims=True, dtype=jnp.int32)
        share = exact(self.first_stage)
        first = jnp.maximum(room, 0) * share.numerator // share.denominator
        # [B, K, S]
        order = self.importance.score(stats, view)
        chosen = largest(order, jnp.where(held, -1, view.position), first)
        attention = self.importance.amounts(stats, view)
        return jnp.where(chosen, jnp.inf, (attention + self.epsilon) * stats[OutputNorm().name])


@factory
def critical(policy: Policy, *, first_stage: float = 0.5, epsilon: float = 1e-4) -> Evict:
    """Ranks by attention times the norm of the projected value (CriticalKV, arXiv:2502.03805).

    The first part of the budget keeps the slots of the policy's largest importance. The rest keeps slots by this
    importance times ‖v W_o‖₁. The policy's scope is unchanged. See `TwoStages`.

    Args:
      policy: made by `evict` or `compress`, such as h2o, snapkv or expected_attention(value_norm=False).
      first_stage: the share of the budget that is chosen by the policy's importance alone, 0 to 1.
      epsilon: added to the importance, 0 to 1.

    Raises:
      PolicyError: a policy whose importance only orders the slots or can be negative, whose heads share it (`tova`,
        unless ``share_heads=False``), or that evicts nothing.
    """
    inner = ranks_each_head("critical", policy)
    if inner.budget is not None and inner.budget.shared:
        raise PolicyError(f"critical({inner.name}): its heads share a budget; apply adakv to critical(...) instead.")
    if not inner.importance.amount or inner.importance.signed:
        raise PolicyError(
            f"critical({inner.name}): its importance is not an amount of attention; give a policy such as h2o, roco or "
            "snapkv."
        )
    ranked = TwoStages(inner.importance, inner.scope, first_stage, epsilon)
    return dataclasses.replace(inner, importance=ranked, name=f"critical[{inner.name}]")
