"""Layers whose heads share one policy, and layers whose heads are split among several (`kvjax.policies.split_heads`).

A policy with parts has a cache for each: arrays of that part's own capacity, which is where the memory is saved. A
layer is then a tuple, one `LayerKV` a part, None where the part has no head in that layer; whatever is sized by part
(`Block.budget`, `Block.capacity`) is a tuple in the parts' order too. Each part goes through its step by itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache, fused
from kvjax.cache import Block, KVState, LayerKV
from kvjax.policies.base import Policy

Array = jax.Array
Layer = Any  # LayerKV, or tuple[LayerKV | None, ...] of a policy with parts


def step(
    layer: Layer | None, query: Array, key: Array, value: Array, *, block: Block, index: int, **options: Any
) -> tuple[Array, Layer]:
    """`cache.step`, part by part, or the kernel that does the same (`kvjax.fused`); arguments and results as there."""
    parts = block.policy.parts
    if not parts:
        run = (
            fused.step
            if fused.covers(block, layer, query.shape[2], key.shape[1], query.shape[1] // key.shape[1])
            else cache.step
        )
        return run(layer, query, key, value, block=block, index=index, **options)
    batch, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, n, dim)
    outputs: list[Array] = []
    layers: list[LayerKV | None] = []
    order: list[int] = []
    for number, part in enumerate(parts):
        own = part.heads[index]
        if not own:
            layers.append(None)
            continue
        at = np.asarray(own)
        output, after = step(
            None if layer is None else layer[number],
            grouped[:, at].reshape(batch, -1, n, dim),
            key[:, at],
            value[:, at],
            block=block.replace(
                policy=part.policy,
                budget=block.budget[number],
                capacity=None if block.capacity is None else block.capacity[number],
            ),
            index=index,
            heads=own,
            **options,
        )
        outputs.append(output.reshape(batch, len(own), -1, n, dim))
        layers.append(after)
        order += own
    # Back into the model's order of heads.
    output = jnp.concatenate(outputs, axis=1)[:, np.argsort(order)]
    return output.reshape(query.shape), tuple(layers)


def empty(
    policy: Policy, capacity: tuple[Any, ...], batch: int, kv_heads: int, dim: int, dtype: Any
) -> tuple[Layer, ...]:
    """Every layer with its capacity of empty slots."""
    if not policy.parts:
        return tuple(cache.empty(policy, batch, kv_heads, slots, dim, dtype) for slots in capacity)
    parts = [
        [
            cache.empty(part.policy, batch, len(heads), slots, dim, dtype) if heads else None
            for heads, slots in zip(part.heads, sizes, strict=True)
        ]
        for part, sizes in zip(policy.parts, capacity, strict=True)
    ]
    return tuple(zip(*parts, strict=True))


def resize(layers: tuple[Layer, ...], policy: Policy, capacity: tuple[Any, ...]) -> tuple[Layer, ...]:
    """`cache.resize` of every layer."""
    if not policy.parts:
        return tuple(cache.resize(layer, slots) for layer, slots in zip(layers, capacity, strict=True))
    return tuple(
        tuple(part and cache.resize(part, slots) for part, slots in zip(layer, sizes, strict=True))
        for layer, sizes in zip(layers, zip(*capacity, strict=True), strict=True)
    )


def flat(state: KVState) -> list[tuple[int, LayerKV]]:
    """(Which layer, its slots), for every part of every layer."""
    return [
        (index, part)
        for index, layer in enumerate(state.layers)
        for part in (layer if isinstance(layer, tuple) else (layer,))
        if part is not None
    ]
