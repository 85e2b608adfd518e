"""A merge in a step of a layer whose slots are divided over devices.

A pair that is evicted on one device may be folded into a slot of another one. Where a step evicts one slot of a head,
each device sends the pair of its slot of lowest priority with that priority; several victims, at most as many as the
step has tokens, are gathered. Each device then folds the victims of all devices into its own slots. What a merge asks
of all slots, such as the most similar key, is one more collective; see `kvjax.policies.nearest`.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.cache import store_order
from kvjax.cache.context_parallel import packing, victims
from kvjax.cache.context_parallel.placement import NewTokens, PendingWrites
from kvjax.cache.context_parallel.victims import Evicted
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, LayerKV, exact_store
from kvjax.cache.step.step_end import recode
from kvjax.numerics.mask_indices import compact
from kvjax.parallel import slot_reductions
from kvjax.policies.base import View
from kvjax.storage.base import UNROTATED

Array = jax.Array


def refuses(group: Group) -> str | None:
    """Returns why the merge of a group's policy cannot run where slots are divided, or None if it can or is none."""
    policy = group.policy
    if policy.merge is None:
        return None
    if not policy.merge.folds:
        return f"the slots of policy {policy.name} have weights that a compressor gave them"
    if not policy.merge.over_devices:
        return f"the merge of {policy.name} compares what is evicted with all slots"
    if group.storage.frame == UNROTATED:
        return f"the merge of {policy.name} changes keys that are held as they are before rotation"
    if group.storage.divided:
        return f"the merge of {policy.name} may change a token that leaves the residual"
    if not group.evicts_one or policy.when != "step":
        return f"the merge of {policy.name} folds more pairs in a step than it has tokens"
    return None


def sender(moves: PendingWrites, keys: Sequence[Array], values: Sequence[Array]) -> victims.VictimPayload:
    """Returns what a device sends of a slot that may be evicted: its pair and its statistics; see `fold`."""
    return functools.partial(packing.packed, _whole(moves, keys, values))


def gather_victims(
    moves: PendingWrites, keys: Sequence[Array], values: Sequence[Array], victim: Array, view: View
) -> Evicted:
    """Gathers the victims of all devices, n of each, in one collective; see `fold`.

    Args:
      moves: of the step.
      keys: [B, K, S_i, D].
      values: [B, K, S_i, D].
      victim: [B, K, S + n] bool.
      view: of the step, on this device.

    Returns:
      [B, K, C * n, ...] of the victims, and the sum of `PendingWrites.packed`.
    """
    slots, valid = compact(victim, moves.new_tokens.key.shape[2])
    bits = sender(moves, keys, values)(slots)
    position = jnp.where(valid, packing.at(view.position, slots), EMPTY)
    # [B, K, n, 1 + m]
    each = jnp.concatenate([position[..., None], bits], axis=3)
    flat = each.reshape(*slots.shape[:2], math.prod(each.shape[2:]))
    # [C, B, K, n * (1 + m) + m'] int32
    every = slot_reductions.gather(jnp.concatenate([flat, moves.packed()], axis=2))
    # [C, B, K, n, 1 + m], then [B, K, C * n, 1 + m]
    sent = every[..., : flat.shape[2]].reshape(-1, *each.shape)
    sent = jnp.moveaxis(sent, 0, 2).reshape(*slots.shape[:2], -1, each.shape[3])
    return Evicted(sent[..., 0], sent[..., 1:], jnp.sum(every[..., flat.shape[2] :], axis=0))


def fold(
    moves: PendingWrites, keys: Sequence[Array], values: Sequence[Array], victim: Array, evicted: Evicted, view: View
) -> PendingWrites:
    """Folds the victims of all devices into the slots of this device and into the step's own tokens.

    All devices change the step's own tokens in the same way.

    Args:
      moves: of the step; its layer holds the statistics after the step, and the positions before the eviction.
      keys: [B, K, S_i, D] of this device's store and of the step's own tokens, decoded.
      values: [B, K, S_i, D], as `keys`.
      victim: [B, K, S + n] bool, of this device's slots, and of the step's own tokens on the first device.
      evicted: the victims of all devices, with what `sender` sends of them.
      view: of the step, on this device.
    """
    layer, own, merge, n = moves.layer, moves.new_tokens, moves.group.policy.merge, moves.new_tokens.key.shape[2]
    assert merge is not None
    whole, size = _whole(moves, keys, values), layer.position.shape[2]
    # [B, K, V, ...]: of all devices
    evicted_pairs, real = packing.unpacked(evicted.sent, whole), evicted.position >= 0
    # [B, K, n]: every device knows which of the step's own tokens are evicted, and removes its own slots.
    out = jnp.any((own.position[..., None] == evicted.position[:, :, None]) & (own.position >= 0)[..., None], axis=3)
    position = jnp.where(victim[:, :, :size], EMPTY, layer.position)
    # [B, K, S + n + V, ...]
    every = {name: jnp.concatenate([leaf, evicted_pairs[name]], axis=2) for name, leaf in whole.items()}
    key, value = every.pop("key"), every.pop("value")
    folded = merge.fold(
        key,
        value,
        jnp.concatenate([jnp.zeros((*position.shape[:2], size + n), bool), real], axis=2),
        every,
        view._replace(
            position=jnp.concatenate([position, jnp.where(out, EMPTY, own.position), evicted.position], axis=2),
            key=key,
            value=value,
        ),
        n,
    )
    new_key, new_value = (
        x[:, :, size : size + n].astype(old.dtype) for x, old in zip(folded[:2], own[:2], strict=True)
    )
    stored = _stored(moves, (key, value), folded[:2], [each.shape[2] for each in keys[:-1]])
    stored = stored.replace(stats={name: leaf[:, :, :size] for name, leaf in folded.stats.items()})
    new_stats = {name: leaf[:, :, size : size + n] for name, leaf in folded.stats.items()}
    return moves._replace(layer=stored, new_tokens=NewTokens(new_key, new_value, own.position, new_stats))


def _whole(moves: PendingWrites, keys: Sequence[Array], values: Sequence[Array]) -> dict[str, Array]:
    """Returns the pairs and the statistics of this device's slots and of the own tokens, [B, K, S + n, ...] each."""
    new = moves.new_tokens.stats
    stats = {name: jnp.concatenate([leaf, new[name]], axis=2) for name, leaf in moves.layer.stats.items()}
    return stats | {"key": jnp.concatenate(keys, axis=2), "value": jnp.concatenate(values, axis=2)}


def _stored(moves: PendingWrites, old: tuple[Array, Array], new: tuple[Array, Array], sizes: list[int]) -> LayerKV:
    """Stores merged pairs [B, K, S + n, D] of this device's slots. A slot that did not change keeps its bytes."""
    layer, group, size = moves.layer, moves.group, sum(sizes)
    # [B, K, S]
    changed = jnp.any((old[0] != new[0]) | (old[1] != new[1]), axis=3)[:, :, :size]
    keys, values, marks = (store_order.separated(each[:, :, :size], sizes) for each in (*new, changed))
    stores = tuple(
        exact_store(key, value) if storage.exact else recode(storage, store, mark, key, value, value.dtype, moves.sides)
        for storage, store, mark, key, value in zip(group.stores, layer.stores, marks, keys, values, strict=True)
    )
    return layer.replace(stores=stores)
