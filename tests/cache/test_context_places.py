"""Slots on several devices: which one is evicted, and which device takes a new token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.context_parallel import gathered_state
from kvjax.cache.context_parallel.victims import LocalVictim, global_victim
from kvjax.cache.step import evict

AXIS = "context"


def places(position, stays, **options):
    """The slot of each token on each device, [C, n]; the devices are the rows of `position` [C, S]."""
    free = jnp.sum(jnp.asarray(position) < 0, axis=1, dtype=jnp.int32)[:, None, None, None]

    def of_device(own):
        return gathered_state.places(own[None, None], jnp.asarray(stays)[None, None], free, (AXIS,), **options)[0, 0]

    return np.asarray(jax.vmap(of_device, axis_name=AXIS)(jnp.asarray(position)))


def one_by_one(position, stays, in_order):
    """The same, token by token."""
    position, size = position.copy(), position.shape[1]
    made = np.full((len(position), len(stays)), size)
    for number in np.flatnonzero(stays):
        live = (position >= 0).sum(axis=1)
        room = np.flatnonzero(live < size)
        device = room[0] if in_order else min(room, key=lambda each: (live[each], each))
        made[device, number] = np.flatnonzero(position[device] < 0)[0]
        position[device, made[device, number]] = 0
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_order", [False, True])
def test_places(in_order):
    random = np.random.default_rng(0)
    compared = 0
    for _ in range(40):
        devices, tokens = random.choice([1, 4]), random.choice([1, 3])
        position = np.where(random.random((devices, 6)) < random.random(), -1, 5).astype(np.int32)
        stays = random.random(tokens) < 0.8
        if stays.sum() <= (position < 0).sum():
            compared += stays.sum() > 0
            expected = one_by_one(position, stays, in_order)
            np.testing.assert_array_equal(places(position, stays, in_order=in_order), expected)
    assert compared > 10


def test_worked_examples(shared_data):
    arrays = np.load(shared_data / "examples" / "reuse_cases.npz")
    found = 0
    for number, case in enumerate(json.loads(bytes(arrays["cases"]))):
        if case["kind"] == "victim":
            found += 1
            position, priority = (arrays[f"{number}_in_{name}"] for name in ("position", "priority"))
            taken = places(position.astype(np.int32), np.array([True]))[:, 0]
            assert [int(each) for each in np.flatnonzero(taken < position.shape[1])] == [case["expect"]["place"]]
            # [C, 1, 1, 1] each: what each device names
            named = [
                evict.lowest_priority_oldest(jnp.float32(one)[None, None], jnp.int32(two)[None, None])
                for one, two in zip(priority, position, strict=True)
            ]
            lowest, oldest = (jnp.stack(each) for each in zip(*named, strict=True))
            every = jnp.concatenate([jax.lax.bitcast_convert_type(lowest, jnp.int32), oldest], axis=3)
            own = LocalVictim(every[0], jnp.zeros((1, 1, 1), jnp.int32), 0)
            victim = int(global_victim(every, own, jnp.ones((1, 1, 1), jnp.int32)).position[0, 0, 0])
            assert victim == position[case["expect"]["shard"], case["expect"]["slot"]]
    assert found == 2
