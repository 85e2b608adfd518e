"""What the compiled programs do to memory: no copy of a cache while decoding, nothing quadratic in a prompt.

Programs are compiled from shapes and read, not run.
"""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention, cache, policies
from kvjax.allocation import allocate
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.models.decoder import parameter_shapes
from kvjax.prefill import prefill_steps
from kvjax.rope import Rope
from kvjax.sampling import Greedy
from kvjax.statistics import MASS
from tests.tiny import tiny

loop = importlib.import_module("kvjax.generate")
BATCH, SLOTS = 2, 512
# Heads wide enough that a layer's keys outweigh the scores over them.
WIDE = dataclasses.replace(tiny().model.config, head_dim=32, rope=Rope(dim=32))
# The suite may compile without optimisations for speed; these tests read what users run.
OPTIMIZED = {"xla_backend_optimization_level": "3", "xla_llvm_disable_expensive_passes": "False"}


def compile_decode(policy):
    """`decode_steps` for two rows under a budget of `SLOTS`; returns the executable and a layer's key."""
    config = WIDE
    key = jax.ShapeDtypeStruct((BATCH, config.num_kv_heads, SLOTS + 1, config.head_dim), jnp.float32)
    ints = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    layer = cache.LayerKV(
        key, key, jax.ShapeDtypeStruct(key.shape[:3], jnp.int32), jax.eval_shape(lambda: policy.init(key.shape[:3]))
    )
    state = cache.KVState((layer,) * config.num_layers, ints)
    carry = loop.Carry(state, ints, jax.ShapeDtypeStruct((BATCH,), bool), jax.eval_shape(lambda: jax.random.key(0)))
    lowered = loop.decode_steps.lower(
        parameter_shapes(config), carry, (ints,) * config.num_layers, jax.ShapeDtypeStruct((1,), jnp.int32), 5,
        config=config, policy=policy, sampler=Greedy(),
    )  # fmt: skip
    return lowered.compile(OPTIMIZED), key


