"""Cache-Craft (arXiv:2502.15734): of each chunk the cache of the context that is most like this one, and its repair."""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import number_argument
from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.policies.base import Policy
from kvjax.reuse.blending import Blended, largest, recompute
from kvjax.reuse.cache import Text, check_chunks, checked_tokens
from kvjax.reuse.context_scores import ContextScore
from kvjax.reuse.store import ChunkStore
from kvjax.summary import one_line


class Crafted(NamedTuple):
    """A context that was made of variants of chunks.

    Attributes:
      blended: the context, and which tokens were recomputed.
      scores: of each chunk, what its variant lacked.
    """

    blended: Blended
    scores: tuple[ContextScore, ...]

    def __repr__(self) -> str:
        return one_line(self)


@cache_keywords()
def craft(
    store: ChunkStore,
    chunks: Sequence[ArrayLike],
    question: ArrayLike,
    policy: Policy | CacheSpec | None = None,
    *,
    alpha: float = 1.0,
    room: int | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Crafted:
    """Makes a context of the variants of chunks that need the least repair, and repairs them (Cache-Craft).

    Of each chunk, those tokens go through all layers that attended most to the chunks before, when the variant was
    computed; the more of these chunks are missing now or stand in another order, the more tokens.

    Args:
      store: has the variants; see `kvjax.reuse.compute_variants`. A chunk that it does not have is computed.
      chunks: [n] int each, one after the other.
      question: [n] int, what follows; at least one token.
      policy: see `kvjax.reuse.blend`.
      alpha: a factor of the share of tokens that are recomputed, at least 0; `kvjax.reuse.calibrate_alpha` chooses the
        smallest at which contexts are as good as wanted.
      room: see `kvjax.reuse.blend`.
      options: see `kvjax.CacheOptions`.
      cache: fields of the options.

    Raises:
      InputError: see `kvjax.reuse.blend`.
      PolicyError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "craft")
    number_argument("alpha", alpha, minimum=0, maximum=1e9, error=InputError)
    model = store.model
    if not chunks:
        raise InputError("chunks must have the tokens of at least one chunk.")
    ids = checked_tokens(model.config, "question", question)
    found = [store.choose(own, chunks[:number], alpha) for number, own in enumerate(chunks)]
    caches = [variant.cache for variant, _ in found]
    text = Text.of(model, caches, check_chunks(model, caches))
    position = [
        start + largest(variant.token_score, np.arange(len(variant.cache)), score.count(len(variant.cache)),
                        np.zeros(len(variant.cache), bool))
        for start, (variant, score) in zip(text.starts, found, strict=True)
    ]  # fmt: skip
    made = recompute(
        model, caches, text, ids, policy, np.concatenate(position).astype(np.int32), None, room=room, options=options
    )
    return Crafted(made, tuple(score for _, score in found))
