"""The content of the slots of evicted tokens never matters, in any storage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import LayerKV
from kvjax.cache.arrangements.blocks_with_residual import EXACT, OF_PROMPT, PROMPT, SHARED
from kvjax.storage import STORAGES, Blocks, Segments
from tests.storage import every

Array = jax.Array
CODE, NUMBER = 255, 1e15  # what is spoiled becomes; it must decode to finite numbers


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: the same program runs twice."""


def filled(leaf: Array, live: Array) -> Array:
    """Spoils what is not live: leaf [B, K, ...], live its leading axes or all of the next one's entries."""
    live = jnp.broadcast_to(live.reshape(*live.shape, *(1,) * (leaf.ndim - live.ndim)), leaf.shape)
    spoiled = CODE if leaf.dtype == jnp.uint8 else min(NUMBER, float(jnp.finfo(leaf.dtype).max))
    return jnp.where(live, leaf, jnp.asarray(spoiled, leaf.dtype))


def spoil(layer: LayerKV, held: every.Storage) -> LayerKV:
    live = layer.position >= 0
    if isinstance(held.layout, Blocks) and layer.marks:
        return layer.replace(stores=(_blocks(layer, held, jnp.sum(live, axis=2, dtype=jnp.int32)),))
    if isinstance(held.layout, Segments):
        return layer.replace(stores=_segments(layer, held.layout, live))
    stores, start = [], 0
    for store in layer.stores:
        size = jax.tree.leaves(store["value"])[0].shape[2]
        stores.append(jax.tree.map(functools.partial(filled, live=live[:, :, start : start + size]), store))
        start += size
    return layer.replace(stores=tuple(stores))


def _blocks(layer: LayerKV, held: every.Storage, tokens: Array) -> dict:
    """Units that are not encoded, and entries of exact tokens that hold none; tokens [B, K] are live."""
    made = {}
    first = layer.marks.get(PROMPT, jnp.zeros_like(tokens))
    for side, parts in layer.stores[0].items():
        unit = held.layout.size if isinstance(held.codecs[side], every.storage.BlockCodec) else 1
        coded = layer.marks[side]
        made[side] = {}
        for name, part in parts.items():
            count = jnp.arange(part.shape[2], dtype=jnp.int32)
            if name.startswith(SHARED):
                known = jnp.ones(part.shape[:3], bool)
            elif name == EXACT:
                entry = coded[..., None] + (count - coded[..., None]) % max(part.shape[2], 1)
                known = entry < tokens[..., None]
            else:
                end = first if name.startswith(OF_PROMPT) else coded
                start = 0 if name.startswith(OF_PROMPT) else first[..., None]
                known = start + (count + 1) * unit <= end[..., None]
            made[side][name] = filled(part, known)
    return made


def _segments(layer: LayerKV, layout: Segments, live: Array) -> tuple:
    """Slots of both tiers, ranges of segments without a token, and the window."""
    stores, start = [], 0
    for store in layer.stores:
        size = jax.tree.leaves(store["value"])[0].shape[2]
        own = live[:, :, start : start + size]
        start += size
        keys = {}
        later = next((part.shape[2] for name, part in store["key"].items() if name == "codes"), 0)
        each = store["key"]["codes"].shape[3] if later else 0
        first = size - later * each
        for name, part in store["key"].items():
            if name == EXACT:
                keys[name] = filled(part, own)
                continue
            mine = own[:, :, :first]
            if not name.startswith((OF_PROMPT, SHARED)):
                mine = own[:, :, first:].reshape(*own.shape[:2], later, each)
            keys[name] = filled(part, mine if name.endswith("codes") else jnp.any(mine, axis=-1))
        stores.append({"key": keys, "value": jax.tree.map(functools.partial(filled, live=own), store["value"])})
    return tuple(stores)


def test_every_storage_is_here():
    assert set(every.HELD) == set(STORAGES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", every.KINDS)
def test_what_an_evicted_slot_holds_does_not_matter(name):
    made, held = every.prepare(name), every.HELD[name]

    @jax.jit
    def run(spoiled, *given):
        def change(layer):
            return jax.tree.map(functools.partial(jnp.where, spoiled), spoil(layer, held), layer)

        return every.run(name, made, *given, change=change)

    plain, other = (run(jnp.asarray(spoiled), every.tokens(), every.tokens(1)) for spoiled in (False, True))
    live = np.asarray(plain.position) >= 0
    assert (live.sum(axis=2) < every.LENGTHS[:, None] + every.STEPS).any(), "nothing was evicted"
    np.testing.assert_array_equal(plain.position, other.position)
    np.testing.assert_array_equal(plain.output, other.output)
    for one, two in ((plain.key, other.key), (plain.value, other.value)):
        np.testing.assert_array_equal(np.asarray(one)[live], np.asarray(two)[live])
    assert other.changed and not plain.changed, "nothing was spoiled"
