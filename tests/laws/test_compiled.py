"""Compiled programs and memory: no copy of a cache while decoding, nothing quadratic in a prompt.

Programs are compiled from shapes and read, not run.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention, policies, products, storage
from kvjax.cache import CacheSpec, Limits, slots
from kvjax.cache.empty import empty
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import as_spec
from kvjax.generation.decoding import decode_steps
from kvjax.generation.prefill import prefill_steps
from kvjax.generation.sampling import Greedy
from kvjax.kernels.decode import coded
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.models.parameters import parameter_shapes
from kvjax.numerics.rope import Rope
from kvjax.numerics.statistics import MASS
from kvjax.planning.roofline import decode_shapes
from kvjax.products import native
from tests.tiny import tiny

BATCH, SLOTS = 2, 512
# Heads wide enough that a layer's keys outweigh the scores over them.
WIDE = dataclasses.replace(tiny().model.config, head_dim=32, rope=Rope(dim=32))


def lowered(policy, prompt: int, new_tokens: int = 2, block: int | None = None, config=WIDE, rows: int = 1):
    """A layout for arrays of exactly these sizes."""
    lengths = np.full((rows,), prompt)
    limits = Limits(prompt, new_tokens)
    sizes = sizes_for(lengths, new_tokens - 1, width=prompt, block=block, limits=limits, last_fed=False)
    return lower(as_spec(policy), config, sizes, lengths)


def compile_decode(policy):
    """`decode_steps` for two rows under a budget of `SLOTS`; returns the executable and a layer's key."""
    layout = lowered(policy, 2 * SLOTS, rows=BATCH).layout
    shapes = decode_shapes(WIDE, layout, jnp.float32, BATCH, None)
    stop = jax.ShapeDtypeStruct((1,), jnp.int32)
    program = decode_steps.lower(*shapes, stop, 5, config=WIDE, phase=layout.decode, sampler=Greedy())
    store = shapes.carry.state.layers[0].stores[0]
    return program.compile(), next(iter(store["key"].values()))


def compile_prompt(policy, tokens: int, block: int | None, config):
    """`prefill_steps` of one prompt, and its layout."""
    made = lowered(policy, tokens, block=block, config=config)
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    budgets = jax.tree.map(lambda _: row, made.budgets)
    program = prefill_steps.lower(
        parameter_shapes(config), jax.ShapeDtypeStruct((1, tokens), jnp.int32), row, row, budgets.prompt,
        budgets.decode, config=config, layout=made.layout, score=False,
    )  # fmt: skip
    return program.compile(), made.layout


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "every"), [("h2o", 1), ("window", 1), ("h2o", 16)])
def test_decoding_copies_no_cache(name, every):
    executable, key = compile_decode(policies.by_name(name, budget=SLOTS, every=every))
    assert rewrites(executable.as_text(), shape_of(key)) == []
    memory = executable.memory_analysis()
    held = 2 * WIDE.num_layers * key.size * 4
    assert key.shape == (BATCH, WIDE.num_kv_heads, SLOTS + every, WIDE.head_dim)
    assert memory.alias_size_in_bytes >= held, "keys and values are donated"
    assert memory.temp_size_in_bytes < key.size * 4, "no room for even one layer's keys"


@pytest.mark.parametrize(
    "policy", [policies.lagkv(SLOTS, every=16, lag=32), policies.ems(SLOTS, window=31)], ids=["round", "merge"]
)
def test_reading_keys_and_values_copies_no_cache(policy):
    """A round's branch reads keys and values, and a merge changes one row; no step rewrites them for it."""
    executable, key = compile_decode(policy)
    assert rewrites(executable.as_text(), shape_of(key)) == []


def test_a_cosine_per_rank_and_not_per_slot():
    """Heads of positions="cache" rotate every slot in every step."""
    executable, key = compile_decode(policies.window(SLOTS, positions="cache"))
    slots_of_heads = f"f32[{','.join(map(str, (*key.shape[:3], WIDE.head_dim // 2)))}]"
    made = re.findall(r"= (f32\[\S*\])\S* cosine\(", executable.as_text())
    assert f"f32[1,{key.shape[2]},{WIDE.head_dim // 2}]" in made and slots_of_heads not in made


