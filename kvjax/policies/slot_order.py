"""Slots in the order of their positions, for scores that look at neighbours in the text."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.policies.components import Scope, Stats, View

Array = jax.Array
LAST = jnp.iinfo(jnp.int32).max  # sorts empty slots behind all positions


def in_slot_order(position: Array) -> Array:
    """Returns the slots of each head by position, the oldest first and empty ones last; [B, K, S] int32."""
    return jnp.argsort(jnp.where(position < 0, LAST, position), axis=2, stable=True).astype(jnp.int32)


def slot_ranks(position: Array, order: Array | None = None) -> Array:
    """Returns the number of older slots of the same head, [B, K, S] int32.

    Args:
      position: [B, K, S] int32.
      order: from `in_slot_order`, if it is known.
    """
    return jnp.argsort(in_slot_order(position) if order is None else order, axis=2).astype(jnp.int32)


def by_slot_order(x: Array, order: Array) -> Array:
    """Returns arrays [B, K, S, ...] in the order of `in_slot_order`."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 3)), axis=2)


def over_neighbours(
    x: Array, position: Array, kernel: int, function: Callable[[Array, Array], Array], initial: float
) -> Array:
    """Reduces each slot's neighbours in the order of positions, [B, K, S].

    Args:
      x: [B, K, S] float32.
      position: [B, K, S] int32.
      kernel: the number of neighbours, odd, the slot among them.
      function: combines two numbers, such as `jax.lax.max`.
      initial: the value of missing neighbours.
    """
    order, reach = in_slot_order(position), kernel // 2
    reduced = jax.lax.reduce_window(
        by_slot_order(x, order), initial, function, (1, 1, kernel), (1, 1, 1), ((0, 0), (0, 0), (reach, reach))
    )
    return jnp.take_along_axis(reduced, slot_ranks(position, order), axis=2)


@dataclasses.dataclass(frozen=True)
class FirstSlots(Scope):
    """Protects the oldest slots of each head that are live.

    Attributes:
      number: the number of slots.
    """

    number: int
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", count_argument("sinks", self.number))

    def protected(self, stats: Stats, view: View) -> Array:
        return view.live & (slot_ranks(view.position) < self.number)

    def count(self, budget: int) -> int:
        return self.number
