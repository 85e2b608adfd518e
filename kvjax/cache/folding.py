"""A merge in a step of a layer whose slots are divided over devices.

A pair that is evicted on one device may be folded into a slot of another one. One collective tells every device the
victims of all devices: their number is bounded by the tokens of a step. Each device then folds them into its own slots.
What a merge asks of all slots, such as the most similar key, is one more collective; see `kvjax.policies.nearest`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import across
from kvjax.cache import arrange
from kvjax.cache.groups import Group
from kvjax.cache.leaving import packed, unpacked
from kvjax.cache.placing import Moves
from kvjax.cache.settle import recode
from kvjax.cache.state import EMPTY, LayerKV, exact_store
from kvjax.compaction import compact
from kvjax.policies.base import View
from kvjax.storage.base import UNROTATED

Array = jax.Array


def refuses(group: Group) -> str | None:
    """Returns why the merge of a group's policy cannot run where slots are divided, or None if it can or is none."""
    policy = group.policy
    if policy.merge is None:
        return None
    if not policy.merge.over_devices:
        return f"the merge of {policy.name} compares what is evicted with all slots"
    if group.storage.frame == UNROTATED:
        return f"the merge of {policy.name} changes keys that are held as they are before rotation"
    if not group.evicts_one or policy.when != "step":
        return f"the merge of {policy.name} folds more pairs in a step than it has tokens"
    return None


def fold(moves: Moves, keys: Sequence[Array], values: Sequence[Array], victim: Array, view: View) -> Moves:
    """Folds the victims of all devices into the slots of this device and into the step's own tokens.

    Every device has these tokens, and changes its copies in the same way.

    Args:
      moves: of the step; its layer holds the statistics after the step, and the positions before the eviction.
      keys: [B, K, S_i, D] of each of this device's stores and of the step's own tokens, decoded.
      values: [B, K, S_i, D], as `keys`.
      victim: [B, K, S + n] bool, of this device's slots, and of the step's own tokens on the first device.
      view: of the step, on this device.

    Returns:
      `moves` with the slots, the own tokens and the statistics after the merge.
    """
    layer, own, group = moves.layer, moves.own, moves.group
    merge, n = group.policy.merge, own.key.shape[2]
    assert merge is not None
    # [B, K, S + n, ...]
    stats = {name: jnp.concatenate([leaf, own.stats[name]], axis=2) for name, leaf in layer.stats.items()}
    held = (jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2))
    position = jnp.concatenate([layer.position, own.position], axis=2)
    size = position.shape[2]
    # [B, K, V, ...]: of all devices
    gone_key, gone_value, gone_position, gone_stats = _of_all_devices((*held, position, stats), victim, n)
    real = gone_position >= 0
    # [B, K, S + n]: every device knows which of the own tokens are evicted, and removes its own slots.
    same = own.position[..., None] == jnp.where(real, gone_position, EMPTY)[:, :, None]
    evicted = jnp.any(same & (own.position >= 0)[..., None], axis=3)
    out = jnp.concatenate([victim[:, :, : size - n], evicted], axis=2)
    # The victims of all devices follow this device's slots.
    key, value = (jnp.concatenate(pair, axis=2) for pair in zip(held, (gone_key, gone_value), strict=True))
    folded = merge.fold(
        key,
        value,
        jnp.concatenate([jnp.zeros_like(out), real], axis=2),
        {name: jnp.concatenate([leaf, gone_stats[name]], axis=2) for name, leaf in stats.items()},
        view._replace(
            position=jnp.concatenate([jnp.where(out, EMPTY, position), gone_position], axis=2), key=key, value=value
        ),
        n,
    )
    new = folded.key[:, :, :size], folded.value[:, :, :size]
    after = {name: leaf[:, :, : size - n] for name, leaf in folded.stats.items()}
    own = own._replace(
        key=new[0][:, :, size - n :].astype(own.key.dtype),
        value=new[1][:, :, size - n :].astype(own.value.dtype),
        stats={name: leaf[:, :, size - n : size] for name, leaf in folded.stats.items()},
    )
    stored = _stored(moves, held, new, [each.shape[2] for each in keys[:-1]])
    return moves._replace(layer=stored.replace(stats=after), own=own)


