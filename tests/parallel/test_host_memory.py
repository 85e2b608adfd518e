"""Slots in host memory: the same results as on the device, and only what is read crosses the link."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, presets, selection, storage
from kvjax.cache import layers_of
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.state import nbytes
from kvjax.errors import PolicyError
from kvjax.generation.decoding import decode_steps
from kvjax.numerics.rope import Rope
from kvjax.parallel import host_memory as memory
from tests.laws.test_compiled import computations
from tests.tiny import kept, random_tokens, tiny

TOKENS, PROMPTS, ENDS = random_tokens(3, 31, seed=4), np.array([20, 9, 15]), np.array([31, 26, 24])
GUESS = selection.infinigen(2.0, first_layer=1)
WHOLE, VALUES = "host", ("device", "host")
COMPRESS = policies.after_prefill(policies.snapkv(8, window=4), then=policies.h2o(9))
LAYERS = tiny().model.config.num_layers

#: name -> (policy, storage of a memory, selection, tokens of a block of the prompt)
CASES = {
    "full": (policies.full(), storage.dense, None, None),
    "h2o in blocks": (policies.h2o(8), storage.dense, None, 6),
    "a residual": (policies.full(), lambda memory: storage.int8(residual=4, memory=memory), None, 6),
    "compressor": (COMPRESS, storage.int4, None, None),
    "int8 pool": (presets.infinigen(2.0, first_layer=1, pool_limit=12), storage.int8, None, None),
    "infinigen in blocks": (policies.full(), storage.dense, GUESS, 6),
    "quest": (policies.full(), storage.dense, selection.quest(4, 12, first_layer=0), None),
    "shadowkv": (policies.full(), storage.dense, selection.shadowkv(8, 4, 8, local=0, outliers=0), None),
    "split heads": (policies.duo_attention(((True, False),) * LAYERS, sinks=1, recent=4), storage.dense, GUESS, None),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Newest(selection.Selection):
    """A user's selection that reads four slots, and says nothing of what it cannot be combined with."""

    name = "newest"

    def width(self, capacity):
        return 4

    def always(self, index, view):
        return view.visible & view.recent(4)


def score(name: str, where) -> np.ndarray:
    policy, held, look, block = CASES[name]
    made = held(memory=where) if where != "device" else held(memory="device")
    # A guess needs a layer before; and layers of which one streams are not alike.
    layers = LAYERS if look is GUESS or name == "int8 pool" else 1
    return kvjax.log_likelihood(
        tiny(layers=layers).model, TOKENS, policy, prompt_length=PROMPTS, lengths=ENDS, selection=look, storage=made,
        prefill_block=block,
    ).logprobs  # fmt: skip


#: Values alone are on the host: without a selection, with codes, and with each way of reading some.
APART = {"full", "a residual", "infinigen in blocks", "quest"}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_memory(name):
    expected = score(name, "device")
    for where in (WHOLE, VALUES) if name in APART else (WHOLE,):
        np.testing.assert_allclose(score(name, where), expected, atol=2e-5)


@pytest.mark.sampled(0)
def test_what_is_generated_and_kept_and_where_it_lies():
    model, prompts = tiny(layers=1).model, TOKENS[:, :20]
    made = [
        kvjax.generate(model, prompts, policies.h2o(8), lengths=PROMPTS, max_new_tokens=9, storage=held)
        for held in (storage.dense(), storage.dense(memory=WHOLE), storage.dense(memory=VALUES))
    ]
    for other in made[1:]:
        np.testing.assert_array_equal(made[0].tokens, other.tokens)
        assert all(kept(made[0].state, row) == kept(other.state, row) for row in range(3))
    for generated, places in zip(made, (("device", "device"), ("host", "host"), ("device", "host")), strict=True):
        for _, layer in layers_of(generated.state):
            assert [memory.on_host(store["exact"]) for store in layer.stores[0].values()] == [
                p == "host" for p in places
            ]
            assert not any(map(memory.on_host, jax.tree.leaves((layer.position, layer.stats, layer.index))))
    assert nbytes(made[1].state) == made[1].state.layers[0].key.nbytes * 2


