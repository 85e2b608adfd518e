"""Prompt-phase compressors that rank by the attention of the prompt's last queries: SnapKV, PyramidKV and AdaKV."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, count_argument, named
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic, prompt_tail
from kvjax.policies.allocation import Pyramid, Shared
from kvjax.policies.base import Evict, Policy, compress, factory, fixed_slots
from kvjax.policies.budget import BudgetLike, Fraction, Slots, as_budget
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.phases import Phases

Array = jax.Array
POOLINGS = ("avg", "max")


@dataclasses.dataclass(frozen=True)
class ObservationWindow(Importance):
    """Ranks a slot by the attention of the prompt's last queries, pooled over its neighbours (SnapKV, section 4).

    Attributes:
      window: the number of queries; their own positions are not pooled.
      kernel: the number of positions that are pooled, odd, centred on the slot's position.
      pooling: ``avg`` (of the whole kernel, padded with zeros at both ends) or ``max``.
    """

    window: int = 32
    kernel: int = 5
    pooling: str = "avg"

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "kernel", count_argument("kernel", self.kernel, minimum=1))
        if self.kernel % 2 == 0:
            raise PolicyError(f"kernel={self.kernel} has no centre; give an odd number.")
        choice_argument("pooling", self.pooling, POOLINGS)

    @property
    def statistic(self) -> Statistic:
        """The attention of the last `window` queries of the prompt."""
        return prompt_tail(self.window)

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset({self.statistic})

    def score(self, stats: Stats, view: View) -> Array:
        average = self.pooling == "avg"
        padding = 0.0 if average else -jnp.inf
        size, n, window = view.position.shape[2], view.prompt[:, None, None], jnp.int32(self.window)
        if view.turn is None:
            # [B, K, S]: a token's place in the prompt is its position, since no slot has been evicted yet.
            place = jnp.where(view.live, view.position, size)
        else:
            # [B, K, S]: its place among the live slots
            age = jnp.argsort(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max), axis=2, stable=True)
            place = jnp.where(view.live, jnp.argsort(age, axis=2), size)
            # [B, 1, 1]
            window = jnp.minimum(window, view.prompt - view.turn)[:, None, None]
            # [B, K, 1]
            n = jnp.sum(view.live, axis=2, keepdims=True, dtype=jnp.int32)
        scatter = jax.vmap(jax.vmap(lambda row, new: jnp.zeros(size, jnp.float32).at[row].set(new, mode="drop")))
        # [B, K, S]: by position, without the window
        in_order = jnp.where(jnp.arange(size) < n - window, scatter(place, stats[self.statistic.name]), padding)
        pooled = jax.lax.reduce_window(
            in_order, jnp.float32(padding), jax.lax.add if average else jax.lax.max, (1, 1, self.kernel), (1, 1, 1),
            "SAME",
        )  # fmt: skip
        pooled = pooled / self.kernel if average else pooled
        return jnp.take_along_axis(pooled, jnp.minimum(place, size - 1), axis=2)


@dataclasses.dataclass(frozen=True)
class PromptEnd(Scope):
    """Protects the last positions of the prompt.

    Attributes:
      window: the number of positions.
      beyond: whether the budget must be larger than the window.
    """

    window: int
    beyond: bool = True
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))

    def protected(self, stats: Stats, view: View) -> Array:
        first = view.prompt - self.window
        return view.position >= (first if view.turn is None else jnp.maximum(first, view.turn))[:, None, None]

    def count(self, budget: int) -> int:
        if self.beyond and budget <= self.window:
            raise PolicyError(f"window={self.window} needs a larger budget than {budget}, of which it is a part.")
        return self.window


observation_window_score = ObservationWindow
protect_prompt_end = PromptEnd


@factory
def snapkv(
    budget: BudgetLike,
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "avg",
    positions: str = "original",
    group_reduce: str = "mean",
) -> Evict:
    """Keeps the slots that the prompt's last queries attend to, and their neighbours (SnapKV, arXiv:2404.14469).

    Importance pool(Σ_i m_ij) over the last `window` queries i, pooled over `kernel` positions around j (section 4); the
    window is protected.

    Args:
      budget: slots per KV head that remain of a prompt, the window included; see `evict`. A shorter prompt is kept
        whole. Decoding appends; to evict while decoding, see `after_prefill`.
      window: see `ObservationWindow`; smaller than the budget.
      kernel: see `ObservationWindow`.
      pooling: see `ObservationWindow`.
      positions: see `evict`.
      group_reduce: see `evict`.

    The authors' code repeats the keys of grouped queries, so that each query head selects its own slots; here a KV head
    selects by the mean of its group.
    """
    return compress(
        importance=ObservationWindow(window, kernel, pooling),
        scope=PromptEnd(window),
        budget=budget,
        positions=positions,
        group_reduce=group_reduce,
        name="snapkv",
    )


@factory
def pyramidkv(
    budget: BudgetLike,
    *,
    window: int = 32,
    beta: int = 20,
    kernel: int = 5,
    pooling: str = "avg",
    positions: str = "original",
    group_reduce: str = "mean",
) -> Evict:
    """SnapKV with more slots in the first layers and fewer in the last (PyramidKV, arXiv:2406.02069, section 3.2).

    Layer l of L has c_l + w slots in arrays of its own: c_l = max - l·⌊(max - min) / (L - 1)⌋, min = ⌊(b - w) / beta⌋,
    max = 2(b - w) - min; if that is more than n - w, max = n - w and min = 2(b - w) - max.

    Args:
      budget: slots of the average layer, or a fraction of the prompt; see `Pyramid`.
      window: see `ObservationWindow`; smaller than the budget.
      beta: see `Pyramid`.
      kernel: see `ObservationWindow`.
      pooling: see `ObservationWindow`.
      positions: see `evict`.
      group_reduce: see `evict`.

    Where n < 2(b - w), the authors' code gives each layer b slots; here the rule above always holds.
    """
    with named("pyramidkv"):
        average = as_budget(budget)
        if not isinstance(average, Slots | Fraction):
            raise PolicyError(
                f"budget {budget!r} is not one number, from which the budgets of the layers follow; give slots or a "
                "fraction of the prompt."
            )
        for each in fixed_slots(average):
            PromptEnd(window).count(each)
        pyramid = Pyramid(average, window, beta)
    return Evict(
        importance=ObservationWindow(window, kernel, pooling),
        # A layer may have no slots beyond the window.
        scope=PromptEnd(window, beyond=False),
        budget=pyramid,
        when="prompt_end",
        positions=positions,
        group_reduce=group_reduce,
        name="pyramidkv",
    )


@factory
def adakv(base: Policy, *, safeguard: float = 0.2, max_share: float | None = None, layers: bool = False) -> Evict:
    """Shares a layer's slots among its heads by need (AdaKV, arXiv:2407.11550), or those of all layers.

    The budget of `base` is that of the average head. See `Shared` for the rule.

    Args:
      base: a compressor such as snapkv or pyramidkv; the slots that it protects are not shared.
      safeguard: the share of each head's slots that other heads cannot take, 0 to 1.
      max_share: the most slots of a head beyond those that are protected, as a multiple of the average head's, at
        least 1; None = without limit, as published.
      layers: whether the heads of all layers share their slots, for `kvzip` and `kvgrad`. KVzip does so, with
        safeguard=0.

    Raises:
      PolicyError: a policy that is not a compressor, whose heads must hold the same positions (`chunkkv`), or that
        already shares slots or merges; with `layers`, one that does not rank by a replay of the prompt alone.

    Memory: the heads of a layer have arrays of one size, and which head gets many slots is known when they are
    allocated already, so that each has room for as many as any head may get: safeguard + K·(1 - safeguard) times the
    average, at most the prompt. With two KV heads, half of the prompt's slots are held in nine tenths of its bytes;
    ``max_share=1.25`` allocates 1.25 times the average. Without `max_share`, slots that all layers share are held in
    arrays as long as the prompt, which frees no memory. The paper counts live slots: the authors hold heads of
    different lengths in one flat array, for kernels that accept it.
    """
    if isinstance(base, Phases) or (isinstance(base, Evict) and base.budget is not None and base.budget.shared):
        raise PolicyError(f"adakv({base.name}): it is combined already; give the compressor itself, such as snapkv.")
    if not isinstance(base, Evict) or base.when != "prompt_end" or base.budget is None:
        raise PolicyError(f"adakv(): {getattr(base, 'name', base)!r} is not a compressor; give one such as snapkv.")
    if base.importance.shared_by_heads:
        raise PolicyError(
            f"adakv({base.name}): its heads must all hold the same positions, but adakv gives each its own; give a "
            "compressor that ranks each head by itself, such as snapkv."
        )
    budget = Shared(base.budget, safeguard, max_share, layers)
    return dataclasses.replace(base, budget=budget, name=f"adakv[{base.name}]")
