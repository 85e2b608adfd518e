"""Memory of rounds: numbers that ranking remembers from one round of evictions to the next."""

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
    """Remembers a number of each slot, or of each head, that is written when the head evicts.

    Write a frozen dataclass that inherits from this class, and list it in `Importance.memory`. In a step in which no
    slot of a head is evicted, its numbers do not change.

    Attributes:
      per_slot: whether each slot has a number, [B, K, S] float32, which is 0 at first, moves with the slot and is
        forgotten with it; otherwise each head has one, [B, K] int32, which is 0 at first.
    """

    per_slot: bool = True

    def before(self, stats: Mapping[str, Array], view: "View") -> Array:
        """Returns the numbers that the last round left, [B, K, S] float32 or [B, K] int32."""
        return stats[self.name] if self.per_slot else view.memory[self.name][NUMBER]

    def after(self, stats: Mapping[str, Array], view: "View", victim: Array) -> Array:
        """Returns the numbers that a round leaves, for all heads as if they all evicted; in the shape of `before`.

        Args:
          stats: statistic name -> [B, K, S, ...], with those that this memory keeps.
          view: the slots before the eviction.
          victim: [B, K, S] bool, the slots that go.
        """
        raise NotImplementedError

    def empty(self, shape: tuple[int, int, int], dim: int) -> dict[str, Array]:
        return {} if self.per_slot else {NUMBER: jnp.zeros(shape[:2], jnp.int32)}

    def update(self, memory: Arrays, queries: Queries) -> dict[str, Array]:
        return dict(memory)


def written(
    memories: tuple[RoundMemory, ...], due: Array, stats: Mapping[str, Array], view: "View", victim: Array
) -> dict[str, Array]:
    """Returns the numbers of each memory after a round of the heads that are due: name -> array.

    Args:
      memories: of a policy.
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
