"""Round memory: numbers that ranking remembers from one round of evictions to the next."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.policies.row_memory import Arrays, Queries, RowMemory

if TYPE_CHECKING:
    from kvjax.policies.components import View

Array = jax.Array
NUMBER = "number"  # the only array of a memory of heads


class RoundMemory(RowMemory):
    """A number for each slot or each head that is updated when the head evicts.

    Write a frozen dataclass that inherits from this class, and list it in `Importance.memory`. The numbers of a head do
    not change in a step in which it evicts nothing.

    Attributes:
      per_slot: whether each slot has a number, [B, K, S] float32, which moves with the slot and is deleted with it;
        otherwise each head has one, [B, K] int32. Both begin at 0.
    """

    per_slot: bool = True

    def before(self, stats: Mapping[str, Array], view: "View") -> Array:
        """Returns the numbers that the last round left, [B, K, S] float32 or [B, K] int32."""
        return stats[self.name] if self.per_slot else view.memory[self.name][NUMBER]

    def after(self, stats: Mapping[str, Array], view: "View", victim: Array) -> Array:
        """Returns the numbers after a round in which all heads evict, in the shape of `before`.

        Args:
          stats: statistic name -> [B, K, S, ...], with those that this memory keeps.
          view: the slots before the eviction.
          victim: [B, K, S] bool, the slots that are evicted.
        """
        raise NotImplementedError

    def empty(self, shape: tuple[int, int, int], dim: int) -> dict[str, Array]:
        return {} if self.per_slot else {NUMBER: jnp.zeros(shape[:2], jnp.int32)}

    def update(self, memory: Arrays, queries: Queries) -> dict[str, Array]:
        return dict(memory)


def written(
    memories: tuple[RoundMemory, ...], due: Array, stats: Mapping[str, Array], view: "View", victim: Array
) -> dict[str, Array]:
    """Returns the numbers of each memory after a round in which the heads that are due evict: name -> array.

    Args:
      memories: the memories of a policy.
      due: [B, K, 1] bool, the heads that evict.
      stats: see `RoundMemory.after`.
      view: see `RoundMemory.after`.
      victim: see `RoundMemory.after`.
    """
    made = {}
    for each in memories:
        own = due if each.per_slot else due[:, :, 0]
        made[each.name] = jnp.where(own, each.after(stats, view, victim), each.before(stats, view))
    return made
