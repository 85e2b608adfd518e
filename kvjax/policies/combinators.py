"""Policies made of other policies, with another scope or importance."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import number_argument
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.numerics.top_k import largest
from kvjax.policies.base import Evict, Policy, evict, factory
from kvjax.policies.budget import FromLayer, exact
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.h2o import mass
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.layers import SplitLayers
from kvjax.policies.phases import Phases

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Best(Scope):
    """Protects the b - ⌊fraction·b⌋ slots to which another policy gives the highest priority.

    Attributes:
      policy: ranks the slots, under the whole budget b.
      fraction: the part of each row's budget that stays open.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    policy: Evict
    fraction: float

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Evict):
            raise PolicyError(f"Best: policy={self.policy!r} is not a policy of `evict`; give one such as roco(64).")
        object.__setattr__(self, "fraction", number_argument("fraction", self.fraction, minimum=0.0, maximum=1.0))

    @property
    def needs(self) -> frozenset[Statistic]:
        return self.policy.needs

    @property
    def reads(self) -> frozenset[str]:
        return self.policy.reads

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.policy,)

    def kept(self, budget: Array | int) -> Any:
        """Returns b - ⌊fraction·b⌋ for a number or integers [...], in the same shape."""
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
                f"{self.policy.name} protects {protected} slots, but keeps {kept} of a budget of {budget}, since "
                f"fraction={self.fraction:g} is for heavy hitters; protect fewer or lower the fraction."
            )
        return kept

    def traced(self) -> "Best":
        return dataclasses.replace(self, policy=self.policy.traced())


@dataclasses.dataclass(frozen=True)
class TimesValueNorm(Importance):
    """Ranks a slot by another importance times the norm of its value, ‖v‖₂ (VATP, arXiv:2406.12335, eq. 4, with ‖v‖₁).

    Attributes:
      importance: the factor; its `amount` must be true.

    Raises:
      PolicyError: an importance that is none, or whose `amount` is false.
    """

    importance: Importance

    def __post_init__(self) -> None:
        if not isinstance(self.importance, Importance):
            raise PolicyError(
                f"TimesValueNorm: importance={self.importance!r} is not an Importance; give one such as "
                "kvjax.policies.mass."
            )
        if not self.importance.amount:
            raise PolicyError(
                f"TimesValueNorm: importance={self.importance!r} only orders the slots, so that there is nothing to "
                "multiply; give one with amounts, such as kvjax.policies.mass."
            )

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset(self.importance.needs)

    @property
    def shared_by_heads(self) -> bool:
        return self.importance.shared_by_heads

    @property
    def reads(self) -> frozenset[str]:
        return self.importance.reads | {"value"}

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.importance,)

    def score(self, stats: Stats, view: View) -> Array:
        # [B, K, S]
        norm = jnp.sqrt(jnp.sum(jnp.square(view.value.astype(jnp.float32)), axis=-1))
        return self.importance.amounts(stats, view) * norm


@factory
def with_heavy_hitters(policy: Policy, *, fraction: float = 0.5) -> Evict:
    """Keeps the best b - ⌊fraction·b⌋ slots of a policy, and of the others those of largest S (H2O, Tables 1 and 8).

    Args:
      policy: an eviction policy. It ranks under the whole budget b. Its default `local` or `recent` of ⌊b/2⌋ can be
        all that it keeps: give it a smaller number.
      fraction: the part of each row's budget that is for heavy hitters.

    Raises:
      PolicyError: a fraction outside [0, 1], a policy that evicts nothing, or one that protects more than it keeps.
    """
    inner = ranks_each_head("with_heavy_hitters", policy)
    if inner.when == "prompt_end":
        raise PolicyError(f"with_heavy_hitters({inner.name}): it is for prompts only; give an eviction policy.")
    return evict(
        importance=mass,
        scope=Best(inner, fraction),
        budget=inner.budget,
        positions=inner.positions,
        group_reduce=inner.group_reduce,
        merge=inner.merge,
        every=inner.every,
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

    VATP uses ‖v‖₁, and its code protects the first tokens; here the norm is ‖v‖₂, and the policy's scope protects.
    """
    inner = ranks_each_head("value_norm", policy)
    if not inner.importance.amount:
        raise PolicyError(
            f"value_norm({inner.name}): its importance only orders the slots, so that there is nothing to multiply; "
            "give a policy whose importance is an amount, such as h2o, roco or scissorhands."
        )
    return dataclasses.replace(inner, importance=TimesValueNorm(inner.importance), name=f"{inner.name}*|v|")


@factory
def from_layer(policy: Policy, *, first: int) -> Evict:
    """Limits the layers from `first` on; the layers before it keep every token (InfiniGen, arXiv:2406.19707).

    Args:
      policy: an eviction policy or a compressor.
      first: the first layer that evicts.

    Raises:
      PolicyError: a policy that evicts nothing or is made of several, or a layer below 0.
    """
    if not isinstance(policy, Evict) or policy.budget is None:
        name = policy.name if isinstance(policy, Policy) else repr(policy)
        raise PolicyError(f"from_layer({name}): give a single policy that evicts, such as h2o(budget=256).")
    return dataclasses.replace(policy, budget=FromLayer(policy.budget, first))


@factory
def by_page(policy: Policy, *, page: int) -> Evict:
    """Evicts whole pages of consecutive tokens, for selections that read pages.

    The page of the lowest worth is evicted, which is the highest priority of its slots; of equal ones the older. The
    newest page is never evicted. If every page has a protected slot, the oldest is evicted nevertheless. Between b - p
    and b slots are live, where the budget b is rounded down to whole pages.

    Args:
      policy: an eviction policy without a merge.
      page: p, the number of tokens of a page.

    Raises:
      PolicyError: any other policy, or a budget of less than two pages.
    """
    if not isinstance(policy, Evict) or policy.budget is None:
        name = policy.name if isinstance(policy, Policy) else repr(policy)
        raise PolicyError(f"by_page({name}): give a single policy that evicts, such as h2o(budget=256).")
    return dataclasses.replace(policy, page=page, name=f"{policy.name}/page")


def ranks_each_head(name: str, policy: Policy) -> Evict:
    """Returns a policy that evicts and ranks each head by itself; raises a PolicyError for any other."""
    if not isinstance(policy, Policy):
        raise PolicyError(f"{name}(): {policy!r} is not a policy; give one such as h2o(budget=256).")
    if isinstance(policy, Split):
        raise PolicyError(f"{name}({policy.name}): its heads have policies of their own; apply {name} to these.")
    if isinstance(policy, SplitLayers):
        raise PolicyError(f"{name}({policy.name}): its layers have policies of their own; apply {name} to these.")
    if isinstance(policy, WithSelection):
        raise PolicyError(f"{name}({policy.name}): it hides slots and evicts none; give a policy that evicts.")
    if isinstance(policy, Phases):
        raise PolicyError(f"{name}({policy.name}): its phases have policies of their own; apply {name} to these.")
    if not isinstance(policy, Evict):
        raise PolicyError(f"{name}({policy.name}): it is not made by `evict`; give a policy such as h2o(budget=256).")
    if policy.budget is None:
        raise PolicyError(f"{name}({policy.name}): it keeps every token; give a policy with a budget.")
    if policy.importance.shared_by_heads:
        raise PolicyError(
            f"{name}({policy.name}): its heads must all hold the same positions, and here each chooses its own; give a "
            "policy that ranks each head by itself, such as tova(share_heads=False)."
        )
    return policy
