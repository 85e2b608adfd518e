"""The KV cache: its specification, its layout, its state, and the step that updates it."""

from kvjax.cache.groups import Group
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Limits
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState, Layer, LayerKV, layers_of, live_slots, nbytes

__all__ = [
    "Block",
    "CacheLayout",
    "CacheSpec",
    "Group",
    "KVState",
    "Layer",
    "LayerKV",
    "Limits",
    "layers_of",
    "live_slots",
    "nbytes",
]
