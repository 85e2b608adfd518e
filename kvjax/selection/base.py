"""What a selection is: which of the slots that a cache holds does a decoding query read?

A selection never moves, frees or changes a slot. `kvjax.cache` appends the new token, asks for the slots to read,
attends over these alone, and observes: a slot that is not read is not seen by any statistic. Selections are frozen
dataclasses: equal by value, hashable, picklable, and `repr` evaluates to an equal object; their arrays are the `index`
of a layer's state.

For each query the live slots are the *new* token, slots that are *always* read, and *candidates*, of which some are
*chosen*. Counts and `Selection.most` are of chosen slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.policies.base import Policy
from kvjax.policies.budget import Budget
from kvjax.statistics import Statistic

if TYPE_CHECKING:
    from kvjax.kernels.problem import Problem
    from kvjax.storage.base import Storage

Array = jax.Array
Index = dict[str, Array]  # name -> [B, K, ...]
Columns = dict[str, Array]  # statistic name -> [B, K, S]


class SelectView(NamedTuple):
    """What a selection may look at when the query heads of one group of KV heads of one layer read.

    Where slots are held in a code, the step's own tokens are not among them yet and follow behind them.

    Attributes:
      position: [B, K, S] int32 absolute token position, -1 = empty; the step's own tokens included.
      key: [B, K, S, D] as attention sees them: rotated and decoded, those of the step's own tokens exact.
      newest: [B] int32 position of each row's newest token; -1 for a row without one in this step.
      budget: [B] int32 slots per KV head; read only by selections that have a budget.
      prompt: [B] int32 tokens of each row's prompt.
      slot: [B, K] int32 the slot that holds the newest token, or will hold it after the step; any number for a row
        without one.
      scale: factor of the logits.
      layer: index of the layer.
      window: the number of newest positions that a query sees, its own included; None = all.
      first: [B] int32 position of the step's first token, -1 for a row without one; None = `newest`, while decoding.
    """

    position: Array
    key: Array
    newest: Array
    budget: Array
    prompt: Array
    slot: Array
    scale: float
    layer: int
    window: int | None = None
    first: Array | None = None

    @property
    def active(self) -> Array:
        """[B, 1, 1] bool: whether the row has a token in this step."""
        return (self.newest >= 0)[:, None, None]

    @property
    def live(self) -> Array:
        """[B, K, S] bool."""
        return self.position >= 0

    @property
    def visible(self) -> Array:
        """[B, K, S] bool: live slots inside the window, of rows that have a token in this step."""
        seen = self.live & self.active
        return seen if self.window is None else seen & self.recent(self.window)

    @property
    def new(self) -> Array:
        """[B, K, S] bool: the slots of the step's own tokens."""
        first = self.newest if self.first is None else self.first
        return self.live & self.active & (self.position >= first[:, None, None])

    def recent(self, count: Array | int) -> Array:
        """[B, K, S] bool: the `count` ([B] or a number) newest positions of each row, live or not."""
        return self.position > (self.newest - count)[:, None, None]


class Selection:
    """Which slots a decoding query reads; a frozen dataclass inherits from this class.

    As it is, it reads everything.

    Attributes:
      name: shown in reports; not part of what two selections are compared by.
      budget: numbers of slots that are data in the state; None for selections whose widths are static.
      first_layer: layers before this one read everything; `dense` says so, the other methods do not look at it.
      in_prompt: whether it also applies to the blocks of a prompt; otherwise these read everything.
      whole_text: whether it applies to a text that goes in as one prompt, through `attend_text`, and to nothing else.
      needs: the statistics whose columns `settle` or `attend_text` reads.
      ranks_by_keys: whether ranking reads every key that is held, so that nothing is saved by reading few slots.
    """

    name: str
    budget: Budget | None = None
    first_layer: int = 0
    in_prompt: bool = False
    whole_text: bool = False
    needs: frozenset[Statistic] = frozenset()
    ranks_by_keys: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether every query reads every slot."""
        return False

    @property
    def most(self) -> int | None:
        """The largest number of slots that a query chooses; None = not known before the step."""
        return None

    def width(self, capacity: int) -> int | None:
        """The largest number of slots that a query reads, chosen, always read and new ones together.

        None where slots are hidden by a mask rather than gathered: the number is not known before the step, or is not
        smaller than the capacity.
        """
        return None

    def dense(self, layer: int, window: int | None = None) -> bool:
        """Whether a layer reads everything: one before `first_layer`, or whose window is within `most`."""
        narrow = window is not None and self.most is not None and window <= self.most
        return self.reads_all or layer < self.first_layer or narrow

    def traced(self) -> Selection:
        """The selection without the numbers of its budget, which are data in the state."""
        return self if self.budget is None else dataclasses.replace(self, budget=self.budget.traced())  # type: ignore[type-var]

    def check_slots(self, slots: int) -> None:
        """Refuses a budget that cannot work.

        Raises:
          SelectionError: with the number.
        """

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        """Why this selection does not compose with a policy and a storage, as a sentence; None where it does.

        Where heads are split, it applies to those that keep every token; the others read all that they hold.
        """
        return None

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        """The index of empty slots, shape = (B, K, S), keys of `dim` features; {} where nothing is kept."""
        return {}

    def build(self, index: Index, position: Array, key: Array) -> Index:
        """The index when the prompt has ended, from all slots that are held.

        Args:
          index: as `init` makes it.
          position: [B, K, S] int32, -1 = empty.
          key: [B, K, S, D] rotated, from before they were coded.
        """
        return index

    def write(self, index: Index, key: Array, slot: Array, active: Array) -> Index:
        """The index with a new token, which is written before the query chooses.

        Args:
          index: as it was.
          key: [B, K, 1, D] rotated, exact.
          slot: [B, K] int32 the slot that the token is appended to.
          active: [B] bool, False for a row without a token: its index is unchanged.
        """
        return index

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        """The slots that are chosen, [B, K, S] bool: none of them new, or read always.

        Args:
          index: the selection's, the new token written.
          query: [B, K, G, D] rotated.
          view: the slots.
        """
        return jnp.zeros(view.position.shape, bool)

    def always(self, index: Index, view: SelectView) -> Array:
        """The slots that are read without being chosen, the new token's among them, [B, K, S] bool."""
        return view.visible

    def read(self, index: Index, query: Array, view: SelectView) -> Array:
        """The slots that are read, [B, K, S] bool."""
        return self.chosen(index, query, view) | self.always(index, view)

    def settle(self, index: Index, columns: Columns, view: SelectView) -> Index:
        """The index after a step was observed.

        Args:
          index: as of the step.
          columns: statistic name -> [B, K, S] float32, this step's column sums, for each of `needs`.
          view: as of the step.
        """
        return index

    def attend_text(self, attend: Callable[[Problem], Any], problem: Problem, view: SelectView) -> Array:
        """Attention over a whole text; only of a selection with `whole_text`.

        Args:
          attend: problem -> (`Attended`, columns).
          problem: the text, with `needs` among its statistics.
          view: of the text's slots; reads position, newest and budget.

        Returns:
          [B, K, G, n, D] in value's dtype.
        """
        raise NotImplementedError
