"""Whole runs through the TPU kernels: interpreted, against XLA; and what the TPU compiler makes of the decode loop."""

import dataclasses
import importlib.util
import math
import re

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax import policies, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.step import fused_kernel
from kvjax.kernels import registry
from kvjax.kernels.step import tpu as step_tpu
from kvjax.models import layer_loop
from kvjax.models.shapes import by_name
from kvjax.numerics import stack_slices
from kvjax.planning import plan
from kvjax.planning.hlo_collectives import BYTES
from tests.tiny import in_stacks, random_tokens, tiny

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'kvjax[tpu]'"
)
LENGTHS = (19, 24)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("policy", "block"),
    [
        (policies.h2o(budget=12), None),  # a step in one kernel
        (policies.after_prefill(policies.snapkv(budget=14, window=4), then=policies.window(budget=10)), 8),
        (policies.keydiff(budget=10), None),  # a kernel for attention alone
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_generation_is_that_of_xla(policy, block):
    model = tiny().model
    prompt = np.random.default_rng(0).integers(5, model.config.vocab_size, (2, max(LENGTHS)))
    with pltpu.force_tpu_interpret_mode():
        got, expected = (
            kvjax.generate(
                model,
                prompt,
                policy,
                max_new_tokens=5,
                lengths=LENGTHS,
                prefill_block=block,
                implementation=each,
                limits=Limits(max(LENGTHS), 5),
            )
            for each in ("pallas_tpu", "xla")
        )
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
    for ours, theirs in zip(got.state.layers, expected.state.layers, strict=True):
        slots = theirs.position.shape[2]
        assert ours.position.shape[2] == -(-slots // 8) * 8, "whole tiles of float32"
        np.testing.assert_array_equal(np.sort(ours.position)[..., -slots:], np.sort(theirs.position))


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("coded", "whole"),
    [
        (storage.int4(residual=3), False), (storage.int4(), True), (storage.rotated(storage.int4()), True),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)  # fmt: skip
def test_decoding_from_codes_is_that_of_xla(interpreted, monkeypatch, coded, whole):
    """In one kernel, or one that reads codes and one that writes them; XLA decodes keys and values."""
    steps = []
    monkeypatch.setattr(fused_kernel, "step", lambda *a, step=fused_kernel.step, **k: steps.append(1) or step(*a, **k))
    model, tokens = tiny(head_dim=64, layers=1).model, random_tokens(2, 34, seed=4)
    got, expected = (
        kvjax.log_likelihood(
            model, tokens, CacheSpec(policies.h2o(budget=12), coded), prompt_length=np.array([24, 17]),
            lengths=np.array([34, 27]), implementation=each,
        )
        for each in ("pallas_tpu", "xla")
    )  # fmt: skip
    assert bool(steps) == whole
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-4)
    ours, theirs = got.state.layers[0], expected.state.layers[0]
    assert ours.position.shape[2] == 128 + coded.residual, "whole tiles"
    slots = theirs.stores[0]["key"]["codes"].shape[2]

    def coded_slots(layer, x):
        """The newest coded slots, oldest first."""
        position = np.asarray(layer.position)[:, :, : layer.position.shape[2] - coded.residual]
        order = np.argsort(position, axis=2, kind="stable")[..., -slots:]
        return np.take_along_axis(np.asarray(x), order.reshape(*order.shape, *(1,) * (x.ndim - 3)), axis=2)

    np.testing.assert_array_equal(np.sort(ours.position)[..., -slots:], np.sort(theirs.position)[..., -slots:])
    np.testing.assert_allclose(
        coded_slots(ours, ours.stats["mass"]), coded_slots(theirs, theirs.stats["mass"]), atol=1e-4
    )
    live = coded_slots(theirs, theirs.position) >= 0
    for side, parts in theirs.stores[0].items():
        for name, x in parts.items():
            mine = coded_slots(ours, ours.stores[0][side][name])
            np.testing.assert_array_equal(mine[live], coded_slots(theirs, x)[live])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("held", [storage.dense(), storage.int4()], ids=lambda x: x.name)
def test_a_loop_over_layers_is_what_unrolled_layers_are(interpreted, held):
    """The kernel of a whole step reads and writes the slots of each layer in stacks of three."""
    model, tokens = tiny(head_dim=64, layers=3).model, random_tokens(2, 34, seed=4)
    spec = CacheSpec(policies.h2o(budget=15), held)

    def scored(model):
        return kvjax.log_likelihood(
            model, tokens, spec, prompt_length=np.array([24, 17]), lengths=np.array([34, 27]),
            implementation="pallas_tpu",
        )  # fmt: skip

    unrolled, looped = scored(model), scored(in_stacks(model))
    assert [len(run) for run in looped.layout.runs] == [3]
    assert looped.layout.decode[0][0].step_implementation == "pallas_tpu"
    np.testing.assert_allclose(looped.logprobs, unrolled.logprobs, atol=2e-5)
    for one, other in zip(looped.state.layers, unrolled.state.layers, strict=True):
        np.testing.assert_array_equal(one.position, other.position)
        np.testing.assert_allclose(one.stats["mass"], other.stats["mass"], atol=1e-5)


def planned(shape: str, topology: str, held: storage.Storage | None = None, layers: int | None = None):
    layers = layers or (2 if held is None else 1)
    config = dataclasses.replace(by_name(shape), num_layers=layers, windows=())
    spec = CacheSpec(policies.h2o(budget=0.2), held or storage.dense())
    return plan(config, spec, batch=64, prompt_length=1984, new_tokens=64, topology=topology)


def cache_moves(made, dim: int) -> list[str]:
    """Instructions outside the entry, which only the loop calls, that make a whole new cache."""
    text = re.split(r"^ENTRY ", made.compiled.as_text(), flags=re.MULTILINE)[0]
    whole = rf"^\s*\S+ = \S*bf16\[\d+,\d+,{made.slots[0]},{dim}\]\S* (copy|transpose|all-gather|pad|select)\("
    return re.findall(whole, text, flags=re.MULTILINE)


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("shape", "topology", "dim"),
    [("opt-6.7b", "v5e:1x1", 128), ("opt-6.7b", "v6e:2x2", 128), ("opt-125m", "v5e:1x1", 64)],
)
def test_the_decode_loop_moves_no_cache(shape, topology, dim):
    """Kernels on TPUs without being asked for: one a layer, no copy of a cache at a step and none gathered."""
    made = planned(shape, topology)
    assert made.slots[0] == 400  # 396 + 1, and three that stay empty so that a pair can be written in place
    assert made.compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert not cache_moves(made, dim)
    if dim % 128 == 0:
        assert made.temporaries < made.cache // 50


