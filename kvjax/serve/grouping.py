"""Groups of prompts that begin alike, and the order in which they run (BatchLLM, arXiv:2412.03594).

A request has one shared prefix at the most. Which prefixes these are is decided in the radix tree of all prompts, so
that as few tokens as possible are computed twice.
"""

import dataclasses
import fractions
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class PrefixGroup:
    """Requests whose prompts begin with the same tokens.

    Attributes:
      requests: their numbers, ascending.
      prefix: the number of tokens that they share and that are run once; 0 = one request, which is run alone.
    """

    requests: tuple[int, ...]
    prefix: int


@dataclasses.dataclass(frozen=True)
class PrefixGroups:
    """The groups of some requests.

    Attributes:
      groups: in the order in which they run.
      saved: tokens of prompts that are not computed.
      bound: as many as there would be if every shared beginning were computed once, over several levels.
    """

    groups: tuple[PrefixGroup, ...]
    saved: int
    bound: int

    def order(self) -> list[int]:
        """Returns the numbers of all requests in the order in which they run."""
        return [number for group in self.groups for number in group.requests]


@dataclasses.dataclass
class _Node:
    """A node of the radix tree, as an interval of the sorted prompts.

    Attributes:
      depth: tokens from the root.
      first: the first of its prompts.
      saved: tokens that its children save.
      spans: first and last prompt and depth of the nodes among its children that save them.
    """

    depth: int
    first: int
    saved: int = 0
    spans: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def best(self, last: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Returns the most tokens that are saved at or below it, whose last prompt is `last`, and by which nodes."""
        if (own := (last - self.first) * self.depth) >= self.saved:
            return own, [(self.first, last, self.depth)] if own else []
        return self.saved, self.spans


def prefix_groups(prompts: Sequence[ArrayLike], new_tokens: Sequence[int]) -> PrefixGroups:
    """Groups requests by the beginnings of their prompts.

    A node of the radix tree of all prompts saves (its prompts − 1) · its depth tokens if these share a prefix, or what
    its children save if that is more. Groups run by falling quotient of new tokens and tokens of prompts that are not
    shared, so that long answers decode while later prompts run; those that have nothing of their own first, and equal
    ones in the order of their first requests.

    Args:
      prompts: [n] int of each request, possibly empty.
      new_tokens: the number of new tokens of each.

    Raises:
      InputError: there are not as many numbers as prompts.
    """
    if len(new_tokens) != len(prompts):
        raise InputError(f"new_tokens must have a number for each of {len(prompts)} prompts; got {len(new_tokens)}.")
    rows = [np.asarray(prompt, np.int64).reshape(-1) for prompt in prompts]
    # Token ids are not negative, so that these bytes sort as the ids do.
    by_text = sorted(range(len(rows)), key=lambda number: rows[number].astype(">i8").tobytes())
    shared = [shared_length(rows[one], rows[two]) for one, two in itertools.pairwise(by_text)]
    saved, spans = _best(shared)
    groups, alone = [], set(by_text)
    for first, last, depth in spans:
        members = tuple(sorted(by_text[first : last + 1]))
        groups.append(PrefixGroup(members, depth))
        alone -= {*members}
    groups += [PrefixGroup((number,), 0) for number in alone]

    def key(group: PrefixGroup) -> tuple[bool, fractions.Fraction, int]:
        own = sum(len(rows[number]) - group.prefix for number in group.requests)
        new = sum(int(new_tokens[number]) for number in group.requests)
        return own > 0, -fractions.Fraction(new, own or 1) if own else fractions.Fraction(0), group.requests[0]

    return PrefixGroups(tuple(sorted(groups, key=key)), saved, sum(shared))


def shared_length(one: np.ndarray, two: np.ndarray) -> int:
    """Returns the number of tokens with which both of two prompts, [n] and [m] int, begin."""
    count = min(len(one), len(two))
    different = np.flatnonzero(one[:count] != two[:count])
    return int(different[0]) if different.size else count


def _best(shared: list[int]) -> tuple[int, list[tuple[int, int, int]]]:
    """Returns the tokens that are saved, and first and last prompt and depth of the nodes that save them.

    Args:
      shared: the number of tokens that each of the sorted prompts but the last shares with the next one.
    """
    stack = [_Node(0, 0)]
    for last, depth in enumerate([*shared, 0]):
        first, saved, spans = last, 0, list[tuple[int, int, int]]()
        while stack[-1].depth > depth:
            node = stack.pop()
            first, (saved, spans) = node.first, node.best(last)
            if depth <= stack[-1].depth:
                stack[-1].saved += saved
                stack[-1].spans = stack[-1].spans + spans
        if stack[-1].depth < depth:
            stack.append(_Node(depth, first, saved, spans))
    return stack[0].best(len(shared))
