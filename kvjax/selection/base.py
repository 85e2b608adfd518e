"""The base class of selections, which choose the slots that a decoding query reads.

A selection never moves, frees or changes a slot. `kvjax.cache` appends the new token, asks for the slots to read and
attends over these alone; statistics do not observe the other slots. Selections are frozen dataclasses: equal by value,
hashable and picklable, and `repr` evaluates to an equal object. Their arrays are the `index` of a layer's state.

For each query the live slots are the *new* token, slots that are *always* read, and *candidates*, of which some are
*chosen*. `Selection.most` counts chosen slots.

Prompts are read whole, unless `Selection.prompt` says which pages a block of queries reads. An index is then made in
three steps: `start` allocates sums, `watch` adds each block of the prompt to them, and `build` makes the index of the
slots that are left when the prompt has ended. A decoding step calls `write` or `entries` for its token, and then
`choose`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Policy
from kvjax.policies.budget import Budget
from kvjax.selection.oldest_and_newest import Ends
from kvjax.selection.query_blocks import QueryBlocks

if TYPE_CHECKING:
    from kvjax.kernels.problem import Problem
    from kvjax.storage.base import Storage

Array = jax.Array
Index = dict[str, Array]  # name -> [B, K, ...]
Columns = dict[str, Array]  # statistic name -> [B, K, S]


class Held(NamedTuple):
    """The slots of a prompt that has ended.

    Attributes:
      position: [B, K, S] int32 absolute token position, -1 = empty; ascending from slot 0 on, unless the index has an
        entry for each slot.
      key: [B, K, S, D] rotated, exact.
      prompt: [B] int32 tokens of each row's prompt.
      skew: [K, D, D] of the layer, see `kvjax.models.skew`; None = the identity.
      unrotate: [B, K, S, D] keys -> the same before rotation, float32.
      value: [B, K, S, D], exact; None unless the selection `sees_values`.
    """

    position: Array
    key: Array
    prompt: Array
    skew: Array | None
    unrotate: Callable[[Array], Array]
    value: Array | None = None


class SelectView(NamedTuple):
    """The arguments of a selection that chooses for the query heads of one group of KV heads of one layer.

    If slots are held as codes, the step's own tokens have no slot yet and follow after the slots.

    Attributes:
      position: [B, K, S] int32 absolute token position, -1 = empty; includes the step's own tokens.
      key: [B, K, S, D] as attention reads them: rotated and decoded; those of the step's own tokens are exact. None
        where keys are in host memory, which selections with `ranks_by_keys` refuse.
      newest: [B] int32 position of each row's newest token; -1 for a row without a token in this step.
      budget: [B] int32 slots per KV head; read only by selections that have a budget.
      prompt: [B] int32 tokens of each row's prompt.
      slot: [B, K] int32 the slot that holds the newest token, or will hold it after the step; undefined for a row
        without a token.
      scale: factor of the logits.
      layer: index of the layer, a [] int32 array where layers are traced.
      window: the number of newest positions that a query sees, including its own; None = all.
      first: [B] int32 position of the step's first token, -1 for a row without a token; None = `newest`, in decoding.
      skew: [K, D, D] of the layer, see `kvjax.models.skew`; None = the identity.
      soft_cap: c, where logits x become c · tanh(x / c); None = they stay as they are.
      from_devices: [C, B, K, m] int32, of slots on several devices, what each tells by `Selection.to_devices`;
        otherwise None.
      ends: of slots on several devices, those that `Selection.ends` counts, and what is known of the others; otherwise
        None.
    """

    position: Array
    key: Any
    newest: Array
    budget: Array
    prompt: Array
    slot: Array
    scale: float
    layer: int | Array
    window: int | None = None
    first: Array | None = None
    skew: Array | None = None
    soft_cap: float | None = None
    from_devices: Array | None = None
    ends: Ends | None = None

    @property
    def active(self) -> Array:
        """[B, 1, 1] bool: whether the row has a token in this step."""
        return (self.newest >= 0)[:, None, None]

    @property
    def live(self) -> Array:
        """[B, K, S] bool: whether a slot holds a token."""
        return self.position >= 0

    @property
    def visible(self) -> Array:
        """[B, K, S] bool: the live slots inside the window, in rows that have a token in this step."""
        seen = self.live & self.active
        return seen if self.window is None else seen & self.recent(self.window)

    @property
    def new(self) -> Array:
        """[B, K, S] bool: the slots of the step's own tokens."""
        first = self.newest if self.first is None else self.first
        return self.live & self.active & (self.position >= first[:, None, None])

    def recent(self, count: Array | int) -> Array:
        """Marks the `count` ([B] or a number) newest positions of each row, live or not, [B, K, S] bool."""
        return self.position > (self.newest - count)[:, None, None]


