"""Tiers: what a policy evicts is not dropped but encoded into a second store, for ever (see `Tiers`).

The slots of the low tier come first, then those of the high tier, which the policy ranks. Low slots have no statistics;
queries attend to both.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements.base import Arrangement, Counts, PromptSlots, StepTokens, merges
from kvjax.cache.arrangements.single_slots import read_stores
from kvjax.cache.slots import (
    after_reading,
    constrain,
    empty_stats,
    forget,
    free_slots,
    oldest_first,
    slots_of,
    take,
    write,
)
from kvjax.cache.state import EMPTY, FAR, LayerKV, PerSlot, Store
from kvjax.errors import PolicyError
from kvjax.parallel.host_memory import gather, pad
from kvjax.policies.base import Evict
from kvjax.policies.traits import is_split
from kvjax.selection.base import Selection
from kvjax.storage import store as held
from kvjax.storage.base import Storage
from kvjax.storage.layouts import Tiers, slots
from kvjax.storage.side import PROMPT, Sides

if TYPE_CHECKING:
    from kvjax.cache.groups import Group
    from kvjax.cache.planning.head_groups import Branch
    from kvjax.cache.planning.limits import Sizes
    from kvjax.cache.spec import CacheSpec

Array = jax.Array


class TierArrangement(Arrangement):
    """The arrangement of `kvjax.storage.layouts.Tiers`."""

    holds_victims = True
    follows_windows = False
    without_prompt_side = ", or use balance=False"

    def refuses(self, spec: "CacheSpec", branch: "Branch", sizes: "Sizes", layers: int) -> str | None:
        if merges(branch):
            return (
                "a merge folds evicted tokens into kept ones, but a low tier keeps evicted tokens; use a "
                "policy without a merge."
            )
        if not branch.selection.reads_all:
            return (
                f"selection={branch.selection!r} hides or chooses slots of one tier; leave it out, or use a storage of "
                "single slots such as int4."
            )
        if branch.prompt.budget is None and branch.decode.budget is None and not is_split(spec.policy):
            return "it evicts nothing that a low tier could hold; use a policy with a budget, such as h2o(0.2)."
        return None

    def of_layer(self, storage: Storage, branch: "Branch", layer: int, layers: int, sizes: "Sizes") -> Storage:
        layout = storage.layout
        assert isinstance(layout, Tiers)
        low = max_evicted(branch.prompt, branch.decode, sizes.prompts, sizes.following, layers)[layer]
        if not low:
            # Nothing is ever evicted.
            high: Storage = layout.high
            return high
        low = low if layout.low_capacity is None else min(low, layout.low_capacity)
        return dataclasses.replace(storage, layout=dataclasses.replace(layout, low_capacity=low))

    def stores(self, storage: Storage) -> tuple[Storage, ...]:
        assert isinstance(storage.layout, Tiers)
        return dataclasses.replace(storage, layout=slots, name=f"{storage.name} low"), storage.layout.high

    def slots(self, storage: Storage, counts: Counts) -> tuple[int, ...]:
        assert isinstance(storage.layout, Tiers) and storage.layout.low_capacity is not None, "see `of_layer`"
        return storage.layout.low_capacity, counts.slots

    def unranked_stores(self, selection: Selection) -> int:
        return 1

    def refuses_devices(self, group: "Group") -> str | None:
        return f"storage {group.storage.label} moves what is evicted to a second tier"

    def read(self, storage: Storage, layer: LayerKV, sides: Sides, lower: LayerKV | None) -> tuple[Array, Array, Array]:
        return read_stores(self.stores(storage), storage, layer, sides)

    def write(self, step: StepTokens) -> tuple[LayerKV, PerSlot]:
        return _write(step)

    def convert(self, prompt: PromptSlots) -> tuple[LayerKV, PerSlot]:
        if prompt.in_place:
            return _resize(prompt.layer, prompt.group, prompt.per_slot)
        return _convert(prompt.layer, prompt.group, prompt.per_slot, prompt.length, prompt.sides)

    def refuses_start(self, before: "Group", after: "Group") -> str | None:
        storage, layout = after.storage, after.storage.layout
        assert isinstance(layout, Tiers)
        if storage.sides_of(PROMPT):
            return super().refuses_start(before, after)
        alike = before.storage == layout.high and before.storage.exact
        return None if alike else f"storage {storage.label} holds fewer tokens in another form"

    def start(self, slots: PromptSlots) -> tuple[LayerKV, PerSlot]:
        return _with_low_tier(slots.layer, slots.group, slots.per_slot)


def _with_low_tier(layer: LayerKV, group: "Group", per_slot: PerSlot) -> tuple[LayerKV, PerSlot]:
    """Adds an empty low tier to slots of which none has been evicted."""
    shape = slots_of(layer.position)[:2]
    low = held.empty(group.stores[0], (*shape, group.slots[0]), layer.dim, layer.value.dtype)
    count = group.slots[1]
    high, per_slot = jax.tree.map(lambda leaf: pad(leaf, count), (layer.stores[0], per_slot))
    # [B, K, low]
    empty = jnp.full((*layer.position.shape[:2], group.slots[0]), EMPTY, jnp.int32)
    position = jnp.concatenate([empty, pad(layer.position, count, EMPTY)], axis=2)
    return layer.replace(position=position, stores=(low, high)), per_slot


def _write(step: StepTokens) -> tuple[LayerKV, PerSlot]:
    """Encodes victims into the low tier and writes a step's own tokens into the high tier."""
    layer, key, value, position, victim, per_slot, newest, group, sides = step
    key, value, position, per_slot = constrain((key, value, position, per_slot))
    size, count, n = group.slots[0], group.slots[1], key.shape[2]
    low, high = layer.stores
    low_at, ranked_at = position[:, :, :size], position[:, :, size:]
    high_at, own_at = ranked_at[:, :, :count], ranked_at[:, :, count:]
    page, before = group.policy.page, high_at
    if victim is not None:
        # A victim of each own token, if the budget is that of the step before and slots are freed one by one.
        maximum = n if group.evicts_one and group.policy.when == "step" and page == 1 else count + n
        index, due = _first(victim, ranked_at, maximum)
        # [B, K, most, D]
        keys, values = _victims(layer, key, value, index, due, group, sides)
        # [B, K, 1]: all tokens before the step are in the high tier, or were demoted
        seen = newest[:, None, None] + 1 - jnp.sum(own_at >= 0, axis=2, keepdims=True, dtype=jnp.int32)
        demoted = seen - jnp.sum(high_at >= 0, axis=2, keepdims=True, dtype=jnp.int32)
        turn = jnp.arange(maximum, dtype=jnp.int32)
        # The oldest entry is lost where the tier is full: of more victims than it has slots, all but the newest.
        due &= turn >= jnp.sum(due, axis=2, keepdims=True) - size
        target = jnp.where(due, (demoted + turn) % size, size)
        new = held.encode(group.stores[0], keys, values, value.dtype, sides)
        low = jax.tree.map(lambda old, made: write(old, target, made), low, new)
        low_at = write(low_at, target, jnp.take_along_axis(ranked_at, index, axis=2))
        high_at = jnp.where(victim[:, :, :count], EMPTY, high_at)
        own_at = jnp.where(victim[:, :, count:], EMPTY, own_at)
        # XLA would copy the high tier if it could write the step's tokens before it has read the victims.
        for x in (keys, values):
            own_at = after_reading(own_at, x[:, :, :1, 0].astype(jnp.float32))
    # Where pages are freed as a whole, a token goes where it would have gone before any was.
    free = free_slots(high_at if page == 1 else before, n, page)
    number = jnp.maximum(jnp.cumsum(own_at >= 0, axis=2) - 1, 0)
    target = jnp.where(own_at >= 0, jnp.take_along_axis(free, number, axis=2), count)
    new = held.encode(group.stores[1], key, value, value.dtype, sides)
    high = jax.tree.map(lambda old, made: write(old, target, made), high, new)
    high_at = write(high_at, target, own_at)
    moved = jax.tree.map(lambda leaf: write(leaf[:, :, :count], target, leaf[:, :, count:]), per_slot)
    layer = layer.replace(position=jnp.concatenate([low_at, high_at], axis=2), stores=(low, high))
    return layer, moved.replace(stats=forget(moved.stats, high_at))


