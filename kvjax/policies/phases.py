"""Policies over time: one for the prompt, another while decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.budget import Budget, BudgetLike, Derived
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.patterns import random
from kvjax.policies.window import full

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BeyondPrompt(Derived):
    """A budget for the tokens after the prompt; the prompt's slots are kept in addition to it.

    Attributes:
      after: the number of slots per KV head for tokens after the prompt.
      window: the sliding window of the layer, outside of which slots of the prompt are not kept; None = no window.
    """

    after: Budget
    window: int | None = None

    @property
    def base(self) -> Budget:
        return self.after

    @property
    def beyond_prompt(self) -> bool:
        return True

    def limit(self, policy: Evict, stats: Stats, view: View) -> Array:
        kept = view.live & of_prompt(view)
        if self.window is not None:
            kept &= view.recent(self.window)
        limit = jnp.sum(kept, axis=2, keepdims=True, dtype=jnp.int32) + view.budget[:, None, None]
        if self.evicts_early:
            # The prompt's slots are protected, so their rank is not -inf.
            worthy = view.live & (policy.rank(stats, view) > -jnp.inf)
            limit = jnp.minimum(limit, jnp.sum(worthy, axis=2, keepdims=True, dtype=jnp.int32))
        return limit

    def in_window(self, window: int) -> Budget:
        return dataclasses.replace(self, window=window)

    def traced(self) -> Budget:
        return dataclasses.replace(self, after=self.after.traced())


def of_prompt(view: View) -> Array:
    """Marks the positions of each row's prompt, [B, K, S] bool."""
    return view.position < view.prompt[:, None, None]


@dataclasses.dataclass(frozen=True)
class KeptPrompt(Scope):
    """Protects the slots of the prompt, which do not count against the budget; see `phases`.

    Attributes:
      after: protects slots of the tokens after the prompt; it does not see the others.
    """

    after: Scope

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return self.after.needs

    @property
    def reads(self) -> frozenset[str]:
        return self.after.reads

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.after,)

    def protected(self, stats: Stats, view: View) -> Array:
        prompt = of_prompt(view)
        return prompt | self.after.protected(stats, view._replace(position=jnp.where(prompt, -1, view.position)))

    def count(self, budget: int) -> int:
        return self.after.count(budget)

    def newest(self, budget: int) -> int:
        return self.after.newest(budget)

    def traced(self) -> Scope:
        return dataclasses.replace(self, after=self.after.traced())

    def mapped(self, change: Callable[[Scope], Scope]) -> Scope:
        return dataclasses.replace(self, after=self.after.mapped(change))


@dataclasses.dataclass(frozen=True)
class AfterPrompt(Importance):
    """Ranks the slots after the prompt by an importance that does not see those of the prompt; see `phases`.

    Attributes:
      inner: ranks the slots.
    """

    inner: Importance
    of_budget = True

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset(self.inner.needs)

    @property
    def amount(self) -> bool:
        return self.inner.amount

    @property
    def signed(self) -> bool:
        return self.inner.signed

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.inner.reads)

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.inner,)

    def score(self, stats: Stats, view: View) -> Array:
        position = jnp.where(of_prompt(view), -1, view.position)
        return self.inner.score(stats, view._replace(position=position))


@dataclasses.dataclass(frozen=True)
class Phases(Policy):
    """One policy shortens the prompt when it ends, and another evicts while decoding.

    Attributes:
      prompt: evicts once, when the prompt ends; may keep all of the prompt if `decode` keeps the prompt's slots.
      decode: evicts at every step from the first new token on, under its own budget; its statistics include the
        prompt. It may keep the prompt's slots; see `phases`.
      name: see `Policy`.

    Raises:
      PolicyError: a `prompt` that is not a compressor, a `decode` that does not evict at every step or whose heads must
        hold the same positions, or two policies of different `positions` or `group_reduce`.
    """

    prompt: Evict
    decode: Evict
    name: str = dataclasses.field(default="after_prefill", compare=False)

    def __post_init__(self) -> None:
        one, two = self.prompt, self.decode
        for policy in (one, two):
            if not isinstance(policy, Policy):
                raise PolicyError(f"after_prefill(): {policy!r} is not a policy; give one such as snapkv(budget=256).")
        if isinstance(one, Phases):
            raise PolicyError(f"after_prefill({one.name}): it is combined already; give the compressor itself.")
        keeps_prompt = isinstance(two, Evict) and two.budget is not None and two.budget.beyond_prompt
        whole = isinstance(one, Evict) and one.budget is None
        if not isinstance(one, Evict) or (one.when != "prompt_end" and not (whole and keeps_prompt)):
            raise PolicyError(
                f"after_prefill({one.name}): it evicts at every step; give a compressor of prompts such as snapkv."
            )
        if isinstance(two, WithSelection):
            raise PolicyError(
                f"after_prefill(then={two.name}): it hides slots and evicts none; give a policy that evicts."
            )
        if isinstance(two, Split):
            raise PolicyError(f"after_prefill(then={two.name}): its heads have caches of their own; use it by itself.")
        if not isinstance(two, Evict) or two.when != "step":
            raise PolicyError(f"after_prefill(then={two.name}): it is for prompts only; give an eviction policy.")
        call = f"phases({one.name}, {two.name})" if keeps_prompt else f"after_prefill({one.name}, then={two.name})"
        for field in ("positions", "group_reduce"):
            first, second = getattr(one, field), getattr(two, field)
            if first != second and (field == "positions" or (one.needs and two.needs)):
                raise PolicyError(
                    f"{call}: {field} {first!r} and {second!r} differ; both share one cache and one attention."
                )
        if one.merge is not None and two.merge is not None:
            raise PolicyError(
                f"{call}: {one.name} leaves slots of different weights, which the merge of {two.name} would average as "
                "if they were equal; leave out its merge."
            )
        if two.importance.shared_by_heads and not whole:
            raise PolicyError(
                f"{call}: its heads must all hold the same positions, and a "
                "compressor leaves each its own; use one that ranks every head by itself, such as "
                "tova(share_heads=False)."
            )

    @property
    def positions(self) -> str:
        return self.prompt.positions

    @property
    def group_reduce(self) -> str:
        return (self.prompt if self.prompt.needs else self.decode).group_reduce

    @property
    def budget(self) -> Budget | None:
        """The budget of `prompt`, or of `decode` if the whole prompt is kept."""
        return self.decode.budget if self.prompt.budget is None else self.prompt.budget

    @property
    def needs(self) -> frozenset[Statistic]:
        return self.prompt.needs | self.decode.needs


