"""Selections of pages: consecutive tokens that are ranked by a summary of their keys, and read as a whole.

A page is `page` consecutive slots. They hold consecutive tokens, of those that are kept, if slots are filled in order
and none is freed: the i-th token that remains of the prompt is in slot i, and each decoded token takes the next slot.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.policies.base import Policy
from kvjax.policies.traits import evicting_while_decoding
from kvjax.selection.base import Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named
from kvjax.selection.choose import best, grouped_logits, rank

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array
FEWEST_PAGES = 3  # the least number of pages that Quest reads, including the newest


@dataclasses.dataclass(frozen=True)
class Quest(Selection):
    """Reads the pages whose keys could give the largest logits (Quest, arXiv:2406.10774, section 3.3).

    A page's score is the upper bound Σ_d max(q_d·min_d, q_d·max_d) of the logits of its live keys. A KV head ranks
    pages by the gap to each query head's best page, the maximum over its query heads. The page of the newest token is
    always read and never ranked.

    The index has, for every page, the maximum of its keys and of its negated keys: the bound is then a single product
    with (max(q, 0), max(-q, 0)), and a new key needs a single maximum. Its dtype is the model's, in which these numbers
    are exact. The products are summed in float32.

    Attributes:
      page: slots of a page.
      pages: the number of pages that are chosen, in addition to the newest.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: an attribute that is too small.
    """

    page: int
    pages: int
    first_layer: int = 2
    name = "quest"

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (("page", 1), ("pages", FEWEST_PAGES - 1), ("first_layer", 0)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))

    @property
    def most(self) -> int:
        return self.pages * self.page

    def width(self, capacity: int) -> int | None:
        slots = self.most + self.page
        return slots if slots < capacity else None

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        if name := evicting_while_decoding(policy):
            return (
                f"a page is {self.page} consecutive tokens, and the policy {name} evicts single ones while "
                "decoding; use full() or a prompt compressor such as snapkv."
            )
        if positions != "original":
            return (
                f"it keeps bounds of rotated keys, and positions={positions!r} rotates keys again at every step; use "
                "positions='original'."
            )
        if getattr(storage, "residual", 0):
            return (
                f"pages are consecutive slots of one store, and {storage!r} moves tokens to another store when they "
                "are no longer among its newest; use a storage with residual=0."
            )
        return merges(policy)

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        batch, kv_heads, size = shape
        return {"reach": jnp.zeros((batch, kv_heads, -(-size // self.page), 2 * dim), dtype)}

    def build(self, index: Index, position: Array, key: Array) -> Index:
        reach = index["reach"]
        pages = reach.shape[2]
        # [B, K, U, page]
        live = self._by_page(position, pages, -1) >= 0
        # [B, K, U, page, 2D]
        both = self._by_page(_both_signs(key).astype(reach.dtype), pages, 0)
        # [B, K, U, 2D]
        largest = jnp.max(jnp.where(live[..., None], both, -jnp.inf), axis=3)
        return {"reach": jnp.where(jnp.any(live, axis=3)[..., None], largest, 0)}

    def write(self, index: Index, key: Array, slot: Array, active: Array) -> Index:
        reach = index["reach"]
        # [B, K]; for a row without a token, an index out of bounds, whose write is dropped
        target = jnp.where(active[:, None], slot // self.page, reach.shape[2])
        # [B, K, 2D]
        both = _both_signs(key[:, :, 0]).astype(reach.dtype)

        # vmap makes batch and heads batching dimensions of the scatter, so that a sharded index is written in place.
        @jax.vmap
        @jax.vmap
        def update(old: Array, new: Array, page: Array, opens: Array) -> Array:
            joined = jnp.where(opens, new, jnp.maximum(old.at[page].get(mode="clip"), new))
            return old.at[page].set(joined, mode="drop")

        return {"reach": update(reach, both, target, slot % self.page == 0)}

    def bounds(self, index: Index, query: Array, scale: float) -> Array:
        """Computes upper bounds of each page's logits, [B, K, G, U] float32, for query [B, K, G, D]; 0 if empty."""
        parts = jnp.concatenate([jnp.maximum(query, 0), jnp.maximum(-query, 0)], axis=-1)
        return grouped_logits(parts, index["reach"], scale)

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        candidate = view.visible & ~self.always(index, view)
        # [B, K, U]: the newest position of each page; -1 for a page without candidates
        kept = jnp.where(candidate, view.position, -1)
        position = jnp.max(self._by_page(kept, index["reach"].shape[2], -1), axis=3)
        # [B, K, U]
        worth = rank(self.bounds(index, query, view.scale), position >= 0, normalise="gap", reduce="max")
        pages = best(jax.lax.stop_gradient(worth), position >= 0, position, self.pages)
        # [B, K, S]
        return candidate & _fitted(jnp.repeat(pages, self.page, axis=2), candidate.shape[2], False)

    def always(self, index: Index, view: SelectView) -> Array:
        # [S]
        page = jnp.arange(view.position.shape[2], dtype=jnp.int32) // self.page
        return view.new | (view.visible & (page == view.slot[..., None] // self.page))

    def _by_page(self, x: Array, pages: int, fill: int) -> Array:
        """Reshapes [B, K, S, ...] to [B, K, U, page, ...]; drops tokens that follow the slots, pads the last page."""
        batch, kv_heads, _, *rest = x.shape
        return _fitted(x, pages * self.page, fill).reshape(batch, kv_heads, pages, self.page, *rest)


def _fitted(x: Array, size: int, fill: int | bool) -> Array:
    """Truncates or pads [B, K, S, ...] to [B, K, size, ...]."""
    pad = ((0, 0), (0, 0), (0, max(0, size - x.shape[2])), *((0, 0),) * (x.ndim - 3))
    return jnp.pad(x[:, :, :size], pad, constant_values=fill)


def _both_signs(key: Array) -> Array:
    """Concatenates a key and its negative, [..., D] -> [..., 2D]."""
    return jnp.concatenate([key, -key], axis=-1)


@factory
def quest(page: int = 16, budget: int | None = None, *, first_layer: int = 2) -> Quest:
    """Reads the newest page and the pages of the largest upper bounds (Quest, arXiv:2406.10774).

    Reads max(3, ⌊budget / page⌋) pages, including the newest; all pages if there are no more.

    Args:
      page: tokens of a page.
      budget: tokens to read, in whole pages; required.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: a page or a budget below 1, or a first layer below 0.

    The authors' evaluation ranks the newest page with the others; their kernels always read it, as this does.
    """
    with named("quest"):
        page = count_argument("page", page, minimum=1)
        budget = count_argument("budget", budget, minimum=1)
    return Quest(page, max(FEWEST_PAGES, budget // page) - 1, first_layer)
