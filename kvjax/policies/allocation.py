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
from kvjax.policies.budget import MAX_SLOTS, Budget, Derived, Fraction, Slots, TextFraction, as_budget, exact, single

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
    """A layer's heads, or those of all layers, share their slots by need (AdaKV, arXiv:2407.11550, Algorithm 1).

    Every head keeps its own best ⌊safeguard·(b - w)⌋ slots beyond the protected window of w; the rest of the heads'
    Σ (b - w) slots go to the largest importances over all of them, of equal ones to the lower layer, then the lower
    head, then the newer slot.

    Which head gets many slots is known when a prompt ends, and arrays are allocated before: they have room for the most
    slots that any head may get, in every head. `max_share` limits these; the papers have no such limit. Slots that a
    head does not get because of it go to others.

    Attributes:
      average: the budget of the average head.
      safeguard: the share of each head's slots that other heads cannot take, 0 to 1.
      max_share: no head gets more than ⌊max_share·(b - w)⌋ slots beyond the window; at least 1. None = without limit.
      layers: whether the heads of all layers share their slots (KVzip, arXiv:2505.23416), which the scores of a replay
        allow: they are known before any layer evicts.

    Raises:
      PolicyError: an attribute that is not valid.
    """

    average: Budget
    safeguard: float
    max_share: float | None = None
    layers: bool = False

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
        if not isinstance(self.layers, bool):
            raise PolicyError(f"layers={self.layers!r} is not valid; give True or False.")

    @property
    def base(self) -> Budget:
        return self.average

    @property
    def shared(self) -> bool:
        return True

    @property
    def over_layers(self) -> bool:
        return self.layers

    def own(self, room: Number) -> Number:
        """Returns ⌊safeguard·room⌋ for a number or an array of integers."""
        share = exact(self.safeguard)
        return room * share.numerator // share.denominator

    def largest_share(self, room: Number, rest: Number) -> Number:
        """Returns the most slots beyond the window that a head can get, for numbers or arrays of integers.

        Args:
          room: the slots of an average head beyond the window.
          rest: the slots that all heads share.
        """
        share = self.own(room) + rest
        if self.max_share is None:
            return share
        times = exact(self.max_share)
        limit = room * times.numerator // times.denominator
        return min(share, limit) if isinstance(room, int) else jnp.minimum(share, limit)

    def divided(self, score: Array, protected: Array, position: Array, budget: Array, prompt: Array) -> Array:
        """Marks the slots that stay of heads that share their slots, [B, N, S] bool.

        Args:
          score: [B, N, S] float32; the N heads are in the order in which they win ties.
          protected: [B, N, S] bool, the slots that are not shared.
          position: [B, N, S] int32, -1 = empty.
          budget: [B, N or 1] int32, the slots of an average head.
          prompt: [B] int32 tokens of each row's prompt. A head whose budget is as large keeps everything.
        """
        batch, heads, size = position.shape
        live = position >= 0
        # [B, N, 1]: whether all slots stay, and the slots beyond the window
        short = jnp.broadcast_to((prompt[:, None] <= budget)[..., None], (batch, heads, 1))
        room = budget[..., None] - jnp.sum(live & protected, axis=2, keepdims=True, dtype=jnp.int32)
        own = self.own(room)
        open_position = jnp.where(protected, -1, position)
        safe = largest(score, open_position, own)
        # [B, 1]
        rest = jnp.sum(jnp.where(short, 0, room - own), axis=1)
        # What a head holds of the others' slots is the best of its own.
        share = self.largest_share(room, rest[:, None])
        open_to = live if self.max_share is None else largest(score, open_position, share)
        # The lower head wins ties, then the newer slot: the heads are joined to one row in that order.
        head = jnp.arange(heads, dtype=jnp.int32)[:, None]
        # Positions of a prompt are below the number of slots; those of a later turn may be larger.
        stride = jnp.maximum(size, jnp.max(position) + 1)
        order = jnp.where(protected | safe | ~open_to | short, -1, position + (heads - 1 - head) * stride)
        taken = largest(score.reshape(batch, -1), order.reshape(batch, -1), rest)
        return live & (protected | safe | taken.reshape(position.shape) | short)

    def kept(self, policy: Evict, stats: Stats, view: View) -> Array:
        """Marks the slots that stay of the heads of a layer, [B, K, S] bool."""
        score, protected = policy.importance.score(stats, view), policy.scope.protected(stats, view)
        return self.divided(score, protected, view.position, view.budget[:, None], view.prompt)

    def limit(self, policy: Evict, stats: Stats, view: View) -> Array:
        if self.layers:
            # The number of each head is from the ranking of all layers; see `kvjax.cache.step.layer_shares`.
            return view.budget.reshape(view.budget.shape[0], -1, 1)
        return jnp.sum(self.kept(policy, stats, view), axis=2, keepdims=True, dtype=jnp.int32)

    def rank(self, policy: Evict, stats: Stats, view: View) -> Array:
        if self.layers:
            return policy.rank(stats, view)
        return jnp.where(self.kept(policy, stats, view), jnp.inf, 0.0)

    def widest(self, policy: Evict, slots: int, kv_heads: int) -> int:
        # A prompt shorter than the window is left alone.
        return self.widest_after(policy.scope.count(slots), slots, kv_heads)

    def widest_after(self, protected: int, slots: int, kv_heads: int) -> int:
        """Returns the most slots that a head can get if it has `protected` ones; the fewer, the more it can get."""
        window = min(protected, slots)
        room = slots - window
        # Layers may have different budgets, so that what the others share is not known here.
        rest = MAX_SLOTS if self.layers else kv_heads * (room - self.own(room))
        return window + int(self.largest_share(room, rest))

    def traced(self) -> Budget:
        return dataclasses.replace(self, average=self.average.traced())
