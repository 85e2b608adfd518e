"""Questions about a policy that other rooms ask: only policies and the cache look at how a policy is made."""

import dataclasses

import numpy as np

from kvjax.errors import SelectionError
from kvjax.policies.base import Evict, Policy
from kvjax.policies.h2o import Mass, Ring
from kvjax.policies.h2o_variants import WithSelection
from kvjax.policies.heads import Split
from kvjax.policies.keys import KeyDifference, LowNorm
from kvjax.policies.layers import SplitLayers
from kvjax.policies.parameters import Parameters, distinct
from kvjax.policies.phases import Phases
from kvjax.policies.snapkv import ObservationWindow


def phases(policy: Policy) -> tuple[Evict, ...]:
    """Returns the policies of the heads or layers that a selection applies to, in order of time; the last one decodes.

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
        case SplitLayers():
            return phases(next((each for each in policy.policies if each.budget is None), policy.policies[0]))
        case WithSelection():
            return (policy.keep,)
    raise SelectionError(f"{policy!r} cannot be combined with a selection; give a policy of kvjax.policies.")


def evictions(policy: Policy) -> tuple[Evict, ...]:
    """Returns the eviction policies of all heads and phases."""
    match policy:
        case Split():
            return tuple(each for part in (policy.chosen, policy.others) for each in evictions(part))
        case SplitLayers():
            return tuple(each for part in policy.policies for each in evictions(part))
        case _:
            return phases(policy)


def parameters_of(policy: Policy) -> tuple[Parameters, ...]:
    """Returns the parameters that a policy reads.

    Raises:
      PolicyError: different parameters have the same name.
    """
    return distinct(each for part in evictions(policy) for each in part.params)


def merge_parameters_of(policy: Policy) -> tuple[Parameters, ...]:
    """Returns the parameters that the merges of a policy read.

    Raises:
      PolicyError: different parameters have the same name.
    """
    return distinct(each for part in evictions(policy) if part.merge is not None for each in part.merge.params)


def merging(policy: Policy) -> str | None:
    """Returns the name of the first of its `phases` that merges evicted pairs into others; None if there is none."""
    return next((each.name for each in phases(policy) if each.merge is not None), None)


def with_ring(policy: Policy) -> str | None:
    """Returns the name of the first of its `phases` that is H2O's ``ring`` variant; None if there is none."""
    return next((each.name for each in phases(policy) if isinstance(each.scope, Ring)), None)


def evicting(policy: Policy) -> str | None:
    """Returns the name of the first of its `phases` that evicts; None if there is none."""
    return next((each.name for each in phases(policy) if each.budget is not None), None)


def evicting_in_prompt(policy: Policy) -> str | None:
    """Returns the name of a policy of some heads that evicts before the prompt has ended; None if there is none.

    What such a policy keeps depends on the blocks that the prompt is divided into.
    """
    match policy:
        case Split():
            return evicting_in_prompt(policy.chosen) or evicting_in_prompt(policy.others)
        case SplitLayers():
            return next(filter(None, map(evicting_in_prompt, policy.policies)), None)
        case Phases():
            return evicting_in_prompt(policy.prompt)
        case Evict():
            return policy.name if policy.budget is not None and policy.when == "step" else None
    return policy.name


def evicting_while_decoding(policy: Policy, *, page: int) -> str | None:
    """Returns the name of the last of its `phases` if it evicts anything but pages of `page` slots while decoding."""
    decode = phases(policy)[-1]
    return decode.name if decode.budget is not None and decode.when == "step" and decode.page != page else None


def per_head_positions(policy: Policy) -> str | None:
    """Returns the name of the first of its `phases` under which heads may hold different positions, or None."""
    return next(
        (
            each.name
            for each in phases(policy)
            if each.budget is not None
            and not (each.importance.shared_by_heads or each.importance.by_age or each.importance.by_position)
        ),
        None,
    )


def ranking_by_more_than_position(policy: Policy) -> str | None:
    """Returns the name of the first of its `phases` under which layers may hold different positions, or None.

    Layers of different budgets may too.
    """
    return next(
        (
            each.name
            for each in phases(policy)
            if each.budget is not None
            and (each.budget.shared or not (each.importance.by_age or each.importance.by_position))
        ),
        None,
    )


