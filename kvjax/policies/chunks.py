"""ChunkKV: evicts whole chunks of consecutive tokens of a prompt, the same in all heads (arXiv:2502.00299)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.combinators import ranks_each_head
from kvjax.policies.components import Importance, Scope, Stats, View

Array = jax.Array

# ([C * chunk] zeros, [S] places, [S] x) -> x at its places; a place beyond the end is left out
_place = jax.vmap(jax.vmap(lambda into, place, x: into.at[place].set(x, mode="drop", unique_indices=True)))


def looks_at_slots(scope: Scope) -> bool:
    """Returns whether a scope reads more than positions, and so can protect different slots in different heads."""
    return bool(scope.needs or scope.reads or scope.memory or scope.writes or scope.params)


@dataclasses.dataclass(frozen=True)
class ChunkMean(Importance):
    """Ranks a slot by the mean importance of its chunk, then by its own (ChunkKV, arXiv:2502.00299).

    The prompt is divided into chunks of `chunk` positions, and importance is summed over the KV heads of the layer.
    Chunks are kept whole, those of the largest means first, until the budget is full; the last of them keeps its most
    important slots. Of equal chunks, the newer stays. The score of a slot is the number of slots that are evicted
    before it. Slots that the scope protects are in no chunk.

    Attributes:
      importance: ranks the slots of each head; its `amount` must be true.
      scope: protects the same positions in all heads.
      chunk: the number of positions of a chunk.

    Raises:
      PolicyError: an importance that only orders the slots or is shared by heads, or a scope that reads more than
        positions.
    """

    importance: Importance
    scope: Scope
    chunk: int = 10
    amount = False
    shared_by_heads = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", count_argument("chunk", self.chunk, minimum=1))
        if not isinstance(self.importance, Importance) or not self.importance.amount or self.importance.shared_by_heads:
            raise PolicyError(
                f"ChunkMean: importance={self.importance!r} has no mean over slots and heads; give an importance of "
                "single heads with amounts, such as kvjax.policies.mass."
            )
        if not isinstance(self.scope, Scope) or looks_at_slots(self.scope):
            raise PolicyError(
                f"ChunkMean: scope={self.scope!r} can protect other slots in each head, but all heads hold the same "
                "chunks; give a scope of positions, such as kvjax.policies.protect_newest(32)."
            )

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset(self.importance.needs)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.importance.reads)

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.importance,)

    def score(self, stats: Stats, view: View) -> Array:
        batch, _, size = view.position.shape
        chunks = -(-size // self.chunk)
        base = self.importance.amounts(stats, view)
        # [B, 1, S]: the sum over the heads, which hold the same positions in the same slots
        base = slot_reductions.mean_over_heads(jnp.where(jnp.isnan(base), -jnp.inf, base))
        position = view.position[:, :1]
        counted = view.live[:, :1] & ~self.scope.protected(stats, view)[:, :1]
        # [B, 1, S]: a token's place in the prompt is its position, since no slot has been evicted yet
        place = jnp.where(counted, position, chunks * self.chunk)
        zeros = jnp.zeros((batch, 1, chunks * self.chunk), jnp.float32)
        # [B, 1, C]
        total, number = (
            jnp.sum(_place(zeros, place, x).reshape(batch, 1, chunks, self.chunk), axis=3)
            for x in (base, jnp.ones_like(base))
        )
        mean = total / jnp.maximum(number, 1.0)
        # [B, 1, S]
        own = jnp.minimum(jnp.maximum(position, 0) // self.chunk, chunks - 1)
        keys = (jnp.take_along_axis(mean, own, axis=2), own, base, position)
        slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), position.shape)
        in_order = jax.lax.sort((*keys, slot), dimension=2, num_keys=len(keys))[-1]
        before = jnp.argsort(in_order, axis=2).astype(jnp.float32)
        return jnp.broadcast_to(before, view.position.shape)


@factory
def chunkkv(base: Policy, *, chunk: int = 10) -> Evict:
    """Keeps whole chunks of the prompt, by the mean importance of their slots (ChunkKV, arXiv:2502.00299).

    All heads of a layer keep the same positions, because importance is summed over them; see `ChunkMean`. Slots that
    `base` protects are kept, and are in no chunk.

    Args:
      base: a compressor such as snapkv, which gives the importance, the scope and the budget.
      chunk: the number of positions of a chunk.

    Raises:
      PolicyError: a policy that is not a compressor, whose importance only orders the slots (`lagkv`), that protects
        other slots in each head, or whose heads share their slots (`adakv`).

    The authors' code keeps whole chunks only, and therefore fewer slots than the budget.
    """
    inner = ranks_each_head("chunkkv", base)
    if inner.when != "prompt_end" or (inner.budget is not None and inner.budget.shared):
        raise PolicyError(
            f"chunkkv({inner.name}): it is not a compressor that gives each head its own budget; give one such as "
            "snapkv."
        )
    if not inner.importance.amount:
        raise PolicyError(
            f"chunkkv({inner.name}): its importance only orders the slots, so that a chunk has no mean; give a "
            "compressor whose importance is an amount, such as snapkv or knorm."
        )
    if looks_at_slots(inner.scope):
        raise PolicyError(
            f"chunkkv({inner.name}): it can protect other slots in each head, but all heads hold the same chunks; give "
            "a compressor that protects positions, such as snapkv."
        )
    mean = ChunkMean(inner.importance, inner.scope, chunk)
    return dataclasses.replace(inner, importance=mean, name=f"chunkkv[{inner.name}]")
