"""The conversion of slots from one phase to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements.base import PromptSlots
from kvjax.cache.context_parallel import position_ranks
from kvjax.cache.groups import RANK, Group
from kvjax.cache.slots import oldest_first, slots_of, take
from kvjax.cache.state import EMPTY, LIVE, LayerKV, PerSlot, live_slots
from kvjax.numerics.rope import Rope
from kvjax.parallel import host_memory
from kvjax.selection.base import Held
from kvjax.storage.base import UNROTATED
from kvjax.storage.side import Sides

Array = jax.Array


class Prompt(NamedTuple):
    """The prompts of a layer, for `convert`.

    Attributes:
      length: [B] int32 tokens of each row's prompt.
      rope: the model's rotary embedding.
      frequencies: of the rows, see `Rope.frequencies`; None without a rotary embedding.
      skew: [K, D, D] of these KV heads, see `kvjax.models.skew`; None = the identity.
      sides: of a calibration, of these KV heads; None = the storage has none.
    """

    length: Array
    rope: Rope | None = None
    frequencies: Array | None = None
    skew: Array | None = None
    sides: Sides | None = None

    def unrotate(self, key: Array, position: Array) -> Array:
        """Returns keys [B, K, S, D] as they were before rotation to `position` [B, K, S], float32."""
        if self.rope is None or self.frequencies is None:
            return key.astype(jnp.float32)
        return self.rope.unrotate(key, position, self.frequencies)

    def rotate(self, key: Array, position: Array) -> Array:
        """Returns keys [B, K, S, D], which are not rotated, at their positions [B, K, S]."""
        if self.rope is None or self.frequencies is None:
            return key
        return self.rope.rotate(key, position, self.frequencies)


def convert(layer: LayerKV, before: Group, after: Group, prompt: Prompt) -> LayerKV:
    """Moves the live slots of the prompt phase, oldest first, into the arrays of the decoding phase.

    The live slots must fit, which lowering ensures. Keys and values that are exact are encoded where `after` has a
    codec; codes are moved unchanged.

    Args:
      layer: the slots at the end of the prompt.
      before: the group of the prompt phase.
      after: the group of the decoding phase.
      prompt: the prompts.

    Returns:
      The stores, statistics and index of `after`.
    """
    made = _converted(layer, before, after, prompt)
    made = made.replace(memory={each.name: layer.memory[each.name] for each in after.memory})
    marks = {name: mark for name, mark in made.marks.items() if name != LIVE}
    if not after.holds_ranks:
        return made.replace(marks=marks)
    ranks = position_ranks.of_slots(made.position)
    return made.replace(stats=made.stats | {RANK: ranks}, marks=marks | {LIVE: live_slots(made)})


def _converted(layer: LayerKV, before: Group, after: Group, prompt: Prompt) -> LayerKV:
    """Returns the slots without their ranks; see `convert`."""
    # A one-shot prompt is exact and on the device, whatever the storage.
    in_place = bool(before.slots) and before.storage.new_tokens_separate
    index = _index(layer, before, after, prompt)
    per_slot = PerSlot(layer.stats, {name: index.pop(name) for name in after.selection.per_slot})
    sides = {**(prompt.sides or {}), **layer.sides}
    made, own = after.arrangement.convert(PromptSlots(layer, per_slot, after, prompt.length, sides, in_place))
    return made.replace(stats=own.stats, index=own.index | index)


def _index(layer: LayerKV, before: Group, after: Group, prompt: Prompt) -> dict[str, Array]:
    """Builds the index of the selection of the decoding phase from exact keys.

    Arrays with an entry for each slot are of the layer's slots, others of the slots of `after`.
    """
    selection = after.selection
    if before.selection.per_slot:
        # It is kept during the prompt.
        return dict(layer.index)
    if before.slots and not before.storage.exact:
        # Lowering refuses selections that summarise exact keys.
        return {}
    # [B, K, S] and [B, K, S, D]: one layer of a pool in host memory is on the device at a time.
    position, key = layer.position, _exact(layer, "key")
    value = _exact(layer, "value") if selection.sees_values else None
    if after.storage.frame == UNROTATED:
        key = prompt.rotate(key, position)
    if not selection.per_slot:
        # [B, K, S] and [B, K, S, D], as they will be after the slots have moved
        order = oldest_first(position, position >= 0, after.capacity)
        position, key = take(position, order, after.capacity, EMPTY), take(key, order, after.capacity)
        value = None if value is None else take(value, order, after.capacity)
    index = selection.init(slots_of(position), layer.dim, key.dtype)
    if not index:
        return {}
    kept = Held(position, key, prompt.length, prompt.skew, lambda key: prompt.unrotate(key, position), value)
    if not selection.rotated and after.policy.positions != "cache":
        kept = kept._replace(key=kept.unrotate(key).astype(key.dtype))
    return selection.build(index, layer.index if before.prompt_index else {}, kept)


def _exact(layer: LayerKV, side: str) -> Array:
    """Returns the exact keys or values of all stores on the device, [B, K, S, D]."""
    parts = [host_memory.to_device(store[side]["exact"]) for store in layer.stores]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)
