"""Protects slots by their values (VaSE, arXiv:2606.03928)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.numerics.top_k import largest
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.combinators import ranks_each_head
from kvjax.policies.components import Scope, Stats, View
from kvjax.policies.slot_order import slot_ranks
from kvjax.policies.union import protect_any

Array = jax.Array

#: [B, K, S, D] float32 -> [B, K, S]: how large a value is.
MEASURES: Mapping[str, Callable[[Array], Array]] = {
    "range": lambda v: jnp.max(v, axis=-1) - jnp.min(v, axis=-1),
    "absmax": lambda v: jnp.max(jnp.abs(v), axis=-1),
    "var": lambda v: jnp.var(v, axis=-1),
    "l2": lambda v: jnp.sqrt(jnp.sum(jnp.square(v), axis=-1)),
}


@dataclasses.dataclass(frozen=True)
class LargestValues(Scope):
    """Protects the slots of the largest values among those that another scope leaves open (VaSE, section 3.2).

    Attributes:
      number: the number of slots; None = a quarter of each row's budget, ⌊b/4⌋.
      measure: ``range``, the largest feature less the smallest; ``absmax``, ``var`` or ``l2``.
      among: leaves open the slots that are compared.
      sinks: the number of first slots that are among these, whatever their values.
    """

    number: int | None = None
    measure: str = "range"
    among: Scope | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", count_argument("sinks", self.sinks))
        if self.number is not None:
            object.__setattr__(self, "number", count_argument("large", self.number))
        choice_argument("measure", self.measure, tuple(MEASURES))
        if self.among is not None and not isinstance(self.among, Scope):
            raise PolicyError(
                f"LargestValues: among={self.among!r} is not a Scope; give one such as protect_newest(64)."
            )

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset() if self.among is None else frozenset(self.among.needs)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"value"}) | (frozenset() if self.among is None else frozenset(self.among.reads))

    @property
    def made_of(self) -> tuple[Any, ...]:
        return () if self.among is None else (self.among,)

    def protected(self, stats: Stats, view: View) -> Array:
        position = view.position
        if self.among is not None:
            position = jnp.where(self.among.protected(stats, view), -1, position)
        size = MEASURES[self.measure](view.value.astype(jnp.float32))
        if self.sinks:
            size = jnp.where(slot_ranks(position) < self.sinks, jnp.inf, size)
        number = view.budget // 4 if self.number is None else jnp.full_like(view.budget, self.number)
        return largest(size, position, number[:, None, None])

    def count(self, budget: int) -> int:
        return budget // 4 if self.number is None else self.number

    def mapped(self, change: Callable[[Scope], Scope]) -> Scope:
        return self if self.among is None else dataclasses.replace(self, among=self.among.mapped(change))

    def traced(self) -> "LargestValues":
        return self if self.among is None else dataclasses.replace(self, among=self.among.traced())


@factory
def value_aware(policy: Policy, *, large: int | None = None, measure: str = "range") -> Evict:
    """Protects, in addition to what a policy protects, the slots of the largest values (VaSE, arXiv:2606.03928).

    Args:
      policy: made by `evict` or `compress`, such as h2o, random or snapkv.
      large: the number of slots; None = a quarter of the budget, ⌊b/4⌋, as in the paper.
      measure: see `LargestValues`.

    Raises:
      PolicyError: a policy whose heads share their importance, or that evicts nothing, or a budget that is smaller than
        the number of protected slots.
    """
    inner = ranks_each_head("value_aware", policy)
    scope = protect_any(inner.scope, LargestValues(large, measure, inner.scope))
    return dataclasses.replace(inner, scope=scope, name=f"{inner.name}+values")
