"""Policies over time: one for the prompt, another while decoding."""

import dataclasses

from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict, Policy, factory
from kvjax.policies.budget import Budget
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split


@dataclasses.dataclass(frozen=True)
class Phases(Policy):
    """One policy shortens the prompt when it ends, and another evicts while decoding.

    Attributes:
      prompt: evicts once, when the prompt ends.
      decode: evicts at every step from the first new token on, under its own budget; its statistics include the
        prompt.
      name: see `Policy`.

    Raises:
      PolicyError: a `prompt` that is not a compressor, a `decode` that does not evict at every step or whose heads must
        hold the same positions, or two policies of different `positions` or `group_reduce`.
    """

    prompt: Evict
    decode: Evict
    name: str = dataclasses.field(default="after_prefill", compare=False)

    def __post_init__(self) -> None:
        one, two = self.prompt, self.decode
        for policy in (one, two):
            if not isinstance(policy, Policy):
                raise PolicyError(f"after_prefill(): {policy!r} is not a policy; give one such as snapkv(budget=256).")
        if isinstance(one, Phases):
            raise PolicyError(f"after_prefill({one.name}): it is combined already; give the compressor itself.")
        if not isinstance(one, Evict) or one.when != "prompt_end":
            raise PolicyError(
                f"after_prefill({one.name}): it evicts at every step; give a compressor of prompts such as snapkv."
            )
        if isinstance(two, WithSelection):
            raise PolicyError(
                f"after_prefill(then={two.name}): it hides slots and evicts none; give a policy that evicts."
            )
        if isinstance(two, Split):
            raise PolicyError(f"after_prefill(then={two.name}): its heads have caches of their own; use it by itself.")
        if not isinstance(two, Evict) or two.when != "step":
            raise PolicyError(f"after_prefill(then={two.name}): it is for prompts only; give an eviction policy.")
        for field in ("positions", "group_reduce"):
            first, second = getattr(one, field), getattr(two, field)
            if first != second and (field == "positions" or (one.needs and two.needs)):
                raise PolicyError(
                    f"after_prefill({one.name}, then={two.name}): {field} {first!r} and {second!r} differ; "
                    "both share one cache and one attention."
                )
        if two.importance.shared_by_heads:
            raise PolicyError(
                f"after_prefill({one.name}, then={two.name}): its heads must all hold the same positions, and a "
                "compressor leaves each its own; use one that ranks every head by itself, such as "
                "tova(share_heads=False)."
            )

    @property
    def positions(self) -> str:
        return self.prompt.positions

    @property
    def group_reduce(self) -> str:
        return (self.prompt if self.prompt.needs else self.decode).group_reduce

    @property
    def budget(self) -> Budget | None:
        """The budget of `prompt`."""
        return self.prompt.budget

    @property
    def needs(self) -> frozenset[Statistic]:
        return self.prompt.needs | self.decode.needs


@factory
def after_prefill(compressor: Policy, *, then: Policy) -> Phases:
    """`compressor` shortens the prompt once, and `then` evicts while decoding, under its own budget.

    Args:
      compressor: such as snapkv(budget=256); alone, it leaves decoding to append without evicting.
      then: an eviction policy. It protects slots from the first new token on; its statistics include the prompt.

    Raises:
      PolicyError: see `Phases`.
    """
    for policy in (compressor, then):
        if not isinstance(policy, Policy):
            raise PolicyError(f"after_prefill(): {policy!r} is not a policy; give one such as snapkv(budget=256).")
    return Phases(compressor, then, f"{compressor.name}>{then.name}")  # type: ignore[arg-type]  # checked there
