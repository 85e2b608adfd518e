"""ReKV: a question chooses pages for its whole answer (arXiv:2503.00540)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import SelectionError
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Policy
from kvjax.policies.traits import evicting_while_decoding, per_head_positions
from kvjax.selection.base import Held, Index, SelectView
from kvjax.selection.checks import factory, named
from kvjax.selection.choose import best
from kvjax.selection.query_blocks import QueryBlocks, query_blocks
from kvjax.selection.quest import QUERIES, MeanKeys

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReKV(MeanKeys):
    """Reads the first and the newest pages, and the pages that the last question has chosen (ReKV, section 3.2).

    A question is the last tokens of a prompt, or a further turn that is fed as a block. Its mean query and the mean
    keys of pages, before rotation and of all heads of a layer side by side, choose the pages of the largest products;
    all heads read the same ones. The choice stands until the next question. Tokens of a turn read the pages that the
    turn has chosen; those of a prompt read the prompt as `prompt` says.

    Pages that are always read when a question chooses are no candidates, and are not read once the window has left
    them, until the next question. A turn that is fed one token at a time, as storages that encode tokens need, leaves
    the choice as it is.

    The index has the sum of the keys of each page, [B, K, U, D], and their number, [B, K, U], in float32, and the pages
    that are chosen, [B, K, U] bool.

    Attributes:
      sinks: the number of oldest pages that are always read.
      recent: the number of newest pages that are always read, including the newest; at least 1. A question and an
        answer that are longer are not read whole.
      question: the number of last tokens of a prompt that are its question; None = all of its tokens.
      queries: query heads of a KV head; set by `bound`.

    Raises:
      SelectionError: an attribute that is too small, or blocks of queries of a prompt that choose pages.
    """

    sinks: int = 0
    recent: int = 1
    question: int | None = None
    queries: int = 1
    first: bool = False
    name = "rekv"
    fewest = 1
    rotated = False
    by_turn = True
    watches = True
    shared_by_heads = True
    over_devices = False
    per_head = frozenset({"last_queries"})

    def __post_init__(self) -> None:
        super().__post_init__()
        with named(self.name):
            for field, minimum in (("sinks", 0), ("recent", 1), ("queries", 1)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))
            if self.question is not None:
                object.__setattr__(self, "question", count_argument("question", self.question, minimum=1))
            if self.first or self.every > 1:
                raise SelectionError("first and every are not used; give sinks, and questions as turns.")
            if self.prompt is not None and self.prompt.pages:
                raise SelectionError(
                    f"blocks of queries of a prompt choose {self.prompt.pages} pages, but a question chooses; use "
                    "pages=0."
                )

    def width(self, capacity: int) -> int | None:
        slots = self.most + (self.sinks + self.recent) * self.page
        return slots if slots < capacity else None

    def bound(self, queries: int, following: int) -> ReKV:
        return dataclasses.replace(self, queries=queries)

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        # No page has 0 slots: any eviction is named.
        if name := evicting_while_decoding(policy, page=0):
            return (
                f"pages are counted from the first token, and the policy {name} evicts while decoding; use full(), or "
                "compress prompts by a policy under which all heads keep the same tokens."
            )
        if name := per_head_positions(policy):
            return (
                f"all heads of a layer read the same pages, and under the policy {name} each head holds its own "
                "tokens; use full()."
            )
        return super().refuses(policy, storage, positions=positions)

    def start(self, shape: tuple[int, int], dim: int) -> Index:
        size = (*shape, self.question or 1, self.queries * dim)
        return {"last_queries": jnp.zeros(size, jnp.float32), "number": jnp.zeros(shape, jnp.int32)}

    def watch(self, sums: Index, query: Array, key: Array, real: Array, skew: Array | None) -> Index:
        # [B, K, n, G * D]: all query heads of a KV head side by side
        own = jnp.moveaxis(query.astype(jnp.float32), 2, 3).reshape(*key.shape[:3], -1)
        own = jnp.where(real[:, None, :, None], own, 0.0)
        # [B, 1]
        count = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
        number = sums["number"] + count
        if self.question is None:
            return {"last_queries": sums["last_queries"] + jnp.sum(own, axis=2, keepdims=True), "number": number}
        # [B, K, m + n, G * D], of which the last m before padding are kept
        every = jnp.concatenate([sums["last_queries"], own], axis=2)
        last = (count + jnp.arange(self.question, dtype=jnp.int32))[:, None, :, None]
        kept = jnp.take_along_axis(every, jnp.broadcast_to(last, sums["last_queries"].shape), axis=2)
        return {"last_queries": kept, "number": jnp.minimum(number, self.question)}

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        pages = (*shape[:2], -(-shape[2] // self.page))
        return super().init(shape, dim, dtype) | {"stands": jnp.zeros(pages, bool)}

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        index = super().build(index, {}, held)
        batch, kv_heads, _, dim = held.key.shape
        # [B, K, G, D]
        number = jnp.maximum(sums["number"], 1).astype(jnp.float32)
        mean_query = jnp.sum(sums["last_queries"], axis=2) / number[..., None]
        # [B, K]: the number of pages before the one that has the newest token
        newest = (jnp.sum(held.position >= 0, axis=2, dtype=jnp.int32) - 1) // self.page
        return index | {"stands": self.best_pages(index, mean_query.reshape(batch, kv_heads, -1, dim), newest, newest)}

    def best_pages(self, index: Index, mean_query: Array, before: Array, newest: Array) -> Array:
        """Marks the pages that a question chooses, [B, K, U] bool.

        Args:
          index: has the sums of pages.
          mean_query: [B, K, G, D] float32, the mean query of the question, before rotation.
          before: [B, K] int32, the number of pages that are candidates if they are not always read.
          newest: [B, K] int32, the page of the newest token.
        """
        mean = index["sum"] / jnp.maximum(index["live"], 1.0)[..., None]
        # [B, K, U], and [B, 1, U] of all heads
        product = jnp.mean(jnp.einsum("bkgd,bkud->bkgu", mean_query, mean, precision=HIGHEST), axis=2)
        worth = jnp.broadcast_to(slot_reductions.mean_over_heads(product), product.shape)
        # [U]
        page = jnp.arange(product.shape[2], dtype=jnp.int32)
        candidate = (page < before[..., None]) & ~self._ends(page, newest)
        number = jnp.broadcast_to(page, candidate.shape)
        return best(jax.lax.stop_gradient(worth), candidate, number, self.pages)

    def ask(self, index: Index, query: Array, key: Array, real: Array, view: SelectView) -> Index:
        n, pages = key.shape[2], index["live"].shape[2]
        # [B, 1]
        count = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
        # [B, K]: the slot of the turn's first token; the others follow it
        first = view.slot - (count - 1)
        # [B, K, n]; for padding, a page out of bounds
        page = (first[..., None] + jnp.arange(n, dtype=jnp.int32)) // self.page
        page = jnp.where(real[:, None], page, pages)
        # [B, K, n, U]
        member = (page[..., None] == jnp.arange(pages, dtype=jnp.int32)).astype(jnp.float32)
        added = jnp.einsum("bknu,bknd->bkud", member, key.astype(jnp.float32), precision=HIGHEST)
        made = index | {"sum": index["sum"] + added, "live": index["live"] + jnp.sum(member, axis=2)}
        # [B, K, G, D]
        among = real[:, None, None, :, None]
        mean_query = jnp.sum(jnp.where(among, query.astype(jnp.float32), 0.0), axis=3)
        mean_query = mean_query / jnp.maximum(count, 1).astype(jnp.float32)[..., None, None]
        stands = self.best_pages(made, mean_query, first // self.page, view.slot // self.page)
        return made | {"stands": jnp.where(view.active, stands, index["stands"])}

    def choose_units(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        pages = index["stands"].shape[2]
        return index["stands"] & view.active & ~self.always_units(pages, view), index

    def always_units(self, units: int, view: SelectView) -> Array:
        return self._ends(jnp.arange(units, dtype=jnp.int32), view.slot // self.page)

    def always(self, index: Index, view: SelectView) -> Array:
        # [S]
        page = jnp.arange(view.position.shape[2], dtype=jnp.int32) // self.page
        return view.new | (view.visible & self._ends(page, view.slot // self.page))

    def score_flops(self, dim: int, soft_cap: bool) -> int:
        return 0  # blocks of queries of a prompt choose nothing

    def _ends(self, page: Array, newest: Array) -> Array:
        """Marks the pages [n] that are always read if page `newest` [B, K] has the newest token, [B, K, n] bool."""
        return (page < self.sinks) | (page > newest[..., None] - self.recent)


@factory
def rekv(
    page: int,
    budget: int | None = None,
    *,
    sinks: int = 0,
    recent: int | None = None,
    question: int | None = None,
    first_layer: int = 0,
    in_prompt: bool = False,
    query_block: int | None = None,
) -> ReKV:
    """Reads the pages that the last question has chosen, and both ends of the text; see `ReKV` (arXiv:2503.00540).

    Args:
      page: tokens of a page, such as those of a video frame.
      budget: tokens that a question chooses, in whole pages; required.
      sinks: the number of oldest tokens that are always read, rounded up to whole pages.
      recent: the number of newest tokens that are always read, rounded up to whole pages, of which the newest may not
        be full; None = `budget`. It should be more than the tokens of a question and its answer.
      question: see `ReKV`.
      first_layer: layers before this one read everything.
      in_prompt: whether queries of a prompt read `sinks` and `recent` alone, in blocks, instead of the whole prompt:
        the sliding window in which ReKV encodes a video.
      query_block: the number of queries of such a block, a multiple of `page`; None = 64.

    Raises:
      SelectionError: a number that is too small, or a budget below a page.

    In ReKV, positions of the tokens that are read follow each other; here keys stay rotated at their own positions, as
    those of a full cache. The tokens of a question that ends a prompt read that prompt, and not the chosen pages.
    """
    with named("rekv"):
        page = count_argument("page", page, minimum=1)
        budget = count_argument("budget", budget, minimum=1)
        if budget < page:
            raise SelectionError(f"budget={budget} is less than a page of {page} tokens; raise it, or lower page.")
        recent = budget if recent is None else count_argument("recent", recent, minimum=1)
        sinks = count_argument("sinks", sinks)
        if not isinstance(in_prompt, bool):
            raise SelectionError(f"in_prompt={in_prompt!r} is not valid; use True or False.")
        if query_block is not None and not in_prompt:
            raise SelectionError(f"query_block={query_block!r} needs in_prompt=True.")
        first_pages, recent_pages = (-(-count // page) for count in (sinks, recent))
        prompt: QueryBlocks | None = None
        if in_prompt:
            prompt = query_blocks(
                page, (first_pages + recent_pages) * page, budget_name="budget", sinks=sinks, recent=recent,
                size=QUERIES if query_block is None else query_block, over="mean",
            )  # fmt: skip
    return ReKV(
        page=page, pages=budget // page, sinks=first_pages, recent=recent_pages, question=question,
        first_layer=first_layer, prompt=prompt,
    )  # fmt: skip
