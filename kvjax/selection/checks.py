"""Checks shared by selections: of their arguments, and of the policies that they are combined with."""

import functools

from kvjax import arguments
from kvjax.errors import SelectionError
from kvjax.policies.base import Evict, Policy
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases

factory = arguments.checked_call(SelectionError)  # decorates the factories of selections
named = functools.partial(arguments.named, noun="selection", error=SelectionError)


def phases(policy: Policy) -> tuple[Evict, ...]:
    """Returns the policies, in order of time, of the heads that a selection applies to; the last of them decodes.

    Raises:
      SelectionError: an unknown kind of policy.
    """
    match policy:
        case Evict():
            return (policy,)
        case Phases():
            return (policy.prompt, policy.decode)
        case Split():
            keep = [each for each in (policy.chosen, policy.others) if each.budget is None]
            return ((keep or [policy.chosen])[0],)
        case WithSelection():
            return (policy.keep,)
    raise SelectionError(f"{policy!r} cannot be combined with a selection; give a policy of kvjax.policies.")


def rotated_once(positions: str) -> str | None:
    """Returns why a selection that keeps numbers of rotated keys cannot be used with `positions`; None if it can."""
    if positions == "original":
        return None
    return (
        f"it keeps numbers of rotated keys, and positions={positions!r} rotates keys again at every step; use "
        "positions='original'."
    )


def keeps_all(policy: Policy) -> str | None:
    """Returns why a selection that needs every token cannot be combined with a policy; None if it keeps all."""
    name = next((each.name for each in phases(policy) if each.budget is not None), None)
    return name and f"it needs every token of the prompt, and the policy {name} evicts; use full()."


def aligned(policy: Policy) -> str | None:
    """Returns why the heads of a policy may hold different positions; None if all hold the same."""
    for each in phases(policy):
        if each.budget is not None and not (each.importance.shared_by_heads or each.importance.by_age):
            return (
                f"all heads of a layer read the same positions, and under the policy {each.name} each head holds its "
                "own; use full(), a window, or tova()."
            )
    return None


def merges(policy: Policy) -> str | None:
    """Returns why a selection cannot be combined with a policy that merges; None if it does not merge."""
    name = next((each.name for each in phases(policy) if each.merge is not None), None)
    return name and (
        f"the policy {name} merges evicted pairs into others, whose keys then differ from those that the selection "
        "ranked; use a policy without merge."
    )
