"""A²ATS: chooses slots by logits of the nearest codebook entries of their keys (arXiv:2502.12665)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.policies.base import Policy
from kvjax.selection.base import Held, Index, Selection, SelectView
from kvjax.selection.checks import factory, merges, named, rotated_once
from kvjax.selection.choose import best, grouped_logits, rank, view_ends

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST
FAR = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Codebook(Selection):
    """Chooses the slots of the largest logits, with each key k replaced by the nearest codebook entry c (A²ATS).

    The nearest entry minimises the expected squared error of a logit, (k - c)ᵀ E[qqᵀ] (k - c), over the queries of the
    row's prompt; of equal entries, it is the first (query-aware vector quantization). A query is multiplied only by the
    entries, and the score of a slot is looked up.

    When the prompt ends, k-means under the same distance computes a codebook for the keys of each KV head, beginning at
    evenly spaced slots. The index has the codebook, [B, K, codes, D], the metric, [B, K, D, D], and codes, [B, K, S]
    int32.

    Attributes:
      k: the number of slots that are chosen.
      codes: the number of entries of a codebook.
      rounds: the number of rounds of k-means.
      sinks: the number of oldest slots that are always read.
      recent: the number of newest slots that are always read, including the new one; at least 1.
      first_layer: layers before this one read everything.

    Raises:
      SelectionError: an attribute that is too small.
    """

    k: int
    codes: int = 64
    rounds: int = 4
    sinks: int = 0
    recent: int = 1
    first_layer: int = 0
    name = "a2ats"
    watches = True
    per_slot = frozenset({"code"})
    per_head = frozenset({"codebook", "metric"})

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (
                ("k", 1), ("codes", 1), ("rounds", 0), ("sinks", 0), ("recent", 1), ("first_layer", 0),
            ):  # fmt: skip
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))

    @property
    def ends(self) -> tuple[int, int]:
        return self.sinks, self.recent - 1

    @property
    def most(self) -> int:
        return self.k

    def width(self, capacity: int) -> int | None:
        slots = self.k + self.sinks + self.recent
        return slots if slots < capacity else None

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        return merges(policy) or rotated_once(positions)

    def start(self, shape: tuple[int, int], dim: int) -> Index:
        return {"metric": jnp.zeros((*shape, dim, dim), jnp.float32)}

    def watch(self, sums: Index, query: Array, key: Array, real: Array, skew: Array | None) -> Index:
        query = jnp.where(real[:, None, None, :, None], query.astype(jnp.float32), 0.0)
        # A constant factor of the metric changes no choice.
        return {"metric": sums["metric"] + jnp.einsum("bkgnd,bkgne->bkde", query, query, precision=HIGHEST)}

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {
            "codebook": jnp.zeros((*shape[:2], self.codes, dim), jnp.float32),
            "metric": jnp.zeros((*shape[:2], dim, dim), jnp.float32),
            "code": jnp.zeros(shape, jnp.int32),
        }

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        key, metric = held.key.astype(jnp.float32), sums["metric"]
        # [B, K, S]
        live = held.position >= 0
        oldest_first = jnp.argsort(jnp.where(live, held.position, FAR), axis=2, stable=True)
        # [B, K, codes]: evenly spaced slots, with repetitions if there are fewer slots than codes
        number = jnp.sum(live, axis=2, keepdims=True, dtype=jnp.int32)
        spaced = jnp.arange(self.codes, dtype=jnp.int32) * number // self.codes
        first = jnp.take_along_axis(oldest_first, spaced, axis=2)
        # [B, K, codes, D]
        codebook = jnp.take_along_axis(key, first[..., None], axis=2)
        for _ in range(self.rounds):
            # [B, K, S, codes]
            member = (nearest(key, codebook, metric)[..., None] == jnp.arange(self.codes)) & live[..., None]
            # [B, K, codes, 1]
            count = jnp.sum(member, axis=2, dtype=jnp.float32)[..., None]
            total = jnp.einsum("bksm,bksd->bkmd", member.astype(jnp.float32), key, precision=HIGHEST)
            codebook = jnp.where(count > 0, total / jnp.maximum(count, 1.0), codebook)
        made = {"codebook": codebook, "metric": metric, "code": nearest(key, codebook, metric)}
        return jax.lax.stop_gradient(made)

    def entries(self, index: Index, key: Array, skew: Array | None) -> Index:
        return {"code": nearest(jax.lax.stop_gradient(key), index["codebook"], index["metric"])}

    def always(self, index: Index, view: SelectView) -> Array:
        return view.new | (view.visible & view_ends(view, *self.ends))

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        # [B, K, G, codes]
        table = grouped_logits(query.astype(jnp.float32), index["codebook"], view.scale, view.soft_cap)
        # [B, K, G, S]
        score = jnp.take_along_axis(table, index["code"][:, :, None], axis=3)
        candidate = view.visible & ~self.always(index, view)
        # [B, K, S]
        worth = rank(score, candidate, normalise="gap", reduce="max")
        return best(jax.lax.stop_gradient(worth), candidate, view.position, self.k)


def nearest(key: Array, codebook: Array, metric: Array) -> Array:
    """Finds the entry c that minimises (k - c)ᵀ A (k - c) for each key, the first of equal ones.

    Args:
      key: [B, K, n, D].
      codebook: [B, K, M, D] float32.
      metric: A, [B, K, D, D] float32.

    Returns:
      [B, K, n] int32.
    """
    # [B, K, M, D]
    warped = jnp.einsum("bkmd,bkde->bkme", codebook, metric, precision=HIGHEST)
    # [B, K, n, M], up to a constant per key
    product = jnp.einsum("bknd,bkmd->bknm", key.astype(jnp.float32), warped, precision=HIGHEST)
    distance = jnp.sum(warped * codebook, axis=-1)[:, :, None] - 2.0 * product
    return jnp.argmin(distance, axis=-1).astype(jnp.int32)


@factory
def a2ats(
    k: int, *, codes: int = 64, rounds: int = 4, sinks: int = 0, recent: int = 1, first_layer: int = 0
) -> Codebook:
    """Reads the slots of the largest logits under a codebook of keys; see `Codebook` (A²ATS, arXiv:2502.12665).

    Args:
      k: see `Codebook`.
      codes: see `Codebook`.
      rounds: see `Codebook`.
      sinks: see `Codebook`.
      recent: see `Codebook`.
      first_layer: see `Codebook`.

    Raises:
      SelectionError: a number that is too small.

    The paper computes one codebook offline, for keys before rotation, and rotates distant queries by a constant
    distance, so that one table serves all positions. Here each row has a codebook of its prompt's keys, as attention
    uses them.
    """
    return Codebook(k, codes, rounds, sinks, recent, first_layer)
