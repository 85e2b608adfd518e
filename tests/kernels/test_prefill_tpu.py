"""The prefill kernel for TPUs: interpreted, with races detected, against float64; and by the real TPU compiler."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.devices import topology_devices
from kvjax.kernels.prefill import grid_tpu, pallas_tpu
from kvjax.kernels.prefill.grid_tpu import Grid
from kvjax.statistics import ABOVE, LAST, MASS, MASS_SQ, decayed, prompt_tail, recent_above

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'kvjax[tpu]'"
)
EVERY = (MASS, MASS_SQ, ABOVE, LAST, decayed(0.9), prompt_tail(9), recent_above(20))
WIDE = recent_above(130)  # of more words than the vector unit sums


@pytest.fixture
def interpreted(capfd):
    """Kernels run on this machine, as a simulated TPU that looks for races between its memories, and prints them."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
        jax.effects_barrier()
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


def arrays(heads, kv_heads, n, before, dim, real, causal, dtype=np.float32):
    """Query, key, value, query_position and key_position, of rows with so many `real` queries.

    Before them lie `before` older positions of which half survive, all in any order, unless the block is causal.
    """
    rng = np.random.default_rng(n)
    batch, size = len(real), before + n
    shapes = ((batch, kv_heads, heads // kv_heads, n, dim), *[(batch, kv_heads, size, dim)] * 2)
    query, key, value = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    query_position = np.where(np.arange(n) < np.array(real)[:, None], before + np.arange(n), -1).astype(np.int32)
    key_position = np.broadcast_to(query_position[:, None], (batch, kv_heads, n)).copy()
    if not causal:
        key_position = np.full((batch, kv_heads, size), -1, np.int32)
        for row, head in np.ndindex(batch, kv_heads):
            live = [*rng.choice(before, before // 2, replace=False), *query_position[row, : real[row]]]
            key_position[row, head, rng.permutation(size)[: len(live)]] = live
    return query, key, value, jnp.asarray(query_position), jnp.asarray(key_position)


def shapes(batch, kv_heads, group, n, size, dim, dtype, sharding=None):
    """As `arrays`, without anything in them."""
    pair = [((batch, kv_heads, size, dim), dtype)] * 2
    positions = [((batch, n), jnp.int32), ((batch, kv_heads, size), jnp.int32)]
    every = ((batch, kv_heads, group, n, dim), dtype), *pair, *positions
    return [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in every]


def attend(inputs, statistics=EVERY, causal=True, group_reduce="mean", **masks):
    """The kernel, and the weights it was given."""
    query, query_position = inputs[0], inputs[3]
    age = jnp.where(query_position >= 0, jnp.max(query_position, axis=1, keepdims=True) - query_position, -1)
    weights = tuple(statistic.query_weights(age, age) for statistic in statistics)
    masks = {"window": None, "exempt": None, "log_weight": None} | masks
    run = functools.partial(
        pallas_tpu.attend, scale=query.shape[-1] ** -0.5, statistics=statistics, group_reduce=group_reduce,
        causal=causal, **masks,
    )  # fmt: skip
    return *jax.jit(lambda *x: run(*x[:3], query_position=x[3], key_position=x[4], weights=x[5]))(
        *inputs, weights
    ), weights


def golden(inputs, window=None, exempt=None, log_weight=None):
    """In float64, with every matrix there is: output, probabilities [B, K, G, n, S], who sees whom [B, K, n, S]."""
    query, key, value, query_position, key_position = (np.asarray(x).astype(np.float64) for x in inputs)
    at, slot = query_position[:, None, :, None], key_position[:, :, None]
    seen = (slot >= 0) & (slot <= at)
    if window is not None:
        near = slot > at - np.asarray(window).reshape(-1, 1, 1, 1)
        seen &= near if exempt is None else near | np.asarray(exempt)[:, :, None]
    logits = np.einsum("bkgtd,bksd->bkgts", query, key) / math.sqrt(query.shape[-1])
    if log_weight is not None:
        logits += np.asarray(log_weight, np.float64)[:, :, None, None]
    weight = np.exp(logits) * seen[:, :, None]
    probability = weight / np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)
    return np.einsum("bkgts,bksd->bkgtd", probability, value), probability, seen


def assert_golden(got, inputs, statistics=EVERY, group_reduce="mean", atol=2e-6, **masks):
    output, columns, weights = got
    expected, probability, seen = golden(inputs, **masks)
    assert output.dtype == inputs[2].dtype
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=atol)
    assert set(columns) == {statistic.name for statistic in statistics}
    m = probability.mean(axis=2) if group_reduce == "mean" else probability.max(axis=2)
    count = seen.sum(axis=-1, keepdims=True)
    for statistic, weight in zip(statistics, weights, strict=True):
        column = columns[statistic.name]
        assert column.dtype == jnp.float32
        sums = functools.partial(np.einsum, "bkts,bt...->bks...", optimize=True)
        if statistic.transform != "above":
            term = m if statistic.transform == "identity" else m**2
            np.testing.assert_allclose(column, sums(term, weight), rtol=1e-5, atol=2e-6, err_msg=statistic.name)
            continue
        # As close to the uniform share as this, float32 may decide either way; not of a single slot.
        high = sums(seen & (m * count >= 1 - 1e-5), weight)
        low = sums(seen & ((m * count >= 1 + 1e-5) | (count == 1)), weight)
        assert np.mean(low != high) < 0.02 and np.any(low > 0)
        assert np.all((low <= column) & (column <= high)), statistic.name


@pytest.mark.parametrize(
    ("shape", "options"),
    [  # heads, KV heads, queries, older slots, head size, real queries of each row
        ((4, 2, 300, 0, 64, (300, 120)), {"statistics": (*EVERY, WIDE)}),
        ((2, 2, 290, 0, 80, (290,)), {"window": 60}),
        ((3, 1, 21, 180, 96, (21, 9, 0)), {"window": True, "exempt": True, "log_weight": True, "group_reduce": "max"}),
        ((2, 1, 140, 31, 256, (133,)), {"window": 50}),
        ((4, 1, 150, 0, 128, (150,)), {"window": 40, "exempt": True, "statistics": (LAST, MASS)}),
    ],
)
def test_attention_is_that_of_float64(interpreted, monkeypatch, shape, options):
    """Several tiles and one, rows that end early and one that is empty, groups whole and in parts."""
    monkeypatch.setattr(grid_tpu, "TILE", 128)
    *_, before, _, real = shape
    causal = before == 0
    inputs = arrays(*shape, causal)
    rng = np.random.default_rng(1)
    slots = inputs[4].shape
    if options.get("window") is True:
        options = options | {"window": jnp.asarray(40 + 7 * np.arange(len(real)), jnp.int32)}
    if "exempt" in options:
        options = options | {"exempt": jnp.asarray(rng.random(slots) < 0.2)}
    if "log_weight" in options:
        options = options | {"log_weight": jnp.asarray(rng.random(slots) * 3, jnp.float32)}
    assert_golden(attend(inputs, causal=causal, **options), inputs, **options)


def test_in_bfloat16_statistics_are_float32(interpreted):
    inputs = arrays(8, 2, 37, 0, 128, (37,), True, jnp.bfloat16)
    assert_golden(attend(inputs), inputs, atol=0.02)
    output, columns, _ = attend(inputs, statistics=())
    np.testing.assert_allclose(output.astype(jnp.float32), golden(inputs)[0], atol=0.02)
    assert columns == {}


def test_what_ties_with_the_uniform_share_is_above_it(interpreted):
    query, key, *rest = arrays(2, 2, 40, 0, 64, (40,), True)
    inputs = (query, jnp.broadcast_to(key[:, :, :1], key.shape), *rest)
    _, columns, _ = attend(inputs, statistics=(ABOVE,))
    np.testing.assert_array_equal(columns["above"], np.broadcast_to(np.arange(40, 0, -1), (1, 2, 40)))


def test_a_tile_too_few_is_noticed(interpreted, monkeypatch):
    """A mutation: the second pass leaves out the last tile of queries."""
    monkeypatch.setattr(grid_tpu, "TILE", 128)
    whole = Grid.query_tiles
    monkeypatch.setattr(Grid, "query_tiles", lambda self, at: (whole(self, at)[0], 0))
    inputs = arrays(2, 2, 150, 0, 64, (150,), True)
    with pytest.raises(AssertionError, match="mass"):
        assert_golden(attend(inputs, statistics=(MASS,)), inputs, statistics=(MASS,))


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize(("n", "queries", "slots"), [(41, 8, 8), (41, 16, 4), (30, 5, 15), (7, 16, 16)])
def test_a_tile_is_visited_where_something_is_seen(n, queries, slots, window):
    grid = Grid(n, n, queries, slots, 1, True, window)
    tiles, slot_tiles = grid.shape
    i, j = np.arange(tiles * queries)[:, None], np.arange(slot_tiles * slots)
    seen = (j <= i) & (i - j < (window or np.inf))
    holds = seen.reshape(tiles, queries, slot_tiles, slots).any(axis=(1, 3))
    at, slot = np.ogrid[:tiles, :slot_tiles]
    by_query = np.array([grid.slot_tiles(x) for x in range(tiles)])
    by_slot = np.array([grid.query_tiles(x) for x in range(slot_tiles)])
    np.testing.assert_array_equal((by_query[:, :1] <= slot) & (slot <= by_query[:, 1:]), holds)
    np.testing.assert_array_equal((by_slot[:, 0] <= at) & (at <= by_slot[:, 1]), holds)
    assert grid.pairs == holds.sum() * queries * slots


def programs(equation):
    """The programs inside an equation: branches, bodies of loops and kernels."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def dot_flops(jaxpr) -> int:
    """FLOPs of all products in a program."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (over, _), _ = equation.params["dimension_numbers"]
            one, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(one[axis] for axis in over)
        turns = equation.params.get("length", 1)  # of a loop over heads
        total += turns * sum(dot_flops(inner) for inner in programs(equation))
    return total


def kernels(jaxpr):
    """Parameters of a program's pallas_calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params
        else:
            for inner in programs(equation):
                yield from kernels(inner)


@pytest.mark.parametrize("heads", [2, 8])
def test_the_second_pass_takes_half_of_the_first(heads):
    """FLOPs of the kernels' own products, at whole tiles, are what their cost estimates say, beside the sums."""
    inputs = shapes(1, 2, heads // 2, 1024, 1024, 64, jnp.float32)
    first, second = kernels(jax.make_jaxpr(lambda *x: attend(x, (MASS, MASS_SQ))[:2])(*inputs).jaxpr)
    group = heads // 2
    grids = grid_tpu.grids(group, 1024, 1024, 64, 4, True, None)
    flops = []
    for params, grid in zip((first, second), grids, strict=True):
        programs = 2 * group // grid.heads * grid.pairs // (grid.queries * grid.slots)
        flops.append(programs * dot_flops(params["jaxpr"]))
    sums = 2 * 2 * 2 * grids[1].pairs
    assert flops[0] == first["cost_estimate"].flops
    assert flops[1] + sums == second["cost_estimate"].flops
    assert second["cost_estimate"].flops <= 0.6 * first["cost_estimate"].flops


@pytest.mark.parametrize("group", [1, 4, 7, 8, 71])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_statistics_cost_at_most_sixty_percent(group, dim, itemsize):
    """All of POLICIES.md's at once, or Scissorhands' with a history of 128 queries, in every kind of block."""
    for words in (sum(max(statistic.words, default=1) for statistic in EVERY), *WIDE.words):
        for n in (16, 100, 129, 520, 1100, 4096, 20001):
            for size, causal, window in ((n, True, None), (n, True, 600), (n + 900, False, None)):
                grids = grid_tpu.grids(group, n, size, dim, itemsize, causal, window)
                attention, columns = grid_tpu.costs(*grids, 8, group, dim, itemsize, words)
                assert columns.flops <= 0.6 * attention.flops


def compiled(topology, shape, dtype, statistics=EVERY, **options):
    """The program for a TPU, which is refused if its vector memory cannot hold it."""
    batch, kv_heads, _, n, size, _ = shape
    mesh = Mesh(np.array(topology_devices(topology)[:1]), ("x",))

    where = NamedSharding(mesh, PartitionSpec())
    masks = {"window": options.get("window")}
    kinds = {"exempt": jnp.bool_, "log_weight": jnp.float32}
    given = {
        name: jax.ShapeDtypeStruct((batch, kv_heads, size), kind, sharding=where)
        for name, kind in kinds.items()
        if name in options
    }

    def run(*inputs, **given):
        return attend(inputs, statistics, n == size, options.get("group_reduce", "mean"), **masks, **given)[:2]

    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*shapes(*shape, dtype, where), **given).compile()


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [  # batch, KV heads, group, queries, slots, head size
        ((1, 12, 1, 2049, 2049, 64), jnp.bfloat16, {}),
        ((1, 8, 4, 1023, 1023, 128), jnp.bfloat16, {"window": 500, "statistics": (*EVERY, WIDE)}),
        ((1, 2, 4, 700, 700, 256), jnp.float32, {"window": 500, "exempt": True, "log_weight": True}),
        ((2, 4, 7, 37, 801, 80), jnp.bfloat16, {"group_reduce": "max", "log_weight": True}),
        ((1, 1, 71, 300, 300, 96), jnp.float32, {"statistics": (MASS,)}),
    ],
)
def test_the_tpu_compiler_takes_it(topology, shape, dtype, options):
    compiled(topology, shape, dtype, **options)


def held(jaxpr) -> int:
    """Bytes of all arrays that a program ever makes, outside its kernels."""
    total = 0
    for equation in jaxpr.eqns:
        total += sum(out.aval.size * out.aval.dtype.itemsize for out in equation.outvars)
        if equation.primitive.name != "pallas_call":
            total += sum(held(inner) for inner in programs(equation))
    return total


def test_every_array_is_linear_in_the_prompt():
    sizes = [
        held(jax.make_jaxpr(lambda *x: attend(x)[:2])(*shapes(1, 2, 4, n, n, 128, jnp.bfloat16)).jaxpr)
        for n in (4096, 8192, 16384)
    ]
    assert sizes[2] - sizes[1] <= 2.01 * (sizes[1] - sizes[0])


@needs_libtpu
@pytest.mark.parametrize("n", [16384, 32768])
def test_temporary_memory_is_linear_in_the_prompt(n):
    """On a chip, where what is small may stay in its vector memory and is not counted."""
    program = compiled("v5e:1x1", (1, 8, 4, n, n, 128), jnp.bfloat16, (MASS, ABOVE))
    most = 4 * 8 * n * (4 + 4 + 4)
    assert program.memory_analysis().temp_size_in_bytes <= most, "log-sum-exp, counts, positions, weights: float32"
