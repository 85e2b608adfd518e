"""Scores of the newest queries' attention: R-KV (arXiv:2505.24133) and MorphKV (arXiv:2503.00979)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, count_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.numerics.group_reductions import max_over_group, mean_over_group
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.h2o import Newest
from kvjax.policies.row_memory import RecentQueries, RowMemory
from kvjax.policies.slot_order import over_neighbours

Array = jax.Array
TILE = 128  # slots that are compared with all others at a time
SMALL = 1e-8  # added to norms of keys
FUSES = ("sum", "max")


def recent_logits(view: View, window: int) -> tuple[Array, Array, Array]:
    """Returns the logits of the newest queries on older slots.

    Args:
      view: with a memory of `RecentQueries(window)`.
      window: the number of newest queries; as many newest positions are left out.

    Returns:
      The logits [B, K, G, w, S] float32; the slots that are not among the newest positions, [B, K, S] bool; and whether
      each query is there, [B, K, w] bool.
    """
    memory = view.memory[RecentQueries(window).name]
    key = view.rotated().astype(jnp.float32)
    logits = view.scale * jnp.einsum("bkgwd,bksd->bkgws", memory["query"], key, precision=jax.lax.Precision.HIGHEST)
    return logits, view.live & ~view.recent(window), memory["position"] >= 0


def check_odd(kernel: int) -> None:
    """Raises PolicyError for an even number of neighbours, which has no middle."""
    if kernel % 2 == 0:
        raise PolicyError(f"kernel={kernel} is even; give an odd number of neighbours.")


def softmax_over(logits: Array, counted: Array) -> Array:
    """Returns the softmax of logits [..., S] over the slots that count, [..., S]; 0 elsewhere."""
    largest = jnp.max(logits, axis=-1, keepdims=True, where=counted, initial=-jnp.inf)
    weight = jnp.where(counted, jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0.0)), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total > 0, total, 1.0)


def mean_over_queries(x: Array, there: Array) -> Array:
    """Returns the mean [B, K, S] of x [B, K, w, S] over the queries that exist, [B, K, w] bool."""
    number = jnp.maximum(jnp.sum(there, axis=2), 1).astype(jnp.float32)[..., None]
    return jnp.sum(jnp.where(there[..., None], x, 0.0), axis=2) / number


def redundancy(key: Array, position: Array, similar: float) -> Array:
    """Returns how much each key is like the others of its head, [B, K, S] float32: a softmax over the live slots.

    The mean over keys i of their cosine with key j. For each i, the newest key whose cosine is above `similar` counts
    as 0, so that of similar keys the newest is not redundant (R-KV, arXiv:2505.24133, section 3.2).

    Args:
      key: [B, K, S, D], rotated.
      position: [B, K, S] int32, -1 = empty.
      similar: a cosine.
    """
    batch, kv_heads, size, dim = key.shape
    live = position >= 0
    unit = key.astype(jnp.float32) / (jnp.linalg.norm(key.astype(jnp.float32), axis=3, keepdims=True) + SMALL)
    pad = -size % TILE
    tiles = -(-size // TILE)
    # [tiles, B, K, TILE, D] and [tiles, B, K, TILE]
    rows = jnp.moveaxis(
        jnp.pad(unit, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(batch, kv_heads, tiles, TILE, dim), 2, 0
    )
    at = jnp.pad(position, ((0, 0), (0, 0), (0, pad)), constant_values=-1)
    at = jnp.moveaxis(at.reshape(batch, kv_heads, tiles, TILE), 2, 0)

    def add(total: Array, tile: tuple[Array, Array]) -> tuple[Array, None]:
        own, places = tile
        # [B, K, TILE, S]
        cosine = jnp.einsum("bktd,bksd->bkts", own, unit, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where(places[..., None] == position[:, :, None], 0.0, cosine)
        alike = (cosine > similar) & live[:, :, None]
        newest = jnp.max(jnp.where(alike, position[:, :, None], -1), axis=3, keepdims=True)
        cosine = jnp.where(alike & (position[:, :, None] == newest), 0.0, cosine)
        return total + jnp.sum(jnp.where(places[..., None] >= 0, cosine, 0.0), axis=2), None

    total, _ = jax.lax.scan(add, jnp.zeros((batch, kv_heads, size), jnp.float32), (rows, at))
    number = jnp.maximum(jnp.sum(live, axis=2, keepdims=True), 1).astype(jnp.float32)
    return softmax_over(total / number, live)


@dataclasses.dataclass(frozen=True)
class Redundancy(Importance):
    """Ranks a slot by the attention of the newest queries, less its redundancy (R-KV, arXiv:2505.24133, eq. 7).

    λ·attention - (1 - λ)·redundancy. Attention is the mean over the last `window` queries of a softmax over the older
    slots, of the largest logit of the query heads that share a KV head, and then the maximum over `kernel` neighbours
    in the order of positions. For redundancy see `redundancy`.

    Attributes:
      window: the number of newest queries.
      kernel: the number of neighbours, odd.
      lam: λ, 0 to 1.
      similar: the cosine above which keys count as similar.
    """

    window: int
    kernel: int
    lam: float
    similar: float
    needs = frozenset()
    signed = True
    reads = frozenset({"key"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "kernel", count_argument("kernel", self.kernel, minimum=1))
        object.__setattr__(self, "lam", number_argument("lam", self.lam, minimum=0.0, maximum=1.0))
        object.__setattr__(self, "similar", number_argument("similar", self.similar, minimum=-1.0, maximum=1.0))
        check_odd(self.kernel)

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (RecentQueries(self.window),)

    def score(self, stats: Stats, view: View) -> Array:
        logits, older, there = recent_logits(view, self.window)
        # [B, K, w, S]
        attention = softmax_over(max_over_group(logits), jnp.broadcast_to(older[:, :, None], logits[:, :, 0].shape))
        # [B, K, S]
        mean = jnp.where(older, mean_over_queries(attention, there), -jnp.inf)
        pooled = over_neighbours(mean, view.position, self.kernel, jax.lax.max, -jnp.inf)
        alike = redundancy(view.rotated(), view.position, self.similar)
        # The newest are protected by the scope.
        return self.lam * jnp.where(older, pooled, 0.0) - (1 - self.lam) * alike


@dataclasses.dataclass(frozen=True)
class RecentAttention(Importance):
    """Ranks a slot by the attention that the newest queries pay it (MorphKV, arXiv:2503.00979, section 3).

    The sum or the maximum over the last `window` queries of the attention to the slots that are older, averaged over
    the query heads that share a KV head.

    Attributes:
      window: the number of newest queries.
      fuse: ``sum`` or ``max``.
    """

    window: int
    fuse: str = "sum"
    needs = frozenset()
    reads = frozenset({"key"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        choice_argument("fuse", self.fuse, FUSES)

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (RecentQueries(self.window),)

    def score(self, stats: Stats, view: View) -> Array:
        logits, older, there = recent_logits(view, self.window)
        # [B, K, w, S]
        paid = mean_over_group(softmax_over(logits, jnp.broadcast_to(older[:, :, None, None], logits.shape)))
        paid = jnp.where(there[..., None], paid, 0.0)
        return jnp.sum(paid, axis=2) if self.fuse == "sum" else jnp.max(paid, axis=2)


@factory
def rkv(
    budget: BudgetLike,
    *,
    every: int = 128,
    window: int = 8,
    kernel: int = 7,
    lam: float = 0.07,
    similar: float = 0.5,
    positions: str = "original",
) -> Evict:
    """Evicts what the newest queries attend to least and what is redundant (R-KV, arXiv:2505.24133).

    Importance is λ·attention - (1 - λ)·redundancy, see `Redundancy`; the `window` newest positions are protected.

    Args:
      budget: see `evict`.
      every: see `evict`. All keys of a head are compared with each other whenever it evicts.
      window: the number of newest queries whose attention counts, and of newest positions that are protected.
      kernel: the number of neighbours, odd, of which a slot gets the largest attention.
      lam: λ, the weight of attention, 0 to 1; the paper has 0.1, its code 0.07.
      similar: the cosine above which keys count as similar.
      positions: see `evict`.

    In the authors' code, a key without any similar one takes away the first key's share, and only one row is handled.
    """
    return evict(
        importance=Redundancy(window, kernel, lam, similar), scope=Newest(window), budget=budget, positions=positions,
        every=every, name="rkv",
    )  # fmt: skip


@factory
def morphkv(
    budget: BudgetLike, *, window: int = 32, fuse: str = "sum", every: int = 1, positions: str = "original"
) -> Evict:
    """Evicts what the last queries attend to least (MorphKV, arXiv:2503.00979).

    Importance is the attention that the last `window` queries pay the slots before them, see `RecentAttention`; the
    `window` newest positions are protected.

    Args:
      budget: see `evict`.
      window: the number of newest queries, and of newest positions that are protected.
      fuse: ``sum`` or ``max`` over these queries.
      every: see `evict`.
      positions: see `evict`.
    """
    return evict(
        importance=RecentAttention(window, fuse), scope=Newest(window), budget=budget, positions=positions, every=every,
        name="morphkv",
    )  # fmt: skip
