"""The sizes of arrays for further tokens: room that stays, and room for the tokens of one block."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import positions_of
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import slots_bucket
from kvjax.cache.resize import refuses
from kvjax.cache.state import KVState
from kvjax.contexts.feed import resize
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.generate import check_following
from kvjax.parallel import distributed
from kvjax.policies.traits import appended_one_by_one, compresses_prompts, refuses_turns

STEP = 256  # slots; larger arrays have a multiple of it
BY_LENGTH = ("dynamic", "longrope")  # scalings of RoPE that depend on the tokens to come


def with_room(context: Context, fed: np.ndarray) -> Context:
    """Returns a context with room for more tokens in the heads that evict nothing while decoding.

    Args:
      context: the context.
      fed: [B] int, the number of tokens that each row will have more.

    Raises:
      InputError: arrays that cannot grow have too few slots.
    """
    layout = context.layout
    check_following(context, int(fed.max()))
    length = distributed.to_host(context.state.length)
    changed: list[tuple[Group, ...]] = []
    for index, (early, late) in enumerate(zip(layout.prompt, layout.decode, strict=True)):
        # After a compressor, the number of live slots is known from the cache only.
        counted = any(before.evicts and not after.evicts for before, after in zip(early, late, strict=True))
        live = _live(context.state, index) if counted else [length] * len(late)
        changed.append(
            tuple(
                group if group.evicts else _with_room(group, int((own + fed).max()))
                for group, own in zip(late, live, strict=True)
            )
        )
    after = tuple(changed)
    if after == layout.decode:
        return context
    pairs = [pair for layers in zip(layout.decode, after, strict=True) for pair in zip(*layers, strict=True)]
    if reason := next((why for old, new in pairs if old != new and (why := refuses(old))), None):
        slots = min(old.capacity for old, new in pairs if old != new)
        raise InputError(
            f"{int((length + fed).max())} tokens do not fit in {slots} slots, and {reason}; give `prefill` a larger "
            "room, max_new_tokens or limits."
        )
    state = resize(context.state, before=layout.decode, after=after)
    return context._replace(state=state, layout=dataclasses.replace(layout, decode=after))


def _live(state: KVState, layer: int) -> list[np.ndarray]:
    """Returns the most slots that a head of each row holds, [B] int32 for each group of a layer."""
    counts = [jnp.sum(position >= 0, axis=2, dtype=jnp.int32) for position in positions_of(state.layers, layer)]
    return [each.max(axis=1) for each in distributed.to_host(counts)]


def _with_room(group: Group, needed: int) -> Group:
    """Returns a group whose arrays have at least `needed` slots."""
    if needed <= group.capacity:
        return group
    multiple = math.lcm(STEP, _unit(group))
    others = group.slots[1:]
    return dataclasses.replace(group, slots=(-(-(needed - sum(others)) // multiple) * multiple, *others))


def _unit(group: Group) -> int:
    """Returns the number of slots that an array of a group has a multiple of."""
    return math.lcm(group.policy.page, group.selection.unit) * group.slot_parts


def block_phase(phase: Phase, tokens: int) -> Phase:
    """Returns the groups in which a block of tokens is a prompt: with slots for them, if they are held with the others.

    Args:
      phase: while decoding.
      tokens: the number of tokens of a block.
    """

    def of_group(group: Group) -> Group:
        slots = group.slots
        if group.evicts and not group.storage.new_tokens_separate:
            unit = _unit(group)
            slots = (slots[0] + -(-tokens // unit) * unit, *slots[1:])
        return dataclasses.replace(
            group, slots=slots, decoding=False, step_implementation=None, attn_implementation="xla"
        )  # fmt: skip

    return tuple(tuple(of_group(group) for group in layer) for layer in phase)


def reason_for_steps(phase: Phase) -> str | None:
    """Returns why tokens that follow a prompt are fed in steps, one at a time, or None if a turn can be a block."""
    for group in (each for layer in phase for each in layer):
        if reason := appended_one_by_one(group.policy):
            return reason
        if not group.selection.reads_all:
            return f"selection {group.selection.name} chooses slots for each query"
        if group.storage.new_tokens_separate and not group.evicts:
            return f"storage {group.storage.label} encodes tokens one by one"
        if group.arrangement.sized_by_extent:
            return f"storage {group.storage.label} holds tokens together"
    return None


def compression_phase(layout: CacheLayout, tokens: int) -> Phase:
    """Returns the groups in which a turn is compressed with what is held: those of the prompt, with slots for both.

    Args:
      layout: of the context.
      tokens: the number of tokens of the turn.

    Raises:
      InputError: this cache cannot be compressed again.
    """

    def of_group(before: Group, after: Group) -> Group:
        reason = None
        if not compresses_prompts(before.policy):
            reason = f"{before.policy.name} does not compress prompts"
        elif before.shares is not None or after.evicts or after.needs or after.memory:
            reason = f"{layout.name} evicts while decoding, or shares slots among heads"
        elif after.slot_axes or before.replay is not None:
            reason = "slots are divided over devices" if after.slot_axes else "the prompt is replayed"
        reason = reason or refuses_turns(before.policy) or refuses(after)
        if reason is not None:
            raise InputError(f"turns='compress' cannot be used: {reason}; use turns='append'.")
        slots = after.slots
        if not after.storage.new_tokens_separate:
            slots = (slots[0] + tokens, *slots[1:])
        return dataclasses.replace(
            before, slots=slots, storage=after.storage, array_sizes=None, decode_group=None, selection=after.selection,
            prompt_index=None, attn_implementation="xla", step_implementation=None,
        )  # fmt: skip

    return tuple(
        tuple(of_group(*each) for each in zip(*groups, strict=True))
        for groups in zip(layout.prompt, layout.decode, strict=True)
    )


def with_budgets(context: Context, budgets: tuple[tuple[np.ndarray | None, ...], ...]) -> Context:
    """Returns a context whose arrays have room for other budgets while decoding, per layer and group [B] or None.

    Raises:
      InputError: arrays that cannot grow have too few slots.
    """

    def of_group(group: Group, rows: np.ndarray | None) -> Group:
        if rows is None or not group.evicts:
            return group
        own = 0 if group.storage.new_tokens_separate else 1
        needed = slots_bucket(int(rows.max()) + group.policy.every - 1 + own)
        if needed <= group.capacity:
            return group
        if reason := refuses(group) or ("heads share their slots" if group.shares is not None else None):
            raise InputError(f"rebudget needs {needed} slots instead of {group.capacity}, and {reason}.")
        unit = _unit(group)
        return dataclasses.replace(group, slots=(-(-(needed - sum(group.slots[1:])) // unit) * unit, *group.slots[1:]))

    before = context.layout.decode
    after = tuple(
        tuple(of_group(*each) for each in zip(groups, own, strict=True))
        for groups, own in zip(before, budgets, strict=True)
    )
    if after == before:
        return context
    state = resize(context.state, before=before, after=after)
    return context._replace(state=state, layout=dataclasses.replace(context.layout, decode=after))
