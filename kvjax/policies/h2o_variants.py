"""H2O's evaluation variants, which keep every token and hide what the policy would evict (arXiv:2306.14048)."""

import dataclasses
from typing import Any

from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, Policy
from kvjax.policies.budget import Budget
from kvjax.policies.window import full
from kvjax.statistics import Statistic


@dataclasses.dataclass(frozen=True)
class Reads(Policy):
    """Keeps every token and brings a selection of the slots that a query reads. For evaluation: frees no memory.

    Attributes:
      keep: the policy that keeps every token.
      selection: which of the slots a query reads; see `kvjax.selection`.
      name: see `Policy`.
    """

    keep: Evict
    selection: Any  # selections are built on this package
    name: str = dataclasses.field(default="reads", compare=False)

    @property
    def positions(self) -> str:  # type: ignore[override]
        return self.keep.positions

    @property
    def group_reduce(self) -> str:  # type: ignore[override]
        return self.keep.group_reduce

    @property
    def budget(self) -> Budget | None:  # type: ignore[override]
        """The number of slots that a query may read."""
        return self.selection.budget

    @property
    def needs(self) -> frozenset[Statistic]:
        return self.keep.needs


def hidden(policy: Evict, variant: str, recent: int | None) -> Policy:
    """The policy that keeps every token and hides what `policy` would evict.

    Args:
      policy: `h2o` with a budget.
      variant: ``masked``, ``global`` or ``local``; see `kvjax.selection.h2o`.
      recent: how many newest positions are always read; None = ⌊b/2⌋.

    Raises:
      PolicyError: a policy with a merge or without a budget.
    """
    # Imported here: selections are built on this package's views and budgets.
    from kvjax.selection.h2o import Allowed, Hindsight, Local

    if policy.merge is not None:
        raise PolicyError(f"policy {policy.name}: it evicts nothing that could be merged; leave out merge.")
    if policy.budget is None:
        raise PolicyError(f"policy {policy.name}: without a budget it hides nothing; give slots or a fraction.")
    selection = {"masked": Allowed, "global": Hindsight, "local": Local}[variant]
    # Every slot is live, so that a rank is a position, and "cache" the same as "original".
    keep = dataclasses.replace(full(positions=policy.positions), group_reduce=policy.group_reduce)
    return Reads(
        keep=keep,
        selection=selection(budget=policy.budget, recent=None if recent is None else int(recent)),
        name=policy.name,
    )
