"""Prompt-phase compressors that listen to the prompt's last queries: SnapKV, PyramidKV and AdaKV's shares."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.base import (
    Budget,
    Importance,
    Policy,
    Scope,
    Stats,
    View,
    compress,
    count_argument,
    exact,
    memoized,
    number_argument,
    slots,
)
from kvjax.selection import largest
from kvjax.statistics import prompt_tail

Array = jax.Array
POOLINGS = ("avg", "max")


@memoized
def heard_at_the_end(window: int = 32, kernel: int = 5, pooling: str = "avg") -> Importance:
    """What the prompt's last `window` queries gave a slot, pooled over its neighbours (SnapKV, section 4).

    Args:
      window: queries; their own positions are no neighbours of anybody.
      kernel: positions that are pooled, odd, centred on the slot's own.
      pooling: ``avg`` (over the kernel, zeros beyond the ends count) or ``max``.
    """
    window, kernel = count_argument("window", window, minimum=1), count_argument("kernel", kernel, minimum=1)
    if kernel % 2 == 0:
        raise PolicyError(f"kernel={kernel} has no centre; give an odd number.")
    if pooling not in POOLINGS:
        raise PolicyError(f"pooling={pooling!r} is not valid; use {' or '.join(map(repr, POOLINGS))}.")
    statistic = prompt_tail(window)

    def score(stats: Mapping[str, Array], view: View) -> Array:
        # A prompt has lost nobody yet: position p is one of its `n` slots, and `place` says which.
        size, n = view.position.shape[2], view.prompt[:, None, None]
        index = jnp.where(view.live, view.position, size)
        place = jax.vmap(jax.vmap(lambda row, new: jnp.zeros(size, jnp.float32).at[row].set(new, mode="drop")))
        nothing = 0.0 if pooling == "avg" else -jnp.inf
        in_order = jnp.where(jnp.arange(size) < n - window, place(index, stats[statistic.name]), nothing)
        pooled = jax.lax.reduce_window(
            in_order, jnp.float32(nothing), jax.lax.add if pooling == "avg" else jax.lax.max, (1, 1, kernel), (1, 1, 1),
            "SAME",
        )  # fmt: skip
        pooled = pooled / kernel if pooling == "avg" else pooled
        return jnp.take_along_axis(pooled, jnp.minimum(index, size - 1), axis=2)

    return Importance(frozenset({statistic}), score)


@memoized
def protect_prompt_end(window: int, beyond: bool = True) -> Scope:
    """Protects the last `window` positions of the prompt; `beyond` = the budget must leave room for others."""
    window = count_argument("window", window, minimum=1)

    def count(budget: int) -> int:
        if beyond and budget <= window:
            raise PolicyError(f"a window of {window} needs a larger budget than {budget}: it is part of it.")
        return window

    return Scope(frozenset(), lambda stats, view: view.position >= (view.prompt - window)[:, None, None], count)


@memoized
def snapkv(
    budget: Budget,
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "avg",
    positions: str = "original",
    group_reduce: str = "mean",
) -> Policy:
    """Keeps what the prompt's last queries looked at, with its surroundings (SnapKV, arXiv:2404.14469, section 4).

    Importance pool(Σ_i m_ij) over the last `window` queries i, pooled over `kernel` positions around j; the window is
    protected. The authors' code repeats the keys of grouped queries, so that every query head selects for itself; here
    a KV head selects, by its group's mean.

    Args:
      budget: slots per KV head that a prompt leaves, the window among them; see `evict`. A shorter prompt is left
        alone, and decoding appends; see `after_prefill` for more.
      window, kernel, pooling: see `heard_at_the_end`; window is smaller than the budget.
      positions, group_reduce: see `evict`.
    """
    return compress(
        importance=heard_at_the_end(window, kernel, pooling),
        scope=protect_prompt_end(window),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        name="snapkv",
    )


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """PyramidKV's budgets, falling by layer (arXiv:2406.02069, section 3.2).

    Attributes:
      budget: slots of the average layer, or a fraction of the prompt; window: of these, in every layer.
      beta: the last layer has one beta-th of the average beyond the window.
    """

    budget: int | float
    window: int
    beta: int

    def of_layers(self, prompt_length: int, num_layers: int) -> tuple[int, ...]:
        b, n, w = slots(self.budget, prompt_length), prompt_length, self.window
        if b <= w:
            raise PolicyError(f"pyramidkv: window={w} needs a larger budget than {b}: it is part of it.")
        if n <= b:
            return (n,) * num_layers
        least = (b - w) // self.beta
        most = 2 * (b - w) - least
        if most > n - w:
            most = n - w
            least = 2 * (b - w) - most
        step = (most - least) // (num_layers - 1) if num_layers > 1 else 0
        return tuple(most - layer * step + w for layer in range(num_layers))


@memoized
def pyramidkv(
    budget: int | float,
    *,
    window: int = 32,
    beta: int = 20,
    kernel: int = 5,
    pooling: str = "avg",
    positions: str = "original",
    group_reduce: str = "mean",
) -> Policy:
    """SnapKV with more slots in the first layers and fewer in the last (PyramidKV, arXiv:2406.02069, section 3.2).

    Layer l of L has c_l + w slots in arrays of its own: c_l = max - l·⌊(max - min) / (L - 1)⌋, min = ⌊(b - w) / beta⌋,
    max = 2(b - w) - min; if that is more than n - w, max = n - w and min = 2(b - w) - max. Where
    n < 2(b - w) the authors' code gives every layer b; here the rule is one.

    Args:
      budget: of the average layer, a number of slots or a fraction of the prompt; see `Pyramid`.
      window, kernel, pooling: see `heard_at_the_end`.
      beta: see `Pyramid`.
      positions, group_reduce: see `evict`.
    """
    if isinstance(budget, tuple) or budget is None:
        raise PolicyError(f"pyramidkv: budget {budget!r} is not one number; its layers' budgets follow from that.")
    flat = snapkv(budget, window=window, kernel=kernel, pooling=pooling, positions=positions, group_reduce=group_reduce)
    rule = Pyramid(budget, window, count_argument("beta", beta, minimum=1))
    # A layer may have no slots but the window's.
    scope = protect_prompt_end(window, beyond=False)
    return flat._replace(budget=rule, scope=scope, protects=scope.count, name="pyramidkv")


@memoized
def adakv(base: Policy, *, safeguard: float = 0.2) -> Policy:
    """A layer's heads share their slots by need: `base`'s budget is the average head's (AdaKV, arXiv:2407.11550).

    Every head keeps its own best ⌊safeguard·(b - w)⌋; what is left of the layer's K·(b - w) goes to the largest
    importances over all heads; and all keep the window.

    Args:
      base: a compressor such as snapkv or pyramidkv; its window, if it has one, is beyond sharing.
      safeguard: share of each head's slots that others cannot take.

    Memory: the arrays of a layer are as long as its longest head may become, up to nearly K times the average, so that
    this costs memory instead of saving any; the count of live slots is what the paper counts. The authors keep heads of
    different lengths in one flat array instead, for kernels that take such.
    """
    if isinstance(base, Policy) and base.then is not None and base.importance is None:
        raise PolicyError(f"adakv({base.name}): it is combined already; give the compressor itself, such as snapkv.")
    if not isinstance(base, Policy) or base.then is None or base.importance is None or base.scope is None:
        raise PolicyError(f"adakv(): {getattr(base, 'name', base)!r} is no compressor; give one such as snapkv.")
    importance, scope = base.importance, base.scope
    share = exact(number_argument("safeguard", safeguard, minimum=0.0, maximum=1.0))

    def kept(stats: Stats, view: View) -> Array:
        """[B, K, S] bool."""
        batch, kv_heads, size = view.position.shape
        protected = view.live & scope.protected(stats, view)
        # [B, 1, 1]: slots of a head beyond the window, and those of them that are its own
        room = view.budget[:, None, None] - jnp.sum(protected, axis=2, keepdims=True, dtype=jnp.int32)[:, :1]
        own = room * share.numerator // share.denominator
        score = importance.score(stats, view)
        safe = largest(score, jnp.where(protected, -1, view.position), own)
        # Of equal importances the lower head's, then the newer: one row of all heads, ordered so.
        head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
        order = jnp.where(protected | safe | ~view.live, -1, view.position + (kv_heads - 1 - head) * size)
        rest = largest(score.reshape(batch, -1), order.reshape(batch, -1), (kv_heads * (room - own))[:, 0])
        # A prompt within the budget is left alone.
        alone = (view.prompt <= view.budget)[:, None, None]
        return view.live & (protected | safe | rest.reshape(view.position.shape) | alone)

    def most(budget: int, kv_heads: int) -> int:
        window = min(scope.count(budget), budget)  # a prompt that is shorter than the window is left alone
        room = budget - window
        own = room * share.numerator // share.denominator
        return window + own + kv_heads * (room - own)

    return base._replace(
        priority=lambda stats, view: jnp.where(kept(stats, view), jnp.inf, 0.0),
        limits=lambda stats, view: jnp.sum(kept(stats, view), axis=2, keepdims=True, dtype=jnp.int32),
        most=most,
        name=f"adakv[{base.name}]",
        importance=None,
        scope=None,
    )
