"""What selections refuse with: errors that name the selection, and the policies that a cache is under."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from kvjax.errors import PolicyError, SelectionError
from kvjax.policies import base
from kvjax.policies.base import Evict, Policy
from kvjax.policies.h2o_variants import Reads
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases

P = ParamSpec("P")
R = TypeVar("R")


def phases(policy: Policy) -> tuple[Evict, ...]:
    """The policies of the heads that choose, in order of time; the last of them decodes."""
    match policy:
        case Evict():
            return (policy,)
        case Phases():
            return (policy.prompt, policy.decode)
        case Split():
            keep = [each for each in (policy.chosen, policy.others) if each.budget is None]
            return ((keep or [policy.chosen])[0],)
        case Reads():
            return (policy.keep,)
    raise TypeError(f"{policy!r} is no policy")


def merges(policy: Policy) -> str | None:
    """Why a selection does not compose with a policy that merges; None where it does not merge."""
    name = next((each.name for each in phases(policy) if each.merge is not None), None)
    return name and (
        f"the policy {name} merges evicted pairs into others, whose keys then differ from what the selection ranked; "
        "use a policy without merge."
    )


class named:
    """Turns a `PolicyError` that is raised inside into a `SelectionError` with the selection's name in front."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, PolicyError) and not isinstance(error, SelectionError):
            raise SelectionError(f"selection {self.name}: {error}") from None


def factory(function: Callable[P, R]) -> Callable[P, R]:
    """Turns a call with wrong arguments into a `SelectionError` that lists the arguments that are accepted."""
    checked = base.factory(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with named(function.__name__):
            return checked(*args, **kwargs)

    return call
