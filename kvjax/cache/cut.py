"""Shortens texts: empties the slots of their last tokens."""

import jax
import jax.numpy as jnp

from kvjax.cache.slots import forget
from kvjax.cache.state import EMPTY, KVState, LayerKV

Array = jax.Array


def cut(state: KVState, length: Array) -> KVState:
    """Empties the slots of positions from `length`, [B] int32, on; shorter rows are unchanged.

    This is the cache of the shorter text only where nothing else remembers the tokens that are forgotten.
    """

    def shortened(layer: LayerKV) -> LayerKV:
        # [B, 1, 1], or [B, 1, 1, 1] of a stack of layers
        end = length.reshape(-1, *(1,) * (layer.position.ndim - 1))
        position = jnp.where(layer.position < end, layer.position, EMPTY)
        return layer.replace(position=position, stats=forget(layer.stats, position))

    layers = jax.tree.map(shortened, state.layers, is_leaf=lambda each: isinstance(each, LayerKV))
    return state.replace(layers=layers, length=jnp.minimum(state.length, length))
