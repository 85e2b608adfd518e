"""Budgets: the number of slots that a policy keeps per KV head, and how a layer's heads share them.

The numbers are computed on the host from each row's prompt length and are data in the state. A compiled program depends
only on what `Budget.traced` returns, so that budgets of the same kind share a program.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import jax
import numpy as np

from kvjax.arguments import MIN_SLOTS, Restorable, count_argument, warn_once
from kvjax.errors import PolicyError, shown

if TYPE_CHECKING:
    from kvjax.policies.base import Evict
    from kvjax.policies.components import Stats, View

Array = jax.Array

#: What a user may write for a budget.
BudgetLike = Union["Budget", int, float, Sequence[int | float], np.ndarray, None]

MAX_SLOTS = 2**31 - 1  # positions are int32
MAX_DENOMINATOR = 10_000  # of a fraction that a user writes, such as 0.29
HINT = "give a whole number of slots (at least 1) or a fraction of the prompt as a float in (0, 1]."


@dataclasses.dataclass(frozen=True)
class Budget(Restorable):
    """The number of slots per KV head that an eviction leaves; a subclass for each kind.

    Attributes:
      numberless: whether the numbers are in the state, as in compiled programs.
      first_layer: layers before this one keep every token.
      follows_prompt: whether the number of slots depends on the prompt's length.
      shared: whether the heads of a layer share their slots.
      over_layers: whether the heads of all layers share their slots.
      of_text: whether `slots` takes the number of tokens of each row's whole text instead of its prompt.
      beyond_prompt: whether only tokens after the prompt count, and the prompt's slots are all kept.
      evicts_early: whether slots of priority -inf are evicted even if the head is within its budget.
    """

    @property
    def numberless(self) -> bool:
        return False

    @property
    def first_layer(self) -> int:
        return 0

    @property
    def follows_prompt(self) -> bool:
        return False

    @property
    def shared(self) -> bool:
        return False

    @property
    def over_layers(self) -> bool:
        return False

    @property
    def of_text(self) -> bool:
        return False

    @property
    def beyond_prompt(self) -> bool:
        return False

    @property
    def evicts_early(self) -> bool:
        return False

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        """The fractions that the budget is made of, without those that say how many slots they keep at the least."""
        return ()

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        """Computes, on the host, the slots of each layer for a row of `prompt_length` prompt tokens.

        Raises:
          PolicyError: the number of budgets differs from the number of layers.
        """
        raise NotImplementedError

    def largest(self, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
        """Returns the most slots of each layer for any prompt of these lengths, for which arrays are allocated.

        Most budgets grow with the length; one that does not must override this.
        """
        return self.slots(prompt_lengths[-1], num_layers)

    def limit(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Returns the slots of each head, [B, 1, 1] or [B, K, 1] int32."""
        return view.budget[:, None, None]

    def rank(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Returns the priority of each slot, [B, K, S] float32: the policy's, unless the budget changes it."""
        return policy.rank(stats, view)

    def widest(self, policy: Evict, slots: int, kv_heads: int) -> int:
        """Returns the largest limit that a head of a layer can get if the average head has `slots`."""
        return slots

    def in_window(self, window: int) -> Budget:
        """Returns the budget of a layer with a sliding window of `window` positions."""
        return self

    def traced(self) -> Budget:
        """Returns the budget without its numbers: what a compiled program depends on."""
        return GIVEN

    @property
    def value(self) -> Any:
        """Returns the budget as users write it: a number of slots, a fraction, or a tuple of one of these per layer."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Given(Budget):
    """A budget whose numbers are in the state; other kinds of budgets become one in a compiled program."""

    @property
    def numberless(self) -> bool:
        return True

    @property
    def value(self) -> None:
        return None


GIVEN = Given()


@dataclasses.dataclass(frozen=True)
class Slots(Budget):
    """The same number of slots whatever the prompt.

    Attributes:
      count: at least 1.

    Raises:
      PolicyError: any other count.
    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, numbers.Integral):
            raise PolicyError(f"budget {shown(self.count)} is not a number of slots; {HINT}")
        if not 1 <= self.count <= MAX_SLOTS:
            raise PolicyError(f"budget {shown(self.count)} is out of range; {HINT}")
        object.__setattr__(self, "count", int(self.count))

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return (self.count,) * num_layers

    @property
    def value(self) -> int:
        return self.count


