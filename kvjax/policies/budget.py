"""Budgets: how many slots a policy keeps per KV head, and how a layer's heads share them.

The numbers are computed on the host from each row's prompt length and are data in the state; a compiled program depends
only on what `Budget.traced` returns, so that another budget of the same kind is not another program.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import PolicyError
from kvjax.order import largest

if TYPE_CHECKING:
    from kvjax.policies.base import Evict, Stats, View

Array = jax.Array

#: What a user may write for a budget.
BudgetLike = Union["Budget", int, float, Sequence[int | float], np.ndarray, None]

MOST_SLOTS = 2**31 - 1  # positions are int32
MOST_DENOMINATOR = 10_000  # of a fraction that a user writes, such as 0.29
HINT = "give a whole number of slots (at least 1) or a fraction of the prompt as a float in (0, 1]."


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many slots per KV head remain after each step; a subclass for each kind.

    Methods:
      slots: the numbers of a batch, computed on the host.
      limit: the number of slots of each head, inside a compiled program.
      widest: the largest limit that any head of a layer can get.
      traced: the part that a compiled program depends on.
      value: the budget as a user writes it, for reports.
    """

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        """Slots of each layer for a row of `prompt_length` prompt tokens.

        Raises:
          PolicyError: the number of budgets differs from the number of layers.
        """
        raise NotImplementedError

    def limit(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Slots of each head, [B, 1, 1] or [B, K, 1] int32."""
        return view.budget[:, None, None]

    def rank(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Priority of each slot, [B, K, S] float32, where the budget itself has a say in it."""
        return policy.rank(stats, view)

    def widest(self, policy: Evict, slots: int, kv_heads: int) -> int:
        """The largest limit that a head of a layer can get where the average head has `slots`."""
        return slots

    def traced(self) -> Budget:
        """The budget without its numbers."""
        return GIVEN

    @property
    def value(self) -> Any:
        """A number of slots, a fraction, or a tuple with one of these per layer."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Given(Budget):
    """A budget whose numbers are in the state: what remains of any budget in a compiled program."""

    @property
    def value(self) -> None:
        return None


GIVEN = Given()


@dataclasses.dataclass(frozen=True)
class Slots(Budget):
    """The same number of slots whatever the prompt.

    Attributes:
      count: at least 1.
    """

    count: int

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
    """

    fraction: float

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return (max(1, math.floor(self.fraction * prompt_length + 1e-9)),) * num_layers

    @property
    def value(self) -> float:
        return self.fraction


@dataclasses.dataclass(frozen=True)
class PerLayer(Budget):
    """A budget of its own for each layer.

    Attributes:
      layers: `Slots` or `Fraction`, one per layer of the model.
    """

    layers: tuple[Slots | Fraction, ...]

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        if len(self.layers) != num_layers:
            raise PolicyError(
                f"{len(self.layers)} budgets were given for a model of {num_layers} layers; give one number for all "
                "layers or one for each."
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
      window: slots of every layer that hold the prompt's last tokens.
      beta: the last layer has 1 / beta of the average beyond the window.
    """

    average: Slots | Fraction
    window: int
    beta: int

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        (b,), n, w = self.average.slots(prompt_length, 1), prompt_length, self.window
        if b <= w:
            raise PolicyError(f"window={w} needs a larger budget than {b}: it is part of it.")
        if n <= b:  # left alone; a prompt may be shorter than the window, which is protected all the same
            return (max(n, w),) * num_layers
        least = (b - w) // self.beta
        most = 2 * (b - w) - least
        if most > n - w:
            most = n - w
            least = 2 * (b - w) - most
        step = (most - least) // (num_layers - 1) if num_layers > 1 else 0
        return tuple(most - layer * step + w for layer in range(num_layers))

    @property
    def value(self) -> int | float:
        return self.average.value


@dataclasses.dataclass(frozen=True)
class Shared(Budget):
    """A layer's heads share their slots by need (AdaKV, arXiv:2407.11550, Algorithm 1).

    Every head keeps its own best ⌊safeguard·(b - w)⌋ slots beyond the protected window of w; the rest of the layer's
    K·(b - w) slots go to the largest importances over all heads, of equal ones to the lower head, then the newer slot.

    Attributes:
      average: the budget of the average head.
      safeguard: the share of each head's slots that other heads cannot take.
    """

    average: Budget
    safeguard: float

    def slots(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        return self.average.slots(prompt_length, num_layers)

    def own(self, room: Any) -> Any:
        """⌊safeguard·room⌋ of a number or an array of integers."""
        share = exact(self.safeguard)
        return room * share.numerator // share.denominator

    def kept(self, policy: Evict, stats: Stats, view: View) -> Array:
        """[B, K, S] bool: the slots that stay."""
        batch, kv_heads, size = view.position.shape
        protected = view.live & policy.scope.protected(stats, view)
        # [B, 1, 1]: slots of a head beyond the window
        room = view.budget[:, None, None] - jnp.sum(protected, axis=2, keepdims=True, dtype=jnp.int32)[:, :1]
        own = self.own(room)
        score = policy.importance.score(stats, view)
        safe = largest(score, jnp.where(protected, -1, view.position), own)
        # Ties go to the lower head, then to the newer slot: one row of all heads, ordered accordingly.
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
        window = min(policy.scope.count(slots), slots)  # a prompt that is shorter than the window is left alone
        room = slots - window
        return window + self.own(room) + kv_heads * (room - self.own(room))

    def traced(self) -> Budget:
        return Shared(self.average.traced(), self.safeguard)

    @property
    def value(self) -> Any:
        return self.average.value


def as_budget(value: BudgetLike) -> Budget | None:
    """A `Budget` from what a user writes: slots, a fraction, a sequence with one of these per layer, or None.

    Raises:
      PolicyError: a value that is none of these, or out of range.
    """
    if value is None or isinstance(value, Budget):
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return PerLayer(tuple(_one(each) for each in value))
    return _one(value)


def _one(value: Any) -> Slots | Fraction:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, Slots | Fraction):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise PolicyError(f"budget {value!r} is not a number; {HINT}")
    if isinstance(value, numbers.Integral):
        if not 1 <= int(value) <= MOST_SLOTS:
            raise PolicyError(f"budget {value} is out of range; {HINT}")
        return Slots(int(value))
    if not 0 < float(value) <= 1:  # NaN fails this too
        raise PolicyError(f"budget {value} is out of range; {HINT}")
    return Fraction(float(value))


def exact(fraction: float) -> fractions.Fraction:
    """The fraction that was meant: ⌊fraction·b⌋ of whole numbers must not depend on how 0.29 is stored."""
    return fractions.Fraction(fraction).limit_denominator(MOST_DENOMINATOR)


def batch_slots(
    budget: Budget, prompt_lengths: np.ndarray, num_layers: int, check: Callable[[int], None]
) -> np.ndarray:
    """[L, B] int32: slots of each layer and row.

    Args:
      prompt_lengths: [B] int.
      check: called with every number of slots; raises where the policy protects more.
    """
    # The smallest budgets first, so that an error names the row that is worst off.
    lengths = sorted({int(n) for n in prompt_lengths})
    rows = {n: budget.slots(n, num_layers) for n in lengths}
    for n in lengths:
        for each in sorted(set(rows[n])):
            check(each)
    return np.array([rows[int(n)] for n in prompt_lengths], np.int32).T.reshape(num_layers, -1)
