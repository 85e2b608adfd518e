"""Rewinds contexts: forgets their last tokens."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache.cut import cut
from kvjax.cache.planning.layout import CacheLayout
from kvjax.contexts.turns import extend, own_model
from kvjax.errors import InputError
from kvjax.generation.context import Context, Span, padded_rows
from kvjax.generation.continuations import takes_blocks
from kvjax.generation.program import program
from kvjax.models.model import Model


@plain_signature
def rewind(model: Model, context: Context, length: ArrayLike) -> Context:
    """Forgets the tokens of a context from a position on, and feeds the last token that is left for its logits.

    Only a full cache without statistics can be shortened exactly. For others, keep the shorter contexts: with ``keep=``
    of `kvjax.contexts.prefill`, or those before `kvjax.contexts.extend`.

    Args:
      model: that of the context.
      context: the context, which is unchanged.
      length: [] or [B] int, the number of tokens that are left of each row, from 1 to those that it has.

    Raises:
      InputError: a length that is not valid, a cache that remembers more than the slots of the tokens that are left, or
        a context whose tokens are not known.
    """
    model = own_model(model, context)
    if reason := reason_against(context.layout):
        raise InputError(
            f"this context cannot be rewound: {reason}. Keep shorter contexts, with keep= of kvjax.contexts.prefill."
        )
    if (text := context.text) is None or context.boundaries is None:
        raise InputError("this context cannot be rewound, since its tokens are not known.")
    sizes = np.array([len(row) for row in text])
    given = np.asarray(length)
    if not np.issubdtype(given.dtype, np.integer) or given.shape not in ((), sizes.shape):
        raise InputError(f"length must be a whole number, or {len(sizes)}, one per row; got {length!r}.")
    left = np.broadcast_to(given, sizes.shape)
    if (left < 1).any() or (left > sizes).any():
        row = int(np.argmax((left < 1) | (left > sizes)))
        raise InputError(f"length must be from 1 to {sizes[row]} for row {row}; got {left[row]}.")
    padding = context.logits.shape[0] - len(sizes)
    with model.on_mesh():
        state = _forget(context.state, model.place(np.pad(left - 1, (0, padding)).astype(np.int32)))
    before = context._replace(
        state=state,
        tokens=padded_rows([row[: n - 1] for row, n in zip(text, left, strict=True)], context.logits.shape[0]),
        boundaries=tuple(_cut(spans, int(n) - 1) for spans, n in zip(context.boundaries, left, strict=True)),
        snapshots=(),
    )
    last = [[row[n - 1]] for row, n in zip(text, left, strict=True)]
    made = extend(model, before, last, block=1)
    return made._replace(
        boundaries=tuple(_cut(spans, int(n)) for spans, n in zip(context.boundaries, left, strict=True))
    )


def reason_against(layout: CacheLayout) -> str | None:
    """Returns why a cache cannot be rewound: what it remembers besides the slots of its tokens; None if it can."""
    if not layout.keeps_all:
        return f"{layout.name} evicts, and what it has evicted does not come back"
    if any(group.needs or group.memory or group.writes for group in layout.groups):
        return f"{layout.name} has statistics of all queries"
    if any(group.parallel is not None for group in layout.groups):
        return f"{layout.name} has contexts that share positions"
    if not takes_blocks(layout.decode):
        return f"{layout.name} encodes tokens, or has an index of them"
    return None


_forget = program()(cut)


def _cut(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """Returns the spans of the first `length` tokens."""
    made = [each for each in spans if each.stop < length]
    if length and (rest := spans[len(made) :]):
        start = made[-1].stop if made else 0
        made.append(dataclasses.replace(rest[0], stop=length, block=min(rest[0].block, length - start)))
    return tuple(made)
