"""How many slots each row keeps and each layer allocates: settled on the host, before anything is traced."""

from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.errors import PolicyError
from kvjax.policies.base import Policy, budgets_of


class Allocation(NamedTuple):
    """Slots of every layer; of a policy with parts, in each field one such tuple a part.

    Attributes:
      budget: one [B] int32 array a layer: slots per KV head each row keeps of its prompt; empty when that is all.
      decode_budget: the same while decoding.
      capacity: slots of each layer's arrays while decoding: the largest budget and one for the newest token.
      block_capacity: the same while a prompt goes in blocks: the largest budget and a block.
    """

    budget: tuple[Any, ...]
    decode_budget: tuple[Any, ...]
    capacity: tuple[Any, ...]
    block_capacity: tuple[Any, ...]

    def rounded_up(self, multiple: int) -> "Allocation":
        """With as many slots more as make each capacity a multiple; they stay empty."""

        def up(capacities: tuple[Any, ...]) -> tuple[Any, ...]:
            return jax.tree.map(lambda slots: -(-slots // multiple) * multiple, capacities)

        return self._replace(capacity=up(self.capacity), block_capacity=up(self.block_capacity))


def allocate(
    policy: Policy,
    prompt_lengths: np.ndarray,
    total: np.ndarray | int,
    num_layers: int,
    kv_heads: int = 1,
    block: int = 1,
) -> Allocation:
    """Resolves a policy's budget for a batch.

    Args:
      policy: its budget may be slots, a fraction of each row's own prompt, one of these a layer, or a rule.
      prompt_lengths: [B] real tokens of each row's prompt.
      total: tokens that each row, or any, will ever hold; no layer allocates more.
      kv_heads: of a layer, which may share its slots unevenly.
      block: tokens of a prefill block.

    Raises:
      PolicyError: a budget that is smaller than what the policy protects, or a tuple of the wrong length.
    """
    if policy.parts:
        _check_heads(policy, num_layers, kv_heads)
        parts = (allocate(p.policy, prompt_lengths, total, num_layers, kv_heads, block) for p in policy.parts)
        return Allocation(*zip(*parts, strict=True))
    new_tokens, total = int(np.max(total - prompt_lengths)), int(np.max(total))
    budget = _resolve(policy, prompt_lengths, num_layers)
    if policy.mask is not None:
        # Nothing is freed.
        if policy.mask.band is not None and new_tokens:
            raise PolicyError(
                f"policy {policy.name}: it looks at all queries of a text, later ones too, and cannot go on after the "
                f"prompt ({new_tokens} tokens follow here); score whole texts, with prompt_length their length."
            )
        return Allocation(budget, budget, (total,) * num_layers, (total,) * num_layers)
    if policy.then is None:
        capacity = _bounded(budget, 1, total, num_layers)
        return Allocation(budget, budget, capacity, _bounded(budget, block, total, num_layers))
    # A compressor holds the whole prompt until its end, and leaves at most so many slots to a head.
    after = _resolve(policy.then, prompt_lengths, num_layers)
    left = tuple(np.array([policy.most(int(b), kv_heads) for b in rows]) for rows in budget)
    appended = new_tokens if policy.then.budget is None else 1
    capacity = tuple(
        max(sizes)
        for sizes in zip(
            # What is left of a prompt is never more than the prompt.
            (int(np.minimum(rows, prompt_lengths).max()) + appended for rows in left),
            _bounded(after, 1, total, num_layers) if after else (1,) * num_layers,
            strict=True,
        )
    )
    return Allocation(budget, after, capacity, (int(prompt_lengths.max()),) * num_layers)


def _check_heads(policy: Policy, num_layers: int, kv_heads: int) -> None:
    counts = [sum(sizes) for sizes in zip(*([len(own) for own in part.heads] for part in policy.parts), strict=True)]
    if counts != [kv_heads] * num_layers:
        raise PolicyError(
            f"policy {policy.name}: its table has {len(counts)} layers of {counts[0]} KV heads; this model has "
            f"{num_layers} layers of {kv_heads}."
        )


def _resolve(policy: Policy, prompt_lengths: np.ndarray, num_layers: int) -> tuple[np.ndarray, ...]:
    """One [B] int32 a layer; none of a policy that keeps everything."""
    if policy.budget is None:
        return ()
    budgets_of(policy, int(prompt_lengths.min()), num_layers)  # the smallest budgets are refused first
    rows = [budgets_of(policy, int(n), num_layers) for n in prompt_lengths]
    return tuple(np.array(layer, np.int32) for layer in zip(*rows, strict=True))


def _bounded(budget: tuple[np.ndarray, ...], extra: int, total: int, num_layers: int) -> tuple[int, ...]:
    """The largest budget of each layer and so many slots more, within `total`."""
    if not budget:
        return (total,) * num_layers
    return tuple(min(int(rows.max()) + extra, total) for rows in budget)
