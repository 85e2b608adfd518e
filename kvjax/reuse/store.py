"""`ChunkStore`: caches of chunks with a bound in bytes, and of each chunk the variants of several contexts."""

import collections
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import number_argument
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.models.model import Model
from kvjax.reuse.cache import ChunkCache, check_chunks, check_prefix, checked_tokens
from kvjax.reuse.context_scores import ContextScore, context_score
from kvjax.reuse.variants import Chunk, Variant, compute_variants
from kvjax.units import size

LEAST_OVERHEAD = 0.05  # a variant that needs no repair scores as one that needs so much


class VariantScores:
    """The scores of the variants of a chunk: 1 / max(CFO, 0.05) is added at each use.

    Attributes:
      variants: in the order in which they were stored.
      scores: of each.
    """

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.scores: list[float] = []

    def copy(self) -> "VariantScores":
        """Returns the same variants with the same scores."""
        made = VariantScores()
        made.variants, made.scores = [*self.variants], [*self.scores]
        return made

    def compare(self, new: Sequence[Chunk], alpha: float) -> list[ContextScore]:
        """Returns what each variant lacks after the chunks `new`."""
        found = []
        for each in self.variants:
            lengths = {chunk: len(chunk) for chunk in each.before}
            found.append(context_score(
                each.inter, each.intra, length=len(each.cache), old=each.before, new=new, lengths=lengths, alpha=alpha,
            ))  # fmt: skip
        return found

    def use(self, found: Sequence[ContextScore]) -> int:
        """Returns the variant of lowest CFO, of equal ones the last stored, and adds to its score."""
        place = best_of(found)
        self.scores[place] += use_score(found[place])
        return place

    def add(self, variant: Variant, most: int) -> None:
        """Stores a variant; where there are `most`, the one of lowest score is dropped, of equal ones the oldest."""
        if len(self.variants) >= most:
            place = least_of(self.scores)
            del self.variants[place], self.scores[place]
        self.variants.append(variant)
        self.scores.append(0.0)

    @property
    def nbytes(self) -> int:
        """The bytes of all variants."""
        return sum(each.cache.nbytes for each in self.variants)


def best_of(found: Sequence[ContextScore]) -> int:
    """Returns the place of the lowest CFO, of equal ones the last."""
    return min(range(len(found)), key=lambda place: (found[place].cfo, -place))


def use_score(found: ContextScore) -> float:
    """Returns what a use of a variant adds to its score."""
    return 1 / max(found.cfo, LEAST_OVERHEAD)


def least_of(scores: Sequence[float]) -> int:
    """Returns the place of the lowest score, of equal ones the first."""
    return min(range(len(scores)), key=lambda place: (scores[place], place))


