"""LaCache: thins the text unit by unit, with different offsets in different layers (arXiv:2507.14204)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.round_memory import RoundMemory
from kvjax.policies.row_memory import RowMemory
from kvjax.policies.slot_order import FirstSlots, in_slot_order, slot_ranks

Array = jax.Array


class Rungs(NamedTuple):
    """The units of a ladder.

    Attributes:
      unit: u, the number of slots of a unit.
      kept: c, the number of slots of a unit that stay.
      layers: L, the number of layers.
    """

    unit: int
    kept: int
    layers: int


def rungs(span: int, overlap: int, layers: int) -> Rungs:
    """Returns the units of a ladder over `layers` layers.

    Raises:
      PolicyError: no slot of a unit would be evicted.
    """
    step = span - overlap
    unit = 1 - (span - layers) // step  # 1 + ⌈(layers - span) / step⌉
    kept = min(-(-span // step), unit)
    if unit <= kept:
        raise PolicyError(
            f"span={span} with overlap={overlap} and {layers} layers thins nothing: a unit has {unit} slots, and "
            f"keeps {kept} of them; give a smaller span."
        )
    return Rungs(unit, kept, layers)


@dataclasses.dataclass(frozen=True)
class Cursor(RoundMemory):
    """Remembers the number of slots after the sinks that the current pass has thinned, [B, K] int32.

    Attributes: see `Ladder`.
    """

    span: int
    overlap: int
    sinks: int
    layers: int | None
    per_slot = False

    def after(self, stats: Mapping[str, Array], view: View, victim: Array) -> Array:
        number = jnp.sum(victim, axis=2, keepdims=True, dtype=jnp.int32)
        return self.thin(stats, view, number)[1][:, :, 0] - self.sinks

    def thin(self, stats: Mapping[str, Array], view: View, number: Array) -> tuple[Array, Array]:
        """Thins each head until `number` slots are evicted.

        Args:
          stats: see `RoundMemory.after`.
          view: the slots.
          number: [B, K, 1] int32.

        Returns:
          The number of slots that are evicted before each slot, [B, K, S] int32; slots that are not among the `number`
          follow, oldest first. The cursor afterwards, the number of slots before the next unit, [B, K, 1] int32.
        """
        unit, kept, layers = rungs(self.span, self.overlap, view.num_layers if self.layers is None else self.layers)
        size, removed = view.position.shape[2], unit - kept
        # []: the index in each unit of the first slot that stays
        first = jnp.asarray(view.layer, jnp.int32) % (removed + 1)
        live = jnp.sum(view.live, axis=2, keepdims=True, dtype=jnp.int32)

        class State(NamedTuple):
            turn: Array  # [B, K, S] int32, in the order of positions: slots evicted before this one; -1 = not evicted
            evicted: Array  # [B, K, 1] int32
            cursor: Array  # [B, K, 1] int32
            stuck: Array  # [B, K, 1] bool: there is no whole unit after the sinks

        def waiting(state: State) -> Array:
            return (state.evicted < number) & ~state.stuck

        def turn_through(state: State) -> State:
            """Thins the units after the cursor, until too few slots follow."""
            there = (state.turn < 0) & (jnp.arange(size) < live)
            held = live - state.evicted
            begin = jnp.where(held - state.cursor < unit + layers, self.sinks, state.cursor)
            units = jnp.maximum((held - begin - layers) // unit, 0)
            # [B, K, S]: slots from the cursor on are numbered from 0
            place = jnp.cumsum(there, axis=2, dtype=jnp.int32) - 1 - begin
            offset = place % unit
            thinned = there & (place >= 0) & (place < units * unit) & ((offset < first) | (offset >= first + kept))
            turn = state.evicted + jnp.cumsum(thinned, axis=2, dtype=jnp.int32) - 1
            own = jnp.minimum(jnp.sum(thinned, axis=2, keepdims=True, dtype=jnp.int32), number - state.evicted)
            # At most `number` slots are marked.
            marked = thinned & (turn < number)
            made = State(
                jnp.where(marked, turn, state.turn), state.evicted + own, begin + kept * (own // removed), units == 0
            )
            return jax.tree.map(functools.partial(jnp.where, waiting(state)), made, state)

        start = State(
            jnp.full(view.position.shape, -1, jnp.int32), jnp.zeros_like(number),
            self.before(stats, view)[:, :, None] + self.sinks, jnp.zeros(number.shape, bool),
        )  # fmt: skip
        state = jax.lax.while_loop(lambda state: jnp.any(waiting(state)), turn_through, start)
        order = in_slot_order(view.position)
        ranks = slot_ranks(view.position, order)
        turn = jnp.take_along_axis(state.turn, ranks, axis=2)
        return jnp.where(turn < 0, size + ranks, turn), state.cursor


@dataclasses.dataclass(frozen=True)
class Ladder(Importance):
    """Ranks slots by the order in which a ladder evicts them (LaCache, arXiv:2507.14204, section 3).

    With L layers, a unit has u = 1 + ⌈(L - span) / (span - overlap)⌉ live slots, in the order of positions. A layer
    keeps c = min(⌈span / (span - overlap)⌉, u) of them, beginning at offset (layer mod (u - c + 1)).

    Units are thinned one after another, from a cursor on: each loses its other slots, oldest first, until the head is
    within its budget. After a whole unit, the cursor moves forward by c. If fewer than u + L slots follow the cursor,
    it returns to the sinks before the next unit. If fewer follow even the sinks, the oldest slots after the sinks are
    evicted. A slot that a scope protects is skipped.

    Attributes:
      span: the number of layers that keep a slot.
      overlap: the number of layers that keep a slot and also its neighbour, less than `span`.
      sinks: the number of first slots that are never thinned.
      layers: L; None = the layers of the model.
    """

    span: int
    overlap: int = 0
    sinks: int = 4
    layers: int | None = None
    needs = frozenset()
    amount = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", count_argument("span", self.span, minimum=1))
        object.__setattr__(self, "overlap", count_argument("overlap", self.overlap))
        object.__setattr__(self, "sinks", count_argument("sinks", self.sinks))
        if self.overlap >= self.span:
            raise PolicyError(f"overlap={self.overlap} is not less than span={self.span}; give a smaller overlap.")
        if self.layers is not None:
            object.__setattr__(self, "layers", count_argument("layers", self.layers, minimum=1))
            rungs(self.span, self.overlap, self.layers)

    @property
    def _cursor(self) -> Cursor:
        return Cursor(self.span, self.overlap, self.sinks, self.layers)

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (self._cursor,)

    def score(self, stats: Stats, view: View) -> Array:
        live = jnp.sum(view.live, axis=2, keepdims=True, dtype=jnp.int32)
        turn, _ = self._cursor.thin(stats, view, jnp.maximum(live - view.budget[:, None, None], 0))
        return turn.astype(jnp.float32)


@factory
def ladder(
    budget: BudgetLike,
    *,
    span: int,
    overlap: int = 0,
    sinks: int = 4,
    every: int = 64,
    layers: int | None = None,
    positions: str = "cache",
) -> Evict:
    """Thins the text unit by unit, with a different offset in each layer (LaCache, arXiv:2507.14204).

    Each part of the text is kept by some of the layers, and older parts are thinned more often than newer ones.
    Attention is not used. See `Ladder` for the definition of a unit, and for the slots that it keeps.

    Args:
      budget: see `evict`; a budget of fewer than sinks + u + L slots has no room for a unit.
      span: the number of layers that keep a slot.
      overlap: the number of layers that keep a slot and also its neighbour, less than `span`.
      sinks: the number of first slots that are never evicted.
      every: see `evict`. Give a multiple of u - c: an unfinished unit begins again at the next eviction.
      layers: the number of layers of a ladder, L; None = all layers of the model.
      positions: see `evict`.

    The authors evict whole units, rounding their number up, and use longer units in later passes over the text; here
    units have the same length in every pass.
    """
    importance = Ladder(span, overlap, sinks, layers)
    return evict(
        importance=importance, scope=FirstSlots(sinks), budget=budget, positions=positions, every=every, name="ladder"
    )
