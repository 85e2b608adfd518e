"""The view of a policy on a device that has some of the slots."""

import jax
import jax.numpy as jnp

from kvjax.cache.context_parallel.placement import NewTokens
from kvjax.cache.context_parallel.select import Rows
from kvjax.cache.groups import Group
from kvjax.cache.state import EMPTY, LayerKV
from kvjax.parallel import slot_reductions
from kvjax.policies.base import View

Array = jax.Array


def both_stats(layer: LayerKV, own: NewTokens) -> dict[str, Array]:
    """Returns the statistics [B, K, S + n, ...] of this device's slots and of the step's own tokens."""
    return {name: jnp.concatenate([layer.stats[name], own.stats[name]], axis=2) for name in own.stats}


def view_of(
    layer: LayerKV,
    own: NewTokens,
    ranked: tuple[tuple[Array, ...], tuple[Array, ...]],
    rows: Rows,
    layer_index: Array,
    group: Group,
    axes: slot_reductions.Across,
) -> View:
    """Returns what a policy reads of this device's slots and of the step's own tokens.

    These count once, on the first device. For the arguments see `kvjax.cache.context_parallel.attend`.
    """
    key, value = (jax.lax.stop_gradient(jnp.concatenate(each, axis=2)) for each in ranked)
    counted = jnp.where(jax.lax.axis_index(axes.slots) == 0, own.position, EMPTY)
    return View(
        position=jnp.concatenate([layer.position, counted], axis=2), key=key, value=value,
        newest=jnp.max(rows.position, axis=1), budget=rows.budget, prompt=rows.prompt, layer=layer_index,
        decoding=group.decoding, heads=_heads(group, own.position.shape[1], axes.heads),
    )  # fmt: skip


def _heads(group: Group, kv_heads: int, axes: tuple[str, ...]) -> tuple[int, ...] | Array | None:
    """Returns the model's indices of this device's KV heads; see `View`.

    Args:
      group: of heads.
      kv_heads: KV heads of the group on a device.
      axes: that heads are divided over.
    """
    if not axes:
        return group.heads
    first = jax.lax.axis_index(axes) * kv_heads
    if group.heads is None:
        return first + jnp.arange(kv_heads, dtype=jnp.int32)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(group.heads, jnp.int32), first, kv_heads)
