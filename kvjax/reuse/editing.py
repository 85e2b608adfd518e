"""PIE (arXiv:2407.03157): replaces tokens within a context, whose later tokens are moved instead of computed anew."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import number_argument, plain_signature
from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.cache.resize import holds_single_slots
from kvjax.cache.slots import forget
from kvjax.cache.state import EMPTY, Block, KVState, Layer, LayerKV
from kvjax.contexts.batches import rows
from kvjax.contexts.feed import resized_state
from kvjax.contexts.room import block_phase, reason_for_steps, with_room
from kvjax.contexts.turns import own_model
from kvjax.errors import InputError, shown
from kvjax.generation import compiling
from kvjax.generation.context import EDITED, Context, Span, padded_rows
from kvjax.generation.program import program
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.numerics.rope import Rope
from kvjax.parallel.sharding import Params
from kvjax.reuse.cache import checked_tokens
from kvjax.reuse.layerwise import check_movable
from kvjax.reuse.repairing import holds_rotated, repaired
from kvjax.storage import dense
from kvjax.storage.side import PROMPT

Array = jax.Array


class Edit(NamedTuple):
    """A replacement: ``text[start:stop] = tokens``.

    Attributes:
      start: the position of the first token that is replaced.
      stop: the position after the last one; `start` to insert.
      tokens: [m] int, the new ones; none to delete.
    """

    start: int
    stop: int
    tokens: ArrayLike = ()


@plain_signature
def edit(
    model: Model, context: Context, *edits: Edit | tuple[int, int, ArrayLike], repair: float | None = None
) -> Context:
    """Replaces tokens of a context (PIE).

    The slots of replaced tokens are emptied, and those of later tokens move: their keys are rotated further, their
    values and statistics stay. The new tokens are fed as one block at their place, so that they see the tokens before
    them. Later tokens have not seen the edit, unless `repair` recomputes some. The last token of the text is computed
    again for its logits.

    Args:
      model: that of the context, without learned positions.
      context: of one row, which is unchanged.
      *edits: in the positions of the context as it is, ascending and without overlaps. Each is applied for itself, from
        left to right, and what is over the budget is evicted after it.
      repair: the share of the later tokens that are recomputed as `kvjax.reuse.blend` does with ``check=1``; of a full
        cache and one edit. None = none.

    Raises:
      InputError: edits that are not valid, or leave no token; a context of several rows, whose tokens are not known or
        whose slots cannot move; another model; or a share that is not valid.
    """
    model = own_model(model, context)
    check_movable(model.config)
    if repair is not None:
        number_argument("repair", repair, minimum=0, maximum=1, error=InputError)
    if context.num_rows != 1:
        raise InputError(
            f"edit takes a context of one row, and this one has {context.num_rows}; take kvjax.contexts.rows(context, "
            "[0]) and so on, and join them afterwards."
        )
    if (text := context.text) is None or context.boundaries is None:
        raise InputError("this context cannot be edited, since its tokens are not known.")
    given = _checked(model, edits, len(text[0]))
    if reason := _refuses(context.layout):
        raise InputError(f"this context cannot be edited: {reason}.")
    plain = context.made is not None and context.made.spec.storage == dense() and context.layout.keeps_all
    if repair is not None and (len(given) != 1 or not plain):
        raise InputError(
            "repair takes one edit of a full cache with exact storage; leave it out, or edit one after the other."
        )
    if context.logits.shape[0] != 1:  # a row of padding, on a mesh
        context = rows(context, [0])
    (tokens,) = text
    moved, last_fed = 0, False
    for start, stop, new in given:
        start, stop = start + moved, stop + moved
        tokens = np.concatenate([tokens[:start], new, tokens[stop:]]).astype(np.int32)
        context = _edited(model, context, start, stop, new, tokens)
        last_fed = len(new) > 0 and start + len(new) == len(tokens)
        moved += len(new) - (stop - start)
    if repair is not None:
        ((start, _, new),) = given
        return repaired(model, context, start + len(new), float(repair))
    return context if last_fed else _last_again(model, context)


def _edited(model: Model, context: Context, start: int, stop: int, new: np.ndarray, tokens: np.ndarray) -> Context:
    """Applies one edit; the logits are those after the last new token.

    Args:
      model: of the context.
      context: before.
      start: see `Edit`.
      stop: see `Edit`.
      new: [m] int32.
      tokens: [T] int32, the text afterwards.
    """
    more = len(new) - (stop - start)
    context = with_room(context, np.array([max(more, 0)]))
    width = prompt_bucket(max(len(new), 1))
    during = block_phase(context.layout.decode, width)
    # [1, width]
    ids = np.pad(new, (0, width - len(new)))[None].astype(np.int32)
    numbers = model.place(tuple(np.array([each], np.int32) for each in (start, stop, len(new), len(tokens))))
    with model.on_mesh(), compiling.announced(compiling.tokens_of(context.layout.decode)):
        logits, state = _apply_edit(
            model.params, context.state, context.logits, model.place(ids), *numbers, config=model.config,
            held=context.layout.decode, during=during,
        )  # fmt: skip
    assert context.boundaries is not None
    spans = [each for each in context.boundaries[0] if each.stop <= start]
    boundaries = ((*spans, Span(len(tokens), max(len(new), 1), EDITED)),)
    return context._replace(
        logits=logits, state=state, tokens=padded_rows([tokens], 1), boundaries=boundaries, snapshots=()
    )


@program(static_argnames=("config", "held", "during"))
def _apply_edit(
    params: Params,
    state: KVState,
    logits: Array,
    tokens: Array,
    start: Array,
    stop: Array,
    count: Array,
    length: Array,
    *,
    config: DecoderConfig,
    held: Phase,
    during: Phase,
) -> tuple[Array, KVState]:
    """Empties and moves slots, and feeds the new tokens.

    Args:
      params: of the decoder.
      state: the cache.
      logits: [1, V] float32, returned where there are no new tokens.
      tokens: [1, n] int32.
      start: [1] int32, see `Edit`.
      stop: [1] int32.
      count: [1] int32, the new tokens that are not padding.
      length: [1] int32, the tokens of the whole text afterwards.
      config: the decoder.
      held: the groups of heads of each layer.
      during: the same with slots for the new tokens.
    """
    compiling.traced()
    stacked = stacked_runs(state.layers)
    kv = arranged_state(state, ())
    total = jnp.maximum(kv.total, length)
    layers = tuple(
        Layer(_moved(own, group, config.kind(index).rope, start, stop, start + count - stop, total)
              for own, group in zip(layer, groups, strict=True))
        for index, (layer, groups) in enumerate(zip(kv.layers, held, strict=True))
    )  # fmt: skip
    kv = kv.replace(layers=layers, prompt=length, total=total)
    kv = resized_state(kv, held, during)
    # [1, n]
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    position = jnp.where(at < count[:, None], start[:, None] + at, -1)
    block = Block(position, prompt=length, total=total, budget=kv.budget, row_newest=length - 1)
    decoder = bind(config, params)
    runs = decoder.runs_now(arranged_state(kv, stacked), during)
    kv, decoder = arranged_state(kv, runs), decoder.looped(runs)
    # [1, n, E]
    x, kv = decoder.hidden(tokens, kv, block, during)
    # [1, E]
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    made = jnp.where((count > 0)[:, None], decoder.logits(last), logits)
    kv = resized_state(kv.replace(length=length), during, held)
    return made, arranged_state(kv, stacked)


def _moved(
    own: LayerKV, group: Group, rope: Rope | None, start: Array, stop: Array, more: Array, total: Array
) -> LayerKV:
    """Empties the slots of [start, stop), and moves those of later positions by `more`, [1] int32 each."""
    before = own.position
    later = before >= stop[:, None, None]
    position = jnp.where(later, before + more[:, None, None], jnp.where(before >= start[:, None, None], EMPTY, before))
    stores = own.stores
    if rope is not None and own.is_exact and holds_rotated(group):
        # The factor of attention on cosine and sine is in the keys already.
        plain = dataclasses.replace(rope, attention_factor=1.0)
        steps = jnp.where(later, more[:, None, None], 0)
        key = plain.rotate(own.key, steps, rope.frequencies(total))
        stores = own.with_exact(jnp.where(later[..., None], key, own.key), own.value).stores
    return own.replace(position=position, stores=stores, stats=forget(own.stats, position))


def _last_again(model: Model, context: Context) -> Context:
    """Computes the last token again; its slots have its new key and value, and all else is as it was."""
    assert context.text is not None
    (tokens,) = context.text
    with model.on_mesh(), compiling.announced(compiling.tokens_of(context.layout.decode)):
        logits, state = _feed_last(
            model.params, context.state, model.place(tokens[-1:][None].astype(np.int32)), config=model.config,
            held=context.layout.decode, during=block_phase(context.layout.decode, prompt_bucket(1)),
        )  # fmt: skip
    return context._replace(logits=logits, state=state)


@program(static_argnames=("config", "held", "during"))
def _feed_last(
    params: Params, state: KVState, token: Array, *, config: DecoderConfig, held: Phase, during: Phase
) -> tuple[Array, KVState]:
    """Computes the token [1, 1] at the last position again; it is not observed, and nothing is evicted."""
    compiling.traced()
    stacked = stacked_runs(state.layers)
    before = arranged_state(state, ())
    newest = before.length - 1

    def without(own: LayerKV) -> LayerKV:
        return own.replace(position=jnp.where(own.position == newest[:, None, None], EMPTY, own.position))

    layers = tuple(Layer(map(without, layer)) for layer in before.layers)
    kv = resized_state(before.replace(layers=layers), held, during)
    block = Block(newest[:, None], prompt=kv.prompt, total=kv.total, budget=kv.budget)
    decoder = bind(config, params)
    # [1, 1, E]
    x, kv = decoder.hidden(token, kv, block, during)

    def computed(own: LayerKV, new: LayerKV) -> LayerKV:
        """Puts the new key and value where the old ones were, in heads that held them."""
        there = own.position == newest[:, None, None]
        # [B, K, 1]
        at = jnp.argmax(new.position == newest[:, None, None], axis=2, keepdims=True)

        def put(old: Array, made: Array) -> Array:
            more = (1,) * (old.ndim - 3)
            found = jnp.take_along_axis(made, at.reshape(*at.shape, *more), axis=2)
            return jnp.where(there.reshape(*there.shape, *more), found, old)

        return own.replace(stores=jax.tree.map(put, own.stores, new.stores))

    layers = tuple(
        Layer(computed(*each) for each in zip(*pair, strict=True))
        for pair in zip(before.layers, kv.layers, strict=True)
    )
    return decoder.logits(x[:, 0]), arranged_state(before.replace(layers=layers), stacked)


def _refuses(layout: CacheLayout) -> str | None:
    """Returns why slots cannot move, or None if they can."""
    for group in layout.groups:
        storage = group.storage
        if not group.selection.reads_all:
            return f"selection {group.selection.name} has an index of its slots"
        if group.slot_axes:
            return f"slots are divided over the mesh axis {', '.join(group.slot_axes)}"
        if not holds_single_slots(group) or len(group.slots) != 1:
            return f"storage {storage.label} does not hold slots one by one in one array"
        if storage.sides_of(PROMPT):
            return f"storage {storage.label} was fitted to the prompt"
        if holds_rotated(group) and not storage.exact:
            return f"storage {storage.label} has keys in codes that are rotated to their positions"
        if group.parallel is not None:
            return "it has contexts that share positions"
        if group.memory:
            return f"policy {group.policy.name} remembers queries by their positions"
    return reason_for_steps(layout.decode)


def _checked(
    model: Model, edits: Sequence[Edit | tuple[int, int, ArrayLike]], length: int
) -> list[tuple[int, int, np.ndarray]]:
    """Returns edits with tokens [m] int32."""
    found: list[tuple[int, int, np.ndarray]] = []
    if not edits:
        raise InputError("give at least one edit, as (start, stop, tokens).")
    end = 0
    for each in edits:
        if not isinstance(each, tuple) or len(each) not in (2, 3):
            raise InputError(f"an edit is (start, stop, tokens); got {shown(each)}.")
        start, stop, tokens = Edit(*each)
        whole = all(isinstance(place, int | np.integer) and not isinstance(place, bool) for place in (start, stop))
        if not whole or not end <= start <= stop <= length:
            raise InputError(
                f"start and stop of edits must be ascending positions from {end} to {length}; got {shown(start)}, "
                f"{shown(stop)}."
            )
        empty = np.size(np.asarray(tokens)) == 0
        new = np.zeros(0, np.int32) if empty else checked_tokens(model.config, "the tokens of an edit", tokens)
        found.append((int(start), int(stop), new))
        end = int(stop)
    if length + sum(len(new) - (stop - start) for start, stop, new in found) < 1:
        raise InputError("the edits leave no token; at least one must be left.")
    return found
