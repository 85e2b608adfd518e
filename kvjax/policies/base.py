"""Policies: the class of all, and eviction policies, which are an importance × a scope × a budget.

A policy ranks slots; it never moves one. `kvjax.cache` evicts while more slots are live than the budget allows, so that
no policy can leave more than its budget, evict what it protects or see padding. Policies are frozen dataclasses: equal
by value, hashable and picklable, and `repr` evaluates to an equal object.
"""

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from kvjax.arguments import checked_call, choice_argument, count_argument, did_you_mean, named, plain_signature
from kvjax.errors import KvjaxError, PolicyError
from kvjax.numerics.statistics import NAMED, Statistic, resolve
from kvjax.policies.budget import Budget, BudgetLike, as_budget
from kvjax.policies.components import Importance, Keep, Merge, Scope, Stats, View, check_declared, keep, unprotected
from kvjax.policies.parameters import Parameters, distinct
from kvjax.policies.prompt_replay import REPLAYED, Replay
from kvjax.policies.round_memory import RoundMemory
from kvjax.policies.row_memory import RowMemory
from kvjax.policies.written import Written

Array = jax.Array
When = Literal["step", "prompt_end"]

POSITIONS = ("original", "cache")
REDUCTIONS = ("mean", "max")
WHEN = ("step", "prompt_end")

factory = checked_call(PolicyError)  # decorates the factories of policies and merges


