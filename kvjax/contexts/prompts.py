"""Begins contexts: runs prompts through the model."""

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords
from kvjax.generation.prefill import run_batch
from kvjax.inputs import check_batch, check_count
from kvjax.models.model import Model
from kvjax.policies.base import Policy

ROOM = 256  # tokens after the longest prompt, unless the caller gives a room


@cache_keywords()
def prefill(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    room: int | None = None,
    lengths: ArrayLike | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Context:
    """Runs prompts through the model, and returns the context after them.

    Args:
      model: see `kvjax.generate`.
      tokens: see `kvjax.generate`.
      policy: see `kvjax.generate`.
      room: the number of tokens of a row in all that arrays are made for, those that follow the prompt included; None
        for 256 more than the longest prompt, or as many as ``limits.new_tokens``. Where every token is held exactly,
        arrays grow when more tokens follow.
      lengths: see `kvjax.generate`.
      options: see `kvjax.CacheOptions`.
      cache: fields of the options.

    Raises:
      InputError: see `kvjax.generate`; or `room` is smaller than a prompt.
      PolicyError: see `kvjax.generate`.
      StorageError: see `kvjax.generate`.
      ConfigError: see `kvjax.generate`.
    """
    options = (options or CacheOptions()).updated(cache, "prefill")
    model, spec = options.resolve(model, policy)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    longest = int(batch.lengths.max())
    if room is None:
        following = ROOM if options.limits is None else options.limits.new_tokens
        room = max(longest, min(longest + following, model.config.max_positions))
    check_count("room", room)
    if room < longest:
        raise InputError(f"room={room} is smaller than the longest prompt, which has {longest} tokens; give more.")
    total = np.full(len(batch.lengths), room, np.int32)
    return run_batch(model, spec, batch, total, room - longest, options, last_fed=True)
