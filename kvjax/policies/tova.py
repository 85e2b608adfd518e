"""TOVA: token omission via attention, the newest query's word alone (arXiv:2401.06104)."""

import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.base import Budget, Importance, Merge, Policy, evict, memoized

#: A slot is worth what the newest query gives it, in its own KV head.
last = Importance(frozenset({"last"}), lambda stats, view: stats["last"], in_kernel=True)
#: The same, averaged over all the layer's heads, which therefore all hold the same positions in the same slots.
shared_last = Importance(
    frozenset({"last"}),
    lambda stats, view: jnp.broadcast_to(jnp.mean(stats["last"], axis=1, keepdims=True), stats["last"].shape),
    aligned=True,
    in_kernel=True,
)


@memoized
def tova(
    budget: Budget,
    *,
    share_heads: bool = True,
    positions: str = "original",
    group_reduce: str = "mean",
    merge: Merge | None = None,
) -> Policy:
    """Drops what the newest query i attends to least; nothing is protected (TOVA, section 4).

    Importance m_ij, or its mean over all the layer's heads; of equals, where the paper says nothing, the older goes.

    Args:
      budget: see `evict`.
      share_heads: average over the layer's heads, as the authors do; False = every KV head by itself, as EasyKV does.
      positions: see `evict`.
      group_reduce, merge: see `evict`.
    """
    if not isinstance(share_heads, bool):
        raise PolicyError(f"tova: share_heads={share_heads!r} is not True or False.")
    return evict(
        importance=shared_last if share_heads else last,
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        merge=merge,
        name="tova",
    )
