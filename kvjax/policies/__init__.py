"""Policies: what a cache keeps. A new one is a factory in its family's file and one line of `POLICIES`."""

import inspect
from collections.abc import Callable

from kvjax.errors import PolicyError
from kvjax.policies.base import Importance, Policy, Scope, View, evict
from kvjax.policies.h2o import h2o, heavy_only, mass, protect_newest
from kvjax.policies.window import full, local_only, protect_first, recency, window

#: Every named policy: the command line, sweeps and conformance tests take the list from here.
POLICIES: dict[str, Callable[..., Policy]] = {
    "full": full,
    "window": window,
    "local_only": local_only,
    "h2o": h2o,
    "heavy_only": heavy_only,
}


def by_name(name: str, **arguments) -> Policy:
    """The policy `name` of `POLICIES`, built with `arguments`.

    Raises:
      PolicyError: an unknown name, an argument it does not take, or values that cannot work.
    """
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; known policies: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name](**arguments)


def accepts(name: str) -> frozenset[str]:
    """The argument names that policy `name` takes."""
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; known policies: {', '.join(sorted(POLICIES))}.")
    return frozenset(inspect.signature(POLICIES[name]).parameters)


__all__ = [
    "POLICIES", "Importance", "Policy", "Scope", "View", "accepts", "by_name", "evict", "full", "h2o", "heavy_only",
    "local_only", "mass", "protect_first", "protect_newest", "recency", "window",
]  # fmt: skip
