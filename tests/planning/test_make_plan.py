"""Plans: bytes counted by hand, the compiled step's memory, and errors that say what is valid."""

import dataclasses
import importlib.util
import json
import math
import re
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax import devices, policies, storage
from kvjax.errors import ConfigError, InputError, KvjaxError, PolicyError
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_count
from kvjax.numerics.rope import Rope
from kvjax.planning import plan
from kvjax.planning.programs import compile_for
from kvjax.units import size

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="needs the TPU compiler: pip install 'kvjax[tpu]'")

TINY = DecoderConfig(
    family="llama", vocab_size=256, hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=128,
    mlp_size=512, max_positions=4096, rope=Rope(dim=128), tie_embeddings=False,
)  # fmt: skip
GROUPED = dataclasses.replace(TINY, num_kv_heads=4)
OPT_30B = DecoderConfig(
    family="opt", vocab_size=50_272, hidden_size=7168, num_layers=48, num_heads=56, num_kv_heads=56, head_dim=128,
    mlp_size=28_672, max_positions=2048, learned_positions=True, position_offset=2, norm="layer", norm_bias=True,
    activation="relu", gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
H2O = policies.h2o(budget=127)
CALIBRATED = policies.qfilters(32), policies.knorm(32)  # and the same without a calibration


@pytest.fixture(scope="module")
def local():
    return plan(TINY, H2O, batch=2, prompt_length=200, new_tokens=57)


@pytest.fixture(scope="module")
def tpu():
    if not HAS_LIBTPU:
        pytest.skip("needs the TPU compiler: pip install 'kvjax[tpu]'")
    return plan(TINY, policies.h2o(budget=2047), batch=8, prompt_length=3000, new_tokens=100, topology="v5e:2x4")


def test_parameters_of_a_compressor_are_counted():
    """It reads them at the end of the prompt; its steps have none."""
    made, other = (plan(TINY, policy, prompt_length=64, new_tokens=4, prefill=True) for policy in CALIBRATED)
    assert made.prefill_total is not None
    directions = TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert made.weights - other.weights == directions


def test_local_bytes_by_hand(local):
    """float32 on a CPU; 8 heads of 128 features, 128 slots (127 kept and the newest), 2 rows, 2 layers."""
    layer = 4 * 256 * 1024 + 3 * 256 * 512 + 2 * 256
    assert local.parameters == 2 * 256 * 256 + 2 * layer + 256 == parameter_count(TINY)
    assert local.dtype == "float32"
    assert local.weights == 4 * local.parameters
    slots = 2 * 2 * 8 * 128
    # keys and values, a position, one statistic; of both rows three lengths, and a budget per layer
    assert local.cache == slots * (2 * 128 * 4 + 4 + 4) + 2 * (3 + 2) * 4
    assert local.slots == (128, 128)
    # 200 + 57 - 1 slots: the last new token is never fed back
    assert local.full.cache == 2 * 2 * 8 * 256 * (2 * 128 * 4 + 4) + 2 * 3 * 4


def test_local_roofline_by_hand(local):
    """The untied embedding is looked up, not read; 128 slots are live at every step, 201 to 256 with a full cache."""
    read = local.parameters - 256 * 256
    assert local.step.weights_moved == 4 * read
    heads, key = 2 * 2 * 8, 2 * 128 * 4
    assert local.step.cache_moved == heads * (128 * (key + 4 + 2 * 4) + key + 4)
    assert local.full.cache_moved == heads * (228.5 * (key + 4) + key + 4)
    products = read - 5 * 256  # norms multiply no matrix
    assert local.step.flops == 2 * (2 * products + 2 * 4 * 8 * 128 * 128)
    assert local.flops_per_token == local.step.flops / 2
    assert local.bytes_per_token == (local.step.weights_moved + local.step.cache_moved) / 2
    seconds = max(
        (local.step.weights_moved + local.step.cache_moved) / local.device.bandwidth,
        local.step.flops / local.device.flops,
    )
    assert local.step.tokens_per_second == pytest.approx(2 / seconds)


def test_local_program(local):
    """The very decode loop, its state updated in place, and all its memory accounted for."""
    memory = local.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= local.cache
    assert local.fits is True
    assert local.total == local.weights + local.cache + local.temporaries + local.other
    assert 0 <= local.other < 1 << 16


def test_table_and_dict(local):
    text = local.table()
    for part in ("h2o", "full cache", "batch 2", "128 slots a head", size(local.weights), size(local.cache), "fits"):
        assert part in text
    assert "to prefill" not in text
    assert "8 KV heads of 128 exact slots" in text and "attention by xla" in text
    values = json.loads(json.dumps(local.as_dict()))
    assert values["cache"] == local.cache
    assert values["step"]["limit"] in ("memory", "compute")
    assert values["slots"] == [128, 128]


def test_a_full_cache_says_from_which_length_on_drafts_pay():
    full = plan(TINY, policies.full(), prompt_length=64, new_tokens=8, topology="h100:1", decode=False)
    assert full.drafts is not None and full.drafts.break_even is not None
    assert f"from {full.drafts.break_even:,} tokens" in full.table()
    host = {"storage": storage.dense(memory="host")}
    away = plan(TINY, policies.full(), prompt_length=64, new_tokens=8, topology="h100:1", decode=False, **host)
    assert away.drafts.break_even < full.drafts.break_even and "the cache in host memory" in away.table()
    assert plan(TINY, H2O, prompt_length=64, new_tokens=8, topology="h100:1", decode=False).drafts is None


def test_prefill_is_planned_on_request():
    planned = plan(GROUPED, H2O, prompt_length=300, new_tokens=8, prefill=True, prefill_block=64)
    assert planned.prefill_total >= planned.weights + planned.cache + planned.prefill_temporaries
    assert "total to prefill" in planned.table()


def test_live_slots_respect_windows_and_short_prompts():
    windowed = dataclasses.replace(TINY, windows=(16, None))
    planned = plan(windowed, policies.full(), prompt_length=20, new_tokens=5)
    # 21 to 24 tokens seen, of which layer 0 needs 16
    heads, key = 8, 2 * 128 * 4
    assert planned.step.cache_moved == heads * ((16 + 22.5) * (key + 4) + 2 * (key + 4))


def test_too_large_for_this_machine_is_a_report(monkeypatch):
    """The numbers, not the allocator's death: nothing of the model is allocated."""
    monkeypatch.setattr(devices, "host_memory", lambda: 1e6)
    planned = plan(TINY, H2O, prompt_length=200, new_tokens=57)
    assert planned.fits is False
    assert re.search(r"fits +no +no", planned.table())


def test_model_larger_than_memory_compiles_here():
    """OPT-30B's own widths, in a few layers: 4 layers are already 11 GB of float32."""
    config = dataclasses.replace(OPT_30B, num_layers=4, windows=())
    start = time.perf_counter()
    planned = plan(config, policies.h2o(budget=0.2), prompt_length=1000, new_tokens=48)
    assert planned.weights > 11e9
    assert planned.total < 1.02 * (planned.weights + planned.cache)
    assert time.perf_counter() - start < 60


def test_opt_30b_has_30_billion_parameters():
    assert parameter_count(OPT_30B) == 29_974_540_288


@pytest.mark.parametrize(
    "name",
    [
        "",
        "v5e",
        "v5e:0x4",
        "v5e:2x0",
        "v5e:2x",
        "v5e:2",
        "v5e:2x4x2",
        "v5e:axb",
        "v7:2x2",
        "v5e:999x999",
        "v5e:3x9",
        "v4-8",
    ],
)
def test_bad_topologies_are_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError) as caught:
        devices.topology_devices(name)
    message = str(caught.value)
    assert repr(name) in message
    assert "v5e:2x4" in message
    assert "tpu7x" in message


