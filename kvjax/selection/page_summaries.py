"""Selections of pages: consecutive tokens that are ranked by a summary of their keys, and read as a whole.

A page is `page` consecutive slots. They hold consecutive tokens, of those that are kept, if slots are filled in order
and freed by pages: the i-th token that remains of the prompt is in slot i, and a decoded token takes the next slot of
the newest page, or opens a page.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import SelectionError
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Policy
from kvjax.policies.traits import evicting_while_decoding
from kvjax.selection.base import Held, Index, Selection, SelectView
from kvjax.selection.checks import merges, named, rotated_once
from kvjax.selection.choose import best, rank
from kvjax.selection.naming import best_named, name_best
from kvjax.selection.query_blocks import QueryBlocks

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array
FEWEST_PAGES = 3  # the least number of pages that Quest reads, including the newest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages(Selection):
    """Reads the newest page, and the pages that a summary of their keys ranks highest.

    Write a frozen dataclass that inherits from this class, with the methods `summary`, `summarise`, `join` and `score`.
    A KV head ranks pages by the gap to each query head's best page, the maximum over its query heads.

    Attributes:
      page: slots of a page.
      pages: the number of pages that are chosen, in addition to the newest.
      every: the number of steps that a choice stands; pages that are opened meanwhile are read too.
      first: whether the oldest page is one of the pages that are chosen.
      first_layer: layers before this one read everything.
      prompt: how the queries of a prompt read pages; None = they read everything.

    Raises:
      SelectionError: an attribute that is too small, or blocks of queries that are not of whole pages.
    """

    page: int
    pages: int
    every: int = 1
    first: bool = False
    first_layer: int = 2
    prompt: QueryBlocks | None = None
    over_devices = True
    fewest = FEWEST_PAGES - 1  # the least `pages`

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (("page", 1), ("pages", self.fewest), ("every", 1), ("first_layer", 0)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))
            if self.prompt is not None and self.prompt.size % self.page:
                raise SelectionError(
                    f"blocks of {self.prompt.size} queries are not a multiple of the page of {self.page} tokens."
                )

    def summary(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        """Makes the summary of empty pages, shape = (B, K, U), for keys of `dim` features, [B, K, U, ...] each."""
        raise NotImplementedError

    def summarise(self, key: Array, live: Array) -> Index:
        """Computes the summary of pages.

        Args:
          key: [B, K, U, page, D] rotated, exact.
          live: [B, K, U, page] bool, whether a slot holds a token.
        """
        raise NotImplementedError

    def join(self, summary: Index, key: Array, slot: Array) -> Index:
        """Adds a key to the summary of a page that has tokens already.

        Args:
          summary: of one page, [...] each.
          key: [D] rotated, exact.
          slot: [] int32, the key's slot in the page.
        """
        raise NotImplementedError

    def score(self, index: Index, query: Array, scale: float) -> Array:
        """Computes the score of each page for each query head, [B, K, G, U] float32, for query [B, K, G, D].

        If the model has a soft-cap of its logits, scores are capped as logits are.
        """
        raise NotImplementedError

    def block_score(
        self, index: Index, query: Array, real: Array, scale: float, soft_cap: float | None, blocks: QueryBlocks
    ) -> Array:
        """Computes the score of each page for a block of queries, [B, K, G, U] float32: that of `blocks.reduce`.

        Args:
          index: the summary of pages.
          query: [B, K, G, n, D] rotated.
          real: [B, n] bool, False for padding.
          scale: factor of the logits.
          soft_cap: of each query's score; see `SelectView`.
          blocks: how scores of several queries are reduced.
        """
        batch, kv_heads, group, n, dim = query.shape
        # [B, K, G * n, U]
        each = soft_capped(self.score(index, query.reshape(batch, kv_heads, group * n, dim), scale), soft_cap)
        return blocks.reduce(each.reshape(batch, kv_heads, group, n, -1), real)

    def score_flops(self, dim: int, soft_cap: bool) -> int:
        """Returns the FLOPs of `block_score` for each page and query head.

        Args:
          dim: features of a head.
          soft_cap: whether scores are capped.
        """
        return 0 if self.prompt is None else 2 * dim * self.prompt.size

    def read_in_prompt(self, score: Array | None, first: Array, shape: tuple[int, int, int], view: SelectView) -> Array:
        """Marks the pages before blocks of queries of a prompt that each block reads, [R, K, U] bool.

        The prompt's slots are in the order of its tokens, so that each page before a block is full.

        Args:
          score: [R, K, G, U] float32, from `block_score`; None if no page is chosen.
          first: [R] int32, the position of each block's first query, where a page begins.
          shape: (R, K, U).
          view: the slots of the prompt, of which the window is read.
        """
        blocks = self.prompt
        assert blocks is not None
        # [R, 1, U] each
        before, always = blocks.ends(first // self.page, shape[2])
        number = jnp.arange(shape[2], dtype=jnp.int32)
        if view.window is not None:
            # The first query sees the most of what is before the block.
            before &= (number + 1) * self.page - 1 > first[:, None, None] - view.window
        marks = jnp.broadcast_to(before & always, shape)
        if score is None:
            return marks
        # [R, K, U]
        candidate = jnp.broadcast_to(before & ~always, shape)
        worth = rank(jax.lax.stop_gradient(score), candidate, normalise="gap", reduce="max")
        return marks | best(worth, candidate, jnp.broadcast_to(number, shape), blocks.pages)

    @property
    def most(self) -> int:
        return (self.pages - (-(self.every - 1) // self.page)) * self.page

    def width(self, capacity: int) -> int | None:
        slots = self.most + self.page
        return slots if slots < capacity else None

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        if name := evicting_while_decoding(policy, page=self.page):
            single = evicting_while_decoding(policy, page=1) is None
            return (
                f"a page is {self.page} consecutive tokens, and the policy {name} evicts "
                f"{'single ones' if single else 'pages of another size'} while decoding; use full(), a prompt "
                f"compressor such as snapkv, or by_page(policy, page={self.page})."
            )
        if self.rotated and (reason := rotated_once(positions)):
            return reason
        if storage is not None and storage.divided:
            return (
                f"pages are consecutive slots of one store, and {storage!r} moves tokens to another store when they "
                "are no longer among its newest; use a storage with residual=0 and sinks=0."
            )
        return merges(policy)

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        batch, kv_heads, size = shape
        pages = (batch, kv_heads, -(-size // self.page))
        standing = {"stands": jnp.zeros(pages, bool), "steps": jnp.zeros(pages[:2], jnp.int32)}
        return self.summary(pages, dim, dtype) | (standing if self.every > 1 else {})

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        count = -(-held.position.shape[2] // self.page)
        # [B, K, U, page] and [B, K, U, page, D]
        live = self.by_page(held.position, count, -1) >= 0
        made = self.summarise(self.by_page(held.key, count, 0), live)
        return index | {name: leaf.astype(index[name].dtype) for name, leaf in made.items()}

    def write(self, index: Index, key: Array, slot: Array, active: Array) -> Index:
        names = [name for name in index if name not in ("stands", "steps")]
        summary = {name: index[name] for name in names}
        count = jax.tree.leaves(summary)[0].shape[2]
        # [B, K]; for a row without a token, an index out of bounds, whose write is dropped
        target = jnp.where(active[:, None], slot // self.page, count)

        # vmap makes batch and heads batching dimensions of the scatter, so that a sharded index is written in place.
        @jax.vmap
        @jax.vmap
        def update(old: Index, key: Array, page: Array, slot: Array) -> Index:
            one = {name: leaf.at[page].get(mode="clip") for name, leaf in old.items()}
            # [1, 1, 1, page, D]: the page if the token opens it, in its first slot
            alone = jnp.zeros((1, 1, 1, self.page, key.shape[-1]), key.dtype).at[0, 0, 0, 0].set(key)
            live = jnp.zeros((1, 1, 1, self.page), bool).at[0, 0, 0, 0].set(True)
            opened = self.summarise(alone, live)
            joined = self.join(one, key, slot)
            return {
                name: leaf.at[page].set(
                    jnp.where(slot == 0, opened[name][0, 0, 0], joined[name]).astype(leaf.dtype), mode="drop"
                )
                for name, leaf in old.items()
            }

        made = update(summary, key[:, :, 0], target, slot % self.page)
        if self.every > 1:
            opens = (jnp.arange(count) == target[..., None]) & (slot % self.page == 0)[..., None]
            made["stands"] = index["stands"] | opens
        return index | made

    def choose(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        pages, index = self.choose_units(index, query, view)
        return self.slots_of(pages, index, view), index

    def choose_units(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        count = next(leaf.shape[2] for name, leaf in index.items() if name != "steps")
        newest = self.always_units(count, view)
        position = self._full(view, count)

        def best_pages() -> Array:
            return self._best(index, query, position, view)

        if self.every == 1:
            pages = best_pages()
        else:
            due = (index["steps"] % self.every == 0) & view.active[:, 0]
            # Devices that have slots of a head choose together, whatever rows others have.
            over_devices_now = bool(slot_reductions.current().slots)
            fresh = (
                best_pages()
                if over_devices_now
                else jax.lax.cond(jnp.any(due), best_pages, lambda: jnp.zeros(position.shape, bool))
            )
            stands = jnp.where(due[..., None], fresh | newest, index["stands"])
            steps = jnp.where(view.active[:, 0], index["steps"] + 1, index["steps"])
            index = index | {"stands": stands, "steps": steps}
            pages = stands
        return pages, index

    def _best(self, index: Index, query: Array, position: Array, view: SelectView) -> Array:
        """Marks the pages to choose, [B, K, U] bool, of those whose position [B, K, U] is not -1."""
        candidate, count = position >= 0, self.pages - self.first
        if view.from_devices is not None:
            oldest, top, names = self._from_devices(query.shape[2], view.from_devices)
            chosen = best_named(names, top, position, count, oldest if self.first else None)
        else:
            oldest = _oldest(position)
            if self.first:
                candidate &= position != oldest
            # [B, K, U]
            worth = rank(self._scores(index, query, view), candidate, normalise="gap", reduce="max")
            chosen = best(jax.lax.stop_gradient(worth), candidate, position, count)
        return (chosen | (position == oldest)) if self.first else chosen

    def to_devices(self, index: Index, query: Array, view: SelectView) -> Array:
        score = jax.lax.stop_gradient(self._scores(index, query, view))
        position = self._full(view, score.shape[3])
        candidate, oldest = position >= 0, _oldest(position)
        # [B, K, G]: of the oldest page of this device, and the largest of the others
        first, others = (
            jnp.max(jnp.where(mask[:, :, None], score, -jnp.inf), axis=3)
            for mask in (candidate & (position == oldest), candidate & (position != oldest))
        )
        tops = jnp.concatenate([first, others], axis=2)
        # A page that is full keeps its score in the step.
        names = name_best(score, position, self.pages)
        return jnp.concatenate([oldest, jax.lax.bitcast_convert_type(tops, jnp.int32), names], axis=2)

    def _from_devices(self, queries: int, every: Array) -> tuple[Array, Array, Array]:
        """Returns the oldest page's position, [B, K, 1] int32, the largest score, [B, K, G, 1], and what is named.

        Args:
          queries: G.
          every: [C, B, K, m] int32, from `to_devices`, of all devices.
        """
        # [C, B, K, 1] int32, [C, B, K, G] each, and the rest
        oldest, firsts, others, names = jnp.split(every, [1, 1 + queries, 1 + 2 * queries], axis=3)
        firsts, others = (jax.lax.bitcast_convert_type(each, jnp.float32) for each in (firsts, others))
        least = jnp.min(oldest, axis=0)
        counts = (oldest != least) if self.first else jnp.ones(oldest.shape, bool)
        top = jnp.max(jnp.maximum(others, jnp.where(counts, firsts, -jnp.inf)), axis=0)
        return least, top[..., None], names

    def _scores(self, index: Index, query: Array, view: SelectView) -> Array:
        """Computes the score of each page for each query head, [B, K, G, U] float32."""
        return soft_capped(self.score(index, query, view.scale), view.soft_cap)

    def _full(self, view: SelectView, count: int) -> Array:
        """Returns the positions of the newest tokens of full pages that can be chosen, [B, K, count] int32, else -1."""
        # A page's last slot is its newest, and in the newest page it is empty or the step's own.
        last = view._replace(position=_fitted(view.position[:, :, self.page - 1 :: self.page], count, -1))
        return jnp.where(last.visible & ~last.new, last.position, -1)

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        return self.choose(index, query, view)[0]

    @property
    def unit(self) -> int:
        return self.page

    def always_units(self, units: int, view: SelectView) -> Array:
        return jnp.arange(units, dtype=jnp.int32) == (view.slot // self.page)[..., None]

    def always(self, index: Index, view: SelectView) -> Array:
        # [S]
        page = jnp.arange(view.position.shape[2], dtype=jnp.int32) // self.page
        return view.new | (view.visible & (page == view.slot[..., None] // self.page))

    def by_page(self, x: Array, pages: int, fill: int) -> Array:
        """Reshapes [B, K, S, ...] to [B, K, U, page, ...]; drops tokens that follow the slots, pads the last page."""
        batch, kv_heads, _, *rest = x.shape
        return _fitted(x, pages * self.page, fill).reshape(batch, kv_heads, pages, self.page, *rest)


def _oldest(position: Array) -> Array:
    """Returns the smallest position of pages [B, K, U] that is not -1, [B, K, 1] int32; the largest int32 if none."""
    return jnp.min(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max), axis=2, keepdims=True)


def _fitted(x: Array, size: int, fill: int | bool) -> Array:
    """Truncates or pads [B, K, S, ...] to [B, K, size, ...]."""
    pad = ((0, 0), (0, 0), (0, max(0, size - x.shape[2])), *((0, 0),) * (x.ndim - 3))
    return jnp.pad(x[:, :, :size], pad, constant_values=fill)
