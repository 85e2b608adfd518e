"""Pairs of layers whose prompts are held together (see `Pairs`).

The slots of the prompt come first, oldest first, then those of the tokens that follow, which are exact. What two layers
share is in the arrays of the lower one, which a step of the upper one borrows.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements.base import Arrangement, Counts, PromptSlots, StepTokens, merges, reads_some
from kvjax.cache.arrangements.single_slots import read_stores
from kvjax.cache.slots import constrain, forget, free_slots_for, write
from kvjax.cache.state import LayerKV, PerSlot, Store
from kvjax.errors import StorageError
from kvjax.policies.traits import ranking_by_more_than_position
from kvjax.storage import dense
from kvjax.storage.base import Storage
from kvjax.storage.layouts import LOWER, UPPER, Pairs
from kvjax.storage.minicache import DIRECTION, Merged
from kvjax.storage.side import Sides
from kvjax.typing import PyTree

if TYPE_CHECKING:
    from kvjax.cache.groups import Group
    from kvjax.cache.planning.head_groups import Branch
    from kvjax.cache.planning.limits import Sizes
    from kvjax.cache.spec import CacheSpec

Array = jax.Array


class PairArrangement(Arrangement):
    """The arrangement of `kvjax.storage.layouts.Pairs`."""

    follows_windows = False
    joins_layers = True

    def refuses(self, spec: "CacheSpec", branch: "Branch", sizes: "Sizes", layers: int) -> str | None:
        if branch.heads is not None:
            return "two layers are stored together, but the policy treats heads or layers differently; use one for all."
        if merges(branch):
            return (
                "a merge changes tokens of one layer, but two layers are stored together; use a policy without a merge."
            )
        if branch.decode.budget is not None:
            return (
                "it evicts tokens of one layer while decoding, but two layers are stored together; use full, a prompt "
                "compressor that ranks by position, or a storage of single layers such as int4."
            )
        if named_policy := ranking_by_more_than_position(branch.prompt):
            return (
                f"two layers are stored together and must keep the same positions, but under the policy {named_policy} "
                "each keeps its own; use full, or a prompt compressor that ranks by position."
            )
        if (lower := _pair_of_other_budgets(spec.storage, branch, sizes, layers)) is not None:
            return (
                f"layers {lower} and {lower + 1} are stored together and must keep the same positions, but their "
                "budgets differ; use the same budget for both."
            )
        if reads_some(branch.selection):
            return (
                f"selection={branch.selection!r} reads single slots, but two layers are decoded as a whole; leave it "
                "out, or use a storage of slots such as int4."
            )
        if sizes.block is not None:
            return "two layers are merged at the end of a prompt that is run in one block; leave out prefill_block."
        return None

    def of_layer(self, storage: Storage, branch: "Branch", layer: int, layers: int, sizes: "Sizes") -> Storage:
        assert isinstance(storage.layout, Pairs)
        half = storage.layout.half(layer, layers)
        if half is None:
            return dense()
        key, value = (dataclasses.replace(codec, half=half) for codec in codecs_of(storage).values())
        return dataclasses.replace(storage, key=key, value=value, name=f"{storage.name} {half}")

    def stores(self, storage: Storage) -> tuple[Storage, ...]:
        return storage, dense()

    def slots(self, storage: Storage, counts: Counts) -> tuple[int, ...]:
        # A store has a slot at the least, also if no token follows.
        return counts.slots - counts.following, max(counts.following, 1)

    def sized(self, storage: Storage, slots: tuple[int, ...]) -> Storage:
        key, value = (dataclasses.replace(codec, count=codec.kept(slots[0])) for codec in codecs_of(storage).values())
        return dataclasses.replace(storage, key=key, value=value)

    def prompt_storage(self, storage: Storage, *, compressed: bool, in_blocks: bool) -> Storage:
        # A layer's prompt stays as it is until that of the other layer of its pair has ended.
        return dense()

    def prompt_end(self, group: "Group") -> "Group":
        return dataclasses.replace(group, storage=dense(), slots=(group.capacity,), array_sizes=None)

    def refuses_devices(self, group: "Group") -> str | None:
        return f"storage {group.storage.label} holds the tokens of two layers together"

    def read(self, storage: Storage, layer: LayerKV, sides: Sides, lower: LayerKV | None) -> tuple[Array, Array, Array]:
        if not (layer.is_exact or DIRECTION in layer.stores[0]["key"]):
            if lower is None:
                raise StorageError(
                    f"storage {storage.name}: this layer is the upper one of a pair; pass lower=, the layer before it."
                )
            layer = self.borrow(lower, layer)
        return read_stores(self.stores(storage), storage, layer, sides)

    def refuses_resize(self, before: "Group", after: "Group") -> str | None:
        if before.slots[0] == after.slots[0]:
            return None
        return f"storage {after.storage.label} holds the prompts of two layers in arrays of their own size"

    def write(self, step: StepTokens) -> tuple[LayerKV, PerSlot]:
        layer, key, value, position, _, per_slot, _, group, _ = step
        key, value, position, per_slot = constrain((key, value, position, per_slot))
        merged, size = group.slots
        mine, own = position[:, :, merged : -key.shape[2]], position[:, :, -key.shape[2] :]
        # [B, K, n]; out of bounds, where writes are dropped, for padding
        free = jnp.where(own >= 0, free_slots_for(mine, own), size)
        store = layer.stores[1]
        exact = {
            name: {"exact": write(store[name]["exact"], free, x.astype(store[name]["exact"].dtype))}
            for name, x in (("key", key), ("value", value))
        }
        position = jnp.concatenate([position[:, :, :merged], write(mine, free, own)], axis=2)
        at, count = merged + free, merged + size
        moved: PerSlot = jax.tree.map(lambda leaf: write(leaf[:, :, :count], at, leaf[:, :, count:]), per_slot)
        layer = layer.replace(position=position, stores=(layer.stores[0], exact))
        return layer, moved.replace(stats=forget(moved.stats, position))

    def convert(self, prompt: PromptSlots) -> tuple[LayerKV, PerSlot]:
        raise AssertionError("prompts of pairs end in the arrays of `prompt_end`")

    def borrows(self, group: "Group") -> bool:
        return half_of(group.storage) == UPPER

    def borrow(self, lower: LayerKV, layer: LayerKV) -> LayerKV:
        store = {name: {**lower.stores[0][name], **parts} for name, parts in layer.stores[0].items()}
        sides = {name: {**lower.sides[name], **parts} for name, parts in layer.sides.items()}
        return layer.replace(stores=(store, *layer.stores[1:]), sides=sides)

    def release(self, after: LayerKV, before: LayerKV) -> LayerKV:
        def own(made: Store | Sides, had: Store | Sides) -> dict[str, PyTree]:
            return {name: {part: made[name][part] for part in parts} for name, parts in had.items()}

        store, *others = after.stores
        return after.replace(stores=(own(store, before.stores[0]), *others), sides=own(after.sides, before.sides))

    def join_prompts(self, layer: LayerKV, following: LayerKV, group: "Group") -> tuple[LayerKV, LayerKV] | None:
        return _merged(layer, following, group) if half_of(group.storage) == LOWER else None


def codecs_of(storage: Storage) -> dict[str, Merged]:
    """Returns the codecs of keys and values of a storage of pairs."""
    found = {name: codec for name, codec in storage.codecs.items() if isinstance(codec, Merged)}
    assert len(found) == len(storage.codecs)
    return found


def half_of(storage: Storage) -> str | None:
    """Returns whether a storage of pairs is that of the ``lower`` or the ``upper`` layer; None if of neither."""
    return codecs_of(storage)["key"].half


def _pair_of_other_budgets(storage: Storage, branch: "Branch", sizes: "Sizes", layers: int) -> int | None:
    """Returns the lower layer of a pair whose prompts have different budgets; None if there is none."""
    budget, layout = branch.prompt.budget, storage.layout
    assert isinstance(layout, Pairs)
    if budget is None:
        return None
    pairs = [layer for layer in range(layers) if layout.half(layer, layers) == LOWER]
    for own in (budget.slots(length, layers) for length in (sizes.prompts[0], sizes.prompts[-1])):
        for lower in pairs:
            if own[lower] != own[lower + 1] or budget.first_layer == lower + 1:
                return lower
    return None


def _merged(lower: LayerKV, upper: LayerKV, group: "Group") -> tuple[LayerKV, LayerKV]:
    """Merges two dense layers that hold the same positions; `group` is that of the lower one."""
    size = group.slots[0]
    stores: tuple[dict[str, PyTree], ...] = ({}, {})
    sides: tuple[dict[str, PyTree], ...] = ({}, {})
    position = lower.position[:, :, :size]
    for name, codec in codecs_of(group.storage).items():
        one, other = (each.stores[0][name]["exact"][:, :, :size] for each in (lower, upper))
        halves = codec.encode_pair(one.astype(jnp.float32), other.astype(jnp.float32), position, one.dtype)
        for own, also, (parts, side) in zip(stores, sides, halves, strict=True):
            own[name] = parts
            if side:
                also[name] = side
    first, second = (
        layer.replace(stores=(store, _rest(layer.stores[0], size)), sides=side)
        for layer, store, side in zip((lower, upper), stores, sides, strict=True)
    )
    return first, second


def _rest(store: Store, size: int) -> Store:
    """Returns the slots of a dense store after the first `size`."""
    return {name: {"exact": parts["exact"][:, :, size:]} for name, parts in store.items()}