@pytest.mark.parametrize(
    ("name", "parsed"),
    [("v5e:2x4", (2, 4, 1)), ("V5E=2x4", (2, 4, 1)), ("v4:2x2x4", (2, 2, 4)), ("v5e-2x4x1", (2, 4, 1))],
)
def test_topology_names(name, parsed):
    assert devices.parse_topology(name)[1] == parsed


@pytest.mark.skipif(HAS_LIBTPU, reason="the TPU compiler is installed")
def test_no_libtpu_says_how_to_get_it():
    with pytest.raises(KvjaxError, match=r"pip install 'kvjax\[tpu\]'"):
        plan(TINY, H2O, prompt_length=200, new_tokens=57, topology="v5e:2x4")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"batch": 0}, InputError),
        ({"new_tokens": 0}, InputError),
        ({"prompt_length": 0}, InputError),
        ({"prompt_length": True}, InputError),
        ({"dtype": "float31"}, ConfigError),
        ({"mesh_axes": "model:4096"}, ConfigError),
        ({"mesh_axes": "rows:1"}, ConfigError),
        ({"policy": policies.h2o(budget=0.1, recent=64)}, PolicyError),
    ],
)
def test_what_generate_would_refuse_is_refused(change, error):
    arguments = {"policy": H2O, "prompt_length": 200, "new_tokens": 57} | change
    with pytest.raises(error):
        plan(TINY, arguments.pop("policy"), **arguments)