@factory
def after_prefill(compressor: Policy, *, then: Policy) -> Phases:
    """`compressor` shortens the prompt once, and `then` evicts while decoding, under its own budget.

    Args:
      compressor: such as snapkv(budget=256); alone, it leaves decoding to append without evicting.
      then: an eviction policy. It protects slots from the first new token on; its statistics include the prompt.

    Raises:
      PolicyError: see `Phases`.
    """
    for policy in (compressor, then):
        if not isinstance(policy, Policy):
            raise PolicyError(f"after_prefill(): {policy!r} is not a policy; give one such as snapkv(budget=256).")
    return Phases(compressor, then, f"{compressor.name}>{then.name}")  # type: ignore[arg-type]  # checked there


@factory
def phases(prompt: Policy, decode: Policy) -> Phases:
    """Applies `prompt` to the prompt, and `decode` only to the tokens after it (SCOPE, arXiv:2412.13649).

    The two budgets add up: a head holds the slots that `prompt` keeps, and those of the budget of `decode`. Slots of
    the prompt are protected, and take part in what scores sum or normalise over. `random_control` is an example.

    Args:
      prompt: a compressor such as snapkv(budget=256), or full(), which keeps the whole prompt.
      decode: an eviction policy with a budget for the tokens after the prompt. A fraction is of the prompt's length.

    Raises:
      PolicyError: any other policies; see `Phases`.
    """
    for policy in (prompt, decode):
        if not isinstance(policy, Policy):
            raise PolicyError(f"phases(): {policy!r} is not a policy; give one such as snapkv(budget=256).")
    if not isinstance(decode, Evict) or decode.budget is None or decode.when != "step" or decode.page > 1:
        raise PolicyError(
            f"phases(decode={decode.name}): give a single policy that evicts token by token while decoding, such as "
            "h2o(budget=256)."
        )
    if not isinstance(prompt, Evict) or (prompt.budget is not None and prompt.when != "prompt_end"):
        raise PolicyError(
            f"phases(prompt={prompt.name}): give a compressor such as snapkv(budget=256), or full() to keep the prompt."
        )
    if isinstance(decode.budget, BeyondPrompt):
        raise PolicyError(f"phases(decode={decode.name}): it is combined already; give the policy itself.")
    if any(not each.per_slot for each in decode.rounds):
        raise PolicyError(
            f"phases(decode={decode.name}): it counts slots from the beginning of the text, the prompt included; "
            "give a policy that ranks single slots, such as h2o(budget=256)."
        )
    importance = AfterPrompt(decode.importance) if decode.importance.of_budget else decode.importance
    kept = dataclasses.replace(
        decode, importance=importance, budget=BeyondPrompt(decode.budget), scope=KeptPrompt(decode.scope)
    )
    return Phases(prompt, kept, f"{prompt.name}|{decode.name}")


@factory
def random_control(
    budget: BudgetLike, *, every: int = 64, seed: int = 0, recent: int = 0, positions: str = "original"
) -> Phases:
    """Keeps the whole prompt and evicts generated tokens at random, the control of arXiv:2609.03430.

    It is ``phases(full(), random(budget, every=every))``. A policy whose scores say more than chance does better, as
    ``phases(full(), policy(budget, every=every))``, with the same slots.

    Args:
      budget: slots per KV head for the tokens after the prompt, in addition to the prompt's; a fraction is of the
        prompt's length.
      every: the number of slots that are evicted at once; see `evict`.
      seed: see `random`.
      recent: see `random`. A score that protects the newest tokens has an advantage over a control that does not.
      positions: see `evict`.

    Raises:
      PolicyError: an argument that is not valid.
    """
    made = phases(full(positions=positions), random(budget, seed=seed, recent=recent, positions=positions, every=every))
    return dataclasses.replace(made, name="random_control")