class Selection:
    """Chooses the slots that a decoding query reads; this class, from which frozen dataclasses inherit, reads all.

    Attributes:
      name: shown in reports; ignored by comparisons.
      budget: numbers of slots that are data in the state; None for selections whose widths are static.
      first_layer: layers before this one read everything; only `dense` depends on it.
      ahead: whether the query that chooses is a guess, made of the attention input of the layer before, so that slots
        can be fetched before the layer begins.
      in_prompt: whether it also applies to the blocks of a prompt; otherwise these read everything, or the pages that
        `prompt` says.
      prompt: how the queries of a prompt read pages; only of `Pages`.
      whole_text: whether it applies, through `attend_text`, to texts that are fed as one prompt, and to nothing else.
      needs: the statistics whose columns `settle` or `attend_text` reads.
      ranks_by_keys: whether ranking reads every key that is held, so that reading few slots saves nothing.
      rotated: whether `watch`, `build`, `write` and `choose` are given queries and keys that are rotated to their
        positions; False = as they are before rotation. Those of `SelectView` are rotated.
      by_turn: whether a further turn that is fed as a block reads what `ask` chooses; otherwise it reads everything.
      sees_values: whether the index depends on values, which `build` and `write_value` are then given.
      unit: the number of consecutive slots that are chosen together. If it is above 1, `choose_units` and
        `always_units` exist, so that a step looks at one mark of each unit.
      shared_by_heads: whether all KV heads of a layer read the same positions.
      watches: whether `build` needs the sums of `watch`.
      over_devices: whether slots may be divided over devices. A method is then given the slots of one device, and
        reduces over all by `kvjax.parallel.slot_reductions`; arrays of the index have an entry for each slot or each
        unit, or for none.
      per_slot: the names of arrays of the index that have an entry for each slot, [B, K, S, ...]. They move with the
        slots; an empty slot may have any entry.
      per_head: the names of arrays of the index, and of the sums of `watch`, whose third dimension is neither one of
        slots nor one of units; every device has all of them, if slots are divided.
    """

    name: str
    budget: Budget | None = None
    first_layer: int = 0
    ahead: bool = False
    in_prompt: bool = False
    prompt: QueryBlocks | None = None
    whole_text: bool = False
    needs: frozenset[Statistic] = frozenset()
    ranks_by_keys: bool = False
    rotated: bool = True
    by_turn: bool = False
    sees_values: bool = False
    shared_by_heads: bool = False
    watches: bool = False
    over_devices: bool = False
    per_head: frozenset[str] = frozenset()

    if TYPE_CHECKING:  # attributes of some selections, and properties of others

        @property
        def unit(self) -> int: ...
        @property
        def per_slot(self) -> frozenset[str]: ...
    else:
        unit, per_slot = 1, frozenset()

    @property
    def reads_all(self) -> bool:
        """Whether every query reads every slot."""
        return False

    @property
    def ends(self) -> tuple[int, int]:
        """The number of oldest slots and that of newest slots that are always read, besides the new token's."""
        return 0, 0

    @property
    def most(self) -> int | None:
        """The largest number of slots that are chosen for a query; None = it depends on the number of slots."""
        return None

    def width(self, capacity: int) -> int | None:
        """Returns the largest number of slots that a query reads of `capacity`: chosen, always read and new.

        None = slots are masked instead of gathered, because the number is not known before the step or not smaller
        than the capacity.

        A step must not mark more slots: those beyond this number, in the order of the slots, would not be read.
        """
        return None

    def dense(self, layer: int, window: int | None = None) -> bool:
        """Returns whether a layer reads everything: it is before `first_layer`, or its window is within `most`."""
        narrow = window is not None and self.most is not None and window <= self.most
        return self.reads_all or layer < self.first_layer or narrow

    def traced(self) -> Selection:
        """Returns the selection without the numbers of its budget, which are data in the state."""
        return self if self.budget is None else dataclasses.replace(self, budget=self.budget.traced())  # type: ignore[type-var]

    def bound(self, queries: int, following: int) -> Selection:
        """Returns the selection with the numbers of a model and a batch that its arrays depend on.

        Args:
          queries: query heads of a KV head.
          following: the most tokens that follow a prompt.
        """
        return self

    def check_slots(self, slots: int) -> None:
        """Checks a budget of `slots`.

        Raises:
          SelectionError: the selection needs more slots.
        """

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        """Returns why the selection cannot be combined with a policy and a storage, as a sentence; None if it can.

        If heads have different policies, it applies to those that keep every token; the others read every slot.
        """
        return None

    def start(self, shape: tuple[int, int], dim: int) -> Index:
        """Makes the sums of an empty prompt, shape = (B, K), for queries and keys of `dim` features."""
        return {}

    def watch(self, sums: Index, query: Array, key: Array, real: Array, skew: Array | None) -> Index:
        """Adds a block of the prompt to the sums.

        Args:
          sums: the result of `start` or of the block before.
          query: [B, K, G, n, D] rotated.
          key: [B, K, n, D] rotated, exact.
          real: [B, n] bool, False for padding.
          skew: see `Held`.
        """
        return sums

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        """Makes the index of empty slots, shape = (B, K, S), for keys of `dim` features; {} if there is none."""
        return {}

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        """Builds the index of all slots when the prompt has ended.

        Args:
          index: the result of `init`.
          sums: the result of `watch`; {} if the selection does not watch.
          held: the slots.
        """
        return index

    def to_devices(self, index: Index, query: Array, view: SelectView) -> Array:
        """Computes the arrays that devices exchange before `write`, with their numbers of empty slots.

        Called only where slots are divided over devices, of a selection that has a `write`.

        Args:
          index: the index before the step.
          query: [B, K, G, D] rotated.
          view: the slots of this device, without the step's own token; `slot` is undefined.

        Returns:
          [B, K, m] int32.
        """
        return jnp.zeros((*view.position.shape[:2], 0), jnp.int32)

    def ends_scores(self, index: Index, query: Array, view: SelectView) -> Array | None:
        """Computes the scores whose maximum and sum of exponentials over all candidates are in `SelectView.ends`.

        Called only where slots are divided over devices, of a selection that has `ends`.

        Args:
          index: the result of `write`.
          query: [B, K, G, D] rotated.
          view: the slots of this device.

        Returns:
          [B, K, G, S] float32, or None if `choose` does not compare scores so.
        """
        return None

    def write(self, index: Index, key: Array, slot: Array, active: Array) -> Index:
        """Adds a new token to the index, before slots are chosen; for arrays that are not in `per_slot`.

        Args:
          index: the index before the step.
          key: [B, K, 1, D] rotated, exact.
          slot: [B, K] int32 the slot to which the token is appended.
          active: [B] bool, False for a row without a token, whose index is unchanged.
        """
        return index

    def write_value(self, index: Index, value: Array, active: Array) -> Index:
        """Adds the value of a new token to the index, after `write`; only if the selection `sees_values`.

        Args:
          index: the result of `write`.
          value: [B, K, 1, D], exact.
          active: see `write`.
        """
        return index

    def entries(self, index: Index, key: Array, skew: Array | None) -> Index:
        """Makes the entries of new tokens in the arrays of `per_slot`, [B, K, n, ...] each.

        Args:
          index: the index before the step.
          key: [B, K, n, D] rotated, exact.
          skew: see `Held`.
        """
        batch, kv_heads, n = key.shape[:3]
        empty = self.init((batch, kv_heads, n), key.shape[3], key.dtype)
        return {name: empty[name] for name in self.per_slot}

    def ask(self, index: Index, query: Array, key: Array, real: Array, view: SelectView) -> Index:
        """Adds the tokens of a further turn to the index, before `choose` is called for all of them; see `by_turn`.

        Args:
          index: the index before the turn.
          query: [B, K, G, n, D].
          key: [B, K, n, D], exact.
          real: [B, n] bool, False for padding at the end. A row without a token leaves its index unchanged.
          view: the slots, of which `slot` has the turn's newest token.
        """
        return index

    def choose(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        """Chooses slots, or keeps an earlier choice.

        Args:
          index: the result of `write`.
          query: [B, K, G, D] rotated.
          view: the slots.

        Returns:
          [B, K, S] bool, the slots that are chosen, and the index.
        """
        return self.chosen(index, query, view), index

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        """Marks the slots that are chosen, [B, K, S] bool; none of them is always read, as the new one usually is.

        Args:
          index: the result of `write`.
          query: [B, K, G, D] rotated.
          view: the slots.
        """
        return jnp.zeros(view.position.shape, bool)

    def always(self, index: Index, view: SelectView) -> Array:
        """Marks the slots that are read without being chosen, [B, K, S] bool.

        The new token's is one of them, unless the selection ranks it with the others.
        """
        return view.visible

    def choose_units(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        """Chooses as `choose` does; returns the units, [B, K, U] bool, and the index."""
        raise NotImplementedError

    def always_units(self, units: int, view: SelectView) -> Array:
        """Marks the units that have slots that are always read, [B, K, units] bool."""
        raise NotImplementedError

    def slots_of(self, units: Array, index: Index, view: SelectView) -> Array:
        """Marks the slots that are chosen by units [B, K, U], [B, K, S] bool."""
        slots = jnp.repeat(units, self.unit, axis=2)[:, :, : view.position.shape[2]]
        missing = view.position.shape[2] - slots.shape[2]
        return jnp.pad(slots, ((0, 0), (0, 0), (0, missing))) & view.visible & ~self.always(index, view)

    def restore(self, index: Index, position: Array) -> Array | None:
        """Computes the keys of chosen slots, [B, K, W, D] float32 before rotation; None = they are read.

        Args:
          index: the result of `choose`.
          position: [B, K, W] int32 of the slots that are read, -1 = none.
        """
        return None

    def mix(self, index: Index, output: Array, view: SelectView) -> Array:
        """Changes the output of attention over the slots that a decoding query has read.

        Args:
          index: the result of `choose`.
          output: [B, K, G, D] in value's dtype.
          view: the slots that the step chose from.

        Returns:
          [B, K, G, D] in the same dtype.
        """
        return output

    def settle(self, index: Index, columns: Columns, view: SelectView) -> Index:
        """Updates the index after attention.

        Args:
          index: the index that the step chose with.
          columns: statistic name -> [B, K, S] float32 column sums of this step, for each of `needs`.
          view: the slots that the step chose from.
        """
        return index

    def attend_text(self, attend: Callable[[Problem], Any], problem: Problem, view: SelectView) -> Array:
        """Attends over a whole text; only for selections with `whole_text`.

        Args:
          attend: problem -> (`Attended`, columns).
          problem: the text; its statistics include `needs`.
          view: the slots of the text, of which position, newest and budget are read.

        Returns:
          [B, K, G, n, D] in value's dtype.
        """
        raise NotImplementedError