def test_past_the_position_table_is_refused():
    config = dataclasses.replace(TINY, rope=None, learned_positions=True, max_positions=256)
    with pytest.raises(InputError, match="position table"):
        plan(config, H2O, prompt_length=200, new_tokens=58)


def test_device_table():
    """One row a kind; a TPU7x device is half a chip."""
    assert devices.DEVICES["TPU v5 lite"].bandwidth == 819e9
    assert devices.DEVICES["TPU7x"].bandwidth == 7380e9 / 2
    for kind, device in devices.DEVICES.items():
        assert device.kind == kind
        assert device.memory > 1e10


def test_tpu_bytes(tpu):
    """bfloat16, 8 devices: heads, MLP and vocabulary are cut in eight, norms are whole on each."""
    assert tpu.mesh == {"data": 1, "model": 8}
    assert tpu.mesh_chosen
    layer = 4 * 256 * 1024 + 3 * 256 * 512
    assert tpu.weights == 2 * ((2 * 256 * 256 + 2 * layer) // 8 + 5 * 256)
    assert tpu.cache == 2 * 8 * 1 * 2048 * (2 * 128 * 2 + 4 + 4) + 8 * (3 + 2) * 4
    assert tpu.fits
    assert tpu.step.tokens_per_second == pytest.approx(8 * 819e9 / (tpu.step.weights_moved + tpu.step.cache_moved))


def test_tpu_state_is_updated_in_place(tpu):
    """The donated state is aliased, nothing of a cache's size is copied within HBM or sent between chips."""
    memory = tpu.compiled.memory_analysis()
    assert tpu.cache <= memory.alias_size_in_bytes < 1.1 * tpu.cache
    layer = 2 * 8 * 2048 * 128 * 2  # keys and values of one layer on one device
    assert tpu.temporaries < 2 * layer
    text = tpu.compiled.as_text()
    assert "bf16[8,1,2048,128]" in text
    assert not hbm_copies(text, "bf16[8,1,2048,128]")
    assert max(collective_elements(text), default=0) < 8 * 2048


def hbm_copies(text: str, shape: str) -> list[str]:
    """Copies of whole arrays of a shape from HBM to HBM; ``S(1)`` is on-chip memory, to and from which XLA streams."""
    array = re.escape(shape) + r"\{[^}]*\}"
    found = re.findall(rf"= {array} copy\([^)]*\)", text)
    for match in re.finditer(rf"= \(({array}), ({array})[^=]*? copy-start\(", text):
        if "S(1)" not in match[1] and "S(1)" not in match[2]:
            found.append(match[0])
    return found


def collective_elements(text: str) -> list[int]:
    found = []
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for match in re.finditer(rf"= (.*?) (?:{names})(?:-start)?\(", text):
        for dims in re.findall(r"\w\[([\d,]*)\]", match[1]):
            found.append(math.prod(int(n) for n in dims.split(",") if n))
    return found


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("config", "batch", "mesh"),
    [
        (TINY, 1, {"data": 1, "model": 8}),
        # A cache larger than the weights is not held twice, nor are these: slots are divided too.
        (GROUPED, 64, {"data": 1, "model": 4, "context": 2}),
        (dataclasses.replace(TINY, num_kv_heads=1), 64, {"data": 1, "model": 1, "context": 8}),
    ],
)
def test_chosen_mesh_moves_the_fewest_bytes(config, batch, mesh):
    planned = plan(config, policies.full(), batch=batch, prompt_length=3000, new_tokens=100, topology="v5e:2x4")
    assert planned.mesh == mesh
    assert "chosen here" in planned.table()