@dataclasses.dataclass(frozen=True)
class Fraction(Budget):
    """A fraction f of each row's own prompt: max(min_slots, ⌊f·n + 1e-9⌋) slots, computed in float64.

    Attributes:
      fraction: in (0, 1].
      min_slots: slots that are kept of the shortest prompts, at least 1.

    Raises:
      PolicyError: any other fraction or number of slots.
    """

    fraction: float
    min_slots: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_slots", count_argument("a budget's min_slots", self.min_slots, minimum=1))
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, numbers.Real):
            raise PolicyError(f"budget {shown(self.fraction)} is not a fraction; {HINT}")
        if not 0 < float(self.fraction) <= 1:  # NaN fails this too
            raise PolicyError(f"budget {float(self.fraction)} is out of range; {HINT}")
        object.__setattr__(self, "fraction", float(self.fraction))

    @property
    def follows_prompt(self) -> bool:
        return True

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        return (self,) if self.min_slots == 1 else ()

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return (max(self.min_slots, math.floor(self.fraction * prompt_length + 1e-9)),) * num_layers

    @property
    def value(self) -> float:
        return self.fraction


@dataclasses.dataclass(frozen=True)
class TextFraction(Budget):
    """A fraction of each row's whole text, its prompt and the tokens to come (InfiniGen, arXiv:2406.19707, Table 2).

    Attributes:
      fraction: in (0, 1].

    Raises:
      PolicyError: any other fraction.
    """

    fraction: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", Fraction(self.fraction).fraction)

    @property
    def of_text(self) -> bool:
        return True

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        return (self,)

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return Fraction(self.fraction).slots(prompt_length, num_layers)

    @property
    def value(self) -> float:
        return self.fraction