class Policy:
    """The slots that a cache keeps: an `Evict`, a `Split`, `SplitLayers` or `Phases` of them, or a `WithSelection`.

    Attributes:
      name: shown in reports; ignored by comparisons.
      positions: ``original`` rotates keys once, to their position; ``cache`` at every step, to their rank.
      group_reduce: ``mean`` or ``max`` over the query heads that share a KV head.
      budget: slots per KV head that an eviction leaves; None = all.
    """

    name: str

    if TYPE_CHECKING:  # fields of some policies, and computed from their parts by others

        @property
        def positions(self) -> str: ...
        @property
        def group_reduce(self) -> str: ...
        @property
        def budget(self) -> Budget | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evict(Policy):
    """Evicts the least important slots that the scope leaves open (RoCo, arXiv:2402.06262, section 4).

    Attributes:
      importance: ranks the slots.
      scope: protects slots from eviction.
      budget: slots per KV head that an eviction leaves; None = all.
      when: ``step`` evicts at every step; ``prompt_end`` once, when the prompt ends, and decoding then appends.
      merge: folds evicted pairs into others; None = they are dropped.
      positions: see `Policy`.
      group_reduce: see `Policy`.
      page: the number of consecutive tokens that are evicted together; see `kvjax.policies.by_page`.
      every: m, the number of slots that a head evicts at once, when it holds b + m of a budget of b slots.
      name: see `Policy`.

    Raises:
      PolicyError: a field that is not valid, a budget smaller than the number of protected slots, or an importance
        shared by all heads with a scope that is not.
    """

    importance: Importance
    scope: Scope = unprotected
    budget: Budget | None
    when: When = "step"
    merge: Merge | None = None
    positions: str = "original"
    group_reduce: str = "mean"
    page: int = 1
    every: int = 1
    name: str = dataclasses.field(default="evict", compare=False)

    def __post_init__(self) -> None:
        with named(self.name):
            self._check()
        # Whole numbers of slots are checked now, fractions when the lengths are known.
        for each in fixed_slots(self.budget):
            self.check_slots(each)

    def _check(self) -> None:
        if not isinstance(self.importance, Importance) or not isinstance(self.scope, Scope):
            raise PolicyError(
                f"importance={self.importance!r} and scope={self.scope!r} must be an Importance and a Scope, such as "
                "kvjax.policies.mass and protect_newest(64)."
            )
        for field, valid in (("positions", POSITIONS), ("group_reduce", REDUCTIONS), ("when", WHEN)):
            choice_argument(field, getattr(self, field), valid)
        if self.merge is not None and not isinstance(self.merge, Merge):
            raise PolicyError(f"merge={self.merge!r} is not a merge; give one such as kvjax.policies.d2o().")
        for field in ("importance", "scope", *(("merge",) if self.merge else ())):
            check_declared(field, getattr(self, field))
        if not isinstance(self.budget, Budget):
            object.__setattr__(self, "budget", as_budget(self.budget))
        object.__setattr__(self, "page", count_argument("page", self.page, minimum=1))
        shared = self.budget is not None and self.budget.shared
        if self.page > 1 and (self.folding is not None or self.when != "step" or shared):
            raise PolicyError(
                "whole pages are evicted at every step, without a merge and with one budget for all heads."
            )
        object.__setattr__(self, "every", count_argument("every", self.every, minimum=1))
        if self.every > 1 and (self.when != "step" or self.page > 1):
            which = (
                "a compressor evicts once, when the prompt ends" if self.when != "step" else "pages are evicted whole"
            )
            raise PolicyError(f"every={self.every} is not valid: {which}; leave it out.")
        if self.page > 1 and self.rounds:
            raise PolicyError(
                "pages are evicted whole, but its importance remembers evictions of single slots; leave out by_page."
            )
        _resolve(self._needs)
        if self.importance.shared_by_heads and self.scope.needs:
            raise PolicyError(
                "its importance is shared by all heads, which must hold the same positions, but its scope looks at "
                "each head's attention; use an importance of single heads, or a scope of positions."
            )
        if self.importance.replay is not None and self.when != "prompt_end":
            raise PolicyError(
                "its importance comes from a replay of the prompt, which takes place once, when the prompt ends; make "
                "a compressor of it, with kvjax.policies.compress."
            )
        over_layers = self.budget is not None and self.budget.over_layers
        if over_layers and (self.replay is None or self.merge is not None or self._needs or self.reads):
            raise PolicyError(
                "slots that all layers share are ranked by the scores of a replay alone, before any layer evicts; give "
                "adakv(kvzip(...), layers=True) or adakv(kvgrad(...), layers=True)."
            )
        if self.when == "prompt_end" and self.budget is None:
            raise PolicyError("a compressor needs a budget; give slots or a fraction of the prompt.")

    @functools.cached_property
    def needs(self) -> frozenset[Statistic]:
        """The statistics that attention must report."""
        return _resolve(self._needs)

    @property
    def _needs(self) -> frozenset[str | Statistic]:
        return frozenset().union(self.importance.needs, self.scope.needs, self.merge.needs if self.merge else ())

    @property
    def remembers(self) -> tuple[str, ...]:
        """The names of statistics that attention does not report, [B, K, S] float32."""
        replayed = () if self.replay is None else (REPLAYED,)
        rounds = tuple(each.name for each in self.rounds if each.per_slot)
        written = tuple(each.name for each in self.writes)
        return (*replayed, *(self.merge.remembers if self.merge else ()), *rounds, *written)

    @property
    def replay(self) -> Replay | None:
        """How a prompt is replayed when it ends, before slots are ranked; None = no replay."""
        return self.importance.replay

    @property
    def folding(self) -> Merge | None:
        """The merge, if it folds evicted pairs into kept ones; otherwise None."""
        return self.merge if self.merge is not None and self.merge.folds else None

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        """The memories that ranking reads, of queries and of earlier rounds."""
        return tuple(dict.fromkeys((*self.importance.memory, *self.scope.memory)))

    @property
    def rounds(self) -> tuple[RoundMemory, ...]:
        """The memories that are written when a head evicts."""
        return tuple(each for each in self.memory if isinstance(each, RoundMemory))

    @property
    def writes(self) -> tuple[Written, ...]:
        """The written scores that ranking reads."""
        return tuple(dict.fromkeys((*self.importance.writes, *self.scope.writes)))

    @property
    def params(self) -> tuple[Parameters, ...]:
        """The parameters that ranking, written scores and the merge read."""
        own = (*self.importance.params, *self.scope.params, *(self.merge.params if self.merge else ()))
        return distinct((*own, *(each for score in self.writes for each in score.reads)))

    @property
    def reads(self) -> frozenset[str]:
        """Which of "key" and "value" ranking the slots reads."""
        return frozenset(self.importance.reads) | frozenset(self.scope.reads)

    def rank(self, stats: Stats, view: View) -> Array:
        """Returns the importance of each slot, [B, K, S] float32; +inf where it is protected."""
        score = self.importance.score(stats, view)
        if self.scope == unprotected:
            return score
        return jnp.where(self.scope.protected(stats, view), jnp.inf, score)

    def priority(self, stats: Stats, view: View) -> Array:
        """Returns the priority of each slot, [B, K, S] float32: larger ones stay, +inf is protected."""
        return self.rank(stats, view) if self.budget is None else self.budget.rank(self, stats, view)

    def limit(self, stats: Stats, view: View) -> Array:
        """Returns the slots of each head, [B, 1, 1] or [B, K, 1] int32. The policy must have a budget."""
        assert self.budget is not None
        return self.budget.limit(self, stats, view)

    def keeps_newest(self, slots: int) -> int:
        """Returns how many of the newest tokens are never evicted under a budget of `slots`."""
        rest = slots - self.protects(slots) if self.importance.by_age else 0
        return max(self._number_of("newest", slots), rest)

    def protects(self, slots: int) -> int:
        """Returns the number of slots that are protected under a budget of `slots`."""
        return self._number_of("count", slots)

    def _number_of(self, function: str, slots: int) -> int:
        """Returns what a function of the scope says of a budget of `slots`.

        Raises:
          PolicyError: it raises an error, or does not return a number of slots.
        """
        try:
            found = getattr(self.scope, function)(slots)
            number = None if isinstance(found, bool) else operator.index(found)
        except KvjaxError:
            raise
        except Exception as error:  # of a user's own function
            raise PolicyError(
                f"policy {self.name}: its scope.{function} raised {type(error).__name__}: {error}; expected a whole "
                "number of slots."
            ) from error
        if number is None or number < 0:
            raise PolicyError(
                f"policy {self.name}: its scope.{function} returned {found!r}; expected a whole number of slots of at "
                "least 0."
            )
        return number

    def traced(self) -> "Evict":
        """Returns the policy without the numbers of its budgets: what a compiled program depends on."""
        budget = None if self.budget is None else self.budget.traced()
        return dataclasses.replace(self, budget=budget, scope=self.scope.traced())

    def check_slots(self, slots: int) -> None:
        """Checks a budget of `slots`.

        Raises:
          PolicyError: more slots are protected than the budget has.
        """
        with named(self.name):
            if self.page > 1 and slots < 2 * self.page:
                raise PolicyError(f"a budget of {slots} slots is less than two pages of {self.page}; raise the budget.")
            protected = self.protects(slots)
            if protected > slots:
                raise PolicyError(
                    f"it protects {protected} slots, more than its budget of {slots}; raise the budget to at least "
                    f"{protected} or protect fewer."
                )