@pytest.mark.sampled(0)
@needs_libtpu
def test_given_mesh_is_used_even_if_smaller_than_the_topology():
    """And if it divides no heads."""
    mesh, axes = {"data": 1, "model": 1, "context": 3}, "data:1,model:3"
    planned = plan(TINY, H2O, batch=2, prompt_length=200, new_tokens=8, topology="v5e:2x4", mesh_axes=axes)
    assert planned.mesh == mesh
    assert not planned.mesh_chosen
    # Three devices divide no dimension of the weights.
    assert planned.weights == 3 * planned.weights_even
    assert planned.cache < 1.05 * planned.cache_even
    assert "weights, times the even split" in planned.table()


@needs_libtpu
@pytest.mark.sampled(0)
def test_tpu_holds_no_second_copy_of_the_weights():
    """At OPT-30B's own widths, where the compiler once kept transposed query, key and value kernels."""
    config = dataclasses.replace(OPT_30B, num_layers=2, windows=())
    planned = plan(config, H2O, batch=8, prompt_length=200, new_tokens=8, topology="v5e:2x4", mesh_axes="model:8")
    kernel = 7168 * 7168 // 8 * 2
    assert planned.temporaries < kernel


@pytest.mark.sampled(0)
@needs_libtpu
def test_tpu_holds_the_scales_of_codes_as_they_are():
    """Head size 128 has two groups. Their scales are neither repeated for every channel nor padded to 128 lanes."""
    config = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2, windows=())
    planned = plan(
        config, policies.full(), storage=storage.integer(8), batch=64, prompt_length=1024, new_tokens=256,
        topology="v5e:2x4", mesh_axes="model:2,context:2",
    )  # fmt: skip
    assert planned.temporaries < planned.cache // 4


@pytest.mark.sampled(0)
@needs_libtpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x8", "tpu7x:1x1x1"])
def test_every_family_compiles(topology):
    planned = plan(TINY, H2O, prompt_length=200, new_tokens=57, topology=topology)
    assert planned.fits
    assert planned.dtype == "bfloat16"
    assert planned.step.tokens_per_second > planned.full.tokens_per_second


@needs_libtpu
def test_too_large_for_the_topology_is_a_report():
    config = dataclasses.replace(TINY, hidden_size=16_384, mlp_size=262_144)
    planned = plan(config, H2O, prompt_length=200, new_tokens=57, topology="v5e:1x1")
    assert planned.fits is False
    assert planned.compiled is None
    assert planned.temporaries is None
    assert planned.total == planned.weights + planned.cache
    text = planned.table()
    assert re.search(r"fits +no +no", text)
    assert "at least" in text
    assert "RESOURCE_EXHAUSTED" in text


def _too_large_for_a_core(index, x, out):
    out[...] = x[...] * index[0].astype(jnp.float32)


def _at_no_multiple_of_a_tile(index, x, out):
    out[...] = x[:, pl.ds(index[0], 128)]


@pytest.mark.sampled(0)
@needs_libtpu
@pytest.mark.parametrize(
    ("kernel", "shape", "made", "reason"),
    [
        (_too_large_for_a_core, (65_536, 512), (65_536, 512), "memory space vmem"),
        (_at_no_multiple_of_a_tile, (8, 512), (8, 128), "multiple of 128"),
    ],
)
def test_kernel_that_is_rejected_is_an_error(kernel, shape, made, reason):
    """It says nothing of the memory of the device, of which all batches need less."""
    place = jax.sharding.SingleDeviceSharding(devices.topology_devices("v5e:1x1")[0])
    run = pl.pallas_call(
        kernel, in_specs=[pl.BlockSpec(memory_space=each) for each in (pltpu.SMEM, pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM), out_shape=jax.ShapeDtypeStruct(made, jnp.float32),
    )  # fmt: skip
    given = (((1,), jnp.int32), (shape, jnp.float32))
    with pytest.raises(KvjaxError, match=rf"the compiler rejects this program: .*{reason}.*; implementation='xla'"):
        compile_for(jax.jit(run), *(jax.ShapeDtypeStruct(*each, sharding=place) for each in given))


def test_dtype_is_taken():
    planned = plan(TINY, H2O, prompt_length=200, new_tokens=57, dtype=jnp.bfloat16)
    assert planned.dtype == "bfloat16"
    assert planned.weights == 2 * planned.parameters
    assert jax.devices()[0].platform in planned.target or planned.device.kind in planned.target
