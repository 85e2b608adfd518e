"""Rows of contexts: copies of them, and the rows of two contexts in one."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.state import KVState
from kvjax.contexts.feed import copy_rows
from kvjax.contexts.room import in_arrays, with_sizes
from kvjax.contexts.turns import same_calibration, same_weights
from kvjax.errors import InputError
from kvjax.generation.context import Context, check_context, padded_rows
from kvjax.parallel import host_memory

Array = jax.Array


@plain_signature
def rows(context: Context, indices: ArrayLike) -> Context:
    """Copies rows of a context; ``rows(context, [0] * n)`` is a fork of its first row.

    Args:
      context: the context, which is unchanged.
      indices: [R] int, the row of the context that each row of the result is a copy of; repeats are allowed.

    Raises:
      InputError: an index is not that of a row, or there is none.
    """
    check_context(context)
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer) or (
        chosen.min() < 0 or chosen.max() >= context.num_rows
    ):  # fmt: skip
        raise InputError(
            f"indices must be whole numbers from 0 to {context.num_rows - 1}, at least one; got {indices!r}."
        )
    return _taken(context, chosen.astype(np.int32), context.text, context.boundaries)


@plain_signature
def join(first: Context, second: Context) -> Context:
    """Puts the rows of two contexts into one, those of the first one first.

    Args:
      first: a context.
      second: a context of the same model and the same cache. If one has more slots than the other, the result has as
        many.

    Raises:
      InputError: the contexts are of different models or caches, or their arrays have different sizes and cannot grow.
    """
    check_context(first, "first")
    check_context(second, "second")
    _check_alike(first, second)
    first, second = _in_larger_arrays(first, second)
    states = [first.state, arranged_state(second.state, stacked_runs(first.state.layers))]
    with _on_mesh(first):
        state: KVState = jax.tree.map(_concatenated, *states)
        logits = jnp.concatenate([first.logits, second.logits])
    whole = Context(logits, state, first.layout, made=first.made)
    start = first.logits.shape[0]
    chosen = [*range(first.num_rows), *range(start, start + second.num_rows)]
    texts, spans = (
        None if one is None or two is None else [*one, *two]
        for one, two in ((first.text, second.text), (first.boundaries, second.boundaries))
    )
    own = np.arange(len(chosen))
    if chosen == [*range(len(logits))] and (first.made is None or first.made.model.rows_on_mesh(len(own)) == len(own)):
        made = whole._replace(rows=len(own))
    else:
        made = _taken(whole, np.array(chosen, np.int32), None, None)
    return made._replace(
        tokens=None if texts is None else padded_rows([texts[i] for i in own], made.logits.shape[0]),
        boundaries=None if spans is None else tuple(spans),
        resolved=None
        if first.resolved is None or second.resolved is None
        else np.concatenate([first.resolved, second.resolved]),
    )


def _taken(
    context: Context, chosen: np.ndarray, text: Sequence[np.ndarray] | None, boundaries: Sequence[tuple] | None
) -> Context:
    """Returns the rows [R] int32 of a context; rows without a token follow on a mesh that does not divide them."""
    count = len(chosen)
    model = None if context.made is None else context.made.model
    padding = 0 if model is None or count == 1 else model.rows_on_mesh(count) - count
    index, real = np.pad(chosen, (0, padding)), np.arange(count + padding) < count
    with _on_mesh(context):
        placed = (index, real) if model is None else model.place((index, real))
        logits, state = copy_rows(context.state, context.logits, *placed)
    return context._replace(
        logits=logits, state=state, rows=count, snapshots=(),
        tokens=None if text is None else padded_rows([text[i] for i in chosen], count + padding),
        boundaries=None if boundaries is None else tuple(boundaries[i] for i in chosen),
        resolved=None if context.resolved is None else context.resolved[chosen],
    )  # fmt: skip


def _on_mesh(context: Context) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if context.made is None else context.made.model.on_mesh()


def _check_alike(first: Context, second: Context) -> None:
    """Checks that two contexts are of one model and one cache."""
    different = list[str]()
    if first.made is not None and second.made is not None:
        models = first.made.model, second.made.model
        if not same_weights(*models):
            different.append("the model")
        elif not same_calibration(*models):
            different.append("the calibration")
        for name in ("policy", "storage", "selection"):
            one, two = (getattr(made.spec, name) for made in (first.made, second.made))
            if one != two:
                different.append(f"the {name}, {one!r} and {two!r}")
        one, two = ({group.parallel for group in each.layout.groups} for each in (first, second))
        if one != two:
            different.append("the contexts that share positions, or their temperature and scale")
    elif _without_slots(first.layout) != _without_slots(second.layout):
        different.append("the groups of heads of their layouts")
    if different:
        raise InputError(f"contexts can be joined if they were made alike; these differ in {'; '.join(different)}.")


def _without_slots(layout: CacheLayout) -> list[list[Group]]:
    return [[dataclasses.replace(group, slots=(), array_sizes=None) for group in layer] for layer in layout.decode]


def _in_larger_arrays(first: Context, second: Context) -> tuple[Context, Context]:
    """Returns two contexts in arrays of equal sizes, those of the larger ones."""
    if first.layout.decode == second.layout.decode:
        return first, second
    one, two = (None if each.made is None else each.made.sizes for each in (first, second))
    slots = " and ".join(str(each.layout.groups[0].capacity) for each in (first, second))
    about, instead = f"contexts of {slots} slots cannot be joined", "prefill both with the same limits"
    if one is None or two is None:
        raise InputError(f"{about}: their caches are not known; {instead}.")
    both = dataclasses.replace(
        one, prompt=max(one.prompt, two.prompt), budget_prompt=max(one.budget_prompt, two.budget_prompt),
        shortest=min(one.shortest, two.shortest), following=max(one.following, two.following),
    )  # fmt: skip
    made = [with_sizes(each, both, about=about, instead=instead) for each in (first, second)]
    # Budgets may have made the slots of one more.
    decode = tuple(
        tuple(
            dataclasses.replace(own, slots=tuple(map(max, own.slots, other.slots)))
            for own, other in zip(*layers, strict=True)
        )
        for layers in zip(*(each.layout.decode for each in made), strict=True)
    )
    first, second = (in_arrays(each, dataclasses.replace(each.layout, decode=decode)) for each in made)
    return first, second


def _concatenated(one: Array, two: Array) -> Array:
    """Joins arrays [A, ...] and [B, ...] to [A + B, ...], in the memory of the first."""
    if not host_memory.on_host(one):
        return jnp.concatenate([one, two])
    return jax.device_put(np.concatenate([np.asarray(one), np.asarray(two)]), one.sharding)
