"""Empty slots: the arrays of a cache, before anything is held."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.groups import Group, Phase
from kvjax.cache.slots import constrain, constrain_slots, empty_stats
from kvjax.cache.state import EMPTY, LIVE, Layer, LayerKV
from kvjax.parallel import host_memory
from kvjax.storage import store as held


def empty(group: Group, batch: int, kv_heads: int, dim: int, dtype: DTypeLike) -> LayerKV:
    """Allocates the empty slots of one group.

    Args:
      group: of heads.
      batch: the number of rows.
      kv_heads: KV heads of the model.
      dim: features of a head.
      dtype: of the model's keys and values.
    """
    heads = kv_heads if group.heads is None else len(group.heads)
    shape, dtype = (batch, heads, group.capacity), jnp.dtype(dtype)
    if group.sparse_prompt is not None:
        # Pages of a prompt are summarised in each step, and the index is built when the prompt ends.
        index = {}
    elif group.prompt_index is None:
        index = group.selection.init(shape, dim, dtype)
    else:
        index = group.prompt_index.start((batch, heads), dim)
    stores, marks = group.arrangement.empty(group, (batch, heads), dim, dtype) if group.slots else ((), {})
    if group.slots and group.holds_ranks:
        marks = {**marks, LIVE: jnp.zeros((batch, heads), jnp.int32)}
    ranked = (batch, heads, group.capacity - group.unranked)
    layer = LayerKV(
        position=jnp.full(shape, EMPTY, jnp.int32),
        stores=stores,
        stats=empty_stats(group.needs, group.remembers, ranked),
        index=index,
        dim=dim,
        parts=group.parts,
        sides=held.empty_sides(group.storage, (batch, heads), dim, dtype) if group.slots else {},
        marks=marks,
        memory={each.name: each.empty((batch, heads, group.queries), dim) for each in group.memory},
    )
    return constrain_slots(layer, group.per_head) if group.slot_axes else constrain(layer)


def empty_layers(phase: Phase, batch: int, kv_heads: int, dim: int, dtype: DTypeLike) -> tuple[Layer, ...]:
    """Allocates the empty slots of every group of a phase; see `empty`."""
    return tuple(Layer(empty(group, batch, kv_heads, dim, dtype) for group in layer) for layer in phase)


def memories(phase: Phase, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the memory of every array of a phase, one of `host_memory.MEMORIES`, as a tree like `layers`."""

    def of_group(group: Group, layer: LayerKV) -> LayerKV:
        on_device: LayerKV = jax.tree.map(lambda _: host_memory.DEVICE, layer)
        return on_device.replace(
            stores=tuple(
                {side: dict.fromkeys(parts, storage.memories[side]) for side, parts in store.items()}
                for storage, store in zip(group.stores, layer.stores, strict=True)
            )
        )

    return tuple(
        Layer(of_group(*each) for each in zip(groups, layer, strict=True))
        for groups, layer in zip(phase, layers, strict=True)
    )
