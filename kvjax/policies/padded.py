"""Arrays with room for more slots than a budget, so that runs of several budgets share compiled programs."""

from __future__ import annotations

import dataclasses

from kvjax.policies.base import Evict, Policy
from kvjax.policies.budget import Budget, Fraction, Slots, TextFraction, single


@dataclasses.dataclass(frozen=True)
class Padded(Budget):
    """A budget whose arrays have room for a larger one.

    What is kept and computed is that of the budget, to rounding. Memory and the time of a step are those of the
    capacity, but a program serves every budget up to it.

    Attributes:
      budget: the slots that are kept: a number, or a fraction of each prompt.
      capacity: likewise, what arrays have room for at the least.

    Raises:
      PolicyError: an attribute that is neither.
    """

    budget: Slots | Fraction
    capacity: Slots | Fraction

    def __post_init__(self) -> None:
        for field in ("budget", "capacity"):
            object.__setattr__(self, field, single(getattr(self, field)))

    @property
    def follows_prompt(self) -> bool:
        return self.budget.follows_prompt

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        return self.budget.fractions

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return self.budget.slots(prompt_length, num_layers)

    def largest(self, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
        sizes = (each.largest(prompt_lengths, num_layers) for each in (self.budget, self.capacity))
        return tuple(map(max, *sizes))

    @property
    def value(self) -> int | float:
        return self.budget.value


def padded(policy: Policy, capacity: int | float | Slots | Fraction) -> Policy:
    """Returns a policy with arrays for a larger budget; the policy itself if its budget is not a number or fraction.

    A loop over budgets compiles once if every policy is padded to the largest of them, except under `storage.Tiers`,
    where arrays of both tiers follow the budget::

        for budget in (0.1, 0.2, 0.5):
            kvjax.generate(model, tokens, policies.padded(policies.h2o(budget), 0.5), max_new_tokens=64)

    Args:
      policy: of any kind.
      capacity: see `Padded`.

    Raises:
      PolicyError: a capacity that is neither a number of slots nor a fraction.
    """
    if not isinstance(policy, Evict) or not isinstance(policy.budget, Slots | Fraction):
        return policy
    return dataclasses.replace(policy, budget=Padded(policy.budget, single(capacity)))
