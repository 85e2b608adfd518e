"""Policies by layer: each layer, or each run of layers, under a policy of its own (LongGen)."""

import dataclasses
import itertools

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError, shown
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.phases import Phases
from kvjax.policies.window import full, window

Own = Evict | Phases


@dataclasses.dataclass(frozen=True)
class SplitLayers(Policy):
    """A policy for each layer, or for each run of layers; each layer has a cache of its own capacity.

    Attributes:
      policies: one per layer of the model; or one per run of layers, if there are `shares`.
      shares: the relative number of layers of each run, from the first layer on; None = one layer each. Of L layers,
        run i begins at layer ⌊L · (sum of the shares before i) / (sum of all shares)⌋.
      name: see `Policy`.

    Raises:
      PolicyError: no policies, a policy that is split or hides slots, different `positions`, or `shares` that are not
        one whole number per policy.
    """

    policies: tuple[Own, ...]
    shares: tuple[int, ...] | None = None
    name: str = dataclasses.field(default="split_layers", compare=False)

    def __post_init__(self) -> None:
        own = tuple(self.policies) if isinstance(self.policies, list | tuple) else (self.policies,)
        object.__setattr__(self, "policies", own)
        if not own:
            raise PolicyError(f"{self.name}: no policies are given; give one per layer, or for each of the shares.")
        for each in own:
            if not isinstance(each, Policy):
                raise PolicyError(
                    f"{self.name}: {each!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256)."
                )
            if not isinstance(each, Evict | Phases):
                raise PolicyError(
                    f"{self.name}: {each.name} is split by itself or hides slots; give policies such as h2o, snapkv or "
                    "window."
                )
            if isinstance(each, Phases):
                each = each.prompt
            if each.budget is not None and each.budget.over_layers:
                raise PolicyError(f"{self.name}: {each.name} shares the slots of all layers; use it by itself.")
        for one, two in itertools.pairwise(own):
            if one.positions != two.positions:
                raise PolicyError(
                    f"{self.name}({one.name}, {two.name}): positions {one.positions!r} and {two.positions!r} differ; "
                    "give all policies the same."
                )
        if self.shares is not None:
            object.__setattr__(self, "shares", self._checked(self.shares))

    def _checked(self, shares: object) -> tuple[int, ...]:
        shares = shares.tolist() if hasattr(shares, "tolist") else shares
        if not isinstance(shares, list | tuple) or len(shares) != len(self.policies):
            raise PolicyError(
                f"{self.name}: shares={shown(shares)} is not valid; give a whole number for each of the "
                f"{len(self.policies)} policies, or None for a policy per layer."
            )
        return tuple(count_argument(f"{self.name}: each of the shares", each, minimum=1) for each in shares)

    @property
    def positions(self) -> str:
        return self.policies[0].positions

    @property
    def group_reduce(self) -> str:
        """The `group_reduce` of the first policy; each layer uses that of its own."""
        return self.policies[0].group_reduce

    @property
    def budget(self) -> None:
        """None: each of the policies has its own."""
        return None

    @property
    def needs(self) -> frozenset[Statistic]:
        return frozenset().union(*(each.needs for each in self.policies))

    def of_layers(self, num_layers: int) -> tuple[Own, ...]:
        """Returns the policy of each layer of a model.

        Raises:
          PolicyError: without `shares`, a number of policies that is not the number of layers.
        """
        if self.shares is None:
            if len(self.policies) != num_layers:
                raise PolicyError(
                    f"policy {self.name}: {len(self.policies)} policies were given for a model of {num_layers} layers; "
                    "give one per layer, or shares= for runs of layers."
                )
            return self.policies
        ends = list(itertools.accumulate(self.shares))
        starts = [num_layers * before // ends[-1] for before in (0, *ends)]
        runs = zip(self.policies, itertools.pairwise(starts), strict=True)
        return tuple(own for own, (start, stop) in runs for _ in range(start, stop))


@factory
def split_layers(*policies: Policy, shares: object = None, name: str = "split_layers") -> SplitLayers:
    """Gives each layer, or each run of layers, its own policy and a cache of its own capacity.

    ``split_layers(full(), full(), h2o(64), h2o(64))`` is for a model of four layers;
    ``split_layers(window(64), full(), window(64), shares=(1, 2, 1))`` keeps every token in the middle half of a model.

    Args:
      policies: one per layer of the model, or one per run of layers: eviction policies, compressors, `full`, or
        `phases` of these.
      shares: the relative number of layers of each run; None = one layer each. See `SplitLayers`. A run can be empty
        in a model of few layers.
      name: shown in reports.

    Raises:
      PolicyError: see `SplitLayers`. The number of policies is compared with the model's layers when a cache is made.
    """
    return SplitLayers(policies, shares, name)  # type: ignore[arg-type]  # checked there


@factory
def longgen(
    budget: BudgetLike, *, sinks: int = 4, shares: object = (1, 1, 1), positions: str = "original"
) -> SplitLayers:
    """Keeps every token in the middle third of the layers, and a window with sinks in the others (arXiv:2410.01485).

    Args:
      budget: slots per KV head of the first and the last layers, the sinks included; see `evict`.
      sinks: the number of first positions that these layers keep; see `window`.
      shares: the relative numbers of layers before the middle, in it and after it; see `SplitLayers`.
      positions: see `evict`.

    Raises:
      PolicyError: `shares` that are not three whole numbers of at least 1, or what `window` raises.

    LongGen trains a model with these windows, or with blocks of tokens instead; here any model can be used.
    """
    streaming = window(budget, sinks=sinks, positions=positions)
    return split_layers(streaming, full(positions=positions), streaming, shares=shares, name="longgen")
