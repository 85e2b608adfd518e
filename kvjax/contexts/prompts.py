"""Begins contexts: runs prompts through the model."""

import itertools
import numbers
from collections.abc import Sequence
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.spec import CacheSpec
from kvjax.contexts.room import reason_for_steps
from kvjax.contexts.turns import extend
from kvjax.errors import InputError, shown
from kvjax.generation.context import Context
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.generation.prefill import run_batch
from kvjax.inputs import check_batch, check_count
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.policies.traits import compresses_prompts

ROOM = 256  # tokens after the longest prompt, unless the caller gives a room


@cache_keywords()
def prefill(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    room: int | None = None,
    keep: Sequence[int] = (),
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
        for 256 more than the longest prompt, or as many as ``limits.new_tokens``. Arrays grow when more tokens follow.
      keep: numbers of tokens, ascending, after which the contexts are kept as `Context.snapshots`. The prompt is cut
        there: a policy evicts at the end of each part. A row that is shorter than a part has all of its tokens.
      lengths: see `kvjax.generate`.
      options: see `kvjax.CacheOptions`.
      cache: fields of the options.

    Raises:
      InputError: see `kvjax.generate`; `room` is smaller than a prompt; or the prompt of this cache cannot be cut.
      PolicyError: see `kvjax.generate`.
      StorageError: see `kvjax.generate`.
      ConfigError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "prefill")
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
    cuts = _checked_cuts(keep, longest)
    first = run_batch(
        model, spec, batch, total, room - longest, options, last_fed=True, first=cuts[0] if cuts else None,
        check=_check_cut if cuts else None,
    )  # fmt: skip
    if not cuts:
        return first
    parts = [first]
    for start, stop in itertools.pairwise((*cuts, longest)):
        sizes = np.clip(batch.lengths - start, 0, stop - start)
        parts.append(
            extend(model, parts[-1], batch.tokens[:, start:stop], lengths=sizes, block=options.prefill_block)
        )  # fmt: skip
    return parts[-1]._replace(snapshots=tuple(parts[:-1]))


def _checked_cuts(keep: Sequence[int], longest: int) -> tuple[int, ...]:
    """Returns the numbers of tokens after which a prompt of `longest` tokens is cut."""
    cuts = tuple(keep)
    whole = all(isinstance(each, numbers.Integral) and not isinstance(each, bool) for each in cuts)
    if not whole or any(one >= two for one, two in itertools.pairwise((0, *cuts, longest))):
        raise InputError(f"keep must be ascending numbers of tokens from 1 to {longest - 1}; got {shown(keep)}.")
    return tuple(int(each) for each in cuts)


def _check_cut(layout: CacheLayout) -> None:
    """Checks that the parts of a prompt can be fed one after the other."""
    reason = reason_for_steps(layout.decode)
    own = (group.policy for layer in layout.prompt for group in layer)
    compressor = next(filter(compresses_prompts, own), None)
    if compressor is not None:
        reason = f"policy {compressor.name} compresses whole prompts"
    sparse = next((group.selection for layer in layout.decode for group in layer if group.selection.prompt), None)
    if sparse is not None:
        reason = f"selection {sparse.name} reads pages of whole prompts (in_prompt), and later parts whole"
    if reason is not None:
        raise InputError(f"keep cuts the prompt, and {reason}; leave out keep, or prefill the shorter prompt.")
