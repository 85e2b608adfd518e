"""The interface of arrangements, for lowering, the step and reports: how the slots of a group of heads lie in arrays.

The layout of a storage says which arrangement it is; see `ARRANGEMENTS` and `Group.arrangement`. The base class holds
its slots in the storage's own form, in one store.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.typing import DTypeLike

from kvjax.cache.state import LayerKV, PerSlot, Store
from kvjax.parallel.host_memory import pad
from kvjax.selection.base import Selection
from kvjax.storage import store as held
from kvjax.storage.base import UNROTATED, Storage
from kvjax.storage.side import PROMPT, Sides

if TYPE_CHECKING:
    from kvjax.cache.groups import ArraySizes, Group
    from kvjax.cache.planning.head_groups import Branch
    from kvjax.cache.planning.limits import Sizes
    from kvjax.cache.spec import CacheSpec

Array = jax.Array


class Counts(NamedTuple):
    """The numbers that the slots of each store are computed from.

    Attributes:
      slots: the most slots that a head holds between steps.
      following: the most tokens that follow a prompt while the arrays are in use.
      array_sizes: what else arrays are sized for; None for single slots, and while a prompt is processed in blocks.
      compressed: whether a prompt may lose tokens when it ends.
      evicts: whether slots are freed while decoding.
      newest_stay: whether the tokens of the residual are never evicted while decoding.
    """

    slots: int
    following: int
    array_sizes: "ArraySizes | None"
    compressed: bool
    evicts: bool
    newest_stay: bool


class StepTokens(NamedTuple):
    """The state of a step after eviction, before its own tokens are in the layer.

    Attributes:
      layer: the slots before the step.
      key: [B, K, n, D] of the step's own tokens, as they are held.
      value: [B, K, n, D].
      position: [B, K, S + n] int32 of all slots and of the step's own tokens; -1 for what was evicted, unless the
        arrangement holds it (`Arrangement.holds_victims`).
      victim: [B, K, S' + n] bool, what is evicted, of the slots that are ranked; None = nothing is.
      per_slot: leaves [B, K, S' + n, ...], after the step was observed.
      newest: [B] int32 newest position of each row, -1 for a row without a token.
      group: the policy and the storage.
      sides: what keys and values share.
    """

    layer: LayerKV
    key: Array
    value: Array
    position: Array
    victim: Array | None
    per_slot: PerSlot
    newest: Array
    group: "Group"
    sides: Sides


class PromptSlots(NamedTuple):
    """The slots of a prompt that has ended, before they are moved into the arrays of the decoding phase.

    Attributes:
      layer: the slots.
      per_slot: of these.
      group: of the decoding phase.
      length: [B] int32 tokens of each prompt.
      sides: what keys and values share.
      in_place: whether the prompt was processed in blocks, into the same stores.
    """

    layer: LayerKV
    per_slot: PerSlot
    group: "Group"
    length: Array
    sides: Sides
    in_place: bool


class Arrangement:
    """Base class of arrangements, which have no state of their own.

    Attributes:
      sized_by_extent: whether the arrays depend on more than a number of slots; see `ArraySizes`.
      codes_readable: whether attention may read codes as they are held.
      holds_victims: whether what a policy evicts is held and read for ever, without statistics.
      in_order: whether slot i of a head holds its i-th token, since nothing is evicted while decoding. Every device has
        the exact tokens that wait until they are encoded, where slots are divided over devices.
      follows_windows: whether budgets follow the sliding windows of layers. If not, windows only hide tokens.
      joins_layers: whether the tokens of two layers are stored together after the prompt.
      without_prompt_side: how a user can do without what vectors share of a prompt, as the end of a sentence.
    """

    sized_by_extent: bool = True
    codes_readable: bool = False
    holds_victims: bool = False
    in_order: bool = False
    follows_windows: bool = True
    joins_layers: bool = False
    without_prompt_side: str = ""

    # Lowering

    def refuses(self, spec: "CacheSpec", branch: "Branch", sizes: "Sizes", layers: int) -> str | None:
        """Returns why a policy or a selection does not go with the arrangement, or None if it does.

        Args:
          spec: has the storage.
          branch: the policies and the selection of some heads.
          sizes: of the batch.
          layers: the number of layers of the model.
        """
        return None

    def of_layer(self, storage: Storage, branch: "Branch", layer: int, layers: int, sizes: "Sizes") -> Storage:
        """Returns how a layer is held, for the prompts and new tokens of a batch.

        Args:
          storage: of the layer.
          branch: the policies of some heads.
          layer: its number.
          layers: the number of layers of the model.
          sizes: of the batch.

        Raises:
          StorageError: the model does not have the layers that the storage needs.
        """
        return storage

    def stores(self, storage: Storage) -> tuple[Storage, ...]:
        """Returns how the slots of each store are held."""
        return (storage,)

    def slots(self, storage: Storage, counts: Counts) -> tuple[int, ...]:
        """Returns the number of slots of each store."""
        return (counts.slots,)

    def sized(self, storage: Storage, slots: tuple[int, ...]) -> Storage:
        """Returns how a layer is held whose stores have so many slots."""
        return storage

    def prompt_storage(self, storage: Storage, *, compressed: bool, in_blocks: bool) -> Storage:
        """Returns how slots are held until the prompt ends.

        Args:
          storage: of the decoding phase.
          compressed: whether the prompt may lose tokens when it ends.
          in_blocks: whether it is processed in blocks.
        """
        return storage

    def prompt_end(self, group: "Group") -> "Group":
        """Returns the group whose arrays a prompt in one shot ends in; `group` is that of the decoding phase."""
        return group

    def unranked_stores(self, selection: Selection) -> int:
        """Returns the number of stores, the first of all, whose slots have no statistics."""
        return 0

    def refuses_devices(self, group: "Group") -> str | None:
        """Returns why slots are not divided over devices, or None if they can be."""
        return f"storage {group.storage.label} has arrays that are not divided"

    def slots_over_devices(self, group: "Group", parts: int) -> tuple[int, ...]:
        """Returns the slots of each store on all of `parts` devices, each of which has as many."""
        # No page of a selection is on two devices.
        multiple = parts * group.selection.unit
        return tuple(-(-size // multiple) * multiple for size in group.slots)

    # Arrays

    def empty(
        self, group: "Group", shape: tuple[int, int], dim: int, dtype: DTypeLike
    ) -> tuple[tuple[Store, ...], dict[str, Array]]:
        """Returns the stores and the marks of a group of heads, all zeros.

        Args:
          group: of heads.
          shape: (B, K).
          dim: features of a head.
          dtype: of the model.
        """
        stores = tuple(
            held.empty(storage, (*shape, slots), dim, dtype)
            for storage, slots in zip(group.stores, group.slots, strict=True)
        )
        return stores, {}

    def decoded(
        self, storage: Storage, layer: LayerKV, number: int, side: str, dtype: DTypeLike, sides: Sides
    ) -> Array | None:
        """Decodes the keys or the values of a store, [B, K, S_i, D]; None = codecs decode its slots one by one.

        Args:
          storage: how they are held.
          layer: the slots.
          number: of the store.
          side: ``key`` or ``value``.
          dtype: of the result.
          sides: what vectors share.
        """
        return None

    def read(self, storage: Storage, layer: LayerKV, sides: Sides, lower: LayerKV | None) -> tuple[Array, Array, Array]:
        """Returns what a layer holds, [B, K, S, D] keys and values and [B, K, S] positions.

        Args:
          storage: how its slots are held.
          layer: the slots.
          sides: of a calibration.
          lower: of the upper layer of a pair, the layer before it.

        Raises:
          StorageError: it is held in another way.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a `read`")

    # The step

    def write(self, step: StepTokens) -> tuple[LayerKV, PerSlot]:
        """Writes a step's own tokens and encodes what is due.

        Returns:
          The layer with its positions and stores, and `per_slot` for the slots that are ranked.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a `write`")

    def convert(self, prompt: PromptSlots) -> tuple[LayerKV, PerSlot]:
        """Moves the slots of a prompt that has ended into the arrays of the decoding phase.

        Returns:
          The layer with its positions and stores, and `per_slot` for the slots that are ranked.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a `convert`")

    # Arrays of other sizes

    def same_format(self, before: "Group", after: "Group") -> bool:
        """Returns whether two groups of this arrangement hold a slot in the same form, whatever their sizes."""
        return True

    def refuses_resize(self, before: "Group", after: "Group") -> str | None:
        """Returns why slots cannot be moved to the arrays of `after`, which has room for more tokens; None if they can.

        Args:
          before: a group of heads.
          after: the same with arrays of other sizes.
        """
        return None

    def resized(self, layer: LayerKV, before: "Group", after: "Group") -> tuple[Store, ...]:
        """Returns the stores of a layer in larger arrays; a slot stays the same slot of its store.

        Args:
          layer: the slots, in the arrays of `before`.
          before: a group of heads.
          after: the same with arrays of other sizes.
        """
        return tuple(
            jax.tree.map(lambda leaf, slots=slots: pad(leaf, slots), store)
            for store, slots in zip(layer.stores, after.slots, strict=True)
        )

    def refuses_start(self, before: "Group", after: "Group") -> str | None:
        """Returns why `start` cannot take the slots of `before`, or None if it can.

        Args:
          before: a group of heads in another format.
          after: the same heads, of this arrangement.
        """
        label = after.storage.label
        if after.storage.sides_of(PROMPT):
            return f"storage {label} encodes nothing of so few tokens, and makes its scales when the prompt ends"
        exact = before.storage.exact and not before.storage.on_host and len(before.slots) == 1
        if after.storage.sides or after.storage.frame == UNROTATED or not exact or not before.selection.reads_all:
            return f"storage {label} encodes nothing of so few tokens"
        return None

    def start(self, slots: PromptSlots) -> tuple[LayerKV, PerSlot]:
        """Moves slots into this arrangement that were held in another format, because the text was too short for it.

        Args:
          slots: in the other format, which `refuses_start` accepts.

        Returns:
          See `convert`.
        """
        # As at the end of a prompt, whose tokens are exact until then.
        return self.convert(slots)

    # What neighbouring layers hold together

    def borrows(self, group: "Group") -> bool:
        """Returns whether a step of this layer also reads what the layer before it holds for both."""
        return False

    def borrow(self, lower: LayerKV, layer: LayerKV) -> LayerKV:
        """Returns a layer with what the layer before it holds for both."""
        return layer

    def release(self, after: LayerKV, before: LayerKV) -> LayerKV:
        """Returns a layer after a step without what it borrowed; `before` is the layer before it did."""
        return after

    def join_prompts(self, layer: LayerKV, following: LayerKV, group: "Group") -> tuple[LayerKV, LayerKV] | None:
        """Returns two layers whose prompts have ended, where they hold them together; otherwise None.

        Args:
          layer: in the arrays of `prompt_end`.
          following: the next layer.
          group: of the first one, of the decoding phase.
        """
        return None


def reads_some(selection: Selection) -> bool:
    """Returns whether a selection gathers slots; those that hide slots read all of them."""
    return not selection.reads_all and selection.budget is None


def merges(branch: Any) -> bool:
    """Returns whether a policy merges what it evicts, in the prompt or while decoding."""
    return any(policy.merge is not None for policy in (branch.prompt, branch.decode))
