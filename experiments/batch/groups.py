"""The order of requests: those whose prompts begin alike are neighbours, so that the states of beginnings are there.

An answer depends neither on the order nor on the groups: the runner finds only states that are equal to the bit to
those that it would compute.
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from experiments.batch.requests import Asked
from kvjax.serve.grouping import prefix_groups


class Ordered(NamedTuple):
    """Requests in the order in which they run.

    Attributes:
      asked: the requests; first those that are no valid requests, last those that continue a context.
      about: one line on what they share; empty if they share nothing.
    """

    asked: list[Asked]
    about: str


def in_groups(asked: Sequence[Asked], vocab_size: int) -> Ordered:
    """Orders requests by the beginnings of their prompts; those that share nothing stay as they are.

    Args:
      asked: the requests.
      vocab_size: the number of token ids.
    """
    first, last = by_context(asked)
    others, valid, prompts, new_tokens = valid_prompts(first, vocab_size)
    found = prefix_groups(prompts, new_tokens)
    if not found.saved:
        return Ordered([*first, *last], "")
    count, total = sum(group.prefix > 0 for group in found.groups), sum(map(len, prompts))
    about = (
        f"{count:,} {'group of prompts begins' if count == 1 else 'groups of prompts begin'} alike: {found.saved:,} of "
        f"{total:,} prompt tokens need not be computed again ({found.bound:,} with beginnings within beginnings)"
    )
    return Ordered([*others, *(valid[number] for number in found.order()), *last], about)


class ValidPrompts(NamedTuple):
    """Requests by whether they can be answered.

    Attributes:
      refused: those that cannot, which are to be refused.
      valid: those that can.
      prompts: the tokens of their prompts.
      new_tokens: the new tokens that they ask for.
    """

    refused: list[Asked]
    valid: list[Asked]
    prompts: list[list[int]]
    new_tokens: list[int]


def valid_prompts(asked: Iterable[Asked], vocab_size: int) -> ValidPrompts:
    """Returns the prompts of requests that can be answered; see `in_groups`."""
    found = ValidPrompts([], [], [], [])
    for each in asked:
        request = each.request
        tokens = [] if request is None else list(request.tokens)
        if request is None or not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            found.refused.append(each)
            continue
        wanted = request.max_new_tokens
        found.valid.append(each)
        found.prompts.append(tokens)
        found.new_tokens.append(wanted if isinstance(wanted, int) else 0)
    return found


def by_context(asked: Iterable[Asked]) -> tuple[list[Asked], list[Asked]]:
    """Divides requests into those that begin a text, in their order, and those that continue a context.

    The latter are ordered by their contexts, so that each context is read once.
    """
    beginning, continuing = list[Asked](), dict[str, list[Asked]]()
    for each in asked:
        if each.continues is None:
            beginning.append(each)
        else:
            continuing.setdefault(json.dumps(each.continues), []).append(each)
    return beginning, [each for group in continuing.values() for each in group]
