"""How many slots each row keeps and each layer allocates: settled on the host, before anything is traced."""

from typing import NamedTuple

import numpy as np

from kvjax.errors import PolicyError
from kvjax.policies.base import Policy, check_protects, slots


class Allocation(NamedTuple):
    """Slots of every layer.

    Attributes:
      budget: one [B] int32 array a layer: slots per KV head each row keeps; empty when the policy keeps everything.
      capacity: slots of each layer's arrays while decoding: the largest budget and one for the newest token.
      block_capacity: the same while a prompt goes in blocks: the largest budget and a block.
    """

    budget: tuple[np.ndarray, ...]
    capacity: tuple[int, ...]
    block_capacity: tuple[int, ...]


def allocate(policy: Policy, prompt_lengths: np.ndarray, total: int, num_layers: int, block: int = 1) -> Allocation:
    """Resolves a policy's budget for a batch.

    Args:
      policy: its budget may be slots, a fraction of each row's own prompt, or one of these a layer.
      prompt_lengths: [B] real tokens of each row's prompt.
      total: most tokens that any row will ever hold; no layer allocates more.
      block: tokens of a prefill block.

    Raises:
      PolicyError: a budget that is smaller than what the policy protects, or a tuple of the wrong length.
    """
    if policy.budget is None:
        return Allocation((), (total,) * num_layers, (total,) * num_layers)
    budgets = policy.budget if isinstance(policy.budget, tuple) else (policy.budget,) * num_layers
    if len(budgets) != num_layers:
        raise PolicyError(
            f"policy {policy.name}: {len(budgets)} budgets were given for a model of {num_layers} layers; "
            "give one number for all layers or one for each."
        )
    rows = []
    for budget in budgets:
        row = np.array([slots(budget, int(n)) for n in prompt_lengths], np.int32)
        for each in sorted(set(row.tolist())):
            check_protects(policy, each)
        rows.append(row)
    return Allocation(
        budget=tuple(rows),
        capacity=tuple(min(int(row.max()) + 1, total) for row in rows),
        block_capacity=tuple(min(int(row.max()) + block, total) for row in rows),
    )
