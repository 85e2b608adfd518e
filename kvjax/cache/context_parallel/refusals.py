"""Why the slots of a group of heads are not divided over devices, each of which then holds all of them."""

from kvjax.cache.context_parallel import merge, slotwise
from kvjax.cache.groups import Group
from kvjax.policies.round_memory import RoundMemory
from kvjax.selection.base import Selection
from kvjax.storage.base import UNROTATED


def refuses(group: Group, kv_heads: int, dim: int) -> str | None:
    """Returns why the slots of a group are not divided over devices, or None if they can be.

    Args:
      group: with its stores.
      kv_heads: KV heads of the group.
      dim: features of a head.
    """
    storage, policy = group.storage, group.policy
    if storage.on_host:
        return f"storage {storage.label} is in host memory"
    if reason := group.arrangement.refuses_devices(group):
        return reason
    if policy.page > 1:
        return f"policy {policy.name} evicts whole pages"
    if policy.every > 1:
        return f"policy {policy.name} evicts {policy.every} slots at once"
    if any(not isinstance(each, RoundMemory) for each in (*policy.memory, *group.memory)):
        return f"policy {policy.name} remembers queries"
    if policy.rounds:
        return f"policy {policy.name} remembers earlier evictions"
    if policy.writes or group.writes:
        return f"policy {policy.name} reads scores that are written once per token"
    if policy.params:
        return f"policy {policy.name} reads parameters"
    if policy.budget is not None and policy.budget.beyond_prompt:
        return f"policy {policy.name} counts the slots of the prompt"
    if policy.positions != "original" and not (group.known_ranks or group.evicts_one):
        return f"positions={policy.positions!r} ranks all slots, of which a step evicts more than it has tokens"
    if not group.selection.reads_all and (reason := _not_chosen(group)):
        return reason
    if reason := merge.refuses(group):
        return reason
    if policy.budget is None:
        return None
    return slotwise.reason(policy, group.needs, group.heads, kv_heads, dim) or None


def divided_by_xla(group: Group) -> bool:
    """Returns whether XLA divides the slots of a group that `refuses` names, by constraints on arrays alone.

    For exact slots whose pages are evicted as a whole, its collectives are a few numbers of a head; for blocks of a
    prompt it also gathers positions. Where slots are encoded or moved, it would gather keys and values.
    """
    policy, storage = group.policy, group.storage
    exact = storage.exact and not storage.on_host and group.selection.reads_all
    return exact and policy.page > 1 and policy.positions == "original"


def _not_chosen(group: Group) -> str | None:
    """Returns why a selection cannot choose among slots of several devices, or None if it can."""
    if not group.selection.over_devices:
        return f"selection {group.selection.name} chooses among all slots"
    selection = group.selection
    if selection.sees_values or not selection.rotated or type(selection).mix is not Selection.mix:
        return f"selection {selection.name} looks at values or unrotated vectors, or changes outputs"
    recomputed = type(group.selection).entries is not Selection.entries and group.storage.frame != UNROTATED
    if group.selection.per_slot and group.storage.divided and not recomputed:
        return f"selection {group.selection.name} keeps numbers that move with tokens to another store"
    if group.policy.positions != "original" or any(s.of_selection for s in group.needs):
        return f"selection {group.selection.name} is observed, or chooses among keys that are rotated in each step"
    return None
