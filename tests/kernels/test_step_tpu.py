"""A whole decoding step in one TPU kernel: interpreted, races detected, against XLA; and by the real TPU compiler."""

import bisect
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import storage
from kvjax.cache.empty import empty
from kvjax.cache.step.fused_kernel import observe_and_evict
from kvjax.devices import topology_devices
from kvjax.kernels import registry
from kvjax.kernels.registry import Request
from kvjax.kernels.step import tpu as step_tpu
from tests.kernels.conftest import needs_libtpu
from tests.kernels.steps import Steps, build, decoding, one_step


@pytest.mark.sampled(1)
# Of the policies that the test below has no tiles of: positions, blocks of them, one query's probabilities, a sum that
# fades; and one of those. `test_registry` has what a kernel takes of each.
@pytest.mark.parametrize(
    ("name", "budget"), [("window", 15), ("fixed", 15), ("tova", 15), ("h2o_decay", 15), ("h2o", 20)]
)
def test_a_step_is_that_of_the_cache(interpreted, name, budget):
    """15 and one slot are whole groups, written inside the kernel; 20 and one are not.

    The kernel makes the first two steps, into empty slots, and those from two before the first victim on.
    """
    batch, kv_heads, group, dim = 2, 2, 2, 32
    policy, budgets = build(name, budget), jnp.full((batch,), budget, jnp.int32)
    ours = layer = empty(decoding(policy, budget + 1), batch, kv_heads, dim, jnp.float32)
    plain, kernel = (
        jax.jit(functools.partial(one_step, decoding(policy, budget + 1, each))) for each in (None, "pallas_tpu")
    )
    for step in range(budget + 5):
        keys = jax.random.split(jax.random.key(step), 3)
        query = jax.random.normal(keys[0], (batch, kv_heads * group, 1, dim))
        key, value = (jax.random.normal(k, (batch, kv_heads, 1, dim)) for k in keys[1:])
        at = jnp.array([step, step if step < budget + 3 else -1], jnp.int32)
        expected, layer = plain(layer, query, key, value, at[:, None], budgets)
        if 2 <= step < budget - 2:
            ours = layer
            continue
        got, ours = kernel(ours, query, key, value, at[:, None], budgets)
        np.testing.assert_allclose(got, expected, atol=2e-6)
        np.testing.assert_array_equal(ours.position, layer.position)
        live = np.asarray(layer.position) >= 0
        np.testing.assert_array_equal(ours.key[live], layer.key[live])
        np.testing.assert_array_equal(ours.value[live], layer.value[live])
        for stat, column in layer.stats.items():
            np.testing.assert_allclose(ours.stats[stat], column, atol=1e-5, err_msg=stat)


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "steps",
    [
        Steps("h2o", 384),  # pairs are written inside the kernel, from any of three tiles
        Steps("roco", 300, dim=128, group=1),  # a partial tile, and slots that are written after the kernel
        Steps("roco", 512, dim=128, dtype=jnp.bfloat16, budgets=(511, 300)),
        Steps("h2o", 384, window=120, policy=(("group_reduce", "max"),), group=3),
        Steps("scissorhands", 386, dim=80, budgets=(150, 385)),
        Steps("full", 300, dim=256, window=200, budgets=(250, 290)),
        Steps("ring", 384),
        Steps("heavy", 384),
    ],
    ids=str,
)
def test_a_step_over_several_tiles_is_that_of_the_cache(interpreted, monkeypatch, steps):
    monkeypatch.setattr(step_tpu, "TILE_BYTES", 1 << 16)  # of 128 slots, even of fewer bytes
    assert step_tpu.tile_slots(2, steps.slots, steps.dim, 4) == 128
    steps.run(4)


def compiled(topology, shape, dtype, policy, held=None):
    """The step's program; the TPU compiler refuses what its vector memory cannot hold."""
    batch, kv_heads, group, size, dim = shape
    mesh = Mesh(np.array(topology_devices(topology)[:1]), ("x",))

    def array(dims, kind):
        return jax.ShapeDtypeStruct(dims, kind, sharding=NamedSharding(mesh, PartitionSpec()))

    own = decoding(policy, size, "pallas_tpu", held)
    layer = jax.eval_shape(functools.partial(empty, own, batch, kv_heads, dim, dtype))
    layer = jax.tree.map(lambda x: array(x.shape, x.dtype), layer)
    query, one = array((batch, kv_heads * group, 1, dim), dtype), array((batch, kv_heads, 1, dim), dtype)
    at, row = array((batch, 1), jnp.int32), array((batch,), jnp.int32)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(one_step, own), donate_argnums=0)
        return step.lower(layer, query, one, one, at, row).compile()


