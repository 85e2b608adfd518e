"""The decode kernels for TPUs: interpreted, with races detected, against XLA; and compiled by the real TPU compiler."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import attention, cache, fused
from kvjax.cache import Block, LayerKV
from kvjax.devices import topology_devices
from kvjax.kernels.decode import pallas_tpu, step_tpu
from kvjax.statistics import ABOVE, COUNT, LAST, MASS, MASS_SQ, decayed, recent_above
from tests.kernels.steps import FUSED, Steps, build, fused_step

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'kvjax[tpu]'"
)
EVERY = frozenset({MASS, MASS_SQ, COUNT, ABOVE, LAST, decayed(0.9), recent_above(20)})


@pytest.fixture
def interpreted(capfd):
    """Kernels run on this machine, as a simulated TPU that looks for races between its memories, and prints them."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
        jax.effects_barrier()
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


def arrays(batch, heads, kv_heads, size, dim, dtype=np.float32):
    """Query, key, value, query_position, key_position; two thirds of the slots live, and a row that has ended."""
    rng = np.random.default_rng(size)
    position = np.stack([[rng.permutation(2 * size)[:size] for _ in range(kv_heads)] for _ in range(batch)])
    position[rng.random(position.shape) < 0.3] = -1
    shapes = ((batch, heads, 1, dim), (batch, kv_heads, size, dim), (batch, kv_heads, size, dim))
    query, key, value = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    at = np.full((batch, 1), 2 * size)
    at[1:2] = -1
    return query, key, value, jnp.asarray(at, jnp.int32), jnp.asarray(position, jnp.int32)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 8, 2, 37, 64), {}),
        ((3, 4, 4, 300, 80), {"window": 150}),
        ((2, 6, 1, 520, 96), {"group_reduce": "max"}),
        ((1, 4, 2, 128, 128), {"log_weight": True}),
        ((2, 4, 2, 64, 256), {"window": 20, "exempt": True}),
    ],
)
def test_attention_is_that_of_xla(interpreted, monkeypatch, shape, options):
    monkeypatch.setattr(pallas_tpu, "TILE_BYTES", 1 << 17)  # of 128 slots at D = 256: several tiles
    query, key, value, at, position = arrays(*shape)
    rng = np.random.default_rng(1)
    if "exempt" in options:
        options = options | {"exempt": jnp.asarray(rng.random(position.shape) < 0.2)}
    if "log_weight" in options:
        options = options | {"log_weight": jnp.asarray(rng.random(position.shape) * 3, jnp.float32)}
    run = functools.partial(
        attention.attend, query, key, value, query_position=at, key_position=position, needs=EVERY, **options
    )
    expected, seen = run(implementation="xla")
    got, found = run(implementation="pallas_tpu")
    np.testing.assert_allclose(got, expected, atol=2e-6)
    for name, column in seen.columns.items():
        np.testing.assert_allclose(found[name], column, atol=2e-6, err_msg=name)


def test_in_bfloat16_it_is_as_near_as_xla(interpreted):
    query, key, value, at, position = arrays(2, 8, 2, 70, 64, jnp.bfloat16)
    run = functools.partial(attention.attend, query_position=at, key_position=position, needs=frozenset({MASS}))
    exact, _ = run(*(x.astype(jnp.float32) for x in (query, key, value)))
    for implementation in ("xla", "pallas_tpu"):
        got, _ = run(query, key, value, implementation=implementation)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=0.02)


def test_what_cannot_run_says_so():
    query, key, value, at, position = arrays(1, 2, 2, 16, 64)
    two = jnp.concatenate([query, query], axis=2)
    with pytest.raises(ValueError, match="interpret mode"):
        attention.attend(
            two, key, value, query_position=jnp.array([[32, 33]]), key_position=position, implementation="pallas_gpu"
        )
    with pytest.raises(ValueError, match="interpret mode"):
        attention.attend(query, key, value, query_position=at, key_position=position, implementation="pallas_tpu")[
            0
        ].block_until_ready()


