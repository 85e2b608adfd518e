"""Checks shared by selections: of their arguments, and of the policies that they are combined with."""

import functools

from kvjax import arguments
from kvjax.errors import SelectionError
from kvjax.policies.base import Policy
from kvjax.policies.traits import evicting, merging, per_head_positions, phases, with_ring

factory = arguments.checked_call(SelectionError)  # decorates the factories of selections
named = functools.partial(arguments.named, noun="selection", error=SelectionError)


def rotated_once(positions: str) -> str | None:
    """Returns why a selection that keeps numbers of rotated keys cannot be used with `positions`; None if it can."""
    if positions == "original":
        return None
    return (
        f"its index depends on rotated keys, and positions={positions!r} rotates keys again at every step; use "
        "positions='original'."
    )


def keeps_all(policy: Policy) -> str | None:
    """Returns why a selection that needs every token cannot be combined with a policy; None if it keeps all."""
    name = evicting(policy)
    return name and f"it needs every token of the prompt, and the policy {name} evicts; use full()."


def aligned(policy: Policy) -> str | None:
    """Returns why the heads of a policy may hold different positions; None if all hold the same."""
    name = per_head_positions(policy)
    return name and (
        f"all heads of a layer read the same positions, and under the policy {name} each head holds its own; use "
        "full(), a window, or tova()."
    )


def merges(policy: Policy) -> str | None:
    """Returns why a selection cannot be combined with a policy that merges or has a ring; None if it has neither."""
    if name := with_ring(policy):
        return f"the policy {name} reproduces released code that reads every slot; use h2o with variant='drop'."
    name = merging(policy)
    return name and (
        f"the policy {name} merges evicted pairs into others, whose keys then differ from those that the selection "
        "ranked; use a policy without merge."
    )


__all__ = ["factory", "merges", "named", "phases"]
