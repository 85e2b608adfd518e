"""Generation from a context, which returns the context afterwards."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.contexts.room import with_room
from kvjax.contexts.turns import check_positions, extend, own_model
from kvjax.generation import generate
from kvjax.generation.context import Context
from kvjax.generation.generate import Generation
from kvjax.generation.sampling import Greedy, Sampler
from kvjax.inputs import check_count
from kvjax.models.model import Model
from kvjax.parallel import distributed

Array = jax.Array


@plain_signature
def decode(
    model: Model,
    context: Context,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    until: Callable[[np.ndarray], np.ndarray] | None = None,
    progress: bool = False,
    requests: ArrayLike | None = None,
    record: bool = False,
    donate: bool = False,
) -> Generation:
    """Generates tokens after a context, and returns the context after them.

    The tokens are those of `kvjax.generate`. Their last one, which no loop feeds back, is fed here, so that the context
    can be extended.

    Args:
      model: that of the context.
      context: from `kvjax.contexts.prefill` or another function of contexts.
      max_new_tokens: see `kvjax.generate`.
      sampler: see `kvjax.generate`.
      key: see `kvjax.generate`.
      stop: see `kvjax.generate`.
      stream: see `kvjax.generate`.
      until: see `kvjax.generate`.
      progress: see `kvjax.generate`.
      requests: see `kvjax.generate`. Forks with equal tokens are sampled alike if their keys and ids are equal.
      record: see `kvjax.generate`.
      donate: whether the cache of `context` may be overwritten, so that it is not copied and cannot be used afterwards.

    Returns:
      The new tokens. ``context`` is the context after them, and ``state`` its cache.

    Raises:
      InputError: see `kvjax.generation.generate.decode`; arrays that cannot grow have too few slots; or the
        text is longer than the model's positions.
      StorageError: see `kvjax.generation.generate.decode`.
      NonFiniteError: see `kvjax.generate`.
    """
    check_count("max_new_tokens", max_new_tokens)
    model = own_model(model, context)
    length, total = (
        each[: context.num_rows] for each in distributed.to_host((context.state.length, context.state.total))
    )
    check_positions(model.config, length + max_new_tokens, total)
    larger = with_room(context, np.full(context.logits.shape[0], max_new_tokens, np.int32))
    if not donate and larger.state is context.state:
        larger = larger._replace(state=jax.tree.map(lambda leaf: leaf.copy(), context.state))
    made = generate.decode(
        model, larger, max_new_tokens=max_new_tokens, sampler=sampler, key=key, stop=stop, stream=stream,
        until=until, progress=progress, requests=requests, record=record,
    )  # fmt: skip
    after = fed(model, larger, made)
    return made._replace(state=after.state, context=after)


def fed(model: Model, context: Context, made: Generation) -> Context:
    """Returns the context after generated tokens, the last of which has not been fed.

    Args:
      model: that of the context.
      context: before the tokens; only what does not change with them is read.
      made: the tokens, and the cache without the last one of each row; the cache is donated.
    """
    last = np.arange(len(made.tokens)), np.maximum(made.lengths - 1, 0)
    before = context._replace(state=made.state)
    if (text := context.text) is not None and context.boundaries is not None:
        rows = [
            np.concatenate([row, new[: length - 1]])
            for row, new, length in zip(text, made.tokens, made.lengths, strict=True)
        ]
        before = before.with_text(rows, block=1)
    # [B, 1]
    return extend(model, before, made.tokens[last][:, None], block=1, donate=True)
