"""H2O's evaluation variants, which keep every token and hide those that the policy would evict (arXiv:2306.14048)."""

import dataclasses
from typing import Any

from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, Policy
from kvjax.policies.budget import Budget
from kvjax.policies.window import full

# `kvjax.selection` is imported inside of functions: it is built on this package.


@dataclasses.dataclass(frozen=True)
class WithSelection(Policy):
    """Keeps every token and has a selection of the slots that a query reads. For evaluation: frees no memory.

    Attributes:
      keep: a policy that keeps every token.
      selection: selects the slots that a query reads; see `kvjax.selection`.
      name: see `Policy`.

    Raises:
      PolicyError: a policy that does not keep every token, or a selection that is none.
    """

    keep: Evict
    selection: Any
    name: str = dataclasses.field(default="with_selection", compare=False)

    def __post_init__(self) -> None:
        from kvjax.selection.base import Selection

        if not isinstance(self.keep, Evict) or self.keep.budget is not None:
            raise PolicyError(f"policy {self.name}: keep={self.keep!r} does not keep every token; give full().")
        if not isinstance(self.selection, Selection):
            raise PolicyError(
                f"policy {self.name}: selection={self.selection!r} is not a selection; give one such as "
                "kvjax.selection.quest(budget=512)."
            )

    @property
    def positions(self) -> str:
        return self.keep.positions

    @property
    def group_reduce(self) -> str:
        return self.keep.group_reduce

    @property
    def budget(self) -> Budget | None:
        """The number of slots that a query may read."""
        return self.selection.budget


def hidden(policy: Evict, variant: str, recent: int | None) -> WithSelection:
    """Returns the policy that keeps every token and hides those that `policy` would evict.

    Args:
      policy: `h2o` with a budget and without a merge.
      variant: ``masked``, ``global`` or ``local``; see `kvjax.selection.h2o`.
      recent: the number of newest positions that are always read; None = ⌊b/2⌋.
    """
    from kvjax.selection.h2o import Allowed, Hindsight, Local

    assert policy.budget is not None
    selection = {"masked": Allowed, "global": Hindsight, "local": Local}[variant]
    # Every slot is live, so that a rank is a position, and "cache" the same as "original".
    keep = dataclasses.replace(full(positions=policy.positions), group_reduce=policy.group_reduce)
    return WithSelection(
        keep=keep,
        selection=selection(budget=policy.budget, recent=None if recent is None else int(recent)),
        name=policy.name,
    )