def _first(victim: Array, position: Array, maximum: int) -> tuple[Array, Array]:
    """Returns the first `maximum` victims by position, slots [B, K, maximum] int32, and whether each is one."""
    if maximum == 1:
        slot = jnp.arange(victim.shape[2], dtype=jnp.int32)
        found = jnp.min(jnp.where(victim, slot, FAR), axis=2, keepdims=True)
        return jnp.minimum(found, victim.shape[2] - 1), found < FAR
    index = oldest_first(position, victim, maximum).astype(jnp.int32)
    return index, jnp.take_along_axis(victim, index, axis=2)


def _victims(
    layer: LayerKV, key: Array, value: Array, index: Array, due: Array, group: "Group", sides: Sides
) -> tuple[Array, Array]:
    """Returns keys and values [B, K, m, D] float32 of the high tier, as it decodes, and of a step's own tokens.

    Encoding reads float32: the numbers of a coded high tier are not rounded to the model's dtype in between.

    XLA's CPU backend would read the high tier once for each use of the result, and ignores optimization barriers. What
    a branch of a condition returns is computed once.

    Args:
      layer: the slots.
      key: [B, K, n, D] of the own tokens.
      value: [B, K, n, D].
      index: [B, K, m] int32, of the slots of the high tier followed by the own tokens.
      due: [B, K, m] bool, whether each is evicted.
      group: which has the storage.
      sides: what vectors share.
    """
    count, storage = group.slots[1], group.stores[1]

    def read(high: Store, index: Array, due: Array) -> tuple[Array, Array]:
        old = jnp.minimum(index, count - 1)
        picked: Store = jax.tree.map(lambda leaf: gather(leaf, old), high)
        keys, values = held.decode(storage, picked, layer.dim, jnp.float32, sides)
        return keys.astype(jnp.float32), values.astype(jnp.float32)

    def in_branch(high: Store, index: Array, due: Array) -> tuple[Array, Array]:
        zeros = jnp.zeros((*index.shape, layer.dim), jnp.float32)
        found: tuple[Array, Array] = jax.lax.cond(jnp.any(due), read, lambda *_: (zeros, zeros), high, index, due)
        return found

    decoded = jax.lax.platform_dependent(layer.stores[1], index, due, cpu=in_branch, default=read)
    new = jnp.maximum(index - count, 0)
    keys, values = (
        jnp.where((index < count)[..., None], one, gather(own, new).astype(jnp.float32))
        for one, own in zip(decoded, (key, value), strict=True)
    )
    return keys, values


