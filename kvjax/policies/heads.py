"""Heads under policies of their own: some keep everything, the others a short window (DuoAttention, RazorAttention).

Which heads need everything is a property of a model: `kvjax.analysis.retrieval_heads` finds out.
"""

from typing import Any

import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.base import (
    Budget,
    Folded,
    Merge,
    Part,
    Policy,
    Stats,
    View,
    check,
    count_argument,
    evict,
    keep,
    memoized,
)
from kvjax.policies.window import full, window

Array = Any


@memoized
def split_heads(heads: Any, chosen: Policy, others: Policy, *, name: str = "split_heads") -> Policy:
    """The KV heads that are marked under one policy, all others under another, each with a cache of its own capacity.

    Args:
      heads: [L, K] bool, which KV heads of each layer are `chosen`.
      chosen, others: policies that evict at every step, or keep everything.

    Raises:
      PolicyError: heads that are no such table, a policy for prompts only or one that hides slots, or two that place
        tokens differently.
    """
    rows = heads if isinstance(heads, tuple) else ()
    if not rows or not all(isinstance(row, tuple) and row and len(row) == len(rows[0]) for row in rows):
        raise PolicyError(f"{name}: heads={heads!r} is no table; give one row a layer, one true or false a KV head.")
    if any(each not in (0, 1) for row in rows for each in row):
        raise PolicyError(f"{name}: heads={heads!r} must be true or false (1 or 0), one a KV head.")
    chosen, others = check(chosen), check(others)
    for policy in (chosen, others):
        if policy.then is not None or policy.mask is not None or policy.parts:
            raise PolicyError(
                f"{name}: {policy.name} does not evict step by step; give policies such as h2o or window."
            )
    if chosen.positions != others.positions:
        raise PolicyError(
            f"{name}({chosen.name}, {others.name}): positions {chosen.positions!r} and {others.positions!r} differ; a "
            "token has one."
        )

    def members(mark: bool) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(head for head, each in enumerate(row) if bool(each) is mark) for row in rows)

    whole = evict(importance=keep, budget=None, positions=chosen.positions, name=name)
    return whole._replace(parts=(Part(members(True), chosen), Part(members(False), others)))


@memoized
def duo_attention(heads: Any, *, sinks: int = 64, recent: int = 256, positions: str = "original") -> Policy:
    """Retrieval heads keep everything, streaming heads the first and the newest tokens (arXiv:2410.10819).

    Streaming heads have importance p and {p < sinks} protected. DuoAttention learns which heads are which by tuning
    gates on passkeys; here `heads` may come from anywhere, such as `kvjax.analysis.retrieval_heads`, which only looks.

    Args:
      heads: [L, K] bool, the retrieval heads.
      sinks, recent: slots of a streaming head, which are its budget together.
      positions: see `evict`.
    """
    sinks, recent = count_argument("sinks", sinks), count_argument("recent", recent, minimum=1)
    streaming = window(sinks + recent, sinks=sinks, positions=positions)
    return split_heads(heads, full(positions=positions), streaming, name="duo_attention")


@memoized
def razor_attention(heads: Any, budget: Budget = 0.2, *, sinks: int = 4, positions: str = "original") -> Policy:
    """As `duo_attention`, with one token for all that a head has dropped (`compensation`; arXiv:2407.15891).

    The paper's Algorithm 1 keeps max(S_0, n / C) newest tokens beside the sinks; here a budget is one or the other.

    Args:
      heads: [L, K] bool, the retrieval heads.
      budget: of the other heads, see `evict`: the sinks, the compensation token, and the newest tokens.
      sinks: how many of the first positions they keep.
      positions: see `evict`.
    """
    sinks = count_argument("sinks", sinks)
    streaming = window(budget, sinks=sinks + 1, positions=positions, merge=compensation(sinks))
    return split_heads(heads, full(positions=positions), streaming, name="razor_attention")


@memoized
def compensation(position: int) -> Merge:
    """The slot of one position becomes the mean of all that was dropped, counting as often (RazorAttention, eq. 4, 5).

    With N_d dropped tokens of mean key k and value v, the softmax's sums have N_d·exp(q·k) v and N_d·exp(q·k) beside
    the live tokens'. The token of that position is the first among the dropped: a policy must protect it (as
    `razor_attention` does), so that the slot is there. Keys are averaged as they are stored. In bfloat16 the mean is
    rounded at every step; a prompt in one shot is averaged at once.

    Args:
      position: of the token, counted from 0.
    """
    position = count_argument("position", position)

    def fold(key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        here = view.live & (view.position == position)
        # Where the slot is missing, in a text that ends before it, nothing can have been dropped either.
        count = jnp.sum(victim & jnp.any(here, axis=2, keepdims=True), axis=2, keepdims=True, dtype=jnp.float32)
        before = 1.0 + stats["folded"]

        def mean(x: Array) -> Array:
            gone = jnp.einsum("bks,bksd->bkd", victim.astype(jnp.float32), x.astype(jnp.float32))[:, :, None]
            averaged = (before[..., None] * x.astype(jnp.float32) + gone) / (before + count)[..., None]
            return jnp.where((here & (count > 0))[..., None], averaged, x.astype(jnp.float32)).astype(x.dtype)

        return Folded(mean(key), mean(value), stats | {"folded": jnp.where(here, stats["folded"] + count, 0.0)})

    return Merge(frozenset(), fold, remembers=("folded",), log_weight=lambda stats: jnp.log1p(stats["folded"]))
