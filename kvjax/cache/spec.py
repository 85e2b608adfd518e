"""The specification of a cache: which slots stay, how they are held, and which of them a query reads."""

import dataclasses

from kvjax.errors import PolicyError, SelectionError, StorageError
from kvjax.policies.base import POSITIONS, Evict, Policy
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.layers import SplitLayers
from kvjax.policies.phases import Phases
from kvjax.selection.attributes import check_selection
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.storage.base import Storage
from kvjax.storage.dense import dense


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A policy, a storage and a selection; accepted wherever a policy is.

    Attributes:
      policy: which slots stay.
      storage: how a slot is held.
      selection: which held slots a query reads.
      positions: ``original`` or ``cache``, instead of the policy's own; None = the policy's.

    Raises:
      PolicyError: a policy of another type, or positions that are not valid.
      StorageError: a storage of another type.
      SelectionError: a selection of another type, or one in addition to the policy's own.
    """

    policy: Policy
    storage: Storage = dataclasses.field(default_factory=dense)
    selection: Selection = dataclasses.field(default_factory=everything)
    # The policy has them; two specs that say the same in two ways are equal.
    positions: str | None = dataclasses.field(default=None, compare=False)
    # The policy's own selection. `dataclasses.replace` passes it on, so that a spec of another policy does not have it.
    _own: Selection | None = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for field, kind, error, example in (
            ("policy", Policy, PolicyError, "kvjax.policies.h2o(0.2)"),
            ("storage", Storage, StorageError, "kvjax.storage.int8()"),
            ("selection", Selection, SelectionError, "kvjax.selection.quest(budget=512)"),
        ):
            if not isinstance(given := getattr(self, field), kind):
                raise error(f"{field}={given!r} is not a {kind.__name__}; give one such as {example}.")
        check_selection(self.selection)
        if self.positions not in (None, *POSITIONS):
            raise PolicyError(f"positions={self.positions!r} is not valid; use 'original', 'cache' or None.")
        if self._own is not None and self.selection == self._own:
            object.__setattr__(self, "selection", everything())
        object.__setattr__(self, "_own", None)
        if isinstance(self.policy, WithSelection):
            if not self.selection.reads_all and self.selection != self.policy.selection:
                raise SelectionError(
                    f"policy {self.policy.name} has a selection of its own; selection={self.selection!r} cannot be "
                    "added."
                )
            object.__setattr__(self, "selection", self.policy.selection)
            object.__setattr__(self, "_own", self.policy.selection)
        if self.positions is not None and self.positions != self.policy.positions:
            object.__setattr__(self, "policy", with_positions(self.policy, self.positions))

    @property
    def name(self) -> str:
        """The name of the policy, followed by those of a storage that is not dense and of a selection."""
        parts = [self.policy.name]
        if self.storage.new_tokens_separate:
            parts.append(self.storage.label)
        if not (self.selection.reads_all or isinstance(self.policy, WithSelection)):
            parts.append(self.selection.name)
        return " + ".join(parts)


def as_spec(policy: object, storage: Storage | None = None, selection: Selection | None = None) -> CacheSpec:
    """Returns a `CacheSpec` for the arguments of a public function.

    Args:
      policy: a policy or a `CacheSpec`.
      storage: instead of a dense one; None if not given.
      selection: instead of one that reads everything; None if not given.

    Raises:
      PolicyError: a policy of another type, or a spec together with another storage or selection.
    """
    if isinstance(policy, CacheSpec):
        for field, given, default in (("storage", storage, dense()), ("selection", selection, everything())):
            own = getattr(policy, field)
            if given is not None and given != own and own != default:
                raise PolicyError(f"{field} is given twice: {own!r} in the CacheSpec, and {given!r}; leave one out.")
        return dataclasses.replace(
            policy,
            storage=policy.storage if storage is None else storage,
            selection=policy.selection if selection is None else selection,
        )
    if not isinstance(policy, Policy):
        raise PolicyError(f"{policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256).")
    return CacheSpec(policy, dense() if storage is None else storage, everything() if selection is None else selection)


def on_device(spec: CacheSpec) -> CacheSpec:
    """Returns the spec with its slots in the device's memory, which changes no result."""
    return dataclasses.replace(spec, storage=spec.storage.on_device())


def with_positions(policy: Policy, positions: str) -> Policy:
    """Returns the policy with RoPE at other positions."""

    def placed(own: Evict) -> Evict:
        return dataclasses.replace(own, positions=positions)

    match policy:
        case Evict():
            return placed(policy)
        case Split():
            return dataclasses.replace(policy, chosen=placed(policy.chosen), others=placed(policy.others))
        case SplitLayers():
            own = tuple(with_positions(each, positions) for each in policy.policies)
            return dataclasses.replace(policy, policies=own)  # type: ignore[arg-type]  # of the same types
        case Phases():
            return dataclasses.replace(policy, prompt=placed(policy.prompt), decode=placed(policy.decode))
        case WithSelection():
            return dataclasses.replace(policy, keep=placed(policy.keep))
    raise PolicyError(f"policy {policy.name}: its positions cannot be changed; set them where it is built.")