def _convert(layer: LayerKV, after: "Group", per_slot: PerSlot, length: Array, sides: Sides) -> tuple[LayerKV, PerSlot]:
    """Splits the slots of a one-shot prompt into what stays and what its step has evicted.

    Args:
      layer: dense, token i in slot i; what was evicted has no position.
      after: the group of the decoding phase.
      per_slot: of the layer's slots.
      length: [B] int32 tokens of each prompt.
      sides: what vectors share.

    Returns:
      The layer with its positions and stores, and `per_slot` for the slots of the high tier.
    """
    size, count = after.slots
    exact, dtype = layer.stores[0], layer.value.dtype
    # [B, K, P]
    token = jnp.broadcast_to(jnp.arange(layer.position.shape[2], dtype=jnp.int32), layer.position.shape)
    evicted = (token < length[:, None, None]) & (layer.position < 0)
    total = jnp.sum(evicted, axis=2, keepdims=True, dtype=jnp.int32)
    # [B, K, L]: which victim each slot holds; of more than there are slots, the newest
    slot = jnp.arange(size, dtype=jnp.int32)
    victim = slot + (total - 1 - slot) // size * size
    order = oldest_first(token, evicted, token.shape[2])
    index = jnp.take_along_axis(order, jnp.clip(victim, 0, token.shape[2] - 1), axis=2)
    low_at = jnp.where(victim >= 0, index, EMPTY).astype(jnp.int32)
    key, value = exact["key"]["exact"], exact["value"]["exact"]
    low = held.encode(after.stores[0], gather(key, index), gather(value, index), dtype, sides)
    live = layer.position >= 0
    order = oldest_first(layer.position, live, count)
    high_at = take(jnp.where(live, layer.position, EMPTY), order, count, EMPTY)
    high = held.encode(after.stores[1], take(key, order, count), take(value, order, count), dtype, sides)
    moved = jax.tree.map(lambda leaf: take(leaf, order, count), per_slot)
    position = jnp.concatenate([low_at, high_at], axis=2)
    return layer.replace(position=position, stores=(low, high)), _with_fresh_stats(after, moved, high_at)