@pytest.mark.parametrize(("name", "budget"), [*((name, 15) for name in FUSED), ("h2o", 20), ("roco", 22)])
def test_a_step_is_that_of_the_cache(interpreted, name, budget):
    """15 and one slot are whole groups, written inside the kernel; 20 and 22 are not."""
    batch, kv_heads, group, dim = 2, 2, 2, 32
    policy, budgets = build(name, budget), jnp.full((batch,), budget, jnp.int32)
    layer = cache.empty(policy, batch, kv_heads, budget + 1, dim, jnp.float32)
    ours = layer
    plain = jax.jit(lambda layer, q, k, v, block: cache.step(layer, q, k, v, block=block, index=0))
    kernel = jax.jit(functools.partial(fused_step, policy))
    for step in range(budget + 8):
        keys = jax.random.split(jax.random.key(step), 3)
        query = jax.random.normal(keys[0], (batch, kv_heads * group, 1, dim))
        key, value = (jax.random.normal(k, (batch, kv_heads, 1, dim)) for k in keys[1:])
        at = jnp.array([step, step if step < budget + 4 else -1], jnp.int32)
        block = Block(position=at[:, None], budget=(budgets,), policy=policy, decoding=True)
        expected, layer = plain(layer, query, key, value, block)
        got, ours = kernel(ours, query, key, value, at[:, None], budgets)
        np.testing.assert_allclose(got, expected, atol=2e-6)
        np.testing.assert_array_equal(ours.position, layer.position)
        live = np.asarray(layer.position) >= 0
        np.testing.assert_array_equal(ours.key[live], layer.key[live])
        np.testing.assert_array_equal(ours.value[live], layer.value[live])
        for stat, column in layer.stats.items():
            np.testing.assert_allclose(ours.stats[stat], column, atol=1e-5, err_msg=stat)


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
    ids=lambda steps: f"{steps.name}-{steps.slots}-{steps.dim}",
)
def test_a_step_over_several_tiles_is_that_of_the_cache(interpreted, monkeypatch, steps):
    monkeypatch.setattr(step_tpu, "TILE_BYTES", 1 << 16)  # of 128 slots, even of fewer bytes
    assert step_tpu.tile_slots(2, steps.slots, steps.dim, 4) == 128
    steps.run(6)


def compiled(topology, shape, dtype, policy):
    """The step's program; the TPU compiler refuses what its vector memory cannot hold."""
    batch, kv_heads, group, size, dim = shape
    mesh = Mesh(np.array(topology_devices(topology)[:1]), ("x",))

    def array(dims, kind):
        return jax.ShapeDtypeStruct(dims, kind, sharding=NamedSharding(mesh, PartitionSpec()))

    layer = LayerKV(
        *[array((batch, kv_heads, size, dim), dtype)] * 2,
        array((batch, kv_heads, size), jnp.int32),
        {s.name: array((batch, kv_heads, size), jnp.float32) for s in policy.needs},
    )
    query, one = array((batch, kv_heads * group, 1, dim), dtype), array((batch, kv_heads, 1, dim), dtype)
    at, row = array((batch, 1), jnp.int32), array((batch,), jnp.int32)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(fused_step, policy), donate_argnums=0)
        return step.lower(layer, query, one, one, at, row).compile()


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [  # batch, KV heads, group, slots, head size
        ((8, 8, 4, 528, 128), jnp.bfloat16, "h2o"),
        ((4, 12, 1, 416, 128), jnp.float32, "roco"),
        ((2, 4, 8, 8192, 128), jnp.bfloat16, "scissorhands"),
        ((2, 4, 2, 6000, 256), jnp.float32, "tova"),
        ((2, 4, 8, 513, 96), jnp.bfloat16, "mean_attention"),
        ((1, 1, 7, 100, 80), jnp.bfloat16, "window"),
        ((2, 32, 1, 410, 64), jnp.bfloat16, "h2o_decay"),
        ((2, 4, 2, 1024, 128), jnp.bfloat16, "strided"),
        ((2, 4, 2, 1024, 128), jnp.bfloat16, "fixed"),
        ((2, 4, 2, 1024, 128), jnp.bfloat16, "full"),
        ((2, 4, 2, 1024, 128), jnp.bfloat16, "ring"),
        ((2, 4, 2, 1024, 128), jnp.bfloat16, "heavy"),
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


@needs_libtpu
@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [  # batch, KV heads, group, head size
        ((2, 32, 1, 128), jnp.bfloat16, "h2o"),
        ((2, 32, 1, 128), jnp.float32, "roco"),
        ((2, 8, 4, 128), jnp.bfloat16, "roco"),
        ((2, 1, 8, 256), jnp.bfloat16, "roco"),
    ],
)
def test_what_is_said_to_fit_into_a_core_does(shape, dtype, name):
    """As many slots as `fused.covers` allows; more go through the cache."""
    batch, kv_heads, group, dim = shape

    def fits(slots: int) -> bool:
        policy = build(name, slots - 1)
        layer = jax.eval_shape(functools.partial(cache.empty, policy, batch, kv_heads, slots, dim, dtype))
        block = Block(jnp.zeros((1, 1), jnp.int32), (), policy, decoding=True, implementation="pallas_tpu")
        return fused.covers(block, layer, 1, kv_heads, group)

    assert fits(512)
    assert not fits(1 << 17)
    most = max(slots for slots in range(128, 1 << 15, 128) if fits(slots))
    compiled("v5e:1x1", (batch, kv_heads, group, most, dim), dtype, build(name, most - 1))
