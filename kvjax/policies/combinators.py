"""Policies made of other policies: another scope, or another importance."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.order import largest
from kvjax.policies.base import (
    Evict,
    Importance,
    Policy,
    Scope,
    Stats,
    View,
    evict,
    factory,
    number_argument,
)
from kvjax.policies.budget import exact
from kvjax.policies.h2o import mass
from kvjax.policies.h2o_variants import Reads
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases
from kvjax.statistics import Statistic

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Best(Scope):
    """Protects the best slots by the priority of another policy: b - ⌊fraction·b⌋ of them.

    Attributes:
      policy: ranks the slots, under the whole budget b.
      fraction: of each row's budget, the part that stays open.
    """

    policy: Evict
    fraction: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", number_argument("fraction", self.fraction, minimum=0.0, maximum=1.0))

    @property
    def needs(self) -> frozenset[Statistic]:  # type: ignore[override]
        return self.policy.needs

    @property
    def reads(self) -> frozenset[str]:  # type: ignore[override]
        return self.policy.reads

    def kept(self, budget: Array | int) -> Any:
        """b - ⌊fraction·b⌋ of a number or an array of integers."""
        share = exact(self.fraction)
        return budget - budget * share.numerator // share.denominator

    def protected(self, stats: Stats, view: View) -> Array:
        priority = self.policy.priority(stats, view)
        kept = self.kept(view.budget)[:, None, None]
        return largest(jnp.where(jnp.isnan(priority), -jnp.inf, priority), view.position, kept)

    def count(self, budget: int) -> int:
        kept, protected = self.kept(budget), self.policy.protects(budget)
        if protected > kept:
            raise PolicyError(
                f"{self.policy.name} protects {protected} slots, but keeps {kept} of a budget of {budget} beside "
                f"fraction={self.fraction:g} of heavy hitters."
            )
        return kept

    def traced(self) -> "Best":
        return dataclasses.replace(self, policy=self.policy.traced())


@dataclasses.dataclass(frozen=True)
class TimesValueNorm(Importance):
    """Another importance times the norm of the slot's value, ‖v‖₂ (VATP, arXiv:2406.12335, eq. 4, with ‖v‖₁).

    Attributes:
      importance: the factor; its `amount` must be true.
    """

    importance: Importance

    @property
    def needs(self) -> frozenset[Any]:  # type: ignore[override]
        return frozenset(self.importance.needs)

    @property
    def shared_by_heads(self) -> bool:  # type: ignore[override]
        return self.importance.shared_by_heads

    @property
    def reads(self) -> frozenset[str]:  # type: ignore[override]
        return self.importance.reads | {"value"}

    def score(self, stats: Stats, view: View) -> Array:
        # [B, K, S]
        norm = jnp.sqrt(jnp.sum(jnp.square(view.value.astype(jnp.float32)), axis=-1))
        return self.importance.score(stats, view) * norm


@factory
def with_heavy_hitters(policy: Policy, *, fraction: float = 0.5) -> Evict:
    """`policy` keeps its best b - ⌊fraction·b⌋ slots, and of the others those of largest S stay (H2O, Tables 1 and 8).

    Args:
      policy: an eviction policy. It ranks under the whole budget b, where a `local` or `recent` of ⌊b/2⌋ can be all
        that it keeps: give it a number of its own.
      fraction: of each row's budget, for heavy hitters.

    Raises:
      PolicyError: a fraction outside [0, 1], a policy that evicts nothing, or one that protects more than it keeps.
    """
    inner = _ranks_each_head("with_heavy_hitters", policy)
    if inner.when == "prompt_end":
        raise PolicyError(f"with_heavy_hitters({inner.name}): it is for prompts only; give an eviction policy.")
    return evict(
        importance=mass,
        scope=Best(inner, fraction),
        budget=inner.budget,
        positions=inner.positions,
        group_reduce=inner.group_reduce,
        merge=inner.merge,
        name=f"{inner.name}+heavy",
    )


@factory
def value_norm(policy: Policy) -> Evict:
    """Multiplies the importance of a policy or compressor by ‖v‖₂ of the slot's value (VATP, arXiv:2406.12335, eq. 4).

    Args:
      policy: made by `evict` or `compress`, such as h2o, roco or snapkv.

    Raises:
      PolicyError: a policy whose importance only orders the slots (`strided`, `fixed`), whose heads share it
        (`tova`, unless ``share_heads=False``), or that evicts nothing.

    VATP takes ‖v‖₁, and its code protects the first tokens; here it is ‖v‖₂, and the policy's scope protects.
    """
    inner = _ranks_each_head("value_norm", policy)
    if not inner.importance.amount:
        raise PolicyError(
            f"value_norm({inner.name}): its importance says who goes first and not by how much; there is nothing to "
            "multiply. Policies such as h2o, roco or scissorhands have amounts."
        )
    return dataclasses.replace(inner, importance=TimesValueNorm(inner.importance), name=f"{inner.name}*|v|")


def _ranks_each_head(name: str, policy: Policy) -> Evict:
    """The policy, or a PolicyError if it is not one that evicts and ranks each head by itself."""
    if not isinstance(policy, Policy):
        raise PolicyError(f"{name}(): {policy!r} is not a policy; give one such as h2o(budget=256).")
    if isinstance(policy, Split):
        raise PolicyError(f"{name}({policy.name}): its heads are under policies of their own; apply it to these.")
    if isinstance(policy, Reads):
        raise PolicyError(f"{name}({policy.name}): it hides slots and evicts none; give a policy that evicts.")
    if isinstance(policy, Phases):
        raise PolicyError(f"{name}({policy.name}): its phases are under policies of their own; apply it to these.")
    if not isinstance(policy, Evict):
        raise PolicyError(f"{name}({policy.name}): its statistics are its own; give a policy of `evict`.")
    if policy.budget is None:
        raise PolicyError(f"{name}({policy.name}): a policy that keeps every token has nothing to choose.")
    if policy.importance.shared_by_heads:
        raise PolicyError(
            f"{name}({policy.name}): its heads must all hold the same positions, and here each would choose its own; "
            "use one that ranks every head by itself, such as tova(share_heads=False)."
        )
    return policy