class ChunkStore:
    """Caches of chunks after one prefix, each in up to `variants` contexts, with at most `max_bytes` bytes.

    When there is no room, the chunk that was used least recently is dropped, with all its variants.

    Attributes:
      model: that computes the caches.
      prefix: see `kvjax.reuse.compute`.
      max_bytes: the most bytes of keys and values, without those of the prefix.
      max_variants: the most contexts of a chunk.

    Example::

      store = kvjax.reuse.ChunkStore(model, max_bytes=1 << 30)
      chunks = [store.get(tokens[0, start : start + 96]) for start in (0, 96, 192)]
      made = kvjax.reuse.blend(model, chunks, tokens[0, 500:], check=None, first=4)
    """

    def __init__(self, model: Model, *, prefix: ChunkCache | None = None, max_bytes: int, variants: int = 5) -> None:
        """Begins without chunks.

        Args:
          model: without learned positions.
          prefix: the cache of the tokens that every chunk follows; None = there are none.
          max_bytes: the most bytes of keys and values.
          variants: the most contexts of a chunk.

        Raises:
          InputError: a number that is not valid, or a prefix of another model.
        """
        number = number_argument("max_bytes", max_bytes, minimum=1, maximum=1 << 60, error=InputError)
        check_count("variants", variants)
        check_prefix(model, prefix)
        self.model, self.prefix, self.max_bytes, self.max_variants = model, prefix, int(number), variants
        self._chunks: collections.OrderedDict[Chunk, VariantScores] = collections.OrderedDict()

    def __repr__(self) -> str:
        return f"ChunkStore({size(self.nbytes)} of {size(self.max_bytes)}, {len(self)} chunks)"

    def __len__(self) -> int:
        return len(self._chunks)

    def copy(self) -> "ChunkStore":
        """Returns a store of the same caches, whose further uses and drops do not change this one."""
        made = ChunkStore(self.model, prefix=self.prefix, max_bytes=self.max_bytes, variants=self.max_variants)
        made._chunks.update((chunk, own.copy()) for chunk, own in self._chunks.items())
        return made

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return sum(each.nbytes for each in self._chunks.values())

    def get(self, tokens: ArrayLike) -> ChunkCache:
        """Returns the cache of a chunk after the prefix alone, which is computed if the store does not have it.

        Args:
          tokens: [n] int.

        Raises:
          InputError: tokens that are not valid.
        """
        return self._alone(self._known(tokens)).cache

    def choose(
        self, tokens: ArrayLike, before: Sequence[ArrayLike], alpha: float = 1.0
    ) -> tuple[Variant, ContextScore]:
        """Returns the variant of a chunk that needs the least repair after others, and how much it needs.

        Args:
          tokens: [n] int, the chunk. If the store does not have it, it is computed after the prefix alone.
          before: the chunks before it now, in their order.
          alpha: see `kvjax.reuse.craft`.

        Raises:
          InputError: tokens that are not valid.
        """
        chunk = self._known(tokens)
        if chunk not in self._chunks:
            self._alone(chunk)
        own = self._chunks.get(chunk)
        if own is None:  # larger than the store
            own = VariantScores()
            own.add(self._computed(chunk), self.max_variants)
        found = own.compare([self._known(each) for each in before], alpha)
        place = own.use(found)
        self._use(chunk)
        return own.variants[place], found[place]

    def add(self, variants: Sequence[Variant]) -> None:
        """Stores variants, from `kvjax.reuse.compute_variants`; one in the context of another replaces it.

        Raises:
          InputError: they are of another model or prefix.
        """
        for each in variants:
            check_chunks(self.model, [each.cache])
            if _tokens(each.cache.prefix) != _tokens(self.prefix):
                raise InputError("the variant was computed after another prefix than that of the store.")
            own = self._chunks.setdefault(each.chunk, VariantScores())
            same = [place for place, other in enumerate(own.variants) if other.before == each.before]
            if same:
                own.variants[same[0]] = each
            else:
                own.add(each, self.max_variants)
            self._use(each.chunk)
        self._drop()

    def _known(self, tokens: ArrayLike) -> Chunk:
        return tuple(checked_tokens(self.model.config, "tokens", tokens).tolist())

    def _computed(self, chunk: Chunk) -> Variant:
        (made,) = compute_variants(self.model, [np.array(chunk, np.int32)], self.prefix)
        return made

    def _alone(self, chunk: Chunk) -> Variant:
        """Returns the variant of a chunk that no other is before."""
        own = self._chunks.get(chunk)
        found = None if own is None else next((each for each in own.variants if not each.before), None)
        if found is None:
            found = self._computed(chunk)
            self._chunks.setdefault(chunk, VariantScores()).add(found, self.max_variants)
        self._use(chunk)
        self._drop()
        return found

    def _use(self, chunk: Chunk) -> None:
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)

    def _drop(self) -> None:
        """Drops chunks until there is room."""
        while self.nbytes > self.max_bytes:
            self._chunks.popitem(last=False)


def _tokens(prefix: ChunkCache | None) -> Chunk:
    return () if prefix is None else tuple(prefix.tokens.tolist())
