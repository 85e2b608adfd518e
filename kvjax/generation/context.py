"""`Context`: the cache after some tokens, the logits after the last of them, and how both were made."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvjax.arguments import check_type
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.generation.options import CacheOptions
from kvjax.models.model import Model
from kvjax.summary import one_line

Array = jax.Array
PAD = -1  # after the last token of a row
CHUNKS, EDITED = "chunks", "edited"  # turns of a `Span` whose tokens were not fed


@jax.tree_util.register_static  # no leaf of a result
@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of a row that were fed in blocks of one size.

    Attributes:
      stop: the position after the last of them; they begin where the span before stops.
      block: tokens of a block; the last block may have fewer.
      turn: how they were fed: ``prompt`` = as a prompt; ``append`` = as a turn, where the prompt had another policy, as
        under a prompt compressor; ``compress`` = as a turn that was compressed; ``chunks`` = not at all, because
        their keys and values are those of caches of chunks; ``edited`` = within a text, whose later tokens moved. For
        both see `kvjax.reuse`.
      rebudget: whether budgets became those of the length at `stop`.
    """

    stop: int
    block: int
    turn: str = "prompt"
    rebudget: bool = False


Boundaries = tuple[tuple[Span, ...], ...]  # of each row


@jax.tree_util.register_static  # it is a part of results, and belongs to no row
@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """The model and the cache that a context was made with.

    Attributes:
      model: the model, with the calibration of the cache.
      spec: policy, storage and selection.
      options: blocks of the prompt, limits and implementation; storage and selection are those of `spec`.
      sizes: the sizes that the prompt's layout was lowered for; None = not known.
    """

    model: Model
    spec: CacheSpec
    options: CacheOptions
    sizes: Sizes | None = None

    def __repr__(self) -> str:
        return f"Made({self.spec.name})"


class Context(NamedTuple):
    """The cache after some tokens, from which generation and further turns start.

    A context is a value: `kvjax.contexts` has the functions that make one from another. What it holds depends on its
    tokens and on where their blocks ended, since a policy evicts at the end of a block.

    Attributes:
      logits: [B, V] float32, the logits after each row's last token. On a mesh, rows without a token may follow those
        of the batch; see `Model.rows_on_mesh`.
      state: the cache.
      layout: the static description of the cache.
      tokens: [B, T] int32 on the host, all tokens of each row, those that were evicted included; -1 after a row's last
        token. None = not known.
      rows: the number of rows that are not padding; the first of all. None = all.
      boundaries: per row, the spans of tokens that were fed in blocks of one size. None = not known.
      made: the model and the cache; None = not known, so that the context can be continued token by token only.
      resolved: [B, 2] int32 on the host, the lengths of prompt and text that budgets which are a share were resolved
        for. None = not known.
      snapshots: the contexts after fewer tokens that `kvjax.contexts.prefill` was asked to keep.
    """

    logits: Array
    state: KVState
    layout: CacheLayout
    tokens: np.ndarray | None = None
    rows: int | None = None
    boundaries: Boundaries | None = None
    made: Made | None = None
    resolved: np.ndarray | None = None
    snapshots: tuple["Context", ...] = ()

    def __repr__(self) -> str:
        return one_line(self)

    def kept(self, layer: int) -> list[list[np.ndarray]]:
        """Returns the positions that a layer holds; see `kvjax.generation.generate.Generation.kept`."""
        return self.layout.kept(self.state, layer, self.num_rows)

    @property
    def num_rows(self) -> int:
        """The number of rows that are not padding."""
        return self.logits.shape[0] if self.rows is None else self.rows

    @property
    def text(self) -> list[np.ndarray] | None:
        """The tokens of each row, [n] int32, those that were evicted included; None = not known."""
        return None if self.tokens is None else [row[row != PAD] for row in self.tokens[: self.num_rows]]

    def with_text(self, rows: Sequence[np.ndarray], *, block: int | None) -> "Context":
        """Returns the context with the tokens of its rows, of which the last ones were fed in blocks of `block`.

        Args:
          rows: all tokens of each row, [n] int32; they begin with those that are known.
          block: see `spans_with`.
        """
        before = self.text
        assert before is not None and self.boundaries is not None
        spans = tuple(
            spans_with(own, len(old), len(new) - len(old), block=block, turn=turn_of(self.layout))
            for own, old, new in zip(self.boundaries, before, rows, strict=True)
        )
        return self._replace(tokens=padded_rows(rows, self.logits.shape[0]), boundaries=spans)


def check_context(context: object, name: str = "context") -> None:
    """Checks that an argument is a `Context`.

    Raises:
      InputError: it is not.
    """
    check_type(name, context, Context, "a context, from kvjax.contexts.prefill or another function of contexts")


def padded_rows(rows: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Returns rows of tokens, [n] int32 each, as one array [count, T] int32, with `PAD` after a row's last token."""
    # [count, T]
    made = np.full((count, max((len(row) for row in rows), default=0)), PAD, np.int32)
    for own, row in zip(made, rows, strict=False):
        own[: len(row)] = row
    return made


def turn_of(layout: CacheLayout) -> str:
    """Returns how tokens that follow a prompt are fed, unless they are compressed; see `Span`."""
    pairs = (pair for layers in zip(layout.prompt, layout.decode, strict=True) for pair in zip(*layers, strict=True))
    return "prompt" if all(before.policy == after.policy for before, after in pairs) else "append"


def spans_with(
    before: tuple[Span, ...], start: int, count: int, *, block: int | None, turn: str, rebudget: bool = False
) -> tuple[Span, ...]:
    """Returns the spans of a row after `count` tokens from `start` on.

    Args:
      before: the spans of the tokens before.
      start: the number of tokens before.
      count: the number of tokens that were fed.
      block: tokens of a block; None = one block.
      turn: see `Span`.
      rebudget: see `Span`.
    """
    if not count:
        return before
    own = Span(start + count, count if block is None else min(block, count), turn, rebudget)
    alike = before and before[-1].block == own.block and before[-1].turn == turn != "compress"
    if alike and not rebudget and not before[-1].rebudget:
        begun = before[-2].stop if len(before) > 1 else 0
        # Blocks of one size that follow each other leave no trace of where feeding began.
        if (start - begun) % own.block == 0:
            return (*before[:-1], own)
    return (*before, own)
