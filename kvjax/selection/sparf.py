"""SparF: ranks slots by a few channels of their keys, and reads the mean value in place of the others.

The selection is SparQ attention (arXiv:2312.04985), as InstInfer runs it inside of storage devices (arXiv:2409.04992).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.numerics.soft_cap import soft_capped
from kvjax.numerics.top_k import largest
from kvjax.policies.base import Policy
from kvjax.policies.traits import evicting_while_decoding
from kvjax.selection.base import Held, Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named
from kvjax.selection.choose import best, grouped_logits, softmax

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SparF(Selection):
    """Reads the slots of the largest approximate probabilities, and the mean value for all others (SparQ, Algorithm 1).

    The r channels of a KV head are those of the largest Σ|q| over its query heads, the lower of equal ones. With the
    query q_r and the keys k_r of these channels alone, the approximate probabilities of a query head are

        p = softmax(scale · q_r·k_r / √(|q_r|₁ / |q|₁))

    over all live slots, the new token's among them. The query heads of a KV head read the k slots of the largest Σp.
    Their output is α · (attention over these slots) + (1 - α) · (the mean of the values of all live slots), where α is
    the sum of the head's p over the slots that are read. The new token is ranked like any other, and may go unread.

    Layers with a sliding window read everything: their mean would change with each value that leaves the window.

    The index has the sum of all values, [B, K, D], and their number, [B, K], both float32, and α of the newest step,
    [B, K, G] float32.

    Attributes:
      r: the number of channels; all of them if a head has no more.
      k: the number of slots that are read.
      first_layer: layers before this one read everything.
      queries: query heads of a KV head; set by `bound`.

    Raises:
      SelectionError: an attribute that is too small.
    """

    r: int
    k: int
    first_layer: int = 0
    queries: int = 1
    name = "sparf"
    ranks_by_keys = True
    sees_values = True
    per_head = frozenset({"value_sum", "share"})

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (("r", 1), ("k", 1), ("first_layer", 0), ("queries", 1)):
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))

    @property
    def most(self) -> int:
        return self.k

    def width(self, capacity: int) -> int | None:
        # One more than is read: where slots are held in codes, the new token is in another array, and may go unread.
        return self.k + 1 if self.k + 1 < capacity else None

    def dense(self, layer: int, window: int | None = None) -> bool:
        return window is not None or super().dense(layer)

    def bound(self, queries: int, following: int) -> SparF:
        return dataclasses.replace(self, queries=queries)

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        if reason := merges(policy):
            return reason
        # No page has 0 slots: any eviction is named.
        name = evicting_while_decoding(policy, page=0)
        return name and (
            f"its output has the mean of all live values, whose sum is updated with each token, and the policy {name} "
            "evicts while decoding, which would have to read what it evicts; use full(), or a prompt compressor such "
            "as snapkv."
        )

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {
            "value_sum": jnp.zeros((*shape[:2], dim), jnp.float32),
            "number": jnp.zeros(shape[:2], jnp.float32),
            "share": jnp.ones((*shape[:2], self.queries), jnp.float32),
        }

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        assert held.value is not None
        # [B, K, S]
        live = held.position >= 0
        value_sum = jnp.sum(jnp.where(live[..., None], held.value.astype(jnp.float32), 0.0), axis=2)
        return index | {"value_sum": value_sum, "number": jnp.sum(live, axis=2, dtype=jnp.float32)}

    def write_value(self, index: Index, value: Array, active: Array) -> Index:
        # [B, 1, 1]
        real = active[:, None, None]
        added = jnp.where(real, value[:, :, 0].astype(jnp.float32), 0.0)
        number = index["number"] + active.astype(jnp.float32)[:, None]
        return index | {"value_sum": index["value_sum"] + added, "number": number}

    def choose(self, index: Index, query: Array, view: SelectView) -> tuple[Array, Index]:
        # [B, K, G, S]
        probability = self.approximate(query, view)
        # [B, K, S]; the mean over query heads ranks as their sum
        worth = jax.lax.stop_gradient(jnp.mean(probability, axis=2))
        chosen = best(worth, view.visible, view.position, self.k)
        # [B, K, G]
        share = jnp.sum(jnp.where(chosen[:, :, None], probability, 0.0), axis=3)
        # A row without a token in this step is unchanged.
        return chosen, index | {"share": jnp.where(view.active, share, index["share"])}

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        return self.choose(index, query, view)[0]

    def always(self, index: Index, view: SelectView) -> Array:
        return jnp.zeros(view.position.shape, bool)

    def mix(self, index: Index, output: Array, view: SelectView) -> Array:
        # [B, K, 1, D]
        mean = (index["value_sum"] / jnp.maximum(index["number"], 1.0)[..., None])[:, :, None]
        # [B, K, G, 1]
        share = index["share"][..., None]
        mixed = (share * output.astype(jnp.float32) + (1.0 - share) * mean).astype(output.dtype)
        return jnp.where(view.active[..., None], mixed, output)

    def approximate(self, query: Array, view: SelectView) -> Array:
        """Computes the approximate probabilities of all slots, [B, K, G, S] float32.

        Args:
          query: [B, K, G, D] rotated.
          view: the slots.
        """
        # [B, K, 1, D]
        columns = self.columns(query)[:, :, None]
        few = jnp.where(columns, query, 0)
        # [B, K, G, 1] each
        norm, norm_of_few = (jnp.sum(jnp.abs(x.astype(jnp.float32)), axis=3, keepdims=True) for x in (query, few))
        known = norm_of_few > 0
        sharper = jnp.where(known, jnp.sqrt(norm / jnp.where(known, norm_of_few, 1.0)), 1.0)
        # [B, K, G, S]
        logits = soft_capped(grouped_logits(few, view.key, view.scale) * sharper, view.soft_cap)
        return softmax(logits, view.visible[:, :, None])

    def columns(self, query: Array) -> Array:
        """Marks the channels by which the slots of each KV head are ranked, [B, K, D] bool, for query [B, K, G, D]."""
        size = jnp.sum(jnp.abs(jax.lax.stop_gradient(query).astype(jnp.float32)), axis=2)
        # `largest` breaks ties by the larger number, and the definition by the lower channel: numbers fall.
        number = jnp.arange(size.shape[2], dtype=jnp.int32)[::-1]
        return largest(size, jnp.broadcast_to(number, size.shape), self.r, in_kernels=False)


@factory
def sparf(r: int, k: int, *, first_layer: int = 0) -> SparF:
    """Reads the k slots of the largest probabilities under r channels, and the mean of all values; see `SparF`.

    Args:
      r: see `SparF`.
      k: see `SparF`.
      first_layer: see `SparF`.

    Raises:
      SelectionError: a number that is too small.

    InstInfer holds keys twice, by token and by channel, so that ranking reads r of the D numbers of each key. Here keys
    are held by token, and ranking reads them whole.
    """
    return SparF(r, k, first_layer)