def _resize(layer: LayerKV, after: "Group", per_slot: PerSlot) -> tuple[LayerKV, PerSlot]:
    """Moves tiers into those of the decoding phase, whose low tier has the same size; see `_convert`."""
    size, count = after.slots
    low_at, high_at = layer.position[:, :, :size], layer.position[:, :, size:]
    live = high_at >= 0
    order = oldest_first(high_at, live, count)
    high = jax.tree.map(lambda leaf: take(leaf, order, count), layer.stores[1])
    high_at = take(jnp.where(live, high_at, EMPTY), order, count, EMPTY)
    moved = jax.tree.map(lambda leaf: take(leaf, order, count), per_slot)
    position = jnp.concatenate([low_at, high_at], axis=2)
    layer = layer.replace(position=position, stores=(layer.stores[0], high))
    return layer, _with_fresh_stats(after, moved, high_at)


def _with_fresh_stats(after: "Group", per_slot: PerSlot, position: Array) -> PerSlot:
    """Returns `per_slot` with the statistics of the decoding phase, 0 in empty slots."""
    per_slot = forget(per_slot, position)
    empty = empty_stats(after.needs, after.remembers, slots_of(position))
    return per_slot.replace(stats={name: per_slot.stats.get(name, new) for name, new in empty.items()})


@functools.lru_cache(maxsize=256)
def max_evicted(first: Evict, then: Evict, prompts: range, following: int, layers: int) -> tuple[int, ...]:
    """Returns the most slots of a head that are evicted in each layer.

    Args:
      first: the policy of the prompt.
      then: the policy that decodes.
      prompts: the lengths of prompts.
      following: the most tokens that follow.
      layers: the number of layers.
    """

    def left(policy: Evict, tokens: int, length: int) -> list[int]:
        """Returns the slots of each layer that stay of `tokens`, under a budget for prompts of `length` tokens."""
        budget = policy.budget
        if budget is None:
            return [tokens] * layers
        if budget.shared:
            # A head's share of its layer's slots may be any.
            return [1] * layers
        own = budget.slots(length + following if budget.of_text else length, layers)
        if policy.page > 1:
            # The newest page has one slot at the least.
            own = tuple((each // policy.page - 1) * policy.page + 1 for each in own)
        return [min(each, tokens) if layer >= budget.first_layer else tokens for layer, each in enumerate(own)]

    maximum = [0] * layers
    for length in prompts:
        total = length + following
        try:
            if then is first:
                stays = left(first, total, length)
            else:
                kept = left(first, length, length)
                own = left(then, total, length)
                if then.budget is not None and then.budget.beyond_prompt:
                    own = [one + other for one, other in zip(kept, own, strict=True)]
                stays = [min(one + following, other) for one, other in zip(kept, own, strict=True)]
        except PolicyError:
            # The budget does not allow such a prompt, and a batch that has one is refused.
            continue
        maximum = [max(each, total - other) for each, other in zip(maximum, stays, strict=True)]
    return tuple(maximum)
