"""Scores of keys and values that need no query: leverage (Compactor, arXiv:2507.08143) and CUR (arXiv:2509.15038)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument, number_argument
from kvjax.parallel.sharding import on_each_device
from kvjax.policies.base import Evict, compress_or_evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.h2o import Newest
from kvjax.policies.slot_order import FirstSlots, by_slot_order, in_slot_order, slot_ranks

Array = jax.Array
AXES = ("batch", "kv_heads")  # logical axes, over which a mesh divides factorisations
LEVELS = 1 << 16  # leverage is rounded to multiples of 1 / LEVELS


@dataclasses.dataclass(frozen=True)
class Leverage(Importance):
    """Ranks a slot by the leverage of its key among the live keys (Compactor, arXiv:2507.08143, section 3.1).

    x (XᵀX + ridge·I)⁻¹ xᵀ of the keys X before rotation, less their mean. It is rounded to multiples of 2⁻¹⁶: in the
    first layer, equal tokens have equal keys but for rounding, and their age should decide which of them is evicted.

    Attributes:
      ridge: added to the diagonal; greater than 0.
    """

    ridge: float = 0.01
    needs = frozenset()
    reads = frozenset({"key"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "ridge", number_argument("ridge", self.ridge, minimum=1e-6, maximum=1e6))

    def score(self, stats: Stats, view: View) -> Array:
        found = leverage_scores(view.unrotated(), view.live, self.ridge)
        return jnp.round(found * LEVELS) / LEVELS


def leverage_scores(key: Array, counted: Array, ridge: float, directions: Array | None = None) -> Array:
    """Returns the leverage of keys among those that count, less their mean; [B, K, S] float32.

    Args:
      key: [B, K, S, D] before rotation.
      counted: [B, K, S] bool.
      ridge: added to the diagonal.
      directions: [D, n] float32, to which centred keys are projected; None = no projection.
    """
    mask = counted[..., None]
    # [B, K, 1, 1]
    number = jnp.maximum(jnp.sum(mask, axis=2, keepdims=True), 1).astype(jnp.float32)
    x = jnp.where(mask, key.astype(jnp.float32), 0.0)
    # [B, K, S, D]
    centred = jnp.where(mask, x - jnp.sum(x, axis=2, keepdims=True) / number, 0.0)
    exact = jax.lax.Precision.HIGHEST
    if directions is not None:
        # [B, K, S, n]; n takes the place of D below
        centred = jnp.einsum("bksd,dn->bksn", centred, directions, precision=exact)
    # [B, K, D, D]
    gram = jnp.einsum("bksd,bkse->bkde", centred, centred, precision=exact)
    # [B, K, D, D]: the inverse is of D rows; a solve for all slots would run in LAPACK on CPUs
    inverse = on_each_device(functools.partial(_inverse_factor, ridge=ridge), (gram,), (AXES,), AXES)
    # [B, K, S, D]: ‖L⁻¹x‖² is the leverage
    solved = jnp.einsum("bksd,bked->bkse", centred, inverse, precision=exact)
    return jnp.sum(jnp.square(solved), axis=3)


def _inverse_factor(gram: Array, ridge: float) -> Array:
    """Returns the inverse of the Cholesky factor L of gram + ridge·I = LLᵀ, all [B, K, D, D]."""
    identity = jnp.eye(gram.shape[-1], dtype=jnp.float32)
    factor = jnp.linalg.cholesky(gram + ridge * identity)
    return jax.scipy.linalg.solve_triangular(factor, jnp.broadcast_to(identity, factor.shape), lower=True)


@dataclasses.dataclass(frozen=True)
class KeyValueShare(Importance):
    """Ranks a slot by its share of the squared norms of keys, times that of values, in its block (CUR, section 3.2).

    Attributes:
      block: the number of slots of a block, in the order of their positions.
    """

    block: int = 16
    needs = frozenset()
    reads = frozenset({"key", "value"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", count_argument("block", self.block, minimum=1))

    def score(self, stats: Stats, view: View) -> Array:
        order = in_slot_order(view.position)
        # [B, K, S], in the order of positions
        product = self._share(view.rotated(), view.live, order) * self._share(view.value, view.live, order)
        return jnp.take_along_axis(product, slot_ranks(view.position, order), axis=2)

    def _share(self, x: Array, live: Array, order: Array) -> Array:
        """Returns the shares [B, K, S] of keys or values [B, K, S, D], in the order of positions."""
        batch, kv_heads, size = order.shape
        squares = jnp.where(live, jnp.sum(jnp.square(x.astype(jnp.float32)), axis=3), 0.0)
        padded = jnp.pad(by_slot_order(squares, order), ((0, 0), (0, 0), (0, -size % self.block)))
        # [B, K, blocks, block]
        blocks = padded.reshape(batch, kv_heads, -1, self.block)
        total = jnp.sum(blocks, axis=3, keepdims=True)
        share = jnp.where(total > 0, blocks / jnp.where(total > 0, total, 1.0), 0.0)
        return share.reshape(batch, kv_heads, -1)[:, :, :size]


@factory
def leverage(
    budget: BudgetLike, *, every: int | None = None, ridge: float = 0.01, recent: int = 0, positions: str = "original"
) -> Evict:
    """Keeps the keys of the largest leverage: directions that few other keys have (Compactor, arXiv:2507.08143).

    Leverage is x (XᵀX + ridge·I)⁻¹ xᵀ of the keys before rotation; see `Leverage`. The authors add a score of attention
    to it. Words that occur often have a low leverage in the first layer, where equal tokens have equal keys, so that
    the last tokens of a prompt may be evicted there; `recent` protects them.

    Args:
      budget: slots per KV head; see `evict`.
      every: see `lagkv`.
      ridge: added to the diagonal of XᵀX; greater than 0.
      recent: the number of newest positions that are protected.
      positions: see `evict`.
    """
    scope = Newest(recent) if count_argument("recent", recent, minimum=0) else None
    return compress_or_evict(
        every, importance=Leverage(ridge), scope=scope, budget=budget, positions=positions, name="leverage"
    )


@factory
def cur(budget: BudgetLike, *, block: int = 16, sinks: int = 4, positions: str = "original") -> Evict:
    """Keeps keys and values of large norms within their block (CurDKV, arXiv:2509.15038).

    A slot's importance is its share of the squared norms of keys in its block, times that of values; see
    `KeyValueShare`. The first `sinks` slots are protected.

    Args:
      budget: slots per KV head that remain of a prompt; see `snapkv`.
      block: the number of slots of a block, in the order of their positions.
      sinks: the number of first slots that are protected.
      positions: see `evict`.
    """
    return compress_or_evict(
        None, importance=KeyValueShare(block), scope=FirstSlots(sinks), budget=budget, positions=positions, name="cur"
    )