@pytest.mark.parametrize(
    ("policy", "held", "look", "match"),
    [
        (policies.h2o(8, merge=policies.cam()), storage.dense(memory=WHOLE), None, "a merge changes slots anywhere"),
        (policies.knorm(8), storage.dense(memory=WHOLE), selection.optimal(3), "ranked by every key"),
        (policies.full(), storage.dense(memory=WHOLE), selection.optimal(3), "memory=\\('device', 'host'\\)"),
        (policies.full(), storage.dense(memory=("host", "device")), selection.tokenselect(3, 1, 2), "by every key"),
        (policies.window(8, positions="cache"), storage.dense(memory=WHOLE), Newest(), "rotates every key"),
    ],
)
def test_what_cannot_be_on_the_host_is_refused(policy, held, look, match):
    with pytest.raises(PolicyError, match=match):
        kvjax.generate(tiny().model, [[5, 6]], policy, max_new_tokens=2, storage=held, selection=look)


@pytest.mark.sampled(0)
def test_the_bytes_of_a_record_are_of_the_host():
    arguments = {"max_new_tokens": 3, "selection": GUESS, "record": True}
    both, values = (
        kvjax.generate(tiny().model, TOKENS[:, :20], policies.full(), storage=storage.dense(memory=where), **arguments)
        for where in (WHOLE, VALUES)
    )
    np.testing.assert_array_equal(both.record.positions, values.record.positions)
    assert both.record.bytes_moved().sum() == 2 * values.record.bytes_moved().sum() > 0


def test_a_record_counts_what_moves():
    """A layer that is read whole moves whole arrays, and the roofline of the same layout says so too."""
    limits = kvjax.Limits(20, 40, shortest=20)
    record = kvjax.generate(
        tiny().model, TOKENS[:, :20], policies.full(), storage=storage.dense(memory=WHOLE), selection=GUESS,
        max_new_tokens=3, limits=limits, record=True,
    ).record  # fmt: skip
    heads, slot = tiny().model.config.num_kv_heads, 2 * 8 * 4
    gathered = GUESS.width(59) - 1
    np.testing.assert_array_equal(record.bytes_moved()[0], [[59 * heads * slot] * 3, [gathered * heads * slot] * 3])


@pytest.mark.sampled(0)
def test_a_residual_leaves_room_for_what_a_share_of_all_slots_may_choose():
    """The cap is a share of all slots, those of the residual too."""
    look = selection.infinigen(np.inf, ratio=1.0, cap=0.5, first_layer=1)
    scores = [
        kvjax.log_likelihood(
            tiny().model, random_tokens(2, 60), policies.full(), prompt_length=20, selection=look, storage=held,
            limits=kvjax.Limits(20, 40, shortest=20),
        ).logprobs
        for held in (storage.dense(), storage.dense(memory=WHOLE, residual=24), storage.dense(memory=WHOLE))
    ]  # fmt: skip
    np.testing.assert_allclose(scores[1], scores[0], atol=2e-5)
    np.testing.assert_allclose(scores[2], scores[0], atol=2e-5)


def test_what_a_tpu_moves_through_its_device_is_said():
    def explain(held, dim):
        config = dataclasses.replace(tiny().model.config, head_dim=dim, rope=Rope(dim=dim))
        sizes = sizes_for(np.array([20]), 5, width=20, block=None, limits=None, last_fed=True)
        spec = kvjax.cache.CacheSpec(policies.full(), held)
        return lower(spec, config, sizes, np.array([20]), platform="tpu", dtype="bfloat16").layout.explain()

    said = "not in host memory alone: the TPU compiler moves pools of codes"
    assert said in explain(storage.dense(memory="host"), 64) and said in explain(storage.int8(memory="host"), 128)
    assert said not in explain(storage.dense(memory="host"), 128) and said not in explain(storage.dense(), 64)