def told_again(moves: Moves) -> tuple[Moves, Array]:
    """Tells all devices what leaves the residual as it is after a merge, in one collective.

    Returns:
      The moves, and the sum of `Moves.packed` over all devices.
    """
    bits = moves.packed()
    if moves.goes is None:
        return moves, bits
    vectors = moves.goes.vectors(moves.layer.stores[1])
    batch, kv_heads, n, width = vectors.shape
    flat = jax.lax.bitcast_convert_type(vectors, jnp.int32).reshape(batch, kv_heads, n * width)
    # One device has each token, and the others add 0.
    told = jax.lax.psum(jnp.concatenate([flat, bits], axis=2), moves.axes)
    again = jax.lax.bitcast_convert_type(told[:, :, : n * width].reshape(vectors.shape), jnp.float32)
    return moves._replace(vectors=again), told[:, :, n * width :]


def _of_all_devices(tree: Any, victim: Array, n: int) -> Any:
    """Gathers what arrays [B, K, S', ...] hold in the victims of all devices, [B, K, C * n, ...].

    Args:
      tree: keys, values, positions and statistics.
      victim: [B, K, S'] bool, of this device.
      n: the most victims of a head.

    Returns:
      As `tree`; positions are -1, and all else 0, where a device has fewer victims.
    """
    slots, valid = compact(victim, n)
    key, value, position, stats = tree
    parts = {"key": key, "value": value, "position": position + 1}
    taken = {name: _taken(leaf, slots) for name, leaf in parts.items()}
    kept = {name: _taken(leaf, slots) for name, leaf in stats.items()}
    here = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), valid.shape)
    bits = [packed(_exactly(each), here, valid) for each in (taken, kept)]
    # [C, B, K, m] int32
    every = across.gathered(jnp.concatenate(bits, axis=2))

    def whole(bits: Array, like: Any) -> Any:
        devices = [unpacked(each, _exactly(like), n) for each in bits]
        joined = {name: jnp.concatenate([each[name] for each in devices], axis=2) for name in like}
        return {name: leaf.astype(like[name].dtype) for name, leaf in joined.items()}

    of_pairs, of_stats = whole(every[..., : bits[0].shape[2]], taken), whole(every[..., bits[0].shape[2] :], kept)
    return of_pairs["key"], of_pairs["value"], of_pairs["position"] - 1, of_stats


def _taken(leaf: Array, slots: Array) -> Array:
    return jnp.take_along_axis(leaf, slots.reshape(*slots.shape, *(1,) * (leaf.ndim - 3)), axis=2)


def _exactly(tree: dict[str, Array]) -> dict[str, Array]:
    """Converts shorter floats to float32, whose bits are packed."""
    return {
        name: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for name, leaf in tree.items()
    }


def _stored(moves: Moves, old: tuple[Array, Array], new: tuple[Array, Array], sizes: list[int]) -> LayerKV:
    """Stores merged pairs [B, K, S + n, D] of this device's slots. A slot that did not change keeps its bytes."""
    layer, group, size = moves.layer, moves.group, sum(sizes)
    # [B, K, S]
    changed = jnp.any((old[0] != new[0]) | (old[1] != new[1]), axis=3)[:, :, :size]
    keys, values, marks = (arrange.separated(each[:, :, :size], sizes) for each in (*new, changed))
    stores = tuple(
        exact_store(key, value) if storage.exact else recode(storage, store, mark, key, value, value.dtype, moves.sides)
        for storage, store, mark, key, value in zip(group.stores, layer.stores, marks, keys, values, strict=True)
    )
    return layer.replace(stores=stores)
