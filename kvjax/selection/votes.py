"""TokenSelect: the query heads of a layer vote for tokens that all of its KV heads read (arXiv:2411.02886)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Policy
from kvjax.selection.base import Index, Selection, SelectView
from kvjax.selection.checks import aligned, factory, merges, named, rotated_once
from kvjax.selection.choose import best, grouped_logits, rank, view_ends

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TokenSelect(Selection):
    """Chooses the tokens of the largest softmax, averaged over all query heads of a layer (TokenSelect, section 4.2).

    The softmax of a head is over the candidates: all tokens but the first and the newest ones, which are always read.
    A choice stands while the layer's query resembles the query that made it.

    If choices may stand, the index has the tokens that the last choice chose, [B, K, S] bool, its query, [B, K, G * D],
    and whether there is one, [B, K] bool.

    Attributes:
      k: the number of tokens that are chosen.
      sinks: the number of oldest tokens that are always read.
      recent: the number of newest tokens that are always read, including the new one; at least 1.
      reuse: the least cosine of two queries, of all heads side by side, for which a choice stands; None = never.
      scaled: whether logits are scaled, and capped where the model caps them, before the softmax.
      first_layer: layers before this one read everything.
      queries: query heads of a KV head; set by `bound`.

    Raises:
      SelectionError: an attribute that is not valid.
    """

    k: int
    sinks: int = 128
    recent: int = 512
    reuse: float | None = 0.9
    scaled: bool = True
    first_layer: int = 0
    queries: int = 1
    name = "tokenselect"
    ranks_by_keys = True
    shared_by_heads = True
    over_devices = True
    per_head = frozenset({"query"})

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (("k", 1), ("sinks", 0), ("recent", 1), ("first_layer", 0), ("queries", 1)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))
            if self.reuse is not None:
                reuse = number_argument("reuse", self.reuse, minimum=-1.0, maximum=1.0)
                object.__setattr__(self, "reuse", reuse)

    @property
    def per_slot(self) -> frozenset[str]:
        return frozenset() if self.reuse is None else frozenset({"stands"})

    @property
    def ends(self) -> tuple[int, int]:
        return self.sinks, self.recent - 1

    @property
    def most(self) -> int:
        return self.k

    def width(self, capacity: int) -> int | None:
        slots = self.k + self.sinks + self.recent
        return slots if slots < capacity else None

    def bound(self, queries: int, following: int) -> TokenSelect:
        return dataclasses.replace(self, queries=queries)

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        return aligned(policy) or merges(policy) or rotated_once(positions)

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        if self.reuse is None:
            return {}
        return {
            "stands": jnp.zeros(shape, bool),
            "query": jnp.zeros((*shape[:2], self.queries * dim), jnp.float32),
            "chose": jnp.zeros(shape[:2], bool),
        }

    def choose(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        candidate = view.visible & ~self.always(index, view)

        def votes() -> Array:
            # [B, K, S]
            own = rank(self._scores(query, view), candidate, normalise="softmax", reduce="mean", known=view.ends)
            layer = jnp.where(candidate, slot_reductions.mean_over_heads(own), -jnp.inf)
            return best(jax.lax.stop_gradient(layer), candidate, view.position, self.k)

        if self.reuse is None:
            return votes(), index
        # [B, K, G * D]
        own = jax.lax.stop_gradient(query.astype(jnp.float32)).reshape(*query.shape[:2], -1)
        # [B, 1]: of all heads side by side
        products = (own * index["query"], jnp.square(index["query"]), jnp.square(own))
        product, before, now = jnp.moveaxis(
            slot_reductions.sum_over_heads(jnp.stack([jnp.sum(each, axis=2) for each in products], axis=2)), 2, 0
        )
        alike = product >= self.reuse * jnp.sqrt(before * now)
        # [B, 1]
        if view.ends is None:
            among = slot_reductions.sum_over_slots(jnp.sum(candidate, axis=2, dtype=jnp.int32)[:, :1])
        else:
            among = view.ends.among[:, :1, 0]
        several = among > self.k
        stands = index["chose"][:, :1] & alike
        due = several & ~stands & view.active[:, :, 0]
        made = jax.lax.cond(slot_reductions.anywhere(jnp.any(due)), votes, lambda: jnp.zeros(candidate.shape, bool))
        marks = jnp.where(due[..., None], made, index["stands"])
        index = {
            "stands": marks,
            "query": jnp.where(due[..., None], own, index["query"]),
            "chose": index["chose"] | due,
        }
        return jnp.where(several[..., None], marks & candidate, candidate), index

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        return self.choose(index, query, view)[0]

    def _scores(self, query: Array, view: SelectView) -> Array:
        """Computes the logits [B, K, G, S] float32 of all slots."""
        factors = (view.scale, view.soft_cap) if self.scaled else (1.0, None)
        return grouped_logits(query, view.key, *factors)

    def ends_scores(self, index: Index, query: Array, view: SelectView) -> Array | None:
        # A choice that may stand seldom looks at keys.
        return self._scores(query, view) if self.reuse is None else None

    def always(self, index: Index, view: SelectView) -> Array:
        return view.new | (view.visible & view_ends(view, *self.ends))


@factory
def tokenselect(
    k: int,
    sinks: int = 128,
    recent: int = 512,
    *,
    reuse: float | None = 0.9,
    scaled: bool = True,
    first_layer: int = 0,
) -> TokenSelect:
    """Reads the tokens for which the query heads of a layer vote; see `TokenSelect` (arXiv:2411.02886, section 4.2).

    Args:
      k: see `TokenSelect`.
      sinks: see `TokenSelect`.
      recent: see `TokenSelect`.
      reuse: see `TokenSelect`.
      scaled: see `TokenSelect`; False = as the authors' kernel.
      first_layer: see `TokenSelect`.

    Raises:
      SelectionError: an argument that is not valid.

    The authors also choose within the blocks of a prompt, by the mean query of a block; here a prompt is read whole.
    """
    return TokenSelect(k, sinks, recent, reuse, scaled, first_layer)
