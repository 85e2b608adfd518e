"""Puts a text whose keys and values are known into a cache, and feeds the question after it as the last block."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.empty import empty_layers
from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.parallel_contexts import ParallelContexts
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import prompt_bucket, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import EMPTY, PARALLEL_MARKS, Block, KVState, Layer, LayerKV, exact_store
from kvjax.contexts.room import lowered_layout
from kvjax.errors import InputError
from kvjax.generation import compiling
from kvjax.generation.context import CHUNKS, Context, Made, Span
from kvjax.generation.layer_calls import GroupBudgets
from kvjax.generation.options import CacheOptions
from kvjax.generation.program import program
from kvjax.generation.prompt_end import converted
from kvjax.inputs import check_count
from kvjax.models import layer_loop
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.numerics.statistics import Statistic
from kvjax.parallel.sharding import Params
from kvjax.policies.traits import merging
from kvjax.reuse.layerwise import rotated
from kvjax.storage import dense

Array = jax.Array
ROOM = 256  # tokens after the question, unless the caller gives a room


class Placed(NamedTuple):
    """Contexts that share positions; see `kvjax.reuse.parallel`.

    Attributes:
      how: the weights of their part of attention.
      position: [S] int32, the positions that keys are rotated to.
      start: the running position of the first token of the contexts.
      stop: the running position after the last one.
      shift: by how much later tokens' running positions exceed those that they are rotated to.
    """

    how: ParallelContexts
    position: np.ndarray
    start: int
    stop: int
    shift: int


def checked_room(config: DecoderConfig, room: int | None, length: int) -> int:
    """Returns the number of tokens that arrays are made for.

    Args:
      config: the decoder.
      room: as the user gives it; None = `ROOM` more than there are.
      length: the tokens that there are.

    Raises:
      InputError: it is not valid, or smaller than the text.
    """
    if room is None:
        return max(length, min(length + ROOM, config.max_positions))
    check_count("room", room)
    if room < length:
        raise InputError(f"room={room} is smaller than the text, which has {length} tokens; give more.")
    return room


def check_cache(spec: CacheSpec, layout: CacheLayout, question: int) -> None:
    """Checks that a cache needs nothing of the queries of chunks, most of which were never computed.

    Args:
      spec: of the cache.
      layout: of the cache.
      question: the number of tokens whose queries are known: the last ones of the prompt.

    Raises:
      InputError: it needs more.
    """

    def reason(group: Group) -> str | None:
        if group.replay is not None:
            return "it replays prompts"
        if group.writes or group.memory:
            return "it computes something of every token of a prompt"
        if merging(group.policy) is not None:
            return "it merges what it evicts by the attention of all queries"
        own = [each.name for each in group.reports if not _of_last(each, question)]
        return f"it needs {', '.join(sorted(own))} of all queries, or of more than {question}" if own else None

    if spec.storage != dense():
        raise InputError(f"storage {spec.storage.label} cannot hold chunks: give a policy alone, with exact storage.")
    if not all(group.selection.reads_all for group in layout.groups):
        raise InputError(f"{spec.name} reads a selection, whose index is made of whole prompts; give a policy alone.")
    for group in (group for phase in (layout.prompt, layout.decode) for layer in phase for group in layer):
        if why := reason(group):
            raise InputError(
                f"{spec.name} cannot take over chunks, because most of their queries were not computed, and {why}; "
                "valid are policies that rank by position or by keys, and snapkv, pyramidkv, adakv and tova with a "
                "window of no more tokens than the question."
            )


def _of_last(statistic: Statistic, count: int) -> bool:
    """Returns whether only the last `count` queries of a prompt matter."""
    if statistic.tail is not None:
        return statistic.tail <= count
    return statistic.accumulate == "replace" or (statistic.accumulate == "latest" and statistic.history <= count)


def feed_question(
    model: Model,
    spec: CacheSpec,
    tokens: np.ndarray,
    keys: Sequence[Array],
    values: Sequence[Array],
    question: np.ndarray,
    *,
    room: int,
    options: CacheOptions,
    placed: Placed | None = None,
) -> Context:
    """Returns the context of a text and a question, whose last block is the question.

    Args:
      model: with the calibration of the cache.
      spec: of the cache.
      tokens: [T] int32, the text.
      keys: of each layer, [1, K, S, D] with S at least T, by position and not rotated.
      values: of each layer, [1, K, S, D].
      question: [n] int32, at least one token.
      room: the number of tokens that arrays are made for.
      options: see `kvjax.CacheOptions`.
      placed: of contexts that share positions; None = there are none.

    Raises:
      InputError: see `check_cache`.
    """
    if options.prefill_block is not None:
        raise InputError("prefill_block cannot be used: chunks were not read in blocks, and the question is one block.")
    count, length = len(tokens), len(tokens) + len(question)
    # [1]
    lengths, total = np.array([length], np.int32), np.array([room], np.int32)
    sizes = sizes_for(lengths, room - length, width=length, block=None, limits=options.limits, last_fed=True)
    width = prompt_bucket(len(question))
    with model.on_mesh():
        lowered = lower(
            spec, model.config, dataclasses.replace(sizes, block=width), lengths, platform=model.platform,
            implementation=options.implementation, dtype=model.dtype, totals=total,
        )  # fmt: skip
        check_cache(spec, lowered.layout, len(question))
        prompt, decode = _phase_for(lowered.layout.prompt, keys[0].shape[2] + width), lowered.layout.decode
        layout = lowered_layout(model, spec, sizes, options)
        if placed is not None:
            prompt, decode, before = (_in_parallel(each, placed.how) for each in (prompt, decode, layout.prompt))
            layout = dataclasses.replace(layout, prompt=before)
        runs = layer_loop.possible_runs(model.config, model.params, prompt, decode)
        during = dataclasses.replace(lowered.layout, prompt=prompt, decode=decode, runs=runs)
        # [1, S]
        position = (np.arange(keys[0].shape[2]) if placed is None else placed.position)[None].astype(np.int32)
        marks = None if placed is None else tuple(np.array([each], np.int32) for each in placed[2:])
        # [1, width]
        ids = np.pad(question, (0, width - len(question)))[None]
        with compiling.announced(compiling.prompts_of(during, width)):
            logits, state = _last_block(
                model.params, list(keys), list(values), *model.place((position, marks)),
                *model.place((np.array([count], np.int32), ids, lengths, total)),
                *model.place((lowered.budgets.prompt, lowered.budgets.decode)), config=model.config, layout=during,
            )  # fmt: skip
    made = Made(model, spec, options, sizes)
    layout = dataclasses.replace(layout, decode=during.decode)
    spans = (Span(count, count, CHUNKS), Span(length, len(question)))
    resolved = np.stack([lengths, total], axis=1).astype(np.int32)
    known = np.concatenate([tokens, question])[None].astype(np.int32)
    return Context(logits, state, layout, known, 1, (spans,), made, resolved)


def _phase_for(prompt: Phase, slots: int) -> Phase:
    """Returns the groups of a prompt that is there but for its last block, with slots for all of it."""

    def of_group(group: Group) -> Group:
        unit = math.lcm(group.policy.page, group.selection.unit) * group.slot_parts
        most = -(-max(group.slots[0], slots) // unit) * unit
        return dataclasses.replace(
            group, slots=(most, *group.slots[1:]), attn_implementation="xla", step_implementation=None
        )

    return tuple(tuple(of_group(group) for group in layer) for layer in prompt)


def _in_parallel(phase: Phase, how: ParallelContexts) -> Phase:
    """Returns groups that attend to contexts which share positions.

    Raises:
      InputError: the policy rotates keys to their ranks.
    """
    groups = [group for layer in phase for group in layer]
    if reads := next((group.policy for group in groups if group.policy.params), None):
        raise InputError(f"contexts cannot share positions under {reads.name}, whose scores depend on ages.")
    if any(group.policy.positions != "original" for group in groups):
        raise InputError(
            'contexts cannot share positions under a policy that rotates keys to ranks (positions="cache").'
        )

    def of_group(group: Group) -> Group:
        made = dataclasses.replace(group, parallel=how, attn_implementation="xla", step_implementation=None)
        if not group.slot_axes:
            return made
        # The part of all contexts must be whole before it is raised to a power: XLA adds it up over devices.
        reason = f"a program of each of {group.slot_parts} devices: XLA divides the slots, as contexts share positions"
        return dataclasses.replace(made, by_xla=True, reasons=(reason,))

    return tuple(tuple(of_group(group) for group in layer) for layer in phase)


@program(static_argnames=("config", "layout"))
def _last_block(
    params: Params,
    keys: list[Array],
    values: list[Array],
    rotated_to: Array,
    marks: tuple[Array, Array, Array] | None,
    count: Array,
    tokens: Array,
    length: Array,
    total: Array,
    budget: GroupBudgets,
    decode_budget: GroupBudgets,
    *,
    config: DecoderConfig,
    layout: CacheLayout,
) -> tuple[Array, KVState]:
    """Feeds the last block of a prompt.

    Args:
      params: of the decoder.
      keys: of each layer, [1, K, S, D] by position, not rotated.
      values: of each layer, [1, K, S, D].
      rotated_to: [1, S] int32, the positions that keys are rotated to.
      marks: [1] int32 each, those of `PARALLEL_MARKS`; None = no contexts share positions.
      count: [1] int32, the tokens whose keys and values these are.
      tokens: [1, n] int32, the block.
      length: [1] int32, the tokens of the whole prompt.
      total: [1] int32, see `KVState`.
      budget: see `kvjax.generation.prefill.prefill_steps`.
      decode_budget: see there.
      config: the decoder.
      layout: of the cache, with slots for the whole prompt.

    Returns:
      The logits after the prompt, [1, V] float32, and the cache, in the arrays of the decoding phase.
    """
    compiling.traced()
    decoder = bind(config, params).looped(layout.runs)
    empty = empty_layers(layout.prompt, 1, config.num_kv_heads, config.head_dim, decoder.dtype)
    layers = []
    for index, (groups, layer) in enumerate(zip(layout.prompt, empty, strict=True)):
        key, value, kind = keys[index], values[index], config.kind(index)
        # [1, S]
        position = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
        position = jnp.where(position < count[:, None], position, EMPTY)
        turned = rotated(kind.rope, key, rotated_to, total)
        layers.append(Layer(
            _filled(own, group, turned if group.policy.positions == "original" else key, value, position, marks)
            for own, group in zip(layer, groups, strict=True)
        ))  # fmt: skip
    kv = KVState(tuple(layers), count, prompt=length, total=total, budget=budget)
    kv = arranged_state(kv, layout.runs)
    # [1, n]
    at = count[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    block = Block(jnp.where(at < length[:, None], at, -1), prompt=length, total=total, budget=budget)
    # [1, n, E]
    x, kv = decoder.hidden(tokens, kv, block, layout.prompt)
    # [1, E]
    last = jnp.take_along_axis(x, (length - count - 1)[:, None, None], axis=1)[:, 0]
    kv = kv.replace(layers=converted(kv, layout, config, params))
    return decoder.logits(last), kv.replace(budget=decode_budget)


def _filled(
    own: LayerKV, group: Group, key: Array, value: Array, position: Array, marks: tuple[Array, ...] | None
) -> LayerKV:
    """Fills empty slots with the keys and values [1, K, S, D] of positions [1, S]; for `marks` see `_last_block`."""
    if group.heads is not None:
        heads = np.asarray(group.heads)
        key, value = key[:, heads], value[:, heads]
    room = own.position.shape[2] - key.shape[2]
    key, value = (jnp.pad(each, ((0, 0), (0, 0), (0, room), (0, 0))) for each in (key, value))
    slots = jnp.pad(position, ((0, 0), (0, room)), constant_values=EMPTY)
    named = {} if marks is None else dict(zip(PARALLEL_MARKS, marks, strict=True))
    return own.replace(
        position=jnp.broadcast_to(slots[:, None], own.position.shape), stores=(exact_store(key, value),),
        marks={name: jnp.broadcast_to(each[:, None], own.position.shape[:2]) for name, each in named.items()},
    )  # fmt: skip
