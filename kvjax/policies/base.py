"""What a policy is, and the importance × scope combinator that the eviction policies are made of.

A policy ranks slots; it never moves one. `kvjax.cache` evicts while more than the budget is live, so no policy can
exceed its limit, evict what it protects or see padding.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.statistics import NAMED, Observation, Statistic, resolve

Array = jax.Array
Stats = Any  # the policy's own pytree, leaves [B, K, S, ...]; `evict` uses dict[str, Array]
Budget = Any  # int, float, a tuple of these (one a layer), a `Rule`, or None

P = ParamSpec("P")
R = TypeVar("R")


class View(NamedTuple):
    """What a policy may look at when it ranks the slots of one layer."""

    position: Array  # [B, K, S] int32 absolute token position, -1 = empty
    key: Array  # [B, K, S, D] as stored
    value: Array  # [B, K, S, D]
    newest: Array  # [B] int32 position of each row's newest token; -1 for a row without one in this block
    budget: Array  # [B] int32 slots per KV head that each row may keep
    prompt: Array  # [B] int32 tokens of each row's prompt; while decoding, of all so far
    layer: int
    decoding: bool  # the prompt is over
    heads: tuple[int, ...] | None = None  # which of the model's KV heads these are; None = all, in order

    @property
    def live(self) -> Array:
        """[B, K, S] bool."""
        return self.position >= 0

    def recent(self, count: Array | int) -> Array:
        """[B, K, S] bool: the `count` ([B] or a number) newest positions of each row, live or not.

        A compressor may have left holes among them, which nobody older fills.
        """
        return self.position > (self.newest - count)[:, None, None]

    @property
    def at_prompt_end(self) -> Array:
        """[B] bool: this step was the last of the row's prompt."""
        return (self.newest == self.prompt - 1) & (self.newest >= 0)


