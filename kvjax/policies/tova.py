"""TOVA: token omission via attention, by the newest query alone (arXiv:2401.06104)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.parallel import slot_reductions
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Stats, View

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Last(Importance):
    """Ranks a slot by the attention that the newest query pays it, in its own KV head."""

    needs = frozenset({"last"})

    def score(self, stats: Stats, view: View) -> Array:
        return stats["last"]


@dataclasses.dataclass(frozen=True)
class SharedLast(Importance):
    """Ranks a slot by the attention that the newest query pays it, averaged over all heads of the layer.

    All heads therefore hold the same positions in the same slots.
    """

    needs = frozenset({"last"})
    shared_by_heads = True

    def score(self, stats: Stats, view: View) -> Array:
        # [B, 1, S] -> [B, K, S]
        return jnp.broadcast_to(slot_reductions.mean_over_heads(stats["last"]), stats["last"].shape)


last = Last()
shared_last = SharedLast()


@factory
def tova(
    budget: BudgetLike,
    *,
    share_heads: bool = True,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Evicts what the newest query i attends to least; no slot is protected (TOVA, section 4).

    Importance m_ij, or its mean over all heads of the layer. Of equal slots the older is evicted; the paper does not
    specify which.

    Args:
      budget: see `evict`.
      share_heads: whether to average over the layer's heads, as the authors do; False = each KV head ranks alone, as in
        EasyKV.
      positions: see `evict`.
      group_reduce: see `evict`.
      merge: see `evict`.
      every: see `evict`.
    """
    if not isinstance(share_heads, bool):
        raise PolicyError(f"policy tova: share_heads={share_heads!r} is not valid; give True or False.")
    return evict(
        importance=shared_last if share_heads else last,
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        every=every,
        name="tova",
    )
