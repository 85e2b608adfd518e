"""Budgets: the number of slots that a policy keeps per KV head, and how a layer's heads share them.

The numbers are computed on the host from each row's prompt length and are data in the state. A compiled program depends
only on what `Budget.traced` returns, so that budgets of the same kind share a program.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.order import largest

if TYPE_CHECKING:
    from kvjax.policies.base import Evict
    from kvjax.policies.components import Stats, View

Array = jax.Array

#: What a user may write for a budget.
BudgetLike = Union["Budget", int, float, Sequence[int | float], np.ndarray, None]

MOST_SLOTS = 2**31 - 1  # positions are int32
MOST_DENOMINATOR = 10_000  # of a fraction that a user writes, such as 0.29
HINT = "give a whole number of slots (at least 1) or a fraction of the prompt as a float in (0, 1]."


@dataclasses.dataclass(frozen=True)
class Budget:
    """The number of slots per KV head that remain after each step; a subclass for each kind.

    Attributes:
      first_layer: layers before this one keep every token.
      of_text: whether `slots` takes the number of tokens of each row's whole text instead of its prompt.
    """

    @property
    def first_layer(self) -> int:
        return 0

    @property
    def of_text(self) -> bool:
        return False

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

    def traced(self) -> Budget:
        """Returns the budget without its numbers: what a compiled program depends on."""
        return GIVEN

    @property
    def value(self) -> Any:
        """What a user writes for it: a number of slots, a fraction, or a tuple with one of these per layer."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Given(Budget):
    """A budget whose numbers are in the state; other kinds of budgets become one in a compiled program."""

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
            raise PolicyError(f"budget {self.count!r} is not a number of slots; {HINT}")
        if not 1 <= self.count <= MOST_SLOTS:
            raise PolicyError(f"budget {self.count} is out of range; {HINT}")
        object.__setattr__(self, "count", int(self.count))

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return (self.count,) * num_layers

    @property
    def value(self) -> int:
        return self.count


@dataclasses.dataclass(frozen=True)
class Fraction(Budget):
    """A fraction f of each row's own prompt: max(1, ⌊f·n + 1e-9⌋) slots, computed in float64.

    Attributes:
      fraction: in (0, 1].

    Raises:
      PolicyError: any other fraction.
    """

    fraction: float

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, numbers.Real):
            raise PolicyError(f"budget {self.fraction!r} is not a fraction; {HINT}")
        if not 0 < float(self.fraction) <= 1:  # NaN fails this too
            raise PolicyError(f"budget {float(self.fraction)} is out of range; {HINT}")
        object.__setattr__(self, "fraction", float(self.fraction))

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return (max(1, math.floor(self.fraction * prompt_length + 1e-9)),) * num_layers

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

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return Fraction(self.fraction).slots(prompt_length, num_layers)

    @property
    def value(self) -> float:
        return self.fraction


@dataclasses.dataclass(frozen=True)
class FromLayer(Budget):
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
    def first_layer(self) -> int:
        return self.first

    @property
    def of_text(self) -> bool:
        return self.budget.of_text

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return self.budget.slots(prompt_length, num_layers)

    def largest(self, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
        return self.budget.largest(prompt_lengths, num_layers)

    def widest(self, policy: Evict, slots: int, kv_heads: int) -> int:
        return self.budget.widest(policy, slots, kv_heads)

    def traced(self) -> Budget:
        return self.budget.traced()

    @property
    def value(self) -> Any:
        return self.budget.value


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
                f"budget {self.layers!r} is not a sequence with one budget per layer; give one, such as (64, 0.5)."
            )
        object.__setattr__(self, "layers", tuple(_one(each) for each in self.layers))

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


