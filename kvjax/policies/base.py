"""What a policy is, and the importance × scope × budget that eviction policies are made of.

A policy ranks slots; it never moves one. `kvjax.cache` evicts while more slots are live than the budget allows, so no
policy can exceed its limit, evict what it protects or see padding. Policies are frozen dataclasses: equal by value,
hashable, picklable, and `repr` evaluates to an equal object.
"""

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.budget import Budget, BudgetLike, as_budget
from kvjax.statistics import NAMED, Statistic, resolve

Array = jax.Array
Stats = Mapping[str, Array]  # statistic name -> [B, K, S, ...]
When = Literal["step", "prompt_end"]

P = ParamSpec("P")
R = TypeVar("R")

POSITIONS = ("original", "cache")
REDUCTIONS = ("mean", "max")


class View(NamedTuple):
    """What a policy may look at when it ranks the slots of one group of heads of one layer.

    Attributes:
      position: [B, K, S] int32 absolute token position, -1 = empty.
      key: [B, K, S, D] as stored (rotated, unless ``positions="cache"``) and decoded.
      value: [B, K, S, D] decoded.
      newest: [B] int32 position of each row's newest token; -1 for a row without one in this block.
      budget: [B] int32 slots per KV head that each row may keep.
      prompt: [B] int32 tokens of each row's prompt.
      layer: index of the layer.
      decoding: whether the prompt is over.
      heads: the model's KV heads that these are; None = all, in order.
    """

    position: Array
    key: Array
    value: Array
    newest: Array
    budget: Array
    prompt: Array
    layer: int
    decoding: bool
    heads: tuple[int, ...] | None = None

    @property
    def live(self) -> Array:
        """[B, K, S] bool."""
        return self.position >= 0

    def recent(self, count: Array | int) -> Array:
        """[B, K, S] bool: the `count` ([B] or a number) newest positions of each row, live or not.

        A compressor may have left holes among them, which no older token fills.
        """
        return self.position > (self.newest - count)[:, None, None]

    @property
    def at_prompt_end(self) -> Array:
        """[B] bool: whether this step was the last of the row's prompt."""
        return (self.newest == self.prompt - 1) & (self.newest >= 0)


class Importance:
    """How much a slot is worth.

    Either a call, ``Importance(needs={"mass"}, score=function)``, or a frozen dataclass that inherits from this class,
    whose fields are its parameters and which defines `needs` and `score`.

    Attributes:
      needs: the statistics that `score` reads, by name or as `Statistic`.
      score: (stats, view) -> [B, K, S] float32; larger stays.
      amount: False = the score only orders the slots, so that no multiple of it means anything.
      shared_by_heads: whether the score compares slots across heads, which must then all hold the same positions.
      reads: which of "key" and "value" `score` looks at.
    """

    needs: frozenset[Any]
    score: Callable[[Stats, View], Array]
    amount: bool = True
    shared_by_heads: bool = False
    reads: frozenset[str] = frozenset()

    def __new__(cls, *args: Any, **kwargs: Any) -> "Importance":
        return super().__new__(ImportanceFunction if cls is Importance else cls)


@dataclasses.dataclass(frozen=True)
class ImportanceFunction(Importance):
    """An importance made of a function; what ``Importance(needs=..., score=...)`` returns."""

    needs: frozenset[Any]
    score: Callable[[Stats, View], Array]
    amount: bool = True
    shared_by_heads: bool = False
    reads: frozenset[str] = frozenset({"key", "value"})

    def __post_init__(self) -> None:
        _freeze_needs("Importance", self)


class Scope:
    """Which slots may not be evicted, whatever their importance.

    Either a call, ``Scope(needs=..., protected=function, count=function)``, or a frozen dataclass that inherits from
    this class and defines the same.

    Attributes:
      needs: the statistics that `protected` reads, by name or as `Statistic`.
      protected: (stats, view) -> [B, K, S] bool.
      count: budget in slots -> how many slots are protected.
      reads: which of "key" and "value" `protected` looks at.
    """

    needs: frozenset[Any]
    protected: Callable[[Stats, View], Array]
    count: Callable[[int], int]
    reads: frozenset[str] = frozenset()

    def __new__(cls, *args: Any, **kwargs: Any) -> "Scope":
        return super().__new__(ScopeFunction if cls is Scope else cls)

    def traced(self) -> "Scope":
        """The scope without the numbers of any budget in it; see `Evict.traced`."""
        return self


@dataclasses.dataclass(frozen=True)
class ScopeFunction(Scope):
    """A scope made of functions; what ``Scope(needs=..., protected=..., count=...)`` returns."""

    needs: frozenset[Any]
    protected: Callable[[Stats, View], Array]
    count: Callable[[int], int]
    reads: frozenset[str] = frozenset({"key", "value"})

    def __post_init__(self) -> None:
        _freeze_needs("Scope", self)


class Folded(NamedTuple):
    """A layer after a merge.

    Attributes:
      key: [B, K, S, D] as stored.
      value: [B, K, S, D].
      stats: the statistics, those that the merge remembers among them.
    """

    key: Array
    value: Array
    stats: dict[str, Array]