def test_a_copy_of_the_cache_would_be_seen(monkeypatch):
    """An append that rewrites the array, the usual way to do it, is found by the check above."""

    def write(array, slot, new):
        here = slot[..., None] == jnp.arange(array.shape[2])[:, None, None].T
        return jnp.where(jnp.swapaxes(here, 2, 3) if array.ndim == 4 else here[:, :, 0], new, array)

    monkeypatch.setattr(slots, "write", write)
    jax.clear_caches()
    executable, key = compile_decode(policies.h2o(budget=SLOTS))
    jax.clear_caches()
    assert rewrites(executable.as_text(), shape_of(key))


def decoded_copies(text: str, key: jax.ShapeDtypeStruct) -> list[str]:
    """Float32 arrays of at least as many numbers as a layer's keys, which are coded in `key`, anywhere in a program."""
    numbers = math.prod(key.shape[:3]) * WIDE.head_dim
    return [dims for dims in re.findall(r"f32\[([\d,]+)\]", text) if math.prod(map(int, dims.split(","))) >= numbers]


@pytest.fixture
def form():
    """Sets the form of products, as `kvjax.products.use` does, and how many slots are decoded at a time."""
    before = products.setting(), coded.CHUNKS["cpu"]

    def use(name: str, chunk: int) -> None:
        coded.CHUNKS["cpu"] = chunk
        products.use(name)

    yield use
    use(*before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["native", "fixed"])
@pytest.mark.parametrize("policy", [policies.full(), policies.h2o(SLOTS)], ids=lambda policy: policy.name)
def test_decoding_holds_codes_and_no_decoded_copy(policy, name, form):
    if name == "native" and native.load():
        pytest.skip(native.load())
    form(name, 64)
    executable, key = compile_decode(CacheSpec(policy, storage.int8()))
    text = executable.as_text()
    assert decoded_copies(text, key) == []
    assert rewrites(text, f"u8[{','.join(map(str, key.shape))}]") == []
    assert executable.memory_analysis().temp_size_in_bytes < math.prod(key.shape) * 4 / 2
    # A product of queries, and one of probabilities; statistics are of the same logits.
    calls = len(re.findall(rf'custom-call\(.*"{native.CODED_VECTORS}"', text))
    assert calls == (2 * WIDE.num_layers if name == "native" else 0)


def test_a_decoded_copy_would_be_seen(form):
    form("fixed", 2 * SLOTS)
    executable, key = compile_decode(CacheSpec(policies.h2o(SLOTS), storage.int8()))
    assert decoded_copies(executable.as_text(), key)


def temporaries(n: int, attend) -> int:
    """Bytes beyond inputs and outputs of attending over a prompt of n tokens."""
    query = jax.ShapeDtypeStruct((1, 4, n, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 2, n, 16), jnp.float32)
    position = jax.ShapeDtypeStruct((1, n), jnp.int32)
    return jax.jit(attend).lower(query, key, key, position).compile().memory_analysis().temp_size_in_bytes


def prompt(query, key, value, position, *, needs):
    key_position = jnp.broadcast_to(position[:, None], key.shape[:3])
    problem = attention.problem(
        query, key, value, query_position=position, key_position=key_position, needs=needs, causal=True
    )  # fmt: skip
    output, columns = attention.attend_parts([problem], "xla")
    return output, columns


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


def test_a_prompt_in_blocks_is_held_within_budget_and_block():
    """32,768 tokens under 1,024 slots, in blocks of 256: beyond the token ids, not a byte more than 4,096 take."""
    config, policy = dataclasses.replace(WIDE, max_positions=32_768), policies.roco(budget=1024)

    def temporaries(tokens: int) -> int:
        program, layout = compile_prompt(policy, tokens, 256, config)
        assert {group.capacity for layer in layout.prompt for group in layer} == {1280}
        assert {group.capacity for group in layout.groups} == {1025}
        return program.memory_analysis().temp_size_in_bytes

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
    program, _ = compile_prompt(policy, n, None, config)
    entry = program.as_text().split("\nENTRY ")[1].splitlines()[1:]
    survivors, before = 0, []
    for shape, opcode in (match.group(2, 3) for match in map(INSTRUCTION.match, entry) if match):
        survivors += shape.startswith("f32[1,2,17,64]") and opcode != "bitcast"
        if opcode == "while" and f"[1,2,{n},64]" in shape:
            before.append(survivors)
    assert before == [2 * layer for layer in range(layers)], "keys and values kept when each layer starts"


