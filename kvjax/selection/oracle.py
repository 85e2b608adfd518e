"""The upper reference for selections, which reads the slots of the largest true probabilities."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from kvjax.arguments import count_argument
from kvjax.policies.base import Policy
from kvjax.selection.base import Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named
from kvjax.selection.choose import best, grouped_logits, rank

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Optimal(Selection):
    """Reads the n slots of largest probability (H2O, "Top-K"; InfiniGen, arXiv:2406.19707, Figure 4).

    A probability is the group mean of the softmax over all visible slots, including the new token's.

    Attributes:
      n: the number of slots that are chosen, in addition to the new token.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: n below 1, or a first layer below 0.
    """

    n: int
    first_layer: int = 0
    name = "optimal"
    ranks_by_keys = True
    over_devices = True

    def __post_init__(self) -> None:
        with named(self.name):
            object.__setattr__(self, "n", count_argument("n", self.n, minimum=1))
            object.__setattr__(self, "first_layer", count_argument("first_layer", self.first_layer))

    @property
    def most(self) -> int:
        return self.n

    def width(self, capacity: int) -> int | None:
        return self.n + 1 if self.n + 1 < capacity else None

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        return merges(policy)

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        candidate = view.visible & ~view.new
        # [B, K, G, S]
        score = grouped_logits(query, view.key, view.scale, view.soft_cap)
        # [B, K, S]
        worth = rank(score, candidate, normalise="probability", reduce="mean", visible=view.visible)
        return best(jax.lax.stop_gradient(worth), candidate, view.position, self.n)

    def always(self, index: Index, view: SelectView) -> Array:
        return view.new


@factory
def optimal(n: int, *, first_layer: int = 0) -> Optimal:
    """Reads the n slots of largest true probability: an upper reference, not faster, since ranking reads every key.

    Compare a policy with a budget of b slots with n = b - 1, since the new token is read in addition.

    Args:
      n: the number of slots to choose.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: n below 1, or a first layer below 0.
    """
    return Optimal(n, first_layer)