class Derived(Budget):
    """A budget that wraps another one: every property and method that it does not define is the other budget's.

    Attributes:
      base: the other budget.
    """

    @property
    def base(self) -> Budget:
        raise NotImplementedError

    @property
    def numberless(self) -> bool:
        return self.base.numberless

    @property
    def first_layer(self) -> int:
        return self.base.first_layer

    @property
    def follows_prompt(self) -> bool:
        return self.base.follows_prompt

    @property
    def of_text(self) -> bool:
        return self.base.of_text

    @property
    def evicts_early(self) -> bool:
        return self.base.evicts_early

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        return self.base.fractions

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return self.base.slots(prompt_length, num_layers)

    def largest(self, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
        return self.base.largest(prompt_lengths, num_layers)

    def widest(self, policy: Evict, slots: int, kv_heads: int) -> int:
        return self.base.widest(policy, slots, kv_heads)

    @property
    def value(self) -> Any:
        return self.base.value


@dataclasses.dataclass(frozen=True)
class FromLayer(Derived):
    """A budget for the layers from `first` on; the layers before it keep every token.

    Attributes:
      budget: of the other layers.
      first: the first layer that has a budget.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    budget: Budget
    first: int

    def __post_init__(self) -> None:
        budget = self.budget if isinstance(self.budget, Budget) else as_budget(self.budget)
        if budget is None or isinstance(budget, FromLayer):
            raise PolicyError(f"budget={self.budget!r} cannot be limited to some layers; give slots or a fraction.")
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "first", count_argument("first", self.first))

    @property
    def base(self) -> Budget:
        return self.budget

    @property
    def first_layer(self) -> int:
        return self.first

    def traced(self) -> Budget:
        return self.budget.traced()


@dataclasses.dataclass(frozen=True)
class PerLayer(Budget):
    """A budget of its own for each layer.

    Attributes:
      layers: `Slots` or `Fraction`, one per layer of the model.

    Raises:
      PolicyError: no layers, or a budget that is neither.
    """

    layers: tuple[Slots | Fraction, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, list | tuple) or not self.layers:
            raise PolicyError(
                f"budget {shown(self.layers)} is not a sequence with one budget per layer; give one, such as (64, 0.5)."
            )
        object.__setattr__(self, "layers", tuple(single(each) for each in self.layers))

    @property
    def follows_prompt(self) -> bool:
        return any(each.follows_prompt for each in self.layers)

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        return tuple(fraction for each in self.layers for fraction in each.fractions)

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        if len(self.layers) != num_layers:
            raise PolicyError(
                f"{len(self.layers)} budgets were given for a model of {num_layers} layers; give one for all layers or "
                "one per layer."
            )
        return tuple(each.slots(prompt_length, 1)[0] for each in self.layers)

    @property
    def value(self) -> tuple[int | float, ...]:
        return tuple(each.value for each in self.layers)


def as_budget(value: BudgetLike) -> Budget | None:
    """Returns the `Budget` that a user writes as slots, a fraction, a sequence with one of these per layer, or None.

    Raises:
      PolicyError: a value that is none of these or out of range, or a `Given`.
    """
    if isinstance(value, Budget) and value.numberless:
        raise PolicyError(f"budget {value!r} has no numbers and is for compiled programs; {HINT}")
    if value is None or isinstance(value, Budget):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    return PerLayer(tuple(value)) if isinstance(value, list | tuple) else single(value)


def single(value: object) -> Slots | Fraction:
    """Returns the budget that a user writes as a number of slots or a fraction.

    Raises:
      PolicyError: a value that is neither or out of range.
    """
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, Slots | Fraction):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise PolicyError(f"budget {shown(value)} is not a number; {HINT}")
    if isinstance(value, numbers.Integral) and value == 1:
        warn_once(
            "budget 1 is one slot per KV head, with which predictions mean little: for the whole prompt write 1.0, and "
            "for one slot kvjax.policies.Slots(1)."
        )
    return Slots(int(value)) if isinstance(value, numbers.Integral) else Fraction(float(value))


def exact(fraction: float) -> fractions.Fraction:
    """Returns the decimal fraction that a user wrote, so that ⌊0.29·100⌋ is 29 although 0.29 is stored as less."""
    return fractions.Fraction(fraction).limit_denominator(MAX_DENOMINATOR)


def batch_slots(
    budget: Budget, prompt_lengths: np.ndarray, num_layers: int, check: Callable[[int], None]
) -> np.ndarray:
    """Computes the slots of each layer and row, [L, B] int32.

    Args:
      budget: of the policy or selection.
      prompt_lengths: [B] int.
      num_layers: L.
      check: called with every number of slots; raises an error if the policy protects more.
    """
    # Shortest prompts first: an error is about the smallest budget.
    lengths = sorted({int(n) for n in prompt_lengths})
    rows = {n: budget.slots(n, num_layers) for n in lengths}
    for n in lengths:
        for each in sorted(set(rows[n])):
            check(each)
    for fraction in budget.fractions:
        (kept,) = fraction.slots(lengths[0], 1)
        if kept < min(MIN_SLOTS, lengths[0]):
            _warn_of_few(fraction, kept, lengths[0])
    return np.array([rows[int(n)] for n in prompt_lengths], np.int32).T.reshape(num_layers, -1)


def _warn_of_few(fraction: Fraction | TextFraction, kept: int, length: int) -> None:
    """Warns that a fraction leaves few slots of a batch's shortest text; once for each fraction."""
    instead = "a number of slots"
    if isinstance(fraction, Fraction):
        instead += f", or kvjax.policies.Fraction({fraction.fraction:g}, min_slots={MIN_SLOTS})"
    warn_once(
        f"budget {fraction.fraction:g} leaves {kept} of {length} tokens; with fewer than {MIN_SLOTS} slots "
        f"predictions mean little: give {instead}.",
        about=fraction,
    )
