"""APE (arXiv:2502.05431): contexts that share positions and do not see each other, read as if they were one."""

from collections.abc import Sequence
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from kvjax import policies
from kvjax.arguments import number_argument
from kvjax.cache.parallel_contexts import ParallelContexts
from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.reuse.cache import ChunkCache, Text, check_chunks, checked_tokens
from kvjax.reuse.last_block import Placed, checked_room, feed_question


@cache_keywords()
def parallel(
    model: Model,
    chunks: Sequence[ChunkCache],
    question: ArrayLike,
    policy: Policy | CacheSpec | None = None,
    *,
    temperature: float = 0.9,
    scale: float = 0.9,
    room: int | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Context:
    """Reads a question after chunks that all begin at the same position (APE). Nothing of a chunk is recomputed.

    All later tokens attend to the chunks and to all else separately: the logits of chunks are divided by `temperature`,
    and their part has the weight exp(scale · temperature · L) for the log-sum-exp L of its logits, where that of all
    else has exp(L). The order of the chunks does not matter. The chunks' positions in the context, which decide what
    is old, follow each other in the order that is given.

    Args:
      model: that of the chunks, without sliding windows and caps of logits.
      chunks: the caches, all after one prefix.
      question: [n] int, what follows; at least one token.
      policy: see `kvjax.reuse.blend`.
      temperature: T, from 0.01 to 10.
      scale: the scaling factor, from 0 to 10; 1 with a temperature of 1 = attention as it is.
      room: see `kvjax.reuse.blend`.
      options: see `kvjax.CacheOptions`.
      cache: fields of the options.

    Returns:
      The context, which further turns and answers continue; it cannot be saved.

    Raises:
      InputError: see `kvjax.reuse.blend`; or a model or policy whose attention is not that of positions.
      PolicyError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "parallel")
    prefix = check_chunks(model, chunks)
    number_argument("temperature", temperature, minimum=0.01, maximum=10, error=InputError)
    number_argument("scale", scale, minimum=0, maximum=10, error=InputError)
    if reason := _refuses(model.config):
        raise InputError(f"contexts cannot share positions: {reason}.")
    ids = checked_tokens(model.config, "question", question)
    own, spec = options.resolve(model, policies.full() if policy is None else policy)
    text = Text.of(model, chunks, prefix)
    begun, longest = text.starts[0], max(map(len, chunks))
    position = np.arange(len(text.known), dtype=np.int32)
    for start, each in zip(text.starts, chunks, strict=True):
        position[start : start + len(each)] = begun + np.arange(len(each))
    how = ParallelContexts(float(temperature), float(scale * temperature))
    placed = Placed(how, position, begun, len(text), len(text) - (begun + longest))
    return feed_question(
        own, spec, text.tokens, text.key, text.value, ids, room=checked_room(model.config, room, len(text) + len(ids)),
        options=options, placed=placed,
    )  # fmt: skip


def _refuses(config: DecoderConfig) -> str | None:
    """Returns why the contexts of a model cannot share positions, or None if they can."""
    if any(config.kind(index).window is not None for index in range(config.num_layers)):
        return "the model has layers with a sliding window, which counts positions"
    if config.attention_soft_cap is not None:
        return "the model caps its logits, which a temperature would change"
    return None
