"""Runs a policy as if `kvjax.numerics.top_k.largest` marked every slot, or none.

The slots that hold the largest values of a statistic are known only after a search over all devices. What a policy
makes of each answer is known before, since it ranks each slot by itself otherwise.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Call(NamedTuple):
    """The arguments of a call of `kvjax.numerics.top_k.largest`."""

    value: Array
    position: Array
    number: Array | int


class Assumed:
    """Answers that are assumed while a policy ranks.

    Attributes:
      mark: whether every live slot is marked; False = none is.
      calls: the calls that were answered.
    """

    def __init__(self, mark: bool) -> None:
        self.mark = mark
        self.calls: list[Call] = []

    def answer(self, value: Array, position: Array, count: Array | int) -> Array:
        """Returns the assumed answer of `kvjax.numerics.top_k.largest`, [..., S] bool."""
        self.calls.append(Call(value, position, count))
        return position >= 0 if self.mark else jnp.zeros(position.shape, bool)
