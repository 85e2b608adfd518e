"""The whole attention matrices of the float64 reference decoder, which the library never holds."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import reference
from tests.reference import step
from tests.tiny import Tiny


class Dense(NamedTuple):
    """One row's attention.

    Attributes:
      probability: [L, H, T, T] float64, 0 where unseen.
      seen: [L, K, T, T] bool.
      gap: the smallest gap of any choice of the policy; below 1e-6 a float32 implementation may choose otherwise.
    """

    probability: np.ndarray
    seen: np.ndarray
    gap: float


def dense(own: Tiny, tokens: np.ndarray, policy: Any, prompt: int) -> Dense:
    """Runs a row of T tokens through the reference under one of its policies, and records its attention."""
    config, width = own.config, len(tokens)
    group = config.num_heads // config.num_kv_heads
    probability = np.zeros((config.num_layers, config.num_heads, width, width))
    seen = np.zeros((config.num_layers, config.num_kv_heads, width, width), bool)
    heads: list[step.Head] = []
    attend = step.attend

    def recorded(head, query, position, policy, theta, shown=None):
        weights, sees = attend(head, query, position, policy, theta, shown)
        if not any(head is each for each in heads):
            heads.append(head)
        # Heads come layer by layer; of two calls in a step the second is the one that counts.
        (index,) = (i for i, each in enumerate(heads) if each is head)
        layer, kv_head = divmod(index, config.num_kv_heads)
        at = np.ix_(position, head.position)
        seen[layer, kv_head][at] = sees
        for g in range(group):
            probability[layer, kv_head * group + g][at] = weights[g]
        return weights, sees

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "attend", recorded)
        run = reference.reference_run(own.params, config, tokens[None], policy, prompt)
    return Dense(probability, seen, min(run.evict_gap.min(), 10 * run.above_gap.min()))


def projected(own: Tiny, tokens: np.ndarray) -> list[list[step.Head]]:
    """Returns the KV heads of each layer after a row of T tokens: all keys, values and queries, of the full cache."""
    heads: list[step.Head] = []
    attend = step.attend

    def recorded(head, *args):
        if not any(head is each for each in heads):
            heads.append(head)
        return attend(head, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "attend", recorded)
        reference.reference_run(own.params, own.config, tokens[None], reference.policies.full(), len(tokens))
    count = own.config.num_kv_heads
    return [heads[layer * count : (layer + 1) * count] for layer in range(own.config.num_layers)]


def full(own: Tiny, tokens: np.ndarray) -> Dense:
    return dense(own, tokens, reference.policies.full(), len(tokens))


def top(score: np.ndarray, seen: np.ndarray, count: int) -> set[int]:
    """The `count` positions of largest score among those seen, of equal ones the newer."""
    return set(sorted(np.flatnonzero(seen), key=lambda j: (score[j], j), reverse=True)[:count])
