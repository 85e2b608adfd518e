"""Cache-Craft (arXiv:2502.15734): caches of chunks that were computed in a context, and what they owe to it."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.errors import InputError
from kvjax.models.model import Model
from kvjax.reuse.cache import ChunkCache, Collected, Text, check_prefix, checked_tokens
from kvjax.reuse.layerwise import LayerResult, check_movable, run_tokens
from kvjax.reuse.measures import probabilities
from kvjax.summary import one_line

Chunk = tuple[int, ...]  # the tokens of a chunk, by which it is known
ROWS = 256  # queries whose attention is computed at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """The cache of a chunk after other chunks.

    Probabilities are means over query heads.

    Attributes:
      cache: the keys and values.
      before: the chunks before it, in their order.
      inter: [chunks before, L] float64, the sums of the attention probabilities of its tokens on those of each chunk.
      intra: [L] float64, the sum of those on its own tokens.
      token_score: [n] float64, the attention of each token on all chunks before, as a mean over layers.
    """

    cache: ChunkCache
    before: tuple[Chunk, ...]
    inter: np.ndarray
    intra: np.ndarray
    token_score: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def chunk(self) -> Chunk:
        """The tokens of the chunk."""
        return tuple(self.cache.tokens.tolist())


@plain_signature
def compute_variants(model: Model, chunks: Sequence[ArrayLike], prefix: ChunkCache | None = None) -> list[Variant]:
    """Computes chunks one after the other, as in a whole prefill, and returns the cache of each.

    Args:
      model: without learned positions.
      chunks: [n] int each.
      prefix: see `kvjax.reuse.compute`. It is no chunk: what is attended to there is never missing.

    Raises:
      InputError: see `kvjax.reuse.compute`; or there is no chunk.
    """
    check_movable(model.config)
    if not chunks:
        raise InputError("chunks must have the tokens of at least one chunk.")
    ids = [checked_tokens(model.config, f"chunk {number}", each) for number, each in enumerate(chunks)]
    check_prefix(model, prefix)
    text = Text.of(model, [], prefix, tokens=np.concatenate(ids))
    begun = 0 if prefix is None else len(prefix)
    ends = begun + np.cumsum([len(each) for each in ids])
    starts = ends - [len(each) for each in ids]
    observed = _Attention(model, begun, starts, ends)
    run_tokens(
        model, text.tokens[begun:], np.arange(begun, len(text), dtype=np.int32), text.key, text.value, text.known,
        total=len(text), record=observed.add,
    )  # fmt: skip
    names = tuple(tuple(each.tolist()) for each in ids)
    inter, intra = np.array(observed.inter), np.array(observed.intra)
    scores = np.mean(observed.scores, axis=0)
    return [
        Variant(
            ChunkCache(own, *observed.held.between(start, end), prefix, model), names[:number],
            inter[:, number, :number].T, intra[:, number], scores[start - begun : end - begun],
        )
        for number, (own, start, end) in enumerate(zip(ids, starts, ends, strict=True))
    ]  # fmt: skip


class _Attention:
    """The attention of the tokens of chunks to each other, in each layer of a run of all of them.

    Attributes:
      held: the keys and values of each layer.
      inter: of each layer, [chunk, chunk before] sums of probabilities.
      intra: of each layer, [chunk] sums.
      scores: of each layer, [n] the attention of each token on chunks before its own.
    """

    def __init__(self, model: Model, begun: int, starts: np.ndarray, ends: np.ndarray) -> None:
        self._config, self._begun, self._starts, self._ends = model.config, begun, starts, ends
        self.held = Collected()
        self.inter: list[np.ndarray] = []
        self.intra: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []

    def add(self, index: int, result: LayerResult, count: int) -> None:
        """Adds a layer."""
        size, end = result.key.shape[2], int(self._ends[-1])
        self.held.add(index, result, count)
        # [S]: the chunk of each position, -1 = of none
        of = np.full(size, -1)
        for number, (start, stop) in enumerate(zip(self._starts, self._ends, strict=True)):
            of[start:stop] = number
        # [S, chunks]
        member = (of[:, None] == np.arange(len(self._starts))).astype(np.float32)
        position = jnp.where(jnp.arange(size) < end, jnp.arange(size, dtype=jnp.int32), -1)[None]
        total = jnp.full((1,), end, jnp.int32)
        sums = []
        for row in range(0, count, ROWS):
            query = result.query[:, :, row : row + ROWS]
            at = self._begun + row + jnp.arange(query.shape[2], dtype=jnp.int32)[None]
            found = probabilities(
                query, result.key, at, position, total, config=self._config, kind=self._config.kind(index)
            )
            # [n, chunks]
            sums.append(np.asarray(jnp.mean(found[0], axis=0) @ member, np.float64))
        # [n, chunks]: the attention of each token on each chunk
        on = np.concatenate(sums)[:count]
        own = of[self._begun : self._begun + count]
        # [chunk, chunk]
        whole = np.stack([on[own == number].sum(axis=0) for number in range(len(self._starts))])
        self.inter.append(np.tril(whole, -1))
        self.intra.append(np.diagonal(whole).copy())
        earlier = np.arange(len(self._starts)) < own[:, None]
        self.scores.append((on * earlier).sum(axis=1))
