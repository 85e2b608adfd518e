"""Budgets that methods compute: slots that fall by layer (PyramidKV), and slots that heads share (AdaKV)."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.numerics.top_k import largest
from kvjax.policies.budget import Budget, Derived, Fraction, Slots, TextFraction, as_budget, exact, single

if TYPE_CHECKING:
    from kvjax.policies.base import Evict
    from kvjax.policies.components import Stats, View

Array = jax.Array
Number: TypeAlias = Any  # an int, or an array of integers

MAX_SHARE = 1_000.0  # of an average head's slots; models have fewer KV heads


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
        object.__setattr__(self, "average", single(self.average))
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "beta", count_argument("beta", self.beta, minimum=1))

    @property
    def follows_prompt(self) -> bool:
        return True

    @property
    def fractions(self) -> tuple[Fraction | TextFraction, ...]:
        return self.average.fractions

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
        last = (b - w) // self.beta
        first = np.minimum(2 * (b - w) - last, n - w)
        last = 2 * (b - w) - first
        step = (first - last) // max(num_layers - 1, 1)
        # [N, L]
        falling = first[:, None] - np.arange(num_layers) * step[:, None] + w
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
class Shared(Derived):
    """A layer's heads share their slots by need (AdaKV, arXiv:2407.11550, Algorithm 1).

    Every head keeps its own best ⌊safeguard·(b - w)⌋ slots beyond the protected window of w; the rest of the layer's
    K·(b - w) slots go to the largest importances over all heads, of equal ones to the lower head, then the newer slot.

    Which head gets many slots is known when a prompt ends, and arrays are allocated before: they have room for the most
    slots that any head may get, in every head. `max_share` limits these; the paper has no such limit.

    Attributes:
      average: the budget of the average head.
      safeguard: the share of each head's slots that other heads cannot take, 0 to 1.
      max_share: no head gets more than ⌊max_share·(b - w)⌋ slots beyond the window; at least 1. None = without limit.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    average: Budget
    safeguard: float
    max_share: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.average, Budget):
            object.__setattr__(self, "average", as_budget(self.average))
        if self.average is None or isinstance(self.average, Shared) or self.average.evicts_early:
            raise PolicyError(f"average={self.average!r} cannot be shared by heads; give slots or a fraction.")
        safeguard = number_argument("safeguard", self.safeguard, minimum=0.0, maximum=1.0)
        object.__setattr__(self, "safeguard", safeguard)
        if self.max_share is not None:
            object.__setattr__(
                self, "max_share", number_argument("max_share", self.max_share, minimum=1.0, maximum=MAX_SHARE)
            )

    @property
    def base(self) -> Budget:
        return self.average

    @property
    def shared(self) -> bool:
        return True

    def own(self, room: Number) -> Number:
        """Returns ⌊safeguard·room⌋ for a number or an array of integers."""
        share = exact(self.safeguard)
        return room * share.numerator // share.denominator

    def largest_share(self, room: Number, kv_heads: int) -> Number:
        """Returns the most slots beyond the window that a head can get, for a number or an array of integers."""
        own = self.own(room)
        share = own + kv_heads * (room - own)
        if self.max_share is None:
            return share
        times = exact(self.max_share)
        limit = room * times.numerator // times.denominator
        return min(share, limit) if isinstance(room, int) else jnp.minimum(share, limit)

    def kept(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Marks the slots that stay, [B, K, S] bool."""
        batch, kv_heads, size = view.position.shape
        protected = view.live & policy.scope.protected(stats, view)
        # [B, 1, 1]: slots of a head beyond the window
        room = view.budget[:, None, None] - jnp.sum(protected, axis=2, keepdims=True, dtype=jnp.int32)[:, :1]
        own = self.own(room)
        score = policy.importance.score(stats, view)
        safe = largest(score, jnp.where(protected, -1, view.position), own)
        # What a head holds of the others' slots is the best of its own.
        share = self.largest_share(room, kv_heads)
        open_to = (
            view.live if self.max_share is None else largest(score, jnp.where(protected, -1, view.position), share)
        )
        # The lower head wins ties, then the newer slot: the heads are joined to one row in that order.
        head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
        order = jnp.where(protected | safe | ~open_to, -1, view.position + (kv_heads - 1 - head) * size)
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
        return window + int(self.largest_share(slots - window, kv_heads))

    def traced(self) -> Budget:
        return dataclasses.replace(self, average=self.average.traced())