def test_codes_are_held_and_no_decoded_copy_of_the_cache():
    """int8: what the loop carries is the codes; what it decodes at a time is one layer."""
    executable, codes = compile_decode(CacheSpec(policies.h2o(budget=SLOTS), storage.int8()))
    assert codes.dtype == jnp.uint8 and codes.shape == (BATCH, WIDE.num_kv_heads, SLOTS, WIDE.head_dim)
    memory = executable.memory_analysis()
    layer = 2 * BATCH * WIDE.num_kv_heads * SLOTS * WIDE.head_dim * 4
    carried = WIDE.num_layers * storage.int8().bytes_per_slot(WIDE.head_dim, jnp.float32) * codes.size // WIDE.head_dim
    assert memory.alias_size_in_bytes >= carried
    assert memory.alias_size_in_bytes < carried + WIDE.num_layers * BATCH * WIDE.num_kv_heads * SLOTS * 8 + 4096
    print(f"int8 decode: temporaries {memory.temp_size_in_bytes:,} bytes, a decoded layer {layer:,}")
    assert memory.temp_size_in_bytes < 1.5 * layer, "one layer is decoded at a time"
    shape = f"u8[{','.join(map(str, codes.shape))}]"
    assert rewrites(executable.as_text(), shape) == []


def test_what_is_evicted_is_encoded_where_it_will_lie():
    """MiKV: neither tier is copied, though a victim is read from the one and its slot is written in the same step."""
    spec = CacheSpec(policies.h2o(budget=SLOTS), storage.mikv())
    executable, _ = compile_decode(spec)
    layout = lowered(spec, 2 * SLOTS, rows=BATCH).layout
    layer = jax.eval_shape(lambda: empty(layout.groups[0], BATCH, WIDE.num_kv_heads, WIDE.head_dim, jnp.float32))
    for leaf in jax.tree.leaves(layer.stores):
        shape = f"{NAMES[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"
        assert rewrites(executable.as_text(), shape) == []
    assert executable.memory_analysis().alias_size_in_bytes >= layout.bytes(BATCH)
    assert {leaf.shape[2] for leaf in jax.tree.leaves(layer.stats)} == {SLOTS}, "low slots have no statistics"


def test_segments_are_written_where_they_lie():
    """ZipCache, whose window is full in every step here: no tier and no window is copied."""
    spec = CacheSpec(policies.full(), storage.zipcache(window=1))
    executable, _ = compile_decode(spec)
    layout = lowered(spec, 2 * SLOTS, rows=BATCH).layout
    layer = jax.eval_shape(lambda: empty(layout.groups[0], BATCH, WIDE.num_kv_heads, WIDE.head_dim, jnp.float32))
    for leaf in jax.tree.leaves(layer.stores):
        if leaf.size > 1024:  # the compiler may copy a few parameters and a window of one token
            shape = f"{NAMES[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"
            assert rewrites(executable.as_text(), shape) == []
    assert executable.memory_analysis().alias_size_in_bytes >= layout.bytes(BATCH)


NAMES = {"uint8": "u8", "float32": "f32", "int32": "s32"}


def test_blocks_are_written_where_they_lie():
    """KIVI: nothing that is held is copied, exact tokens included, and keys are encoded under a condition."""
    spec = CacheSpec(policies.full(), storage.kivi())
    executable, _ = compile_decode(spec)
    layout = lowered(spec, 2 * SLOTS, rows=BATCH).layout
    layer = jax.eval_shape(lambda: empty(layout.groups[0], BATCH, WIDE.num_kv_heads, WIDE.head_dim, jnp.float32))
    text, memory = executable.as_text(), executable.memory_analysis()
    for leaf in jax.tree.leaves(layer.stores):
        assert rewrites(text, f"{NAMES[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]") == []
    held = layout.bytes(BATCH)
    assert held == WIDE.num_layers * storage.nbytes(layer) and memory.alias_size_in_bytes >= held
    decoded = 2 * layer.position.size * WIDE.head_dim * 4
    assert memory.temp_size_in_bytes < 1.5 * decoded, "one layer is decoded at a time"
    assert text.count(" conditional(") >= 2 * WIDE.num_layers, "one of attention, and one of a full block"
    # Of the arguments, what is beyond another run's is what more slots take.
    more = lowered(spec, 3 * SLOTS, rows=BATCH).layout
    shapes = [decode_shapes(WIDE, each, jnp.float32, BATCH, None).carry.state for each in (layout, more)]
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) for state in shapes]
    slots = [each.groups[0].capacity for each in (layout, more)]
    positions = WIDE.num_layers * BATCH * WIDE.num_kv_heads * 4 * (slots[1] - slots[0])
    assert sizes[1] - sizes[0] == more.bytes(BATCH) - held + positions
    assert memory.argument_size_in_bytes >= sizes[0]