@pytest.mark.sampled(0)
@needs_libtpu
def test_the_decode_loop_moves_no_codes():
    """A kernel of the whole step reads each layer's codes, and writes one slot per head where they are."""
    made = planned("opt-6.7b", "v5e:1x1", storage.int4())
    text = made.compiled.as_text()
    assert made.slots == (512,)
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    moves = rf"= u8\[\d+,\d+,{made.slots[0]},\d+\]\S* (copy|transpose|fusion|pad|select|scatter|all-gather)\("
    assert not re.findall(moves, text)
    assert made.temporaries < made.cache // 10


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("held", "topology", "layers"),
    [(storage.dense(), "v5e:1x1", 12), (storage.int8(), "v6e:2x2", 3), (storage.int4(), "v5e:1x1", 6)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_loop_over_layers_moves_no_cache_and_no_weight(held, topology, layers, monkeypatch):
    """One kernel for all layers, which writes into the stacks of their slots; weights are read in theirs."""
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.STACKED)
    made = planned("opt-6.7b", topology, held, layers)
    assert f"layers 0-{layers - 1} run as one loop" in made.table()
    assert made.compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert not large_moves(made)
    # Positions are copied once for all steps of a call.
    assert made.temporaries < made.cache // 30


def large_moves(made) -> list[str]:
    """Instructions that move as many bytes in each layer as the positions of all layers have.

    Slices of weights and slots are larger, and activations smaller, but for queries in the kernels' own form.
    """
    (body,) = (
        each[0]
        for each in re.finditer(r"^%?[\w.\-]+ \(.*?^\}", made.compiled.as_text(), flags=re.MULTILINE | re.DOTALL)
        if "tpu_custom_call" in each[0]
    )
    stacks = re.findall(r"s32\[(\d+,\d+,\d+,\d+)\]", body)
    size = BYTES["s32"] * max(math.prod(map(int, dims.split(","))) for dims in stacks)
    moves, found = re.compile("copy|slice|transpose|pad|select|scatter|gather"), []
    made_by = r"^ *(\S+) = \(?(\w+)\[([\d,]+)\].*? ([\w\-]+)\("
    for name, kind, dims, op in re.findall(made_by, body, flags=re.MULTILINE):
        own = math.prod(map(int, dims.split(","))) * BYTES[kind]
        # Positions and statistics of the layer are written into their stacks, which are not copied.
        in_place = "dynamic-update-slice" in name and dims in stacks
        if own >= size and not in_place and not op.endswith("-start") and moves.search(name if op == "fusion" else op):
            found.append(f"{name} = {kind}[{dims}] {op}")
    return found