@plain_signature
def evict(
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: BudgetLike,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    every: int = 1,
    name: str = "evict",
) -> Evict:
    """Makes an eviction policy of an importance, a scope and a budget (RoCo, arXiv:2402.06262, section 4).

    Args:
      importance: ranks the slots, e.g. `mass` or `recency`.
      scope: protects slots from eviction, e.g. ``protect_newest(64)`` or ``protect_first(4)``; None = none.
      budget: live slots per KV head that an eviction leaves. An int is a number of slots; a float in (0, 1] a fraction
        of each row's prompt; a tuple or an array [L] has one of these per layer; None keeps every token.
      positions: ``original`` rotates keys once, to their position; ``cache`` at every step, to their rank.
      group_reduce: ``mean`` or ``max`` over the query heads that share a KV head.
      merge: folds evicted pairs into others, such as ``d2o()``; None = they are dropped. See `kvjax.policies.merge`.
      every: the number of slots that are evicted at once: a head evicts when it holds `every` slots more than its
        budget, down to the budget. Between evictions it holds up to ``budget + every - 1`` slots.
      name: shown in reports.

    Raises:
      PolicyError: see `Evict`.
    """
    with named(name):
        slots = as_budget(budget)
    return Evict(
        importance=importance, scope=scope or unprotected, budget=slots, positions=positions,
        group_reduce=group_reduce, merge=merge, every=every, name=name,
    )  # fmt: skip


@plain_signature
def compress(
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: BudgetLike,
    positions: str = "original",
    group_reduce: str = "mean",
    name: str = "compress",
) -> Evict:
    """Makes a policy that evicts once, when the prompt ends, down to the budget; decoding then appends.

    Until then the whole prompt is held, also if it is fed in blocks. For arguments and errors see `evict`.
    """
    with named(name):
        slots = as_budget(budget)
    return Evict(
        importance=importance, scope=scope or unprotected, budget=slots, when="prompt_end", positions=positions,
        group_reduce=group_reduce, name=name,
    )  # fmt: skip


def compress_or_evict(
    every: int | None,
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: BudgetLike,
    positions: str = "original",
    group_reduce: str = "mean",
    name: str,
) -> Evict:
    """Makes a compressor of prompts if `every` is None, and a policy that evicts `every` slots at once otherwise.

    For the other arguments and errors see `evict`.
    """
    with named(name):
        slots = as_budget(budget)
    return Evict(
        importance=importance, scope=scope or unprotected, budget=slots, when="prompt_end" if every is None else "step",
        positions=positions, group_reduce=group_reduce, every=1 if every is None else every, name=name,
    )  # fmt: skip


def fixed_slots(budget: Budget | None) -> tuple[int, ...]:
    """Returns the whole numbers of slots in a budget as a user wrote it."""
    value = None if budget is None else budget.value
    return tuple(each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, int))


def _resolve(needs: frozenset[str | Statistic]) -> frozenset[Statistic]:
    for each in needs:
        if not isinstance(each, Statistic) and each not in NAMED:
            hint = did_you_mean(each, NAMED)
            raise PolicyError(f"unknown statistic {each!r}; {hint}known: {', '.join(sorted(NAMED))}.")
    return resolve(needs)


__all__ = [
    "POSITIONS", "Budget", "Evict", "Keep", "Policy", "View", "compress", "compress_or_evict", "evict", "factory",
    "fixed_slots", "keep", "named", "unprotected",
]  # fmt: skip
