"""ALISA: reads the newest slots, and those of the most attention from the last queries (arXiv:2403.17312)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.numerics.statistics import LAST, Statistic, prompt_tail
from kvjax.policies.base import Policy
from kvjax.selection.base import Columns, Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named
from kvjax.selection.choose import best, view_ends

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Alisa(Selection):
    """Reads the newest slots, and those of the most attention from the last queries (ALISA's sparse window attention).

    Of b slots, ⌊b / 2⌋ are the newest, including the new token, and the others have the largest sums of probabilities
    under the last queries. A slot that a query does not read has probability 0 under it. No keys are compared.

    The index has the probabilities of each slot under the last queries, the newest first, [B, K, S, queries].

    Attributes:
      slots: b, the number of slots that a query reads; at least 2.
      queries: the number of queries whose probabilities are summed.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: an attribute that is too small.
    """

    slots: int
    queries: int = 4
    first_layer: int = 0
    name = "alisa"
    in_prompt = True  # `settle` observes the prompt, whose slots `always` marks
    per_slot = frozenset({"recent"})

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (("slots", 2), ("queries", 1), ("first_layer", 0)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))

    @property
    def _tails(self) -> list[Statistic]:
        """The sums over the last query of a prompt, over the last two, and so on."""
        return [prompt_tail(count + 1) for count in range(self.queries)]

    @property
    def needs(self) -> frozenset[Statistic]:  # type: ignore[override]
        return frozenset({LAST, *self._tails})

    @property
    def ends(self) -> tuple[int, int]:
        return 0, self.slots // 2 - 1

    @property
    def most(self) -> int:
        return self.slots - self.slots // 2

    def width(self, capacity: int) -> int | None:
        return self.slots if self.slots < capacity else None

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        return merges(policy)

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {"recent": jnp.zeros((*shape, self.queries), jnp.float32)}

    def always(self, index: Index, view: SelectView) -> Array:
        # Queries of a prompt see slots that have left the window of its newest token.
        prompt = view.live & view.active & _in_prompt(view)
        return view.new | prompt | (view.visible & view_ends(view, *self.ends))

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        candidate = view.visible & ~self.always(index, view)
        # [B, K, S]
        paid = jnp.sum(index["recent"], axis=3)
        return best(paid, candidate, view.position, self.most)

    def settle(self, index: Index, columns: Columns, view: SelectView) -> Index:
        # [B, K, S, queries]; a new token may be in the slot of one that was evicted
        recent = jnp.where(view.new[..., None], 0.0, index["recent"])
        # [B, K, S, queries]: the last queries of the prompt, as far as they are in this block
        tails = jnp.stack([columns[each.name] for each in self._tails], axis=3)
        prompt = recent + jnp.maximum(jnp.diff(tails, axis=3, prepend=0.0), 0.0)
        decoded = jnp.concatenate([columns[LAST.name][..., None], recent[..., :-1]], axis=3)
        made = jnp.where(_in_prompt(view)[..., None], prompt, decoded)
        # A row without a token in this step is unchanged.
        return {"recent": jax.lax.stop_gradient(jnp.where(view.active[..., None], made, index["recent"]))}


def _in_prompt(view: SelectView) -> Array:
    """Returns whether the step's tokens belong to the prompt, [B, 1, 1] bool."""
    first = view.newest if view.first is None else view.first
    return (first < view.prompt)[:, None, None]


@factory
def alisa(budget: int, *, queries: int = 4, first_layer: int = 0) -> Alisa:
    """Reads the newest slots, and those of the most attention from the last queries; see `Alisa`.

    Args:
      budget: the number of slots that a query reads, one half of them the newest.
      queries: see `Alisa`.
      first_layer: see `Alisa`.

    Raises:
      SelectionError: a budget below 2, or another number that is too small.

    ALISA (arXiv:2403.17312) reads a fraction of the tokens; here the number is fixed. The paper also deletes old keys
    and values and computes them again when needed, which does not change results and is not done here.
    """
    with named("alisa"):
        budget = count_argument("budget", budget, minimum=2)
    return Alisa(budget, queries, first_layer)
