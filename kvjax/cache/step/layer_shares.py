"""The slots of each head where the heads of all layers share them; see `kvjax.policies.Shared`."""

import itertools

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Phase
from kvjax.cache.layer_stack import LayerStack, entries_of, len_of
from kvjax.cache.state import KVState
from kvjax.policies.allocation import Shared
from kvjax.policies.components import View
from kvjax.policies.prompt_replay import REPLAYED

Array = jax.Array


def shared_by_layers(kv: KVState, phase: Phase) -> KVState:
    """Returns a cache of replayed prompts whose budgets are the slots of each head, [B, K] int32 per layer and group.

    One ranking covers the heads of all layers that have a budget; see `kvjax.policies.Shared`.

    Args:
      kv: the cache after the replay, in the arrays of the prompt phase; its budgets are [B] int32 per layer and group.
      phase: the groups of the prompt phase, whose layers share slots.
    """
    entries = entries_of(kv.layers)
    starts = itertools.accumulate((len_of(each) for each in entries[:-1]), initial=0)
    # The layer, the number of the group and the number of its heads, in the order of the heads.
    places: list[tuple[int, int, int]] = []
    parts: list[tuple[Array, Array, Array, Array]] = []
    for start, entry in zip(starts, entries, strict=True):
        for number, group in enumerate(entry.layer if isinstance(entry, LayerStack) else entry):
            policy = phase[start][number].policy
            if policy.budget is None:
                continue
            # Arrays of a stack of layers are [B, L, K, S].
            heads, size = group.position.shape[-2:]
            own = [(layer, number, heads) for layer in range(start, start + len_of(entry))]
            places += own
            # [B, L·K, S]
            position, replayed = (x.reshape(len(x), -1, size) for x in (group.position, group.stats[REPLAYED]))
            # [B, L·K]
            each = [jnp.repeat(kv.budget[layer][number][:, None], heads, axis=1) for layer, *_ in own]
            budget = jnp.concatenate(each, axis=1)
            nothing = jnp.zeros((*position.shape, 0))  # such a policy reads neither keys nor values
            view = View(
                position=position, key=nothing, value=nothing, newest=kv.prompt - 1, budget=budget, prompt=kv.prompt,
                layer=start, decoding=False,
            )  # fmt: skip
            stats = {REPLAYED: replayed}
            score, protected = policy.importance.score(stats, view), policy.scope.protected(stats, view)
            parts.append((score, protected, position, budget))
            shared = policy.budget
    assert isinstance(shared, Shared)
    # [B, N, S] and [B, N]
    score, protected, position, budget = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    kept = shared.divided(score, protected, position, budget, kv.prompt)
    # [B, N]
    limit = jnp.sum(kept, axis=2, dtype=jnp.int32)
    budgets, first = [list(each) for each in kv.budget], 0
    for layer, number, heads in places:
        budgets[layer][number] = limit[:, first : first + heads]
        first += heads
    return kv.replace(budget=tuple(map(tuple, budgets)))