def observing(policy: Evict) -> Evict:
    """Returns a policy that keeps every token, with the statistics that another one ranks slots by."""
    return dataclasses.replace(policy, budget=None, when="step", merge=None, every=1, page=1)


def ranks_by_content(policy: Policy) -> bool:
    """Returns whether a policy ranks slots by keys, values or attention, and not by positions alone."""
    return any(each.needs or each.reads for each in evictions(policy))


def refuses_ranking(policy: Policy) -> str | None:
    """Returns why a policy cannot rank the slots of a cache that keeps every token, or None if it can."""
    if not isinstance(policy, Evict):
        return "it has several policies, for heads, layers or times"
    if policy.budget is None:
        return "it keeps every token"
    if policy.budget.shared or policy.budget.over_layers or policy.budget.beyond_prompt or policy.budget.evicts_early:
        return "its heads share a budget, or its budget depends on what is held"
    if policy.merge is not None:
        return "it merges evicted slots into others"
    if policy.memory or policy.writes or policy.params or policy.replay is not None:
        return "it ranks slots by more than the statistics of attention"
    if any(each.of_selection for each in policy.needs):
        return "it ranks slots by what a selection chose"
    if policy.positions != "original":
        return "it rotates keys to their ranks, and the keys of the target are at their positions"
    if policy.page > 1:
        return "it evicts whole pages"
    return None


def is_split(policy: Policy) -> bool:
    """Returns whether some heads or layers are under one policy and others under another."""
    return isinstance(policy, Split | SplitLayers)


def one_at_every_step(policy: Policy) -> bool:
    """Returns whether a single policy evicts at every step, in the prompt and while decoding, in all heads alike."""
    return isinstance(policy, Evict) and policy.when == "step"


def left_of_prompt(policy: Evict, budget: int, length: int) -> int:
    """Returns the number of slots that a policy leaves of a prompt of `length` tokens."""
    return length if length < budget + policy.every else budget


def held_in_steps(policy: Evict, budget: int, survivors: int, new: np.ndarray, window: int | None) -> np.ndarray:
    """Returns the number of slots that a head holds in each decoding step, before it evicts; [steps].

    Args:
      policy: evicts while decoding.
      budget: its number of slots.
      survivors: the number of slots that are left of the prompt.
      new: [steps] the number of tokens after the prompt.
      window: the sliding window of the layer; None = no window.
    """
    limit = np.full_like(new, budget)
    if policy.budget is not None and policy.budget.beyond_prompt:
        limit = budget + (np.full_like(new, survivors) if window is None else np.clip(window - new, 0, survivors))
    over = survivors + new - limit
    return np.where(over > 0, limit + 1 + (over - 1) % policy.every, survivors + new)


def appended_one_by_one(policy: Evict) -> str | None:
    """Returns why a policy takes the tokens after a prompt one by one, or None if it takes them as a block."""
    if isinstance(policy.scope, Ring):
        return f"policy {policy.name} is defined token by token"
    if policy.budget is not None and policy.budget.beyond_prompt:
        return f"the budget of policy {policy.name} counts the tokens after a prompt"
    return None


def compresses_prompts(policy: Evict) -> bool:
    """Returns whether a policy evicts once, when a prompt ends."""
    return policy.when == "prompt_end"


def protected_slots(policy: Evict, budget: int) -> int:
    """Returns the number of slots that the scope of a policy protects under a budget of `budget` slots."""
    return policy.scope.count(budget)


#: Importances that are defined for what is left of earlier turns and a further one.
OF_TURNS = (KeyDifference, LowNorm, Mass, ObservationWindow)


def refuses_turns(policy: Evict) -> str | None:
    """Returns why a compressor cannot evict at the end of a further turn, or None if it can."""
    if policy.replay is not None:
        # Queries that repeat a turn say how much the turn needs a slot, and nothing of what the slots before are for.
        return f"{policy.name} replays a prompt, of which slots have been evicted since"
    if not isinstance(policy.importance, OF_TURNS) or policy.writes:
        return f"{policy.name} is defined for whole prompts"
    if policy.merge is not None and policy.merge.remembers:
        return f"{policy.name} has numbers of what was merged, which end with the prompt"
    return None
