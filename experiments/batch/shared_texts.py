"""Groups of requests with a common prefix, whose slots are held once (``--shared_slots``)."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from experiments.batch.groups import valid_prompts
from experiments.batch.requests import Asked
from kvjax.cache import Limits
from kvjax.serve.grouping import prefix_groups

LEAST_REQUESTS, LEAST_TOKENS = 2, 64  # that share a text, and of the text; others have slots of their own


class SharedText(NamedTuple):
    """A text that the prompts of several requests begin with.

    Attributes:
      tokens: the text.
      asked: the requests, with the tokens that follow it, at least one each.
    """

    tokens: list[int]
    asked: list[Asked]


def divide(asked: Sequence[Asked], vocab_size: int, limits: Limits) -> tuple[list[SharedText], list[Asked]]:
    """Divides requests into those that share texts, and all others in their order.

    Args:
      asked: all requests of a file, so that a run that continues another one finds the same texts.
      vocab_size: the number of token ids.
      limits: of whole prompts; longer ones are among the others, to be refused.
    """
    fit = [each for each in asked if each.request is not None and len(each.request.tokens) <= limits.prompt]
    _, valid, prompts, new_tokens = valid_prompts(fit, vocab_size)
    texts, shared = list[SharedText](), set[int]()
    for group in prefix_groups(prompts, new_tokens).groups:
        own = [valid[number] for number in group.requests]
        # At least one token of each prompt follows the text: it is run, for the logits after it.
        size = min(group.prefix, *(len(prompts[number]) - 1 for number in group.requests))
        if len(own) < LEAST_REQUESTS or size < LEAST_TOKENS:
            continue
        texts.append(SharedText(prompts[group.requests[0]][:size], [_after(each, size) for each in own]))
        shared |= {each.index for each in own}
    return texts, [each for each in asked if each.index not in shared]


def _after(each: Asked, size: int) -> Asked:
    """Returns a request for what follows the first tokens of its prompt."""
    assert each.request is not None
    request = dataclasses.replace(each.request, tokens=list(each.request.tokens)[size:])
    return dataclasses.replace(each, request=request, shared=size)