INSTRUCTION = re.compile(r"^\s*(ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
IN_PLACE = {"get-tuple-element", "parameter", "bitcast", "scatter", "dynamic-update-slice", "while"}


def computations(text: str) -> dict[str, list[str]]:
    """Name -> instruction lines of every computation of an HLO module."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head.group(1)
            found[name] = []
        elif name and INSTRUCTION.match(line):
            found[name].append(line)
    return found


def rewrites(text: str, shape: str) -> list[str]:
    """Instructions of while loops that make a whole new array of `shape`, e.g. ``f32[2,2,513,8]``."""
    modules = computations(text)

    def operation(line: str) -> str:
        _, _, opcode, rest = INSTRUCTION.match(line).groups()
        if opcode != "fusion":
            return opcode
        fused = modules[re.search(r"calls=%?([\w.-]+)", rest).group(1)]
        root = next(line for line in fused if INSTRUCTION.match(line).group(1))
        return operation(root)

    bodies = {name for line in text.splitlines() for name in re.findall(r"body=%?([\w.-]+)", line)}
    assert bodies, "a decode loop is a while loop"
    lines = [line for body in bodies for line in modules[body] if INSTRUCTION.match(line).group(2).startswith(shape)]
    assert lines, f"no array {shape} in the loop: is the shape right?"
    return [line.strip() for line in lines if operation(line) not in IN_PLACE]


def shape_of(key: jax.ShapeDtypeStruct) -> str:
    return f"f32[{','.join(map(str, key.shape))}]"


@pytest.mark.parametrize("name", ["h2o", "window"])
def test_decoding_copies_no_cache(name):
    executable, key = compile_decode(policies.by_name(name, budget=SLOTS))
    assert rewrites(executable.as_text(), shape_of(key)) == []
    memory = executable.memory_analysis()
    held = 2 * WIDE.num_layers * key.size * 4
    assert memory.alias_size_in_bytes >= held, "keys and values are donated"
    assert memory.temp_size_in_bytes < key.size * 4, "no room for even one layer's keys"


def test_a_copy_of_the_cache_would_be_seen(monkeypatch):
    """An append that rewrites the array, the usual way to do it, is found by the check above."""

    def write(array, slot, new):
        here = slot[..., None] == jnp.arange(array.shape[2])[:, None, None].T
        return jnp.where(jnp.swapaxes(here, 2, 3) if array.ndim == 4 else here[:, :, 0], new, array)

    monkeypatch.setattr(cache, "_write", write)
    executable, key = compile_decode(policies.h2o(budget=SLOTS)._replace(name="rewrites"))
    assert rewrites(executable.as_text(), shape_of(key))


def temporaries(n: int, attend) -> int:
    """Bytes beyond inputs and outputs of attending over a prompt of n tokens."""
    query = jax.ShapeDtypeStruct((1, 4, n, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 2, n, 16), jnp.float32)
    position = jax.ShapeDtypeStruct((1, n), jnp.int32)
    return jax.jit(attend).lower(query, key, key, position).compile().memory_analysis().temp_size_in_bytes


def prompt(query, key, value, position, *, needs):
    key_position = jnp.broadcast_to(position[:, None], key.shape[:3])
    output, seen = attention.attend(
        query, key, value, query_position=position, key_position=key_position, needs=needs, causal=True
    )  # fmt: skip
    return output, seen.columns


def test_statistics_of_a_prompt_cost_linear_memory():
    short, long = 8_192, 16_384
    with_mass = functools.partial(prompt, needs=frozenset({MASS}))
    without = functools.partial(prompt, needs=frozenset())
    peak = {n: temporaries(n, with_mass) for n in (short, long)}
    extra = {n: peak[n] - temporaries(n, without) for n in (short, long)}
    print(f"temporaries {peak}, of which for the statistic {extra}")
    assert 0 < extra[long] <= 2.2 * extra[short]
    assert extra[long] < long * long * 4 / 16 and peak[long] < long * long * 4 / 8
    assert peak[long] <= 2.2 * peak[short]


def test_a_quadratic_statistic_would_be_seen():
    def square(query, key, value, position):
        p = jax.nn.softmax(jnp.einsum("bkgnd,bksd->bkgns", query.reshape(1, 2, 2, -1, 16), key))
        return jnp.einsum("bkgns,bksd->bkgnd", p, value), p.mean(axis=2).sum(axis=2)

    assert temporaries(16_384, square) >= 16_384**2 * 4


@pytest.mark.parametrize("name", ["h2o", "roco", "tova"])
def test_a_prompt_in_blocks_is_held_within_budget_and_block(name):
    """32,768 tokens under 1,024 slots, in blocks of 256: beyond the token ids, not a byte more than 4,096 take."""
    config, policy = dataclasses.replace(WIDE, max_positions=32_768), policies.by_name(name, budget=1024)

    def temporaries(tokens: int) -> int:
        prompt = np.array([tokens])
        slots = allocate(policy, prompt, prompt + 1, config.num_layers, config.num_kv_heads, 256)
        assert slots.capacity == (1025,) * config.num_layers and slots.block_capacity == (1280,) * config.num_layers
        ints = jax.ShapeDtypeStruct((1,), jnp.int32)
        program = prefill_steps.lower(
            parameter_shapes(config), jax.ShapeDtypeStruct((1, tokens), jnp.int32), ints, (ints,) * config.num_layers,
            config=config, policy=policy, capacity=slots.capacity, block_capacity=slots.block_capacity, block=256,
            score=False,
        )  # fmt: skip
        return program.compile(OPTIMIZED).memory_analysis().temp_size_in_bytes

    short, long = temporaries(4_096), temporaries(32_768)
    print(f"temporaries of 4,096 and 32,768 tokens: {short:,} and {long:,} bytes")
    assert long - short <= 16 * (32_768 - 4_096)
    held = config.num_layers * config.num_kv_heads * 1280 * 2 * config.head_dim * 4
    assert long < prefill_xla.TILE_BYTES + 3 * held < 32_768 * held // 1280, "a tile of scores, and some caches"


def test_no_layer_keeps_its_prompt(monkeypatch):
    """In the order of execution, a layer's survivors are taken before the next layer attends over its own prompt."""
    monkeypatch.setattr(prefill_xla, "SEGMENTS", 1)  # one loop a layer
    n, layers, policy = 2_048, 4, policies.h2o(budget=16)
    config = dataclasses.replace(tiny().model.config, num_layers=layers, windows=(), head_dim=64, rope=Rope(dim=64))
    ints, slots = jax.ShapeDtypeStruct((1,), jnp.int32), (17,) * layers
    lowered = prefill_steps.lower(
        parameter_shapes(config), jax.ShapeDtypeStruct((1, n), jnp.int32), ints, (ints,) * layers, config=config,
        policy=policy, capacity=slots, block_capacity=slots, block=None, score=False,
    )  # fmt: skip
    entry = lowered.compile(OPTIMIZED).as_text().split("\nENTRY ")[1].splitlines()[1:]
    survivors, before = 0, []
    for shape, opcode in (match.group(2, 3) for match in map(INSTRUCTION.match, entry) if match):
        survivors += shape.startswith("f32[1,2,17,64]") and opcode != "bitcast"
        if opcode == "while" and f"[1,2,{n},64]" in shape:
            before.append(survivors)
    assert before == [2 * layer for layer in range(layers)], "keys and values kept when each layer starts"