@pytest.mark.sampled(0)
@needs_libtpu
def test_a_move_of_a_slice_would_be_seen(monkeypatch):
    """A kernel has copies of slices; no other test has traced as many layers."""
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.STACKED)
    monkeypatch.delitem(stack_slices._WITH_STACKS, "call_with_slices")
    assert large_moves(planned("opt-6.7b", "v5e:1x1", layers=11))


@pytest.mark.sampled(0)
@needs_libtpu
def test_small_stacks_remain_in_the_main_memory(monkeypatch):
    """Two KV heads a device: XLA would move the keys and values of all layers into a core's memory for each layer."""
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.STACKED)
    with monkeypatch.context() as patched:
        patched.setattr(step_tpu, "in_main_memory", lambda stacks: stacks)
        assert large_moves(planned("llama2-70b", "v6e:2x2", layers=3))
    jax.clear_caches()
    assert not large_moves(planned("llama2-70b", "v6e:2x2", layers=3))


@needs_libtpu
@pytest.mark.parametrize(
    ("held", "looped"),
    [(storage.int2(), True), (storage.fp8(), False), (storage.turboquant(4), False), (storage.int4(residual=8), False)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_what_a_kernel_cannot_write_in_a_stack_is_unrolled(held, looped, monkeypatch):
    """One scale of two bytes for each vector, and tokens that are not in codes yet."""
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.STACKED)
    config = dataclasses.replace(by_name("opt-6.7b"), num_layers=3, windows=())
    spec = CacheSpec(policies.h2o(budget=0.2), held)
    made = plan(config, spec, batch=64, prompt_length=1984, new_tokens=64, topology="v5e:1x1", compiles=False)
    assert ("run as one loop" in made.table()) == looped


@pytest.mark.sampled(0)
@needs_libtpu
def test_a_move_of_the_cache_would_be_seen(monkeypatch):
    """Slots that fill no tile are written after the kernel, and that rewrites the cache."""
    monkeypatch.setattr(registry, "GROUP_BYTES", 1)
    assert cache_moves(planned("opt-6.7b", "v5e:1x1"), 128)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(kvjax.KvjaxError, match="'pallas' is unknown; use auto, xla, pallas_tpu, pallas_gpu"):
        kvjax.generate(tiny().model, [[5, 6]], policies.full(), max_new_tokens=2, implementation="pallas")