@dataclasses.dataclass(frozen=True)
class Pyramid(Budget):
    """PyramidKV's budgets, which fall by layer (arXiv:2406.02069, section 3.2).

    Attributes:
      average: the budget of the average layer.
      window: slots of every layer for the prompt's last tokens, at least 1.
      beta: the last layer has 1 / beta of the average beyond the window; at least 1.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    average: Slots | Fraction
    window: int
    beta: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "average", _one(self.average))
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "beta", count_argument("beta", self.beta, minimum=1))

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        (b,), w = self.average.slots(prompt_length, 1), self.window
        if b <= w:
            raise PolicyError(f"window={w} needs a larger budget than {b}, of which it is a part.")
        (row,) = self._slots(np.array([prompt_length]), np.array([b]), num_layers)
        return tuple(row.tolist())

    def largest(self, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
        # The last layers of a prompt that is hardly longer than its budget get more than those of a long one.
        return _largest_pyramid(self, prompt_lengths, num_layers)

    def _slots(self, n: np.ndarray, b: np.ndarray, num_layers: int) -> np.ndarray:
        """Returns the slots of each layer, [N, L], for prompts of `n` tokens [N] and average budgets `b` [N]."""
        w = self.window
        least = (b - w) // self.beta
        most = np.minimum(2 * (b - w) - least, n - w)
        least = 2 * (b - w) - most
        step = (most - least) // max(num_layers - 1, 1)
        # [N, L]
        falling = most[:, None] - np.arange(num_layers) * step[:, None] + w
        # A prompt within its budget is left alone. One shorter than the window still has the window's slots.
        return np.where((n <= b)[:, None], np.maximum(n, w)[:, None], falling)

    @property
    def value(self) -> int | float:
        return self.average.value


@functools.lru_cache(maxsize=64)  # a range may be a million lengths, and the answer is the same for every batch
def _largest_pyramid(budget: Pyramid, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
    """See `Pyramid.largest`; lengths whose average budget is within the window are refused elsewhere."""
    n = np.arange(prompt_lengths.start, prompt_lengths.stop)
    b = np.array([budget.average.slots(int(each), 1)[0] for each in n])
    valid = b > budget.window
    rows = budget._slots(n[valid], b[valid], num_layers)
    return tuple(np.max(rows, axis=0, initial=1).tolist())


@dataclasses.dataclass(frozen=True)
class Shared(Budget):
    """A layer's heads share their slots by need (AdaKV, arXiv:2407.11550, Algorithm 1).

    Every head keeps its own best ⌊safeguard·(b - w)⌋ slots beyond the protected window of w; the rest of the layer's
    K·(b - w) slots go to the largest importances over all heads, of equal ones to the lower head, then the newer slot.

    Attributes:
      average: the budget of the average head.
      safeguard: the share of each head's slots that other heads cannot take, 0 to 1.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    average: Budget
    safeguard: float

    def __post_init__(self) -> None:
        if not isinstance(self.average, Budget):
            object.__setattr__(self, "average", as_budget(self.average))
        if self.average is None or isinstance(self.average, Shared):
            raise PolicyError(f"average={self.average!r} cannot be shared by heads; give slots or a fraction.")
        safeguard = number_argument("safeguard", self.safeguard, minimum=0.0, maximum=1.0)
        object.__setattr__(self, "safeguard", safeguard)

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return self.average.slots(prompt_length, num_layers)

    def largest(self, prompt_lengths: range, num_layers: int) -> tuple[int, ...]:
        return self.average.largest(prompt_lengths, num_layers)

    def own(self, room: Any) -> Any:
        """Returns ⌊safeguard·room⌋ for a number or an array of integers."""
        share = exact(self.safeguard)
        return room * share.numerator // share.denominator

    def kept(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Marks the slots that stay, [B, K, S] bool."""
        batch, kv_heads, size = view.position.shape
        protected = view.live & policy.scope.protected(stats, view)
        # [B, 1, 1]: slots of a head beyond the window
        room = view.budget[:, None, None] - jnp.sum(protected, axis=2, keepdims=True, dtype=jnp.int32)[:, :1]
        own = self.own(room)
        score = policy.importance.score(stats, view)
        safe = largest(score, jnp.where(protected, -1, view.position), own)
        # Of equal scores, the lower head wins, then the newer slot: all heads are one row in that order.
        head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
        order = jnp.where(protected | safe | ~view.live, -1, view.position + (kv_heads - 1 - head) * size)
        rest = largest(score.reshape(batch, -1), order.reshape(batch, -1), (kv_heads * (room - own))[:, 0])
        # A prompt within the budget is left alone.
        short = (view.prompt <= view.budget)[:, None, None]
        return view.live & (protected | safe | rest.reshape(view.position.shape) | short)

    def limit(self, policy: Evict, stats: Stats, view: View) -> Array:
        return jnp.sum(self.kept(policy, stats, view), axis=2, keepdims=True, dtype=jnp.int32)

    def rank(self, policy: Evict, stats: Stats, view: View) -> Array:
        return jnp.where(self.kept(policy, stats, view), jnp.inf, 0.0)

    def widest(self, policy: Evict, slots: int, kv_heads: int) -> int:
        window = min(policy.scope.count(slots), slots)  # A prompt shorter than the window is left alone.
        room = slots - window
        return window + self.own(room) + kv_heads * (room - self.own(room))

    def traced(self) -> Budget:
        return Shared(self.average.traced(), self.safeguard)

    @property
    def value(self) -> Any:
        return self.average.value


def as_budget(value: BudgetLike) -> Budget | None:
    """Returns the `Budget` that a user writes as slots, a fraction, a sequence with one of these per layer, or None.

    Raises:
      PolicyError: a value that is none of these or out of range, or a `Given`.
    """
    if isinstance(value.average if isinstance(value, Shared) else value, Given):
        raise PolicyError(f"budget {value!r} has no numbers and is for compiled programs; {HINT}")
    if value is None or isinstance(value, Budget):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    return PerLayer(tuple(value)) if isinstance(value, list | tuple) else _one(value)


def _one(value: Any) -> Slots | Fraction:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, Slots | Fraction):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise PolicyError(f"budget {value!r} is not a number; {HINT}")
    return Slots(int(value)) if isinstance(value, numbers.Integral) else Fraction(float(value))


def exact(fraction: float) -> fractions.Fraction:
    """Returns the decimal fraction that a user wrote, so that ⌊0.29·100⌋ is 29 although 0.29 is stored as less."""
    return fractions.Fraction(fraction).limit_denominator(MOST_DENOMINATOR)


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
    return np.array([rows[int(n)] for n in prompt_lengths], np.int32).T.reshape(num_layers, -1)
