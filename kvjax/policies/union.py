"""Scopes made of other scopes."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.components import Scope, Stats, Unprotected, View, check_declared, unprotected
from kvjax.policies.h2o import Ring

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Union(Scope):
    """Protects the slots that any of several scopes protects.

    Attributes:
      scopes: at least one.

    Raises:
      PolicyError: something that is not a scope, or H2O's ring, whose order of eviction no other scope may change.
    """

    scopes: tuple[Scope, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scopes", tuple(self.scopes))
        for each in self.scopes:
            if not isinstance(each, Scope):
                raise PolicyError(f"Union: {each!r} is not a Scope; give some such as protect_first(4).")
            if isinstance(each, Ring):
                raise PolicyError(f"Union: {each!r} is the ring of h2o(variant='ring') and cannot be part of a union.")
            check_declared("Union", each)
        if not self.scopes:
            raise PolicyError("Union: give at least one scope, such as protect_first(4).")

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset().union(*(each.needs for each in self.scopes))

    @property
    def reads(self) -> frozenset[str]:
        return frozenset().union(*(each.reads for each in self.scopes))

    @property
    def made_of(self) -> tuple[Any, ...]:
        return self.scopes

    def protected(self, stats: Stats, view: View) -> Array:
        return functools.reduce(operator.or_, (each.protected(stats, view) for each in self.scopes))

    def count(self, budget: int) -> int:
        """Returns the largest number of protected slots.

        The newest positions that each scope protects are those of the scope that protects most of them. All else may be
        disjoint.
        """
        others = sum(each.count(budget) - each.newest(budget) for each in self.scopes)
        return others + self.newest(budget)

    def newest(self, budget: int) -> int:
        return max(each.newest(budget) for each in self.scopes)

    def mapped(self, change: Callable[[Scope], Scope]) -> Scope:
        return Union(tuple(each.mapped(change) for each in self.scopes))

    def traced(self) -> "Union":
        return dataclasses.replace(self, scopes=tuple(each.traced() for each in self.scopes))


def protect_any(*scopes: Scope) -> Scope:
    """Returns a scope that protects the slots that any of `scopes` protects; also written ``one | other``.

    Raises:
      PolicyError: see `Union`.
    """
    made = Union(tuple(part for each in scopes for part in (each.scopes if isinstance(each, Union) else (each,))))
    distinct = tuple(dict.fromkeys(each for each in made.scopes if not isinstance(each, Unprotected))) or (unprotected,)
    return distinct[0] if len(distinct) == 1 else Union(distinct)