@pytest.mark.sampled(2)
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "shape", "dtype", "name"),
    [  # batch, KV heads, group, slots, head size; each shape on one of two generations, and one on both
        ("v6e:1x1", (8, 8, 4, 528, 128), jnp.bfloat16, "h2o"),
        ("v5e:1x1", (8, 8, 4, 528, 128), jnp.bfloat16, "h2o"),
        ("v6e:1x1", (4, 12, 1, 416, 128), jnp.float32, "roco"),
        ("v5e:1x1", (2, 4, 8, 8192, 128), jnp.bfloat16, "scissorhands"),
        ("v6e:1x1", (2, 4, 2, 6000, 256), jnp.float32, "tova"),
        ("v5e:1x1", (2, 4, 8, 513, 96), jnp.bfloat16, "mean_attention"),
        ("v6e:1x1", (1, 1, 7, 100, 80), jnp.bfloat16, "window"),
        ("v5e:1x1", (2, 32, 1, 410, 64), jnp.bfloat16, "h2o_decay"),
        ("v6e:1x1", (2, 4, 2, 1024, 128), jnp.bfloat16, "strided"),
        ("v5e:1x1", (2, 4, 2, 1024, 128), jnp.bfloat16, "heavy"),
    ],
)
def test_the_tpu_compiler_takes_it(topology, shape, dtype, name):
    batch, kv_heads, _, size, dim = shape
    program = compiled(topology, shape, dtype, build(name, size - 1))
    held = 2 * batch * kv_heads * size * dim * jnp.dtype(dtype).itemsize
    assert program.memory_analysis().alias_size_in_bytes >= held, "keys and values are where they were"
    if dim % 128 == 0 and size % 16 == 0:
        shapes = f"[{batch},{kv_heads},{size},{dim}]"
        copies = [
            line for line in program.as_text().splitlines() if " copy(" in line and shapes in line.split("copy(")[0]
        ]
        assert not copies, "no copy of a whole cache"
        assert program.memory_analysis().temp_size_in_bytes < held // 4


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "shape", "dtype", "name", "held"),
    [  # batch, KV heads, group, slots, head size: what one core takes as a whole
        ("v5e:1x1", (8, 8, 4, 4096, 128), jnp.bfloat16, "h2o", storage.int4()),
        ("v5e:1x1", (8, 32, 1, 512, 128), jnp.bfloat16, "scissorhands", storage.turboquant(4)),
        ("v6e:1x1", (2, 4, 8, 1024, 64), jnp.float32, "tova", storage.fp8()),
        ("v5e:1x1", (2, 7, 1, 1280, 128), jnp.bfloat16, "h2o", storage.int8()),  # OPT-30B's heads on eight devices
    ],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
def test_the_tpu_compiler_takes_codes(topology, shape, dtype, name, held):
    batch, kv_heads, _, size, dim = shape
    program = compiled(topology, shape, dtype, build(name, size - 1), held)
    codes = batch * kv_heads * size * held.bytes_per_slot(dim, dtype)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= codes, "codes, scales and zeros are where they were"
    moves = re.compile(rf"= u8\[{batch},{kv_heads},{size},\d+\]\S* (copy|transpose|fusion|scatter|pad)\(")
    assert not moves.findall(program.as_text()), "no copy of codes"
    assert memory.temp_size_in_bytes < codes // 2


@pytest.mark.sampled(0)
@needs_libtpu
@pytest.mark.parametrize(
    ("shape", "dtype", "name", "held"),
    [((2, 8, 4, 128), jnp.bfloat16, "roco", storage.int4())],
    ids=lambda x: getattr(x, "name", None),
)
def test_what_is_said_to_fit_into_a_core_of_codes_does(shape, dtype, name, held):
    largest(shape, dtype, name, held)


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [  # batch, KV heads, group, head size
        ((2, 32, 1, 128), jnp.bfloat16, "h2o"),
        ((2, 1, 8, 256), jnp.bfloat16, "roco"),
    ],
)
def test_what_is_said_to_fit_into_a_core_does(shape, dtype, name):
    """The largest number of slots that the registry takes; more go through the cache."""
    largest(shape, dtype, name)


def largest(shape, dtype, name, held=None):
    """Compiles the step with the largest number of slots that the registry takes."""
    batch, kv_heads, group, dim = shape

    def fits(slots: int) -> bool:
        own = decoding(build(name, slots - 1), slots)
        request = Request(
            batch=batch, kv_heads=kv_heads, group=group, tokens=1, slots=slots, dim=dim, dtype=jnp.dtype(dtype).name,
            statistics=tuple(sorted(own.needs, key=lambda s: s.name)), trace=functools.partial(observe_and_evict, own),
            **({} if held is None else {"parts": 2, "codecs": (held.key, held.value)}),
        )  # fmt: skip
        return registry.find("step", "pallas_tpu").refuses(request) is None

    assert fits(512)
    assert not fits(1 << 17)
    sizes = range(512, 1 << 17, 128)
    most = sizes[bisect.bisect_left(sizes, True, key=lambda slots: not fits(slots)) - 1]
    compiled("v5e:1x1", (batch, kv_heads, group, most, dim), dtype, build(name, most - 1), held)
