"""InfiniGen: slots are chosen by a guess of the query, before the layer's own query is known (arXiv:2406.19707)."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import choice_argument, count_argument, warn_once
from kvjax.errors import SelectionError
from kvjax.numerics.group_reductions import mean_over_group
from kvjax.numerics.top_k import largest_counted
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Policy
from kvjax.selection.base import Held, Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named, rotated_once
from kvjax.selection.choose import grouped_logits, rank, view_ends

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array
Columns = Literal["sum", "query", "union"]
COLUMNS = ("sum", "query", "union")
ROUNDING = 1e-9  # of a product of two floats that is a whole number on paper


@dataclasses.dataclass(frozen=True)
class InfiniGen(Selection):
    """Chooses slots whose guessed logits are within `alpha` of the largest (InfiniGen, section 4.3).

    The guess of a query is the layer's own query projection, applied to the attention input of the layer before. It is
    multiplied with a few columns of the keys: those in which queries and keys of the prompt were largest, after a
    rotation of the head's columns (`kvjax.models.skew`) that makes few of them suffice. The number of slots follows the
    number of logits above the threshold, averaged over the KV heads of a layer, up to a cap.

    The index has the numbers of the columns, [B, K, c], and the keys in these columns, [B, K, S, c].

    Attributes:
      alpha: the distance of the threshold from the largest logit of a query head; at least 0.
      ratio: the share of the D columns, in (0, 1].
      cap: the largest number of slots that are chosen: a float in (0, 1] is a fraction of the slots that could be.
      first_layer: layers before this one read everything; at least 1.
      columns: which columns: ``sum``, of the largest sums of |q| and |k| (the paper); ``query``, of |q| alone (the
        authors' fast code); ``union``, the largest of |q| and the largest of |k|, up to twice as many (their accuracy
        code).
      sinks: the number of oldest slots that are always read.
      recent: the number of newest slots that are always read, in addition to the new token.

    Raises:
      SelectionError: an attribute that is not valid.
    """

    alpha: float
    ratio: float = 0.3
    cap: float | int = 0.2
    first_layer: int = 2
    columns: Columns = "sum"
    sinks: int = 0
    recent: int = 0
    # 1 slot and all slots, 1 and 1.0, are equal numbers.
    of_slots: bool = dataclasses.field(init=False, repr=False)
    name = "infinigen"
    ahead = True
    watches = True
    over_devices = True
    per_slot = frozenset({"partial"})
    per_head = frozenset({"columns", "query", "key"})

    def __post_init__(self) -> None:
        with named(self.name):
            object.__setattr__(self, "alpha", _positive("alpha", self.alpha))
            object.__setattr__(self, "ratio", _fraction("ratio", self.ratio))
            whole = isinstance(self.cap, numbers.Integral) and not isinstance(self.cap, bool)
            cap = count_argument("cap", self.cap, minimum=1) if whole else _fraction("cap", self.cap)
            if whole and cap == 1:
                warn_once("cap 1 is one slot per KV head: for all slots write 1.0.")
            object.__setattr__(self, "cap", cap)
            object.__setattr__(self, "of_slots", whole)
            choice_argument("columns", self.columns, COLUMNS)
            for field, minimum in (("first_layer", 1), ("sinks", 0), ("recent", 0)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))

    @property
    def ends(self) -> tuple[int, int]:
        return self.sinks, self.recent

    @property
    def most(self) -> int | None:
        return self.cap if isinstance(self.cap, int) else None

    def width(self, capacity: int) -> int | None:
        slots = int(self._caps(capacity)[-1]) + self.sinks + self.recent + 1
        return slots if slots < capacity else None

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        return merges(policy) or rotated_once(positions)

    def start(self, shape: tuple[int, int], dim: int) -> Index:
        return {name: jnp.zeros((*shape, dim), jnp.float32) for name in ("query", "key")}

    def watch(self, sums: Index, query: Array, key: Array, real: Array, skew: Array | None) -> Index:
        # [B, 1, n, 1]
        mask = real[:, None, :, None]
        # [B, K, G, n, D] and [B, K, n, D]
        query, key = jnp.abs(skewed(query, skew)), jnp.abs(skewed(key, skew))
        # [B, K, D] each
        return {
            "query": sums["query"] + jnp.sum(jnp.where(mask, mean_over_group(query), 0.0), axis=2),
            "key": sums["key"] + jnp.sum(jnp.where(mask, key, 0.0), axis=2),
        }

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        count = min(2 * self._columns(dim), dim) if self.columns == "union" else self._columns(dim)
        return {"columns": jnp.zeros((*shape[:2], count), jnp.int32), "partial": jnp.zeros((*shape, count), dtype)}

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        columns = self._choose_columns(sums["query"], sums["key"])
        index = index | {"columns": columns}
        return index | self.entries(index, held.key, held.skew)

    def entries(self, index: Index, key: Array, skew: Array | None) -> Index:
        # [B, K, n, c]
        return {"partial": _take(skewed(key, skew), index["columns"]).astype(key.dtype)}

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        candidate = view.visible & ~self.always(index, view)
        score = self.ends_scores(index, query, view)
        # [B, K, S]
        worth = jax.lax.stop_gradient(rank(score, candidate, normalise="gap", reduce="max", known=view.ends))
        caps = self._caps(slot_reductions.size_of_all(candidate.shape[2]))

        def count(numbers: Array) -> Array:
            # [B, K, 1] each
            among, above = numbers[..., :1], numbers[..., 1:]
            # [B, 1, 1]: the same for all KV heads
            mean = slot_reductions.sum_over_heads(above) // slot_reductions.number_of_heads(above.shape[1])
            return jnp.minimum(jnp.maximum(1, jnp.minimum(mean, jnp.asarray(caps)[among])), among)

        # [B, K, 2]
        numbers = jnp.stack([jnp.sum(each, axis=2, dtype=jnp.int32) for each in (candidate, worth > -self.alpha)], 2)
        position = jnp.where(candidate, view.position, -1)
        return largest_counted(worth, position, int(caps[-1]), numbers, count)

    def ends_scores(self, index: Index, query: Array, view: SelectView) -> Array:
        # [B, K, G, c]
        partial = _take(skewed(query, view.skew), index["columns"])
        # [B, K, G, S]
        return grouped_logits(partial, index["partial"], view.scale, view.soft_cap)

    def always(self, index: Index, view: SelectView) -> Array:
        return view.new | (view.visible & view_ends(view, *self.ends))

    def _columns(self, dim: int) -> int:
        """Returns the number of columns r of D."""
        return math.ceil(self.ratio * dim - ROUNDING)

    def _caps(self, most: int) -> np.ndarray:
        """Returns the largest number of slots that are chosen of 0 to `most` candidates, [most + 1] int32."""
        among = np.arange(most + 1)
        cap = self.cap if isinstance(self.cap, int) else np.floor(self.cap * among + ROUNDING)
        return np.minimum(np.maximum(1, cap), among).astype(np.int32)

    def _choose_columns(self, query: Array, key: Array) -> Array:
        """Chooses columns by the sums [B, K, D], ascending, [B, K, c] int32; D for a place that is not used."""
        dim = query.shape[-1]
        count = self._columns(dim)

        def largest(sums: Array) -> Array:
            # [B, K, r]; of equal ones the lower column
            return jax.lax.top_k(sums, count)[1]

        if self.columns != "union":
            return jnp.sort(largest(query + key if self.columns == "sum" else query), axis=-1)
        # [B, K, D]
        marks = jnp.any(jnp.arange(dim) == jnp.concatenate([largest(query), largest(key)], axis=-1)[..., None], axis=-2)
        return jnp.sort(jnp.where(marks, jnp.arange(dim), dim), axis=-1)[..., : min(2 * count, dim)]


def skewed(x: Array, skew: Array | None) -> Array:
    """Rotates the columns of queries [B, K, ..., D] or keys by the skew [K, D, D] of their KV head, in float32."""
    x = x.astype(jnp.float32)
    if skew is None:
        return x
    return jnp.einsum("bk...d,kde->bk...e", x, skew.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _take(x: Array, columns: Array) -> Array:
    """Takes columns [B, K, c] of [B, K, n, D]; 0 for a column D."""
    return jnp.take_along_axis(x, columns[:, :, None], axis=3, mode="fill", fill_value=0)


def _positive(name: str, value: float) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not value >= 0:  # NaN fails this too
        raise SelectionError(f"{name} must be a number of at least 0; got {value!r}.")
    return float(value)


def _fraction(name: str, value: float) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0 < value <= 1:
        raise SelectionError(f"{name} must be a number in (0, 1]; got {value!r}.")
    return float(value)


@factory
def infinigen(
    alpha: float = 4.0,
    *,
    ratio: float = 0.3,
    cap: float | int = 0.2,
    first_layer: int = 2,
    columns: Columns = "sum",
    sinks: int = 0,
    recent: int = 0,
) -> InfiniGen:
    """Chooses slots by a guess of the query from the layer before (InfiniGen, arXiv:2406.19707).

    Fewer columns suffice for a model that is skewed, see `kvjax.models.skew`.

    Args:
      alpha: see `InfiniGen`; the authors use 4 for OPT and 5 for LLaMA-2.
      ratio: see `InfiniGen`.
      cap: see `InfiniGen`.
      first_layer: see `InfiniGen`.
      columns: see `InfiniGen`.
      sinks: see `InfiniGen`.
      recent: see `InfiniGen`.

    Raises:
      SelectionError: an argument that is not valid.

    The authors' code has a cap on the final length, counts the new token among the slots that can be chosen, and
    averages the number of slots over a batch.
    """
    return InfiniGen(alpha, ratio, cap, first_layer, columns, sinks, recent)
