"""What a user says about a cache: which slots stay, how they are held, which of them a query reads."""

import dataclasses
from typing import Any

from kvjax.errors import PolicyError
from kvjax.policies.base import POSITIONS, Evict, Policy
from kvjax.policies.phases import Phases
from kvjax.policies.h2o_variants import Reads
from kvjax.policies.heads import Split
from kvjax.selection import everything
from kvjax.selection.base import Selection
from kvjax.storage import dense
from kvjax.storage.base import Storage


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A policy, a storage and a selection; accepted wherever a policy is.

    Attributes:
      policy: which slots stay.
      storage: how a slot is held.
      selection: which held slots a query reads.
      positions: ``original`` or ``cache``, instead of the policy's own; None = the policy's.

    Raises:
      PolicyError: an attribute of another type.
    """

    policy: Policy
    storage: Storage = dataclasses.field(default_factory=dense)
    selection: Selection = dataclasses.field(default_factory=everything)
    positions: str | None = None

    def __post_init__(self) -> None:
        for field, kind, example in (
            ("policy", Policy, "kvjax.policies.h2o(0.2)"),
            ("storage", Storage, "kvjax.storage.int8()"),
            ("selection", Selection, "kvjax.selection.quest(budget=512)"),
        ):
            if not isinstance(given := getattr(self, field), kind):
                raise PolicyError(f"{field}={given!r} is not a {kind.__name__}; give one such as {example}.")
        if self.positions not in (None, *POSITIONS):
            raise PolicyError(f"positions={self.positions!r} is not valid; use 'original', 'cache' or None.")
        if isinstance(self.policy, Reads):
            if not self.selection.reads_all:
                raise PolicyError(
                    f"policy {self.policy.name} chooses itself what is read; selection={self.selection!r} has no place "
                    "beside it."
                )
            object.__setattr__(self, "selection", self.policy.selection)
        if self.positions is not None and self.positions != self.policy.positions:
            object.__setattr__(self, "policy", with_positions(self.policy, self.positions))

    @property
    def name(self) -> str:
        """The policy, and what differs from a dense cache that is read whole."""
        parts = [self.policy.name]
        if not self.storage.exact:
            parts.append(self.storage.name)
        if not (self.selection.reads_all or isinstance(self.policy, Reads)):
            parts.append(self.selection.name)
        return " + ".join(parts)


def as_spec(policy: Any, storage: Storage | None = None, selection: Selection | None = None) -> CacheSpec:
    """A `CacheSpec` from what a caller gave: a policy or a spec, with a storage and a selection beside it.

    Raises:
      PolicyError: something else, or a spec together with another storage or selection.
    """
    if isinstance(policy, CacheSpec):
        for field, given in (("storage", storage), ("selection", selection)):
            own = getattr(policy, field)
            if given is not None and given != own and own != getattr(CacheSpec(policy.policy), field):
                raise PolicyError(f"{field} is given twice: {own!r} in the CacheSpec, and {given!r}; leave one out.")
        changes = {"storage": storage, "selection": selection}
        return dataclasses.replace(policy, **{field: x for field, x in changes.items() if x is not None})
    if not isinstance(policy, Policy):
        raise PolicyError(f"{policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256).")
    return CacheSpec(policy, storage or dense(), selection or everything())


def with_positions(policy: Policy, positions: str) -> Policy:
    """The policy with RoPE at other positions."""
    match policy:
        case Evict():
            return dataclasses.replace(policy, positions=positions)
        case Split():
            return dataclasses.replace(
                policy, chosen=with_positions(policy.chosen, positions), others=with_positions(policy.others, positions)
            )
        case Phases():
            return dataclasses.replace(
                policy, prompt=with_positions(policy.prompt, positions), decode=with_positions(policy.decode, positions)
            )
        case Reads():
            return dataclasses.replace(policy, keep=with_positions(policy.keep, positions))
    raise PolicyError(f"policy {policy.name}: its positions are its own; set them where it is built.")
