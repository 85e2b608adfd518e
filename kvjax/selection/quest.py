"""Selections of pages that papers define: Quest, LServe and TriForce's retrieval."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import SelectionError
from kvjax.selection.base import Index
from kvjax.selection.checks import factory, named
from kvjax.selection.choose import grouped_logits
from kvjax.selection.page_summaries import FEWEST_PAGES, Pages
from kvjax.selection.query_blocks import Over, QueryBlocks, query_blocks

Array = jax.Array
#: Defaults: tokens that a block of queries of a prompt always reads, rounded up to whole pages; queries of a block.
SINKS, RECENT, QUERIES = 16, 64, 64
OVER: Over = "mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Pages):
    """Ranks pages by an upper bound of their logits (Quest, arXiv:2406.10774, section 3.3).

    The bound of a page is Σ_d max(q_d·min_d, q_d·max_d) over its live keys. If a page is made of sub-pages, its bound
    is the largest of theirs, which is closer (LServe, arXiv:2502.14866, section 3.5).

    The index has, for every sub-page, the maximum of its keys and of its negated keys: the bound is then a single
    product with (max(q, 0), max(-q, 0)), and a new key needs a single maximum. Its dtype is the model's, in which these
    numbers are exact. The products are summed in float32.

    Attributes:
      sub: slots of a sub-page, which divides the page; None = the whole page.

    Raises:
      SelectionError: an attribute that is too small, or a `sub` that does not divide the page.
    """

    sub: int | None = None
    name = "quest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sub is not None:
            with named(self.name):
                object.__setattr__(self, "sub", count_argument("sub", self.sub, minimum=1))
                if self.page % self.sub:
                    raise SelectionError(f"sub={self.sub} does not divide page={self.page}.")

    @property
    def _parts(self) -> int:
        """Sub-pages of a page."""
        return 1 if self.sub is None else self.page // self.sub

    def summary(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {"reach": jnp.full((*shape, self._parts, 2 * dim), -jnp.inf, dtype)}

    def summarise(self, key: Array, live: Array) -> Index:
        # [B, K, U, parts, sub, 2D]
        both = _both_signs(key).reshape(*key.shape[:3], self._parts, -1, 2 * key.shape[-1])
        live = live.reshape(*both.shape[:5], 1)
        return {"reach": jnp.max(jnp.where(live, both, -jnp.inf), axis=4)}

    def join(self, summary: Index, key: Array, slot: Array) -> Index:
        # [parts, 1]
        own = (jnp.arange(self._parts) == slot // (self.page // self._parts))[:, None]
        reach = summary["reach"]
        return {"reach": jnp.where(own, jnp.maximum(reach, _both_signs(key).astype(reach.dtype)), reach)}

    def bounds(self, index: Index, query: Array, scale: float) -> Array:
        """Computes upper bounds of each page's logits, [B, K, G, U] float32, for query [B, K, G, D]; 0 if empty."""
        return self._bounds(index["reach"], _signs(query), scale)

    def _bounds(self, reach: Array, signs: Array, scale: float) -> Array:
        """Computes `bounds` from `_signs` of the query, [B, K, G, 2D]."""
        batch, kv_heads, pages, parts, size = reach.shape
        # [B, K, U * parts]: an empty sub-page has no bound; its product with -inf, which may be NaN, is not used
        live = (reach[..., 0] > -jnp.inf).reshape(batch, kv_heads, 1, -1)
        bound = grouped_logits(signs, reach.reshape(batch, kv_heads, -1, size), scale)
        bound = jnp.where(live, bound, -jnp.inf)
        largest = jnp.max(bound.reshape(*bound.shape[:3], pages, parts), axis=-1)
        return jnp.where(largest > -jnp.inf, largest, 0.0)

    def score(self, index: Index, query: Array, scale: float) -> Array:
        return self.bounds(index, query, scale)

    def block_score(
        self, index: Index, query: Array, real: Array, scale: float, soft_cap: float | None, blocks: QueryBlocks
    ) -> Array:
        if not self._by_mean(blocks, soft_cap is not None):
            return super().block_score(index, query, real, scale, soft_cap, blocks)
        # A bound is linear in the signs: the mean over the queries is the bound of the mean.
        # [B, K, G, 2D]
        mean = blocks.reduce(_signs(query.astype(jnp.float32)), real)
        return self._bounds(index["reach"].astype(jnp.float32), mean, scale)

    def _by_mean(self, blocks: QueryBlocks, soft_cap: bool) -> bool:
        """Whether the mean of a page's bounds is the bound of one vector."""
        return blocks.over == "mean" and self._parts == 1 and not soft_cap

    def score_flops(self, dim: int, soft_cap: bool) -> int:
        if self.prompt is None:
            return 0
        return 4 * dim * self._parts * (1 if self._by_mean(self.prompt, soft_cap) else self.prompt.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanKeys(Pages):
    """Ranks pages by the mean of their keys, and always chooses the oldest (TriForce, arXiv:2404.11912, section 4.1).

    The index has the sum of the keys of each page and their number, in float32.
    """

    first: bool = True
    first_layer: int = 0
    name = "retrieval"

    def summary(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {"sum": jnp.zeros((*shape, dim), jnp.float32), "live": jnp.zeros(shape, jnp.float32)}

    def summarise(self, key: Array, live: Array) -> Index:
        total = jnp.sum(jnp.where(live[..., None], key.astype(jnp.float32), 0.0), axis=3)
        return {"sum": total, "live": jnp.sum(live, axis=3, dtype=jnp.float32)}

    def join(self, summary: Index, key: Array, slot: Array) -> Index:
        return {"sum": summary["sum"] + key.astype(jnp.float32), "live": summary["live"] + 1}

    def score(self, index: Index, query: Array, scale: float) -> Array:
        mean = index["sum"] / jnp.maximum(index["live"], 1.0)[..., None]
        return grouped_logits(query.astype(jnp.float32), mean, scale)

    def block_score(
        self, index: Index, query: Array, real: Array, scale: float, soft_cap: float | None, blocks: QueryBlocks
    ) -> Array:
        if blocks.over != "mean" or soft_cap is not None:
            return super().block_score(index, query, real, scale, soft_cap, blocks)
        # Logits are linear in the query.
        return self.score(index, blocks.reduce(query.astype(jnp.float32), real), scale)

    def score_flops(self, dim: int, soft_cap: bool) -> int:
        return (
            2 * dim
            if self.prompt and self.prompt.over == "mean" and not soft_cap
            else super().score_flops(dim, soft_cap)
        )


def _signs(query: Array) -> Array:
    """Splits a query by the signs of its numbers, [..., D] -> [..., 2D], for a product with `_both_signs` of keys."""
    return jnp.concatenate([jnp.maximum(query, 0), jnp.maximum(-query, 0)], axis=-1)


def _both_signs(key: Array) -> Array:
    """Concatenates a key and its negative, [..., D] -> [..., 2D]."""
    return jnp.concatenate([key, -key], axis=-1)


def _counted(name: str, page: int, budget: int | None) -> tuple[int, int]:
    """Checks the tokens of a page and of a budget; returns them as a page and the number of pages to choose."""
    with named(name):
        page = count_argument("page", page, minimum=1)
        budget = count_argument("budget", budget, minimum=1)
    return page, max(FEWEST_PAGES, budget // page) - 1


def _in_prompt(
    name: str, page: int, budget: int | None, *, in_prompt: bool, prompt_budget: int | None, sinks: int | None,
    recent: int | None, query_block: int | None,
) -> QueryBlocks | None:  # fmt: skip
    """Returns how a prompt reads pages; None if it reads everything. For the arguments see `quest`."""
    with named(name):
        if not isinstance(in_prompt, bool):
            raise SelectionError(f"in_prompt={in_prompt!r} is not valid; use True or False.")
        given = {"prompt_budget": prompt_budget, "sinks": sinks, "recent": recent, "query_block": query_block}
        if not in_prompt:
            for argument, value in given.items():
                if value is not None:
                    raise SelectionError(f"{argument}={value!r} needs in_prompt=True.")
            return None
        return query_blocks(
            page,
            budget if prompt_budget is None else prompt_budget,  # type: ignore[arg-type]
            budget_name="budget" if prompt_budget is None else "prompt_budget",
            sinks=SINKS if sinks is None else sinks,
            recent=RECENT if recent is None else recent,
            size=QUERIES if query_block is None else query_block,
            over=OVER,
        )


@factory
def quest(
    page: int = 16,
    budget: int | None = None,
    *,
    first_layer: int = 2,
    in_prompt: bool = False,
    prompt_budget: int | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    query_block: int | None = None,
) -> Quest:
    """Reads the newest page and the pages of the largest upper bounds (Quest, arXiv:2406.10774).

    Reads max(3, ⌊budget / page⌋) pages, including the newest; all pages if there are no more.

    Args:
      page: tokens of a page.
      budget: tokens to read, in whole pages; required.
      first_layer: layers before this one read everything.
      in_prompt: whether blocks of queries of a prompt read chosen pages too; otherwise a prompt is read whole.
      prompt_budget: tokens before a block that its queries read of a prompt, in whole pages; None = `budget`.
      sinks: of `prompt_budget`, the oldest tokens, which are always read; None = 16.
      recent: of `prompt_budget`, the newest tokens, which are always read; None = 64.
      query_block: the number of queries of a block, a multiple of `page`; None = 64.

    Raises:
      SelectionError: a page or a budget below 1, a first layer below 0, or numbers of a prompt that do not fit.

    The authors' evaluation ranks the newest page with the others; their kernels always read it, as this does.
    """
    page, pages = _counted("quest", page, budget)
    prompt = _in_prompt(
        "quest", page, budget, in_prompt=in_prompt, prompt_budget=prompt_budget, sinks=sinks, recent=recent,
        query_block=query_block,
    )  # fmt: skip
    return Quest(page=page, pages=pages, first_layer=first_layer, prompt=prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LServe(Quest):
    """Ranks pages by bounds of their sub-pages, and keeps each choice for some steps (LServe, arXiv:2502.14866)."""

    name = "lserve"


@factory
def lserve(
    page: int = 64,
    sub: int = 16,
    every: int = 4,
    budget: int | None = None,
    *,
    first_layer: int = 2,
    in_prompt: bool = False,
    prompt_budget: int | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    query_block: int | None = None,
) -> LServe:
    """Reads pages by the largest bound of their sub-pages, and chooses anew every few steps (LServe, arXiv:2502.14866).

    Args:
      page: tokens of a page.
      sub: tokens of a sub-page; divides `page`.
      every: the number of steps that a choice stands.
      budget: tokens to read, in whole pages; required.
      first_layer: layers before this one read everything.
      in_prompt: see `quest`.
      prompt_budget: see `quest`.
      sinks: see `quest`.
      recent: see `quest`.
      query_block: see `quest`, a multiple of `page`.

    Raises:
      SelectionError: a number below 1, a `sub` that does not divide the page, or a first layer below 0.

    The authors' code does not read a page that is opened while a choice stands; here it is read.
    """
    page, pages = _counted("lserve", page, budget)
    prompt = _in_prompt(
        "lserve", page, budget, in_prompt=in_prompt, prompt_budget=prompt_budget, sinks=sinks, recent=recent,
        query_block=query_block,
    )  # fmt: skip
    return LServe(page=page, pages=pages, sub=sub, every=every, first_layer=first_layer, prompt=prompt)


@factory
def retrieval(
    chunk: int = 8,
    budget: int | None = None,
    *,
    every: int = 1,
    first_layer: int = 0,
    in_prompt: bool = False,
    prompt_budget: int | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    query_block: int | None = None,
) -> MeanKeys:
    """Reads the oldest chunk, the newest, and those of the largest mean keys (TriForce, arXiv:2404.11912, section 4.1).

    Args:
      chunk: tokens of a chunk.
      budget: tokens to read, in whole chunks; required.
      every: the number of steps that a choice stands: of a draft, its number of tokens.
      first_layer: layers before this one read everything.
      in_prompt: see `quest`.
      prompt_budget: see `quest`.
      sinks: see `quest`.
      recent: see `quest`.
      query_block: see `quest`, a multiple of `chunk`.

    Raises:
      SelectionError: a number below 1, a first layer below 0, or numbers of a prompt that do not fit.
    """
    chunk, pages = _counted("retrieval", chunk, budget)
    prompt = _in_prompt(
        "retrieval", chunk, budget, in_prompt=in_prompt, prompt_budget=prompt_budget, sinks=sinks, recent=recent,
        query_block=query_block,
    )  # fmt: skip
    return MeanKeys(page=chunk, pages=pages, every=every, first_layer=first_layer, prompt=prompt)
