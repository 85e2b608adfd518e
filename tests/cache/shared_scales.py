"""An arrangement of a test: two neighbouring slots share a scale."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.arrangements import Arrangement
from kvjax.cache.slots import free_slots, oldest_first, take, write
from kvjax.cache.state import EMPTY
from kvjax.storage import Integer, Storage
from kvjax.storage.layouts import Layout

LARGEST = 127


@dataclasses.dataclass(frozen=True)
class SharedScales(Layout):
    """The layout; `codes` of two slots have one scale."""

    of_blocks = True


def shared_scales() -> Storage:
    return Storage(key=Integer(8), value=Integer(8), layout=SharedScales(), name="shared scales")


def encoded(x: jax.Array) -> dict[str, jax.Array]:
    """Codes [B, K, S, D] and scales [B, K, S / 2, 1] of vectors [B, K, S, D]."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:2], -1, 2 * x.shape[3])
    scale = jnp.max(jnp.abs(pairs), axis=3, keepdims=True) / LARGEST
    codes = jnp.round(pairs / jnp.where(scale > 0, scale, 1.0))
    return {"codes": codes.astype(jnp.int8).reshape(x.shape), "scale": scale}


def decoded(parts: dict[str, jax.Array]) -> jax.Array:
    return parts["codes"].astype(jnp.float32) * jnp.repeat(parts["scale"], 2, axis=2)


class SharedScaleArrangement(Arrangement):
    def refuses(self, spec, branch, sizes, layers):
        return None if branch.decode.budget is None else "an evicted slot shares its scale with one that stays."

    def slots(self, storage, counts):
        return (counts.slots + counts.slots % 2,)

    def empty(self, group, shape, dim, dtype):
        (slots,) = group.slots
        side = {
            "codes": jnp.zeros((*shape, slots, dim), jnp.int8),
            "scale": jnp.zeros((*shape, slots // 2, 1), jnp.float32),
        }
        return ({"key": side, "value": side},), {}

    def decoded(self, storage, layer, number, side, dtype, sides):
        return decoded(layer.stores[number][side]).astype(dtype)

    def read(self, storage, layer, sides, lower):
        (store,) = layer.stores
        return decoded(store["key"]), decoded(store["value"]), layer.position

    def write(self, step):
        layer, size = step.layer, step.layer.position.shape[2]
        own = step.position[:, :, size:]
        free = jnp.where(own >= 0, free_slots(layer.position, own.shape[2]), size)
        (store,) = layer.stores
        new = {"key": step.key, "value": step.value}
        after = {side: encoded(write(decoded(store[side]), free, x.astype(jnp.float32))) for side, x in new.items()}
        moved = jax.tree.map(lambda leaf: write(leaf[:, :, :size], free, leaf[:, :, size:]), step.per_slot)
        return layer.replace(position=write(layer.position, free, own), stores=(after,)), moved

    def convert(self, prompt):
        layer, (slots,) = prompt.layer, prompt.group.slots
        order = oldest_first(layer.position, layer.position >= 0, slots)
        position = take(layer.position, order, slots, EMPTY)
        store = {side: encoded(take(parts["exact"], order, slots)) for side, parts in layer.stores[0].items()}
        moved = jax.tree.map(lambda leaf: take(leaf, order, slots), prompt.per_slot)
        return layer.replace(position=position, stores=(store,)), moved