class Rule(Protocol):
    """A budget that follows from the prompt: hashable, so that it can be part of a policy."""

    def of_layers(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        """Slots of each layer, for a row of so many prompt tokens."""
        ...


class Policy(NamedTuple):
    """A few pure functions that give every slot a priority; made by factories such as `kvjax.policies.h2o`.

    Equal arguments give the very same policy, so a policy is a static argument of a jitted function without
    recompiling it. A policy with a `then` evicts once, when the prompt ends, and leaves decoding to that one.
    """

    init: Callable[[tuple[int, int, int]], Stats]  # (B, K, S) -> stats of empty slots
    observe: Callable[[Stats, Observation], Stats]
    priority: Callable[[Stats, View], Array]  # -> [B, K, S] float32; larger stays, +inf is protected
    needs: frozenset[Statistic]  # what attention must report; `check` turns names into statistics
    budget: Budget  # slots, a fraction of each row's prompt, one of these a layer, a rule; None = every token
    name: str = "custom"
    positions: str = "original"  # or "cache": RoPE by rank among the live slots
    group_reduce: str = "mean"  # or "max": how the query heads of a KV head share one probability
    protects: Callable[[int], int] = lambda budget: 0  # slots never evicted under a budget
    importance: "Importance | None" = None  # what `evict` made it of, for combinators that take it apart
    scope: "Scope | None" = None
    then: "Policy | None" = None  # who decodes, with its own budget, when this one is for prompts only
    hand_over: Callable[[Stats], Stats] = lambda stats: {}  # this one's statistics -> those of `then`
    limits: Callable[[Stats, View], Array] | None = None  # [B, K, 1] slots of each head; None = the budget, for all
    most: Callable[[int, int], int] = lambda budget, kv_heads: budget  # the largest of these limits
    shrinks: bool = False  # a decoding step may find more than one slot too many
    merge: "Merge | None" = None  # None = what is evicted is lost
    mask: "Mask | None" = None  # everything is kept, and the budget is of what is seen
    parts: "tuple[Part, ...]" = ()  # its heads are under these policies, and nothing else here matters but positions


class Mask(NamedTuple):
    """Hides slots instead of freeing them: for comparison with published evaluations that do so. Saves no memory."""

    visible: Callable[[Stats, View], Array]  # [B, K, S] bool: who is seen by a step beside its own tokens
    settle: Callable[[Stats, View], Stats] = lambda stats, view: stats  # after a step was observed
    # [B]: a whole text attends a second time, through a band of so many newest positions and what is visible beyond it.
    band: Callable[[View], Array] | None = None


class Part(NamedTuple):
    """Some KV heads of every layer, under a policy of their own; see `kvjax.policies.split_heads`."""

    heads: tuple[tuple[int, ...], ...]
    policy: Policy


class Folded(NamedTuple):
    """A layer after a merge: key, value [B, K, S, D] as stored, and stats."""

    key: Array
    value: Array
    stats: Stats


class Merge(NamedTuple):
    """Folds what is evicted into what stays; see `kvjax.policies.merge`."""

    needs: frozenset[str | Statistic]
    fold: Callable[..., Folded]  # (key, value, victim [B, K, S] bool, stats, view, tokens of the block) -> Folded
    remembers: tuple[str, ...] = ()  # statistics of its own, [B, K, S] float32
    # stats -> [B, K, S] float32 added to a slot's logits: the logarithm of how many tokens it stands for.
    log_weight: Callable[[Mapping[str, Array]], Array] | None = None


class Importance(NamedTuple):
    """How much a slot is worth."""

    needs: frozenset[str | Statistic]
    score: Callable[[Mapping[str, Array], View], Array]  # (stats, view) -> [B, K, S] float32, larger stays
    amount: bool = True  # False: it says who goes first and not by how much, so that no multiple of it means anything
    aligned: bool = False  # it compares slots across heads: they must all hold the same positions
    in_kernel: bool = False  # of positions and statistics, by comparisons and sums over slots: a kernel can trace it


class Scope(NamedTuple):
    """Who may not be evicted, whatever its importance."""

    needs: frozenset[str | Statistic]
    protected: Callable[[Mapping[str, Array], View], Array]  # (stats, view) -> [B, K, S] bool
    count: Callable[[int], int]  # budget -> how many slots that protects
    in_kernel: bool = False  # as of `Importance`


def memoized(factory: Callable[P, R]) -> Callable[P, R]:
    """Equal arguments give the same object, so that a jitted function that closes over it is not traced again."""
    made: dict[Any, R] = {}

    @functools.wraps(factory)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = inspect.signature(factory).bind(*args, **kwargs)
        except TypeError as error:
            accepted = ", ".join(inspect.signature(factory).parameters)
            raise PolicyError(f"{factory.__name__}(): {error}; it accepts {accepted}.") from None
        bound.apply_defaults()
        arguments = {name: _plain(value) for name, value in bound.arguments.items()}
        key = tuple(_typed(value) for value in arguments.values())
        try:
            hash(key)
        except TypeError:  # a dict for a budget, say: the factory tells what is wrong with it
            return factory(**arguments)  # type: ignore[call-arg]
        if key not in made:
            made[key] = factory(**arguments)  # type: ignore[call-arg]
        return made[key]

    return call


def _plain(value: Any) -> Any:
    """Sequences and arrays as tuples, NumPy numbers as Python's, so that equal arguments meet."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Importance | Scope | Merge) and not isinstance(value.needs, str):
        return value._replace(needs=frozenset(value.needs))
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(_plain(each) for each in value)
    return value


def _typed(value: Any) -> Any:
    """The value with its type: 1 slot and 1.0 of the prompt are equal in Python, and different budgets."""
    return tuple(_typed(each) for each in value) if type(value) is tuple else (type(value), value)


@memoized
def evict(
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: Budget,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    name: str = "evict",
) -> Policy:
    """Evicts the least important slot that the scope leaves open (RoCo, arXiv:2402.06262, section 4).

    Args:
      importance: what a slot is worth, e.g. `mass` or `recency`.
      scope: what is never evicted, e.g. ``protect_newest(64)`` or ``protect_first(4)``; None = every slot is open.
      budget: live slots per KV head after each step. An int is that many slots; a float in (0, 1] a fraction of each
        row's own prompt; a tuple gives every layer its own; None keeps every token.
      positions: ``original`` rotates keys once at their true position; ``cache`` at every step to their rank.
      group_reduce: ``mean`` or ``max`` over the query heads that share a KV head.
      merge: what becomes of an evicted pair, such as ``d2o()``; None = it is lost. See `kvjax.policies.merge`.
      name: shown in reports.

    Raises:
      PolicyError: a budget below one slot, one smaller than what the scope protects, or an importance that is shared by
        all heads with a scope that is not.
    """
    scope = scope or everything
    if not isinstance(importance, Importance) or not isinstance(scope, Scope):
        raise PolicyError(
            f"policy {name}: importance={importance!r} and scope={scope!r} must be an Importance and a Scope, such as "
            "kvjax.policies.mass and protect_newest(64)."
        )
    for needs in (importance.needs, scope.needs):
        if isinstance(needs, str):
            raise PolicyError(
                f"policy {name}: needs={needs!r} is a text; give a set of statistics, such as {{'mass'}}."
            )
    if importance.aligned and scope.needs:
        raise PolicyError(
            f"policy {name}: its importance is shared by all heads, which must hold the same positions, but its scope "
            "looks at each head's attention; use an importance of single heads, or a scope of positions."
        )
    if merge is not None and not isinstance(merge, Merge):
        raise PolicyError(f"policy {name}: merge={merge!r} is no merge; give one such as kvjax.policies.merge.d2o().")
    needs = _resolve(name, importance.needs | scope.needs | (merge.needs if merge else frozenset()))
    remembered = merge.remembers if merge else ()

    def init(shape: tuple[int, int, int]) -> Stats:
        observed = {s.name: s.empty(shape) for s in sorted(needs, key=lambda s: s.name)}
        return observed | {each: jnp.zeros(shape, jnp.float32) for each in remembered}

    def observe(stats: Stats, observation: Observation) -> Stats:
        observed = {s.name: s.merge(stats[s.name], observation[s.name], observation.queries) for s in needs}
        return observed | {each: stats[each] for each in remembered}

    def priority(stats: Stats, view: View) -> Array:
        score = importance.score(stats, view)
        if scope is everything:
            return score
        return jnp.where(scope.protected(stats, view), jnp.inf, score)

    return check(
        Policy(
            init=init,
            observe=observe,
            priority=priority,
            needs=needs,
            budget=budget,
            name=name,
            positions=positions,
            group_reduce=group_reduce,
            protects=scope.count,
            importance=importance,
            scope=scope,
            merge=merge,
        )
    )


@memoized
def compress(
    *,
    importance: Importance,
    scope: Scope | None = None,
    budget: Budget,
    positions: str = "original",
    group_reduce: str = "mean",
    name: str = "compress",
) -> Policy:
    """Evicts once, when the prompt ends, down to the budget; decoding then appends without evicting.

    The whole prompt is held until then, in blocks too, and the tokens to come have room. Arguments and errors as of
    `evict`.
    """
    policy = evict(
        importance=importance, scope=scope, budget=budget, positions=positions, group_reduce=group_reduce, name=name
    )
    if policy.budget is None:
        raise PolicyError(f"policy {name}: a compressor needs a budget; give slots or a fraction of the prompt.")
    return policy._replace(then=evict(importance=keep, budget=None, positions=positions, name="append"))


#: A slot is worth more than any other: nobody goes.
keep = Importance(frozenset(), lambda stats, view: jnp.full(view.position.shape, jnp.inf), amount=False, in_kernel=True)
everything = Scope(
    frozenset(), lambda stats, view: jnp.zeros(view.position.shape, bool), lambda budget: 0, in_kernel=True
)


def _resolve(name: str, needs: Iterable[str | Statistic]) -> frozenset[Statistic]:
    try:
        return resolve(needs)
    except KeyError as error:
        raise PolicyError(f"policy {name}: unknown statistic {error}; known: {', '.join(sorted(NAMED))}.") from None


def check(policy: Policy) -> Policy:
    """The policy with its needs resolved; refuses, before anything is traced, one that cannot work.

    Raises:
      PolicyError: naming the field, what it was and what would be valid.
    """
    if not isinstance(policy, Policy):
        raise PolicyError(f"{policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256).")
    for field, valid in (("positions", ("original", "cache")), ("group_reduce", ("mean", "max"))):
        if getattr(policy, field) not in valid:
            given = getattr(policy, field)
            raise PolicyError(
                f"policy {policy.name}: {field}={given!r} is not valid; use {' or '.join(map(repr, valid))}."
            )
    if policy.budget is not None and not hasattr(policy.budget, "of_layers"):
        for budget in policy.budget if isinstance(policy.budget, tuple) else (policy.budget,):
            _check_budget(policy, budget)
    return policy._replace(needs=_resolve(policy.name, policy.needs))


def _check_budget(policy: Policy, budget: int | float) -> None:
    hint = "give a whole number of slots (at least 1) or a fraction of the prompt as a float in (0, 1]."
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise PolicyError(f"policy {policy.name}: budget {budget!r} is not a number; {hint}")
    if isinstance(budget, numbers.Integral):
        if not 1 <= budget < 2**31:
            raise PolicyError(f"policy {policy.name}: budget {budget} is out of range; {hint}")
        check_protects(policy, int(budget))
    elif not 0 < budget <= 1:  # NaN fails this too
        raise PolicyError(f"policy {policy.name}: budget {budget} is out of range; {hint}")


def budgets_of(policy: Policy, prompt_length: int, num_layers: int) -> tuple[int, ...]:
    """Slots of each layer for a row of so many prompt tokens.

    Raises:
      PolicyError: as many budgets as the model has no layers, or one that is smaller than what the policy protects.
    """
    budget = policy.budget
    if hasattr(budget, "of_layers"):
        return budget.of_layers(prompt_length, num_layers)
    budgets = budget if isinstance(budget, tuple) else (budget,) * num_layers
    if len(budgets) != num_layers:
        raise PolicyError(
            f"policy {policy.name}: {len(budgets)} budgets were given for a model of {num_layers} layers; "
            "give one number for all layers or one for each."
        )
    resolved = tuple(slots(each, prompt_length) for each in budgets)
    for each in sorted(set(resolved)):
        check_protects(policy, each)
    return resolved


def check_protects(policy: Policy, slots: int) -> None:
    """Refuses a budget that is smaller than what the policy never evicts."""
    protected = policy.protects(slots)
    if protected > slots:
        raise PolicyError(
            f"policy {policy.name}: it protects {protected} slots, more than its budget of {slots}; "
            f"raise the budget to at least {protected} or protect fewer."
        )


def slots(budget: int | float, prompt_length: int) -> int:
    """Budget of a row in slots: b = max(1, ⌊f·n + 1e-9⌋) for a fraction f, in float64 on the host."""
    if isinstance(budget, numbers.Integral):
        return int(budget)
    return max(1, math.floor(float(budget) * prompt_length + 1e-9))


def exact(fraction: float) -> Fraction:
    """The fraction that was meant: ⌊fraction·b⌋ of whole numbers must not depend on how 0.29 is stored."""
    return Fraction(fraction).limit_denominator(10_000)


def number_argument(name: str, value: Any, *, minimum: float, maximum: float) -> float:
    """A number from `minimum` to `maximum`, or a PolicyError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise PolicyError(f"{name} must be a number from {minimum:g} to {maximum:g}; got {value!r}.")
    return float(value)


def count_argument(name: str, value: Any, *, minimum: int = 0) -> int:
    """A whole number ≥ `minimum`, or a PolicyError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise PolicyError(f"{name} must be a whole number of at least {minimum}; got {value!r}.")
    return int(value)
