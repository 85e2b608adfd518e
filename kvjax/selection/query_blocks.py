"""How the queries of a prompt read pages: blocks of queries, each of which reads some of the pages before it."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import SelectionError

Array = jax.Array
Over = Literal["mean", "max"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryBlocks:
    """The pages that a block of consecutive queries of a prompt reads (block-sparse prefill).

    Each block reads its own tokens up to each query, the oldest and the newest pages before the block, and those of the
    largest score of the others. A page has one score per query head: the mean or the maximum over the block's queries.
    The query heads of a KV head then rank pages jointly, as in a decoding step, and read the same ones.

    Without chosen pages, this is the A-shape of StreamingLLM (arXiv:2309.17453) and of MInference (arXiv:2407.02490),
    in whole pages.

    Attributes:
      size: the number of queries of a block; a multiple of the page.
      sinks: the number of oldest pages that are always read.
      recent: the number of newest pages before the block that are always read.
      pages: the number of pages that are chosen of the others.
      over: how a page's scores for the queries of a block are reduced, ``mean`` or ``max``.

    Raises:
      SelectionError: an attribute that is not valid.
    """

    size: int
    sinks: int
    recent: int
    pages: int
    over: Over = "mean"

    def __post_init__(self) -> None:
        for field, minimum in (("size", 1), ("sinks", 0), ("recent", 0), ("pages", 0)):
            made = count_argument(f"query blocks: {field}", getattr(self, field), minimum=minimum, error=SelectionError)
            object.__setattr__(self, field, made)
        choice_argument("query blocks: over", self.over, get_args(Over), error=SelectionError)

    @property
    def before(self) -> int:
        """The largest number of pages before a block that its queries read."""
        return self.sinks + self.recent + self.pages

    def dense(self, page: int) -> int:
        """Returns the number of first queries whose blocks have no more pages before them than a block reads."""
        return self.before * page // self.size * self.size + self.size

    def ends(self, first: Array, units: int) -> tuple[Array, Array]:
        """Marks the pages before blocks of queries.

        Args:
          first: [B] int32, the page of each block's first query.
          units: the number of pages.

        Returns:
          [B, 1, units] bool each: the pages before the block, and those of them that are always read.
        """
        page, first = jnp.arange(units, dtype=jnp.int32), first[:, None, None]
        # [B, 1, U]
        before = page < first
        return before, before & ((page < self.sinks) | (page >= first - self.recent))

    def reduce(self, score: Array, real: Array) -> Array:
        """Reduces scores over the queries of a block.

        Args:
          score: [B, K, G, n, U] float32.
          real: [B, n] bool, False for padding.

        Returns:
          [B, K, G, U] float32; 0 in a row of padding.
        """
        # [B, 1, 1, n, 1] and [B, 1, 1, 1]
        among, count = real[:, None, None, :, None], jnp.sum(real, axis=1, dtype=jnp.float32)[:, None, None, None]
        if self.over == "max":
            return jnp.where(count > 0, jnp.max(jnp.where(among, score, -jnp.inf), axis=3), 0.0)
        return jnp.sum(jnp.where(among, score, 0.0), axis=3) / jnp.maximum(count, 1.0)


def query_blocks(
    page: int, budget: int, *, budget_name: str, sinks: int, recent: int, size: int, over: Over
) -> QueryBlocks:
    """Returns the blocks of queries for numbers of tokens; those that are always read are rounded up to whole pages.

    Args:
      page: tokens of a page.
      budget: tokens before a block that its queries read, in whole pages.
      budget_name: of the argument, for errors.
      sinks: oldest tokens that are always read.
      recent: newest tokens before a block that are always read.
      size: queries of a block.
      over: see `QueryBlocks`.

    Raises:
      SelectionError: a number that is too small, a budget below what is always read, or a block that is not a multiple
        of the page.
    """
    budget = count_argument(budget_name, budget)
    sinks, recent = (-(-count_argument(name, n) // page) for name, n in (("sinks", sinks), ("recent", recent)))
    size = count_argument("query_block", size, minimum=1)
    if size % page:
        raise SelectionError(f"query_block={size} is not a multiple of the page of {page} tokens.")
    if budget // page < sinks + recent:
        raise SelectionError(
            f"in a prompt, {budget_name}={budget} is less than the {(sinks + recent) * page} tokens that are always "
            f"read (sinks: {sinks * page}, recent: {recent * page}); raise it, or lower sinks or recent."
        )
    return QueryBlocks(size=size, sinks=sinks, recent=recent, pages=budget // page - sinks - recent, over=over)
