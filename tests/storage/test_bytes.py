"""Bytes are bytes: what a layout says is what the compiled decoding program takes and gives back."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import storage
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.devices import Device
from kvjax.generation.decoding import decode_steps
from kvjax.generation.sampling import Greedy
from kvjax.planning.roofline import average_slots, decode_shapes, roofline
from tests.storage import every

ROWS, PROMPT, NEW = 2, 20, 9
DTYPE = "bfloat16"  # numbers that are held in another dtype than the model's are seen
CONFIG = dataclasses.replace(every.CONFIG, vocab_size=8, mlp_size=8, windows=())


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: arguments do not depend on it."""


def size(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def program(name: str):
    """The layout, the shapes of a decoding loop, its program, and its roofline."""
    # Both layers of a pair; others are alike.
    config = CONFIG if name == "minicache" else dataclasses.replace(CONFIG, num_layers=1, windows=())
    lengths = np.full((ROWS,), PROMPT)
    sizes = sizes_for(lengths, NEW - 1, width=PROMPT, block=None, limits=Limits(PROMPT, NEW), last_fed=False)
    made = lower(every.spec(name), config, sizes, lengths, dtype=DTYPE)
    layout = made.layout
    shapes = decode_shapes(config, layout, DTYPE, ROWS, None)
    stop, steps = jax.ShapeDtypeStruct((0,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    lowered = decode_steps.lower(*shapes, stop, steps, config=config, phase=layout.decode, sampler=Greedy())
    step = roofline(config, shapes, average_slots(config, made, PROMPT, NEW), Device("none", None, None, None, ""))
    return layout, shapes, lowered.compile().memory_analysis(), step


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:storage .*takes:UserWarning")
@pytest.mark.parametrize("name", [*every.KINDS, "integer", "mxfp4"])  # bits that fill no byte, and scales of one
def test_a_program_takes_what_the_layout_says(name):
    layout, shapes, memory, step = program(name)
    state = shapes.carry.state
    layers = state.layers
    held = size([(layer.stores, layer.sides) for groups in layers for layer in groups])
    assert layout.bytes(ROWS) == storage.nbytes(state) == held
    assert layout.bytes(ROWS, statistics=True) == held + storage.breakdown(state)["rest"] == size(layers)
    # A plan takes its bytes of a cache from here.
    assert step.cache == size(state)
    # All of the cache is donated, and nothing else is an argument but the parameters and the number of steps.
    assert memory.alias_size_in_bytes == size(shapes.carry)
    assert memory.argument_size_in_bytes == size(shapes.carry) + size(shapes.params) + 4
    if every.HELD[name].layout != every.storage.slots:
        return
    # Slots are as many bytes as their codecs say.
    (group,) = layout.groups
    own = sum(
        count * each.bytes_per_slot(every.DIM, DTYPE) for count, each in zip(group.slots, group.stores, strict=True)
    )
    sides = size([layer.sides for groups in layers for layer in groups])
    assert held == ROWS * every.KV_HEADS * own + sides
