"""The upper reference of all selections: the slots of the largest true probabilities."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from kvjax.policies.base import Policy, count_argument
from kvjax.selection.base import Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named
from kvjax.selection.choose import best, grouped_logits, rank

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Optimal(Selection):
    """The n slots of largest probability (H2O, "Top-K"; InfiniGen, arXiv:2406.19707, Figure 4).

    A probability is the group mean of the softmax over all visible slots, the new token's among them.

    Attributes:
      n: the number of slots that are chosen; the new token is read besides.
      first_layer: layers before this one read everything.
    """

    n: int
    first_layer: int = 0
    name = "optimal"
    ranks_by_keys = True

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
        score = grouped_logits(query, view.key, view.scale)
        # [B, K, S]
        worth = rank(score, candidate, normalise="probability", reduce="mean", visible=view.visible)
        return best(jax.lax.stop_gradient(worth), candidate, view.position, self.n)

    def always(self, index: Index, view: SelectView) -> Array:
        return view.new


@factory
def optimal(n: int, *, first_layer: int = 0) -> Optimal:
    """Reads the n slots of largest true probability: an upper reference, never faster, since it reads every key.

    Against a policy with a budget of b slots, compare n = b - 1: the new token is read besides.

    Args:
      n: the number of slots to choose.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: n below 1, or a first layer below 0.
    """
    return Optimal(n, first_layer)
