"""Checks shared by selections: of their arguments, and of the policies that they are combined with."""

import functools

from kvjax import arguments
from kvjax.errors import SelectionError
from kvjax.policies.base import Policy
from kvjax.policies.traits import merging, phases

factory = arguments.checked_call(SelectionError)  # decorates the factories of selections
named = functools.partial(arguments.named, noun="selection", error=SelectionError)


def merges(policy: Policy) -> str | None:
    """Returns why a selection cannot be combined with a policy that merges; None if it does not merge."""
    name = merging(policy)
    return name and (
        f"the policy {name} merges evicted pairs into others, whose keys then differ from those that the selection "
        "ranked; use a policy without merge."
    )


__all__ = ["factory", "merges", "named", "phases"]
