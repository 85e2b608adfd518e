"""Prompt-phase compressors that rank by the attention of the prompt's last queries: SnapKV, PyramidKV and AdaKV."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.base import (
    Evict,
    Importance,
    Policy,
    Scope,
    Stats,
    View,
    compress,
    count_argument,
    factory,
    fixed_slots,
    named,
    number_argument,
)
from kvjax.policies.budget import BudgetLike, Fraction, Pyramid, Shared, Slots, as_budget
from kvjax.policies.phases import Phases
from kvjax.statistics import Statistic, prompt_tail

Array = jax.Array
POOLINGS = ("avg", "max")


@dataclasses.dataclass(frozen=True)
class ObservationWindow(Importance):
    """A slot is worth the attention of the prompt's last queries, pooled over its neighbours (SnapKV, section 4).

    Attributes:
      window: the number of queries; their own positions are not among the neighbours.
      kernel: the number of positions that are pooled, odd, centred on the slot's own.
      pooling: ``avg`` (over the whole kernel: beyond both ends zeros count) or ``max``.
    """

    window: int = 32
    kernel: int = 5
    pooling: str = "avg"

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "kernel", count_argument("kernel", self.kernel, minimum=1))
        if self.kernel % 2 == 0:
            raise PolicyError(f"kernel={self.kernel} has no centre; give an odd number.")
        if self.pooling not in POOLINGS:
            raise PolicyError(f"pooling={self.pooling!r} is not valid; use {' or '.join(map(repr, POOLINGS))}.")

    @property
    def statistic(self) -> Statistic:
        """The attention of the last `window` queries of the prompt."""
        return prompt_tail(self.window)

    @property
    def needs(self) -> frozenset[Statistic]:  # type: ignore[override]
        return frozenset({self.statistic})

    def score(self, stats: Stats, view: View) -> Array:
        average = self.pooling == "avg"
        padding = 0.0 if average else -jnp.inf
        size, n = view.position.shape[2], view.prompt[:, None, None]
        # [B, K, S]: no slot of a prompt has been evicted yet, so that a token's place is its position.
        place = jnp.where(view.live, view.position, size)
        scatter = jax.vmap(jax.vmap(lambda row, new: jnp.zeros(size, jnp.float32).at[row].set(new, mode="drop")))
        # [B, K, S]: by position, without the window's own
        in_order = jnp.where(jnp.arange(size) < n - self.window, scatter(place, stats[self.statistic.name]), padding)
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
      window: how many.
      beyond: whether the budget must be larger than the window.
    """

    window: int
    beyond: bool = True
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))

    def protected(self, stats: Stats, view: View) -> Array:
        return view.position >= (view.prompt - self.window)[:, None, None]

    def count(self, budget: int) -> int:
        if self.beyond and budget <= self.window:
            raise PolicyError(f"a window of {self.window} needs a larger budget than {budget}: it is part of it.")
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
    """Keeps what the prompt's last queries attended to, and its neighbours (SnapKV, arXiv:2404.14469, section 4).

    Importance pool(Σ_i m_ij) over the last `window` queries i, pooled over `kernel` positions around j; the window is
    protected.

    Args:
      budget: slots per KV head that remain of a prompt, the window included; see `evict`. A shorter prompt is left as
        it is, and decoding appends; for another policy while decoding see `after_prefill`.
      window: see `ObservationWindow`; smaller than the budget.
      kernel: see `ObservationWindow`.
      pooling: see `ObservationWindow`.
      positions: see `evict`.
      group_reduce: see `evict`.

    The authors' code repeats the keys of grouped queries, so that each query head selects for itself; here a KV head
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
      budget: of the average layer, a number of slots or a fraction of the prompt; see `Pyramid`.
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
            raise PolicyError(f"budget {budget!r} is not one number; its layers' budgets follow from that.")
        for each in fixed_slots(average):
            PromptEnd(window).count(each)
    return Evict(
        importance=ObservationWindow(window, kernel, pooling),
        # A layer may have no slots but the window's.
        scope=PromptEnd(window, beyond=False),
        budget=Pyramid(average, count_argument("window", window, minimum=1), count_argument("beta", beta, minimum=1)),
        when="prompt_end",
        positions=positions,
        group_reduce=group_reduce,
        name="pyramidkv",
    )


@factory
def adakv(base: Policy, *, safeguard: float = 0.2) -> Evict:
    """Shares a layer's slots among its heads by need: `base`'s budget is the average head's (AdaKV, arXiv:2407.11550).

    See `Shared` for the rule.

    Args:
      base: a compressor such as snapkv or pyramidkv; what it protects is not shared.
      safeguard: the share of each head's slots that other heads cannot take.

    Raises:
      PolicyError: a policy that is not a compressor, or that is combined already.

    Memory: the arrays of a layer are as long as its longest head may become, up to nearly K times the average, so this
    costs memory instead of saving any; the paper counts live slots. The authors hold heads of different lengths in one
    flat array, for kernels that accept it.
    """
    if isinstance(base, Phases) or (isinstance(base, Evict) and isinstance(base.budget, Shared)):
        raise PolicyError(f"adakv({base.name}): it is combined already; give the compressor itself, such as snapkv.")
    if not isinstance(base, Evict) or base.when != "prompt_end" or base.budget is None:
        raise PolicyError(f"adakv(): {getattr(base, 'name', base)!r} is no compressor; give one such as snapkv.")
    share = number_argument("safeguard", safeguard, minimum=0.0, maximum=1.0)
    return dataclasses.replace(base, budget=Shared(base.budget, share), name=f"adakv[{base.name}]")
