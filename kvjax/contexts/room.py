"""The sizes of arrays for further tokens: room that stays, and room for the tokens of one block.

Arrays that are too small are exchanged for those of a prefill with a larger room, so that nothing is lost, and what
follows is what would have followed there.
"""

import contextlib
import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_prefix
from kvjax.cache.arrangements import arrangement_of
from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import positions_of
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Sizes, slots_bucket
from kvjax.cache.planning.lowering import lower
from kvjax.cache.resize import refuses
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.contexts.feed import resize
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.options import CacheOptions
from kvjax.models import layer_loop
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.allocation import Shared
from kvjax.policies.traits import appended_one_by_one, compresses_prompts, protected_slots, refuses_turns

STEP = 256  # slots; larger arrays have a multiple of it
BY_LENGTH = ("dynamic", "longrope")  # scalings of RoPE that depend on the tokens to come


def with_room(context: Context, fed: np.ndarray) -> Context:
    """Returns a context with room for more tokens.

    Args:
      context: the context.
      fed: [B] int, the number of tokens that each row will have more.

    Raises:
      InputError: arrays that cannot grow have too few slots.
    """
    # Where slots were rounded up, those of the larger sizes need not be as many more.
    while (missing := _missing(context, fed)) > 0:
        most = int((distributed.to_host(context.state.length) + fed).max())
        about = f"{most} tokens do not fit in the arrays of this context, which cannot grow"
        instead = "give `prefill` a larger room, max_new_tokens or limits"
        sizes = None if context.made is None else context.made.sizes
        if sizes is None:
            raise InputError(f"{about}: its model and its cache are not known; {instead}.")
        total = -(-(sizes.total + missing) // STEP) * STEP
        following = total - sizes.budget_prompt
        context = with_sizes(context, dataclasses.replace(sizes, following=following), about=about, instead=instead)
    return context


def spare(context: Context) -> int | None:
    """Returns the number of tokens that a row can have more in arrays as they are; None = any number."""
    missing = _missing_by_group(context, np.zeros(context.logits.shape[0], np.int32))
    return max(0, -max(missing)) if missing else None


def _missing(context: Context, fed: np.ndarray) -> int:
    """Returns for how many tokens more than now arrays are needed; 0 for none."""
    return max([0, *_missing_by_group(context, fed)])


def _missing_by_group(context: Context, fed: np.ndarray) -> list[int]:
    """Returns for how many tokens more arrays are needed, of each group whose arrays do not suffice for any number."""
    layout, made = context.layout, context.made
    length, prompt = distributed.to_host((context.state.length, context.state.prompt))
    sizes = None if made is None else made.sizes
    missing: list[int] = []
    for index, (early, late) in enumerate(zip(layout.prompt, layout.decode, strict=True)):
        # After a compressor, the number of live slots is known from the cache only.
        counted = any(before.evicts and not after.evicts for before, after in zip(early, late, strict=True))
        live = _live(context.state, index) if counted else [length] * len(late)
        for before, after, own in zip(early, late, live, strict=True):
            if after.array_sizes is not None:
                missing.append(int((length - prompt + fed).max()) - after.array_sizes.following)
            elif not after.evicts:
                slots = after.capacity
                if before.evicts and len(after.slots) > 1 and sizes is not None:
                    # The newest tokens have slots of both stores; see `SlotArrangement.slots`.
                    slots = after.slots[0] + min(after.storage.residual, sizes.following)
                missing.append(int((own + fed).max()) - slots)
            if sizes is None or made is None:
                continue
            if after.selection.bound(after.queries, 0) != after.selection.bound(after.queries, 1):
                missing.append(int((length - prompt + fed).max()) - sizes.following)
            # A text that is shorter than a budget is held whole, so arrays for it have too few slots, and no place for
            # what a longer one evicts.
            holds_victims = arrangement_of(made.spec.storage).holds_victims
            if after.evicts and (after.capacity >= sizes.total or holds_victims):
                missing.append(int((length + fed).max()) - sizes.total)
    return missing


def with_sizes(context: Context, sizes: Sizes, *, about: str, instead: str) -> Context:
    """Returns a context in the arrays of a prefill of larger sizes.

    Args:
      context: a context whose cache is known.
      sizes: that the prefill is lowered for.
      about: how an error begins.
      instead: how it ends: an alternative.

    Raises:
      InputError: its arrays cannot grow.
    """
    made, before = context.made, context.layout
    assert made is not None
    lowered = lowered_layout(made.model, made.spec, sizes, made.options)
    pairs = [
        [(old, _larger(old, new)) for old, new in zip(*groups, strict=True)]
        for groups in zip(before.decode, lowered.decode, strict=True)
    ]
    if reason := next((why for layer in pairs for pair in layer if (why := refuses(*pair))), None):
        raise InputError(f"{about}: {reason}; {instead}.")
    made = dataclasses.replace(made, sizes=sizes)
    decode = tuple(tuple(new for _, new in layer) for layer in pairs)
    prompt = tuple(
        tuple(dataclasses.replace(new, parallel=old.parallel) for old, new in zip(*groups, strict=True))
        for groups in zip(before.prompt, lowered.prompt, strict=True)
    )
    return in_arrays(context._replace(made=made), dataclasses.replace(lowered, prompt=prompt, decode=decode))


def in_arrays(context: Context, layout: CacheLayout) -> Context:
    """Returns a context in the arrays of another layout of the same cache."""
    before, state = context.layout.decode, context.state
    if layout.decode != before:
        with contextlib.nullcontext() if context.made is None else context.made.model.on_mesh():
            state = resize(state, before=before, after=layout.decode)
    return context._replace(state=state, layout=layout)


def _larger(old: Group, new: Group) -> Group:
    """Returns a new group with as many slots as it has had, which budgets or joined rows may have made more."""
    if old.parallel is not None:
        new = dataclasses.replace(new, parallel=old.parallel, step_implementation=None, attn_implementation="xla")
    if old.arrangement is not new.arrangement or new.array_sizes is not None or len(old.slots) != len(new.slots):
        return new
    return dataclasses.replace(new, slots=tuple(map(max, old.slots, new.slots)))


def lowered_layout(model: Model, spec: CacheSpec, sizes: Sizes, options: CacheOptions) -> CacheLayout:
    """Returns the layout of a cache of some sizes."""
    with model.on_mesh():
        layout = lower(
            spec, model.config, sizes, np.array([sizes.budget_prompt], np.int32),
            implementation=shared_prefix.implementation_for(model.params, options.implementation),
            platform=model.platform, dtype=model.dtype,
        ).layout  # fmt: skip
        runs = layer_loop.possible_runs(model.config, model.params, layout.prompt, layout.decode)
    return dataclasses.replace(layout, runs=runs)


def _live(state: KVState, layer: int) -> list[np.ndarray]:
    """Returns the most slots that a head of each row holds, [B] int32 for each group of a layer."""
    counts = [jnp.sum(position >= 0, axis=2, dtype=jnp.int32) for position in positions_of(state.layers, layer)]
    return [each.max(axis=1) for each in distributed.to_host(counts)]


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


def reason_for_steps(phase: Phase, *, turns: bool = False) -> str | None:
    """Returns why tokens that follow a prompt are fed in steps, one at a time, or None if a turn can be a block.

    Args:
      phase: the groups of heads of each layer.
      turns: whether they are a further turn: selections with `by_turn` then choose for the block.
    """
    for group in (each for layer in phase for each in layer):
        if reason := appended_one_by_one(group.policy):
            return reason
        if not (group.selection.reads_all or (turns and group.selection.by_turn)):
            return f"selection {group.selection.name} chooses slots for each query"
        if group.storage.new_tokens_separate and not group.evicts:
            return f"storage {group.storage.label} encodes tokens one by one"
        if group.arrangement.sized_by_extent:
            return f"storage {group.storage.label} holds tokens together"
    return None


def with_room_to_share(context: Context, fewest: int) -> Context:
    """Returns a context with slots for the shares of heads after a turn is compressed.

    Args:
      context: the context.
      fewest: the least number of tokens of a row's turn; 0 for none. Where a turn is shorter than the protected window
        of a prompt, more is shared.
    """
    layout = context.layout

    def of_group(before: Group, after: Group) -> Group:
        budget = before.policy.budget
        if after.shares is None or not isinstance(budget, Shared) or budget.layers:
            return after
        slots, left = after.shares
        heads = layout.kv_heads if after.heads is None else len(after.heads)
        more = budget.widest_after(min(protected_slots(before.policy, slots), fewest), slots, heads) - left
        if more <= 0:
            return after
        unit = _unit(after)
        return dataclasses.replace(
            after, slots=(after.slots[0] + -(-more // unit) * unit, *after.slots[1:]), shares=(slots, left + more)
        )  # fmt: skip

    decode = tuple(
        tuple(of_group(*each) for each in zip(*groups, strict=True))
        for groups in zip(layout.prompt, layout.decode, strict=True)
    )
    return in_arrays(context, dataclasses.replace(layout, decode=decode))


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
        elif after.evicts or after.needs or after.memory:
            reason = f"{layout.name} evicts while decoding"
        elif after.slot_axes:
            reason = "slots are divided over devices"
        reason = reason or refuses_turns(before.policy) or _refuses_compression(after)
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


def _refuses_compression(group: Group) -> str | None:
    """Returns why slots of a group cannot be evicted again, or None if they can."""
    if group.arrangement.sized_by_extent:
        return f"storage {group.storage.label} holds tokens together"
    if not group.selection.reads_all:
        return f"selection {group.selection.name} has an index of the slots of the first prompt"
    return None


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
        if group.arrangement.sized_by_extent or group.shares is not None:
            reason = "heads share their slots" if group.shares else f"storage {group.storage.label} has tiers"
            raise InputError(f"rebudget needs {needed} slots instead of {group.capacity}, and {reason}.")
        unit = _unit(group)
        return dataclasses.replace(group, slots=(-(-(needed - sum(group.slots[1:])) // unit) * unit, *group.slots[1:]))

    before = context.layout.decode
    after = tuple(
        tuple(of_group(*each) for each in zip(groups, own, strict=True))
        for groups, own in zip(before, budgets, strict=True)
    )
    return in_arrays(context, dataclasses.replace(context.layout, decode=after))
