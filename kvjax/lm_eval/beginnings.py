"""Finds contexts that begin alike, such as those of tasks whose questions follow the same solved ones."""

from collections.abc import Sequence
from typing import NamedTuple

MIN_LENGTH = 64  # tokens of a beginning; a shorter one saves less than running it separately costs
MEMBERS = 4  # contexts that share it

Ids = tuple[int, ...]


class Group(NamedTuple):
    """Contexts that begin with the same tokens.

    Attributes:
      beginning: these tokens; empty if there are too few.
      members: the numbers of the contexts.
    """

    beginning: Ids
    members: list[int]


def groups(contexts: Sequence[Ids]) -> list[Group]:
    """Groups contexts by the longest beginnings that enough of them share.

    Each context of a group has at least one token of its own.

    Args:
      contexts: token ids.

    Returns:
      The groups. The last is of the contexts that share nothing, and may have no member.
    """
    found, alone = _grown(contexts, list(range(len(contexts))), 0)
    return [*found, Group((), alone)]


def _grown(contexts: Sequence[Ids], members: list[int], size: int) -> tuple[list[Group], list[int]]:
    """Groups contexts that share their first `size` tokens. Returns the groups, and the members of none."""
    alike: dict[Ids, list[int]] = {}
    found, others = list[Group](), list[int]()
    for number in members:
        own = contexts[number]
        # Contexts that are too short to share more are together.
        alike.setdefault(own[size : size + MIN_LENGTH] if len(own) > size + MIN_LENGTH else (), []).append(number)
    for more, own_members in alike.items():
        if not more or len(own_members) < MEMBERS:
            others += own_members
            continue
        # What the first and the last in lexicographical order share, all share.
        first, last = (pick(contexts[number] for number in own_members) for pick in (min, max))
        limit = min(len(contexts[number]) for number in own_members) - 1
        longer = next((at for at in range(size + MIN_LENGTH, limit) if first[at] != last[at]), limit)
        inner, rest = _grown(contexts, own_members, longer)
        found += inner
        others += rest
    others.sort()
    if size and len(others) >= MEMBERS:
        return [*found, Group(contexts[others[0]][:size], others)], []
    return found, others