def test_the_functions_of_memory():
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 4)).astype(np.float32)
    slots = np.random.default_rng(1).integers(0, 9, (2, 3, 5)).astype(np.int32)
    new = np.ones((2, 3, 2, 4), np.float32)
    at = np.broadcast_to(np.array([4, 9], np.int32), (2, 3, 2))  # the second is outside, and is dropped

    @jax.jit
    def run(x):
        return (
            memory.gather(x, slots),
            memory.take(x, slots),
            memory.write(x, at, new),
            memory.zeros((2, 3), "int32", "host"),
        )

    on_device, on_host = run(jnp.asarray(x)), run(jax.device_put(x, memory.Space.Host))
    assert [memory.on_host(y) for y in on_device] == [False, False, False, True]
    assert [memory.on_host(y) for y in on_host] == [False, True, True, True]
    written = x.copy()
    written[:, :, 4] = 1
    for made in (on_device, on_host):
        gathered = np.take_along_axis(x, slots[..., None], axis=2)
        for got, expected in zip(made, (gathered, gathered, written, np.zeros((2, 3))), strict=True):
            np.testing.assert_array_equal(got, expected)


# --- the compiled step ---


def program(held, look, prompt=500, layers=4):
    """The compiled decoding loop of a model of some layers, and the shape of a layer's keys."""
    from tests.laws.test_compiled import WIDE, Greedy, decode_shapes, lowered

    config = dataclasses.replace(WIDE, num_layers=layers, windows=(), max_positions=1024)
    spec = kvjax.cache.CacheSpec(policies.full(), held, look or selection.everything())
    layout = lowered(spec, prompt, 12, config=config, rows=2).layout
    shapes = decode_shapes(config, layout, jnp.float32, 2, None)
    stop = jax.ShapeDtypeStruct((1,), jnp.int32)
    made = decode_steps.lower(*shapes, stop, 5, config=config, phase=layout.decode, sampler=Greedy())
    return made.compile(), shapes.carry.state.layers[0].stores[0]["key"]["exact"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "look", [None, selection.infinigen(cap=16), selection.quest(16, 64)], ids=lambda look: look and look.name
)
def test_a_step_copies_no_pool(look):
    executable, key = program(storage.dense(memory=WHOLE), look)
    shape = f"f32[{','.join(map(str, key.shape))}]"
    copies = [
        line
        for lines in computations(executable.as_text()).values()
        for line in lines
        if f"= {shape}" in line and " copy(" in line
    ]
    assert not copies
    assert executable.memory_analysis().temp_size_in_bytes < key.size * 4, "no room for one layer's keys"


def test_a_fetch_waits_for_nothing_of_its_own_layer():
    """The fetch of layer i needs the output of layers up to i - 2 only, so that it may run beside layer i - 1."""
    executable, key = program(storage.dense(memory=WHOLE), selection.infinigen(cap=16, first_layer=1))
    text = executable.as_text()
    modules = computations(text)
    body = next(modules[name] for name in re.findall(r"body=%?([\w.-]+)", text) if len(modules[name]) > 100)
    lines = {re.match(r"\s*(?:ROOT )?%?([\w.-]+) =", line).group(1): line for line in body}

    def needed(name: str, found: set[str]) -> set[str]:
        """The instructions that one depends on."""
        if name not in found:
            found.add(name)
            for operand in re.findall(r"%([\w.-]+)", lines[name].split(" = ", 1)[1]):
                if operand in lines:
                    needed(operand, found)
        return found

    pool = f"f32[{','.join(map(str, key.shape))}]"
    fetches = []
    for name, line in lines.items():
        called = re.search(r"calls=%?([\w.-]+)", line)
        if called and any("gather(" in own for own in modules[called.group(1)]) and "f32[2,2,16,32]" in line:
            fetches.append(name)
    assert pool in text
    waits = {sum("mlp/down" in lines[n] and " fusion(" in lines[n] for n in needed(name, set())) for name in fetches}
    print("outputs of MLPs that the fetches of layers 1, 2 and 3 need:", sorted(waits))
    assert waits == {0, 1, 2}
