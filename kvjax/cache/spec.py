"""What a user says about a cache: which slots stay, how they are held, which of them a query reads."""

import dataclasses
from typing import Any

from kvjax.errors import PolicyError
from kvjax.policies.base import POSITIONS, Evict, Policy
from kvjax.policies.h2o_variants import Reads
from kvjax.policies.heads import Split
from kvjax.policies.phases import Phases
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
            if not self.selection.reads_all and self.selection != self.policy.selection:
                raise PolicyError(
                    f"policy {self.policy.name} chooses itself what is read; selection={self.selection!r} cannot "
                    "be added."
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
    """A `CacheSpec` from what a caller gave: a policy or a spec, and perhaps a storage and a selection.

    Raises:
      PolicyError: something else, or a spec together with another storage or selection.
    """
    if isinstance(policy, CacheSpec):
        for field, given, default in (("storage", storage, dense()), ("selection", selection, everything())):
            own = getattr(policy, field)
            if given is not None and given != own and own != default:
                raise PolicyError(f"{field} is given twice: {own!r} in the CacheSpec, and {given!r}; leave one out.")
        return dataclasses.replace(
            policy, storage=storage or policy.storage, selection=selection or policy.selection
        )  # fmt: skip
    if not isinstance(policy, Policy):
        raise PolicyError(f"{policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256).")
    return CacheSpec(policy, storage or dense(), selection or everything())


def with_positions(policy: Policy, positions: str) -> Policy:
    """The policy with RoPE at other positions."""

    def placed(own: Evict) -> Evict:
        return dataclasses.replace(own, positions=positions)

    match policy:
        case Evict():
            return placed(policy)
        case Split():
            return dataclasses.replace(policy, chosen=placed(policy.chosen), others=placed(policy.others))
        case Phases():
            return dataclasses.replace(policy, prompt=placed(policy.prompt), decode=placed(policy.decode))
        case Reads():
            return dataclasses.replace(policy, keep=placed(policy.keep))
    raise PolicyError(f"policy {policy.name}: its positions are its own; set them where it is built.")