class Merge:
    """Folds evicted pairs into pairs that stay; see `kvjax.policies.merge`. Frozen dataclasses inherit from this class.

    Attributes:
      needs: the statistics that `fold` reads.
      remembers: names of statistics of its own, [B, K, S] float32, 0 in empty slots.
    """

    needs: frozenset[Any] = frozenset()
    remembers: tuple[str, ...] = ()

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        """The layer with the victims folded in.

        Args:
          key, value: [B, K, S, D] as stored.
          victim: [B, K, S] bool.
          stats, view: as of the step.
          tokens: the largest number of victims of a head.
        """
        raise NotImplementedError

    def log_weight(self, stats: Stats) -> Array | None:
        """[B, K, S] float32 added to a slot's logits: the logarithm of the number of tokens it stands for; None = 0."""
        return None


@dataclasses.dataclass(frozen=True)
class Everything(Scope):
    """Protects no slot: every slot is open."""

    needs = frozenset()

    def protected(self, stats: Stats, view: View) -> Array:
        return jnp.zeros(view.position.shape, bool)

    def count(self, budget: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Keep(Importance):
    """Every slot is worth more than any other: none is evicted."""

    needs = frozenset()
    amount = False

    def score(self, stats: Stats, view: View) -> Array:
        return jnp.full(view.position.shape, jnp.inf)


keep = Keep()
everything = Everything()


class Policy:
    """What a cache keeps: an `Evict`, or a `Split` or `Phases` of them.

    Attributes:
      name: shown in reports; not part of what two policies are compared by.
      positions: ``original`` rotates keys once at their true position; ``cache`` at every step to their rank.
      group_reduce: ``mean`` or ``max`` over the query heads that share a KV head.
      budget: the slots per KV head that remain after each step; None = every token.
    """

    name: str
    positions: str
    group_reduce: str
    budget: Budget | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evict(Policy):
    """Evicts the least important slot that the scope leaves open (RoCo, arXiv:2402.06262, section 4).

    Attributes:
      importance: what a slot is worth.
      scope: what is never evicted.
      budget: slots per KV head after each step; None = every token stays.
      when: ``step`` evicts at every step; ``prompt_end`` once, when the prompt ends, and decoding then appends.
      merge: what becomes of an evicted pair; None = it is dropped.
      positions: see `Policy`.
      group_reduce: see `Policy`.
      name: see `Policy`.

    Raises:
      PolicyError: a field that is not valid, a budget smaller than what the scope protects, or an importance that all
        heads share with a scope that they do not.
    """

    importance: Importance
    scope: Scope = everything
    budget: Budget | None
    when: When = "step"
    merge: Merge | None = None
    positions: str = "original"
    group_reduce: str = "mean"
    name: str = dataclasses.field(default="evict", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.importance, Importance) or not isinstance(self.scope, Scope):
            raise PolicyError(
                f"policy {self.name}: importance={self.importance!r} and scope={self.scope!r} must be an Importance "
                "and a Scope, such as kvjax.policies.mass and protect_newest(64)."
            )
        for field, valid in (("positions", POSITIONS), ("group_reduce", REDUCTIONS), ("when", ("step", "prompt_end"))):
            if (given := getattr(self, field)) not in valid:
                raise PolicyError(
                    f"policy {self.name}: {field}={given!r} is not valid; use {' or '.join(map(repr, valid))}."
                )
        if self.merge is not None and not isinstance(self.merge, Merge):
            raise PolicyError(
                f"policy {self.name}: merge={self.merge!r} is not a merge; give one such as kvjax.policies.merge.d2o()."
            )
        with named(self.name):
            object.__setattr__(self, "budget", as_budget(self.budget))
        _resolve(
            self.name, self.importance.needs | self.scope.needs | (self.merge.needs if self.merge else frozenset())
        )
        if self.importance.shared_by_heads and self.scope.needs:
            raise PolicyError(
                f"policy {self.name}: its importance is shared by all heads, which must hold the same positions, but "
                "its scope looks at each head's attention; use an importance of single heads, or a scope of positions."
            )
        if self.when == "prompt_end" and self.budget is None:
            raise PolicyError(
                f"policy {self.name}: a compressor needs a budget; give slots or a fraction of the prompt."
            )
        # Whole numbers of slots are checked now, fractions when the lengths are known.
        for each in fixed_slots(self.budget):
            self.check_slots(each)

    @functools.cached_property
    def needs(self) -> frozenset[Statistic]:
        """The statistics that attention must report."""
        merge = self.merge.needs if self.merge else frozenset()
        return _resolve(self.name, self.importance.needs | self.scope.needs | merge)

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of statistics that attention does not report, [B, K, S] float32."""
        return self.merge.remembers if self.merge else ()

    @property
    def reads(self) -> frozenset[str]:
        """Which of "key" and "value" ranking the slots looks at."""
        return self.importance.reads | self.scope.reads

    def rank(self, stats: Stats, view: View) -> Array:
        """[B, K, S] float32 importance, +inf for what is protected."""
        score = self.importance.score(stats, view)
        if self.scope == everything:
            return score
        return jnp.where(self.scope.protected(stats, view), jnp.inf, score)

    def priority(self, stats: Stats, view: View) -> Array:
        """[B, K, S] float32; larger stays, +inf is protected."""
        return self.rank(stats, view) if self.budget is None else self.budget.rank(self, stats, view)

    def limit(self, stats: Stats, view: View) -> Array:
        """Slots of each head, [B, 1, 1] or [B, K, 1] int32; only of a policy with a budget."""
        assert self.budget is not None
        return self.budget.limit(self, stats, view)

    def protects(self, slots: int) -> int:
        """The number of slots that are never evicted under a budget of `slots`."""
        return self.scope.count(slots)

    def traced(self) -> "Evict":
        """The policy without the numbers of its budgets: what a compiled program depends on."""
        budget = None if self.budget is None else self.budget.traced()
        return dataclasses.replace(self, budget=budget, scope=self.scope.traced())

    def check_slots(self, slots: int) -> None:
        """Refuses a budget that is smaller than what the policy never evicts.

        Raises:
          PolicyError: with both numbers.
        """
        with named(self.name):
            protected = self.protects(slots)
        if protected > slots:
            raise PolicyError(
                f"policy {self.name}: it protects {protected} slots, more than its budget of {slots}; "
                f"raise the budget to at least {protected} or protect fewer."
            )


def evict(
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: BudgetLike,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    name: str = "evict",
) -> Evict:
    """An eviction policy of an importance, a scope and a budget (RoCo, arXiv:2402.06262, section 4).

    Args:
      importance: what a slot is worth, e.g. `mass` or `recency`.
      scope: what is never evicted, e.g. ``protect_newest(64)`` or ``protect_first(4)``; None = every slot is open.
      budget: live slots per KV head after each step. An int is that many slots; a float in (0, 1] a fraction of each
        row's own prompt; a tuple gives every layer its own; None keeps every token.
      positions: ``original`` rotates keys once at their true position; ``cache`` at every step to their rank.
      group_reduce: ``mean`` or ``max`` over the query heads that share a KV head.
      merge: what becomes of an evicted pair, such as ``d2o()``; None = it is dropped. See `kvjax.policies.merge`.
      name: shown in reports.

    Raises:
      PolicyError: see `Evict`.
    """
    with named(name):
        slots = as_budget(budget)
    return Evict(
        importance=importance, scope=scope or everything, budget=slots, positions=positions,
        group_reduce=group_reduce, merge=merge, name=name,
    )  # fmt: skip


def compress(
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: BudgetLike,
    positions: str = "original",
    group_reduce: str = "mean",
    name: str = "compress",
) -> Evict:
    """Evicts once, when the prompt ends, down to the budget; decoding then appends without evicting.

    The whole prompt is held until then, in blocks too, and the tokens to come have room. Arguments and errors as of
    `evict`.
    """
    with named(name):
        slots = as_budget(budget)
    return Evict(
        importance=importance, scope=scope or everything, budget=slots, when="prompt_end", positions=positions,
        group_reduce=group_reduce, name=name,
    )  # fmt: skip


def fixed_slots(budget: Budget | None) -> tuple[int, ...]:
    """The whole numbers of slots in a budget as a user wrote it."""
    value = None if budget is None else budget.value
    return tuple(each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, int))


class named:  # reads as a statement: with named("h2o"): ...
    """Puts a policy's name in front of the `PolicyError` that is raised inside."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, PolicyError) and not str(error).startswith("policy "):
            raise PolicyError(f"policy {self.name}: {error}") from None


def factory(function: Callable[P, R]) -> Callable[P, R]:
    """Turns a call with wrong arguments into a `PolicyError` that lists the arguments that are accepted."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            accepted = ", ".join(signature.parameters)
            raise PolicyError(f"{function.__name__}(): {error}; it accepts {accepted}.") from None
        return function(*args, **kwargs)

    return call


def _freeze_needs(what: str, made: Any) -> None:
    if isinstance(made.needs, str):
        raise PolicyError(f"{what}: needs={made.needs!r} is a text; give a set of statistics, such as {{'mass'}}.")
    object.__setattr__(made, "needs", frozenset(made.needs))


def _resolve(name: str, needs: Iterable[str | Statistic]) -> frozenset[Statistic]:
    try:
        return resolve(needs)
    except KeyError as error:
        raise PolicyError(f"policy {name}: unknown statistic {error}; known: {', '.join(sorted(NAMED))}.") from None


def number_argument(name: str, value: Any, *, minimum: float, maximum: float) -> float:
    """A number from `minimum` to `maximum`, or a PolicyError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not minimum <= float(value) <= maximum:
        raise PolicyError(f"{name} must be a number from {minimum:g} to {maximum:g}; got {value!r}.")
    return float(value)


def count_argument(name: str, value: Any, *, minimum: int = 0) -> int:
    """A whole number ≥ `minimum`, or a PolicyError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise PolicyError(f"{name} must be a whole number of at least {minimum}; got {value!r}.")
    return int(value)
