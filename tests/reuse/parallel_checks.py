"""Contexts that share positions, with and without a mesh that divides their slots, for test_parallel.py.

Prints one line of JSON for each case whose name is an argument, in a process with four simulated devices.
"""

import json
import sys
from typing import Any

import jax
import numpy as np

from kvjax import contexts, policies, reuse
from kvjax.cache.layer_stack import arranged_state
from kvjax.generation.context import Context
from kvjax.models.model import Model
from kvjax.parallel import sharding
from tests.reuse.test_chunks import CHUNKS, PREFIX, QUESTION
from tests.tiny import tiny

CASES = {
    "full": ("context:4", policies.full()),
    "window": ("model:2,context:2", policies.window(16)),
}


def made(model: Model, policy: policies.Policy) -> list[Context]:
    """Returns the context after the question, after a turn, and after an answer."""
    prefix = reuse.compute(model, PREFIX)
    asked = reuse.parallel(model, [reuse.compute(model, each, prefix) for each in CHUNKS], QUESTION, policy, room=64)
    turn = contexts.extend(model, asked, [[5, 9, 2]])
    answer = contexts.decode(model, turn, max_new_tokens=8).context
    assert answer is not None
    return [asked, turn, answer]


def check(name: str) -> dict[str, Any]:
    """Returns the differences of a case from one device, and how its slots are divided."""
    axes, policy = CASES[name]
    alone = tiny(layers=2).model
    mesh = sharding.make_mesh(axes)
    placed = jax.device_put(alone.params, sharding.parameter_shardings(alone.params, mesh))
    divided, whole = (made(each, policy) for each in (Model(alone.config, placed, mesh=mesh), alone))
    pairs = list(zip(divided, whole, strict=True))
    groups = [group for layer in divided[0].layout.decode for group in layer]
    position = arranged_state(divided[-1].state, ()).layers[0][0].position
    return {
        "name": name,
        "logits": max(float(np.abs(np.asarray(one.logits)[0] - np.asarray(two.logits)[0]).max()) for one, two in pairs),
        "kept": all(
            np.array_equal(*heads)
            for one, two in pairs
            for layer in range(alone.config.num_layers)
            for heads in zip(one.kept(layer)[0], two.kept(layer)[0], strict=True)
        ),
        "text": np.array_equal(divided[-1].text[0], whole[-1].text[0]),
        "axes": sorted({axis for group in groups for axis in group.slot_axes}),
        "slots": position.shape[2],
        "own_slots": position.sharding.shard_shape(position.shape)[2],
        "says": divided[0].layout.explain(),
    }


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps(check(each)), flush=True)
