"""The end of a step: evicts, merges, and moves the step's own tokens into the layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements.base import StepTokens
from kvjax.cache.groups import Group
from kvjax.cache.slots import forget
from kvjax.cache.state import EMPTY, Block, LayerKV, PerSlot, exact_store
from kvjax.cache.step import evict
from kvjax.cache.step.operands import Operands, decoded, ranked_vectors
from kvjax.cache.step.pool import KeyRotation, Pool, joined, run_after_inputs
from kvjax.policies.base import View
from kvjax.policies.components import Folded, KeyFrame
from kvjax.policies.parameters import Parts
from kvjax.policies.round_memory import NUMBER
from kvjax.storage import store as held
from kvjax.storage.base import Storage
from kvjax.storage.side import Sides
from kvjax.storage.store import Store
from kvjax.typing import PyTree

Array = jax.Array


class QueryView(NamedTuple):
    """The inputs of a policy in a step besides its slots.

    Attributes:
      frame: how the keys that it ranks are rotated.
      memory: see `LayerKV.memory`, after the step's own queries.
      scale: factor of the logits.
      soft_cap: of the logits, or None.
      window: the layer's sliding window, or None.
      params: of the policies, see `LayerArgs.params`.
    """

    frame: KeyFrame | None = None
    memory: Mapping[str, Mapping[str, Array]] = MappingProxyType({})
    scale: float = 1.0
    soft_cap: float | None = None
    window: int | None = None
    params: Mapping[str, Parts] = MappingProxyType({})


def finish(
    pool: Pool,
    per_slot: PerSlot,
    block: Block,
    group: Group,
    budget: Array | None,
    rotation: KeyRotation | None,
    made: Operands | None,
    seen: QueryView = QueryView(),
) -> tuple[LayerKV, PerSlot, dict[str, dict[str, Array]]]:
    """Evicts until every head is within its limit, and moves the step's own tokens into the layer.

    Nothing is evicted from a prompt before its replay.

    Args:
      pool: the slots and the step's own tokens.
      per_slot: statistics and index of all of them, after the step was observed.
      block: the tokens of the step.
      group: the policy and the storage.
      budget: [B] int32 slots per KV head, or None.
      rotation: the rotation of keys that are held as they are before it; or None.
      made: the operands of attention; None if slots are coded, which are decoded again where a policy looks at them.
      seen: of the queries, for the policy.

    Returns:
      The layer, the arrays that move with its slots, and its memory.
    """
    memory = {name: dict(arrays) for name, arrays in seen.memory.items()}
    position, layer, policy, own, stats = pool.position, pool.layer, group.policy, pool.new_tokens, per_slot.stats
    victim = None
    if policy.budget is not None and group.replay is None:
        n = block.position.shape[1]
        # A compressor evicts once, whatever the last block of the prompt brings.
        one = group.evicts_one and n == 1 and policy.when == "step"

        def choose(pool: Pool, stats: dict[str, Array]) -> evict.Round:
            view = _view(pool, *_ranked(pool, group, rotation, made), block, group, budget, seen)
            return evict.ranked(policy, stats, view, one=one)

        before = stats
        # [B, K, S'] bool, of the slots that are ranked
        victim, remembered = run_after_inputs(choose, pool, stats) if policy.reads else choose(pool, stats)
        for each in policy.rounds:
            if each.per_slot:
                stats = stats | {each.name: remembered[each.name]}
            else:
                memory[each.name] = {NUMBER: remembered[each.name]}
        if (merge := policy.folding) is not None:
            key, value = _ranked(pool, group, rotation, made)
            max_victims = n if group.evicts_one else position.shape[2]
            view = _view(pool, key, value, block, group, budget, seen)

            def fold(key: Array, value: Array, stats: dict[str, Array]) -> Folded:
                # XLA computes the priority once for evictions and for the merge.
                ranked = view._replace(priority=evict.ranking(policy, before, view)[0]) if merge.ranks else view
                return merge.fold(key, value, victim, stats, ranked, max_victims)

            if policy.every > 1:
                # Most steps evict nothing.
                folded = jax.lax.cond(jnp.any(victim), fold, Folded, key, value, dict(stats))
            else:
                folded = fold(key, value, stats)
            stats = folded.stats
            layer, own = _merged(pool, (key, value), (folded.key, folded.value), group, rotation)
        if own is None or not group.arrangement.holds_victims:
            position = jnp.where(victim, EMPTY, position)
    per_slot = per_slot.replace(stats=stats)
    if own is not None:
        tokens = StepTokens(layer, *own, position, victim, per_slot, block.newest, group, pool.sides)
        return *group.arrangement.write(tokens), memory
    return layer.replace(position=position), per_slot.replace(stats=forget(per_slot.stats, position)), memory


def _ranked(pool: Pool, group: Group, rotation: KeyRotation | None, made: Operands | None) -> tuple[PyTree, PyTree]:
    """Returns the keys and values [B, K, S', D] that the policy ranks; None for what is gathered from host memory."""
    # The policy does not see what it has evicted.
    first = 0 if pool.new_tokens is None else group.unranked_stores
    pieces = (each[first:] for each in ranked_vectors(pool, group, rotation, made))
    key, value = (None if each[0] is None else joined(each) for each in pieces)
    return key, value


def _view(
    pool: Pool,
    key: Array,
    value: Array,
    block: Block,
    group: Group,
    budget: Array | None,
    seen: QueryView,
) -> View:
    """Returns what the policy may look at. Which slots go is a constant to a gradient."""
    assert budget is not None
    return View(
        position=pool.position if pool.new_tokens is None else pool.position[:, :, group.unranked :],
        key=jax.lax.stop_gradient(key),
        value=jax.lax.stop_gradient(value),
        newest=block.newest,
        budget=budget,
        prompt=block.prompt,
        layer=block.layer,
        decoding=group.decoding,
        heads=group.heads,
        frame=seen.frame,
        memory=seen.memory,
        scale=seen.scale,
        soft_cap=seen.soft_cap,
        window=seen.window,
        most_left=group.most_left,
        num_layers=group.num_layers,
        params=seen.params,
        turn=block.turn,
    )


def _merged(
    pool: Pool, old: tuple[Array, Array], new: tuple[Array, Array], group: Group, rotation: KeyRotation | None
) -> tuple[LayerKV, tuple[Array, Array] | None]:
    """Stores merged pairs. A slot that nothing was merged into keeps its bytes.

    Args:
      pool: the slots and the step's own tokens.
      old: keys and values [B, K, S', D] before the merge.
      new: keys and values [B, K, S', D] after the merge.
      group: the storage.
      rotation: the rotation of keys that are held as they are before it; or None.

    Returns:
      The layer, and keys and values of the step's own tokens.
    """
    # [B, K, S']
    changed = jnp.any((old[0] != new[0]) | (old[1] != new[1]), axis=3)
    if rotation is not None:
        plain = joined(decoded(pool, group)[0])
        new = jnp.where(changed[..., None], rotation.invert(new[0], pool.position), plain), new[1]
    if pool.new_tokens is None:
        return pool.layer.with_exact(*new), None
    keys, values, marks = (pool.cut(x) for x in (*new, changed))
    stores = tuple(
        exact_store(key, value) if storage.exact else recode(storage, store, mark, key, value, value.dtype, pool.sides)
        for storage, store, mark, key, value in zip(
            group.stores, pool.layer.stores, marks[:-1], keys[:-1], values[:-1], strict=True
        )
    )
    return pool.layer.replace(stores=stores), (keys[-1], values[-1])


def recode(
    storage: Storage, store: Store, changed: Array, key: Array, value: Array, dtype: jnp.dtype, sides: Sides
) -> Store:
    """Encodes the slots again that a merge has changed.

    Args:
      storage: how the slots are held.
      store: before the merge.
      changed: [B, K, S] bool.
      key: [B, K, S, D] after the merge.
      value: [B, K, S, D].
      dtype: the model's.
      sides: what keys and values share.
    """
    new = held.encode(storage, key, value, dtype, sides)
    return jax.tree.map(
        lambda old, made: jnp.where(changed.reshape(*changed.shape, *(1,) * (old.ndim - 3)), made, old), store, new
    )
