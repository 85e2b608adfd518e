"""The spec and the groups of a target's cache: as drafts are verified, and as a level that reads it copies slots."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvjax.cache.groups import Group, Phase
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import slots_bucket
from kvjax.cache.planning.lowering import Budgets
from kvjax.cache.spec import CacheSpec
from kvjax.errors import PolicyError
from kvjax.parallel import distributed
from kvjax.policies import full
from kvjax.policies.base import Policy
from kvjax.policies.traits import observing, ranks_by_content
from kvjax.selection.base import Selection
from kvjax.selection.everything import everything
from kvjax.speculation import slot_copies
from kvjax.speculation.drafts import Level, Seen
from kvjax.speculation.levels import LevelPlan
from kvjax.speculation.slot_copies import GroupBudgets

Array = jax.Array
HostBudgets = tuple[tuple[np.ndarray | None, ...], ...]  # as `GroupBudgets`, on the host


def target_spec(levels: Sequence[Level], plain: CacheSpec) -> CacheSpec:
    """Returns the spec of a full cache with the statistics and the index that levels read.

    Args:
      levels: that draft for it.
      plain: of the same cache without drafts.

    Raises:
      PolicyError: the cache cannot be verified in blocks, or ranked by the policy of a level.
    """
    selection = next((each.draft for each in levels if isinstance(each.draft, Selection)), everything())
    ranks = next((each.draft for each in levels if isinstance(each.draft, Seen)), None)
    policy: Policy = full() if ranks is None else observing(ranks.policy)  # type: ignore[arg-type]  # checked
    if not plain.selection.reads_all:
        raise PolicyError(
            f"selection={plain.selection!r} reads blocks whole and single tokens not, so that drafts cannot be "
            "verified in blocks; leave it out, or give it as draft."
        )
    if ranks is not None and plain.storage.on_host and ranks_by_content(ranks.policy):
        raise PolicyError(
            f"seen({ranks.policy.name}) ranks slots by keys or by statistics of attention, and the cache is in "
            "host memory; use a policy of positions such as window, a selection, or a cache on the device."
        )
    return CacheSpec(policy, plain.storage, selection)


def check_full(policy: Policy, drafting: str) -> None:
    """Checks that a target keeps every token.

    Args:
      policy: of the target.
      drafting: the name of the function by which another policy can draft, ``own`` or ``seen``.

    Raises:
      PolicyError: it does not.
    """
    if policy != full():
        raise PolicyError(
            f"policy {policy.name} is not full(): drafts are verified in blocks, which equal single tokens only where "
            "nothing is evicted. Use full(), and let the policy draft: "
            f"speculate=kvjax.speculation.{drafting}({policy.name}(...))."
        )


def check_target(layout: CacheLayout) -> None:
    """Checks that a block of tokens equals single steps.

    Raises:
      PolicyError: it does not.
    """
    for group in layout.groups:
        reason = None
        if group.evicts:
            reason = "layers with a sliding window evict what has left it"
        elif group.arrangement.sized_by_extent or group.storage.divided or not group.storage.exact:
            reason = f"storage {group.storage.label} encodes tokens"
        elif group.slot_axes:
            reason = "slots are divided over devices"
        if reason is not None:
            raise PolicyError(
                f"drafts are verified in blocks, which equal single steps only in a full cache: {reason}; use "
                "kvjax.generate without speculation."
            )


def map_groups(phase: Phase, change: Callable[[Group], Group]) -> Phase:
    """Returns a phase with other groups."""
    return tuple(tuple(change(group) for group in layer) for layer in phase)


def step_phase(decode: Phase) -> Phase:
    """Returns the target's groups as plain generation feeds a token."""
    return map_groups(decode, lambda group: dataclasses.replace(group, selection=everything()))


def verify_phase(decode: Phase) -> Phase:
    """Returns the target's groups as a block is verified."""
    return map_groups(decode, slot_copies.plain_group)


def ranking_phase(layout: CacheLayout, budgets: Budgets) -> Phase:
    """Returns the groups whose policy ranks slots.

    Args:
      layout: the policy of `Seen`, lowered.
      budgets: of some rows under this policy.
    """
    return layout.prompt if _compresses(budgets) else layout.decode


def ranking_budgets(budgets: Budgets) -> HostBudgets:
    """Returns the number of slots that each row's policy ranks highest; see `ranking_phase`."""
    return budgets.prompt if _compresses(budgets) else budgets.decode


def _compresses(budgets: Budgets) -> bool:
    """Whether a policy has its budget at the end of the prompt."""
    return not any(each is not None for layer in budgets.decode for each in layer)


def most_fed(levels: Sequence[Level], number: int) -> int:
    """Returns the most tokens that a level is fed in a round.

    They are the drafts of all levels up to the next one, and what was chosen after them.
    """
    return sum(each.gamma or 0 for each in levels[: number + 2]) + 2


def copying_level(
    base: LevelPlan, decode: Phase, ranking: Phase, budgets: GroupBudgets | HostBudgets | None, tail: int
) -> LevelPlan:
    """Returns the plan of a level that copies slots of the target.

    Args:
      base: the plan without what depends on the target.
      decode: the target's groups.
      ranking: see `ranking_phase`; read if `budgets` are given.
      budgets: at least the slots that a policy ranks highest; None if a selection chooses the slots.
      tail: the most tokens that the level is fed in a round.
    """
    if budgets is None:
        ranking = map_groups(
            decode, lambda group: dataclasses.replace(
                group, needs=frozenset(), step_implementation=None, attn_implementation="xla"
            ),
        )  # fmt: skip
    slots = budgets or tuple((None,) * len(layer) for layer in decode)
    copies = tuple(
        tuple(
            slot_copies.copy_group(group, _width(group, own, selects=budgets is None), tail)
            for group, own in zip(*each, strict=True)
        )
        for each in zip(decode, slots, strict=True)
    )
    return dataclasses.replace(base, phase=copies, choosing=ranking, selects=budgets is None, tail=tail)


def _width(group: Group, slots: Array | np.ndarray | None, *, selects: bool) -> int:
    """Returns the number of slots of a copy of a group."""
    if selects:
        width = group.selection.width(group.capacity)
        return group.capacity if width is None else width
    return group.capacity if slots is None else slots_bucket(int(np.max(distributed.to_host(slots))))
