"""The prefill kernel for TPUs: interpreted, races detected, against float64; and by the real TPU compiler."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import attention
from kvjax.devices import topology_devices
from kvjax.kernels.prefill import grid_tpu
from kvjax.kernels.prefill.grid_tpu import Grid
from kvjax.numerics.statistics import ABOVE, MASS, MASS_SQ
from tests.kernels.cases import EVERY, WIDE, Case, PrefillCases
from tests.kernels.conftest import needs_libtpu


@pytest.fixture
def machine(interpreted):
    return 2e-6


class TestPrefill(PrefillCases):
    """Several tiles and one, rows that end early and one that is empty, groups whole and in parts."""

    implementation = "pallas_tpu"

    def small_tiles(self, monkeypatch, case):
        monkeypatch.setattr(grid_tpu, "TILE", 128)


@pytest.mark.thorough
def test_a_tile_too_few_is_noticed(machine, monkeypatch):
    """A mutation: the second pass leaves out the last tile of queries."""
    monkeypatch.setattr(grid_tpu, "TILE", 128)
    whole = Grid.query_tiles
    monkeypatch.setattr(Grid, "query_tiles", lambda self, at: (whole(self, at)[0], 0))
    with pytest.raises(AssertionError, match="mass"):
        Case((150,), 2, 1, 150, 0, 64, jnp.float32, needs=frozenset({MASS})).check("pallas_tpu", machine)


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


def run(case, *given):
    """The kernel, of arrays as of `Case.shapes`."""
    attended, columns = attention.attend_and_reduce(case.problem(*given), "pallas_tpu")
    return attended.output.astype(case.dtype), columns


def traced(case):
    return jax.make_jaxpr(lambda *given: run(case, *given))(*case.shapes)


@pytest.mark.parametrize("heads", [2, 8])
def test_the_second_pass_takes_half_of_the_first(heads):
    """FLOPs of the kernels' own products, at whole tiles, are what their cost estimates say, beside the sums."""
    group = heads // 2
    case = Case((1024,), 2, group, 1024, 0, 64, jnp.float32, needs=frozenset({MASS, MASS_SQ}))
    first, second = kernels(traced(case).jaxpr)
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
    wide = max(max(statistic.words, default=1) for statistic in WIDE)
    for words in (sum(max(statistic.words, default=1) for statistic in EVERY if statistic.needs_attention), wide):
        for n in (16, 100, 129, 520, 1100, 4096, 20001):
            for size, causal, window in ((n, True, None), (n, True, 600), (n + 900, False, None)):
                grids = grid_tpu.grids(group, n, size, dim, itemsize, causal, window)
                attention, columns = grid_tpu.costs(*grids, 8, group, dim, itemsize, words)
                assert columns.flops <= 0.6 * attention.flops


def compiled(topology, case):
    """The program for a TPU, whose compiler refuses what its vector memory cannot hold."""
    mesh = Mesh(np.array(topology_devices(topology)[:1]), ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), case.shapes)
    with jax.set_mesh(mesh):
        return jax.jit(lambda *given: run(case, *given)).lower(*placed).compile()


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "case"),
    [  # each on one of two generations, and one on both
        ("v5e:1x1", Case((2049,), 12, 1, 2049, 0, 64)),
        ("v6e:1x1", Case((1023,), 8, 4, 1023, 0, 128, window=500, needs=WIDE)),
        ("v5e:1x1", Case((700,), 2, 4, 700, 0, 256, jnp.float32, window=500, exempt=True, log_weight=True)),
        ("v6e:1x1", Case((37, 37), 4, 7, 37, 764, 80, group_reduce="max", log_weight=True)),
        ("v5e:1x1", Case((300,), 1, 71, 300, 0, 96, jnp.float32, needs=frozenset({MASS}))),
        ("v6e:1x1", Case((300,), 1, 71, 300, 0, 96, jnp.float32, needs=frozenset({MASS}))),
    ],
    ids=str,
)
def test_the_tpu_compiler_takes_it(topology, case):
    compiled(topology, case)


def held(jaxpr) -> int:
    """Bytes of all arrays that a program ever makes, outside its kernels."""
    total = 0
    for equation in jaxpr.eqns:
        total += sum(out.aval.size * out.aval.dtype.itemsize for out in equation.outvars)
        if equation.primitive.name != "pallas_call":
            total += sum(held(inner) for inner in programs(equation))
    return total


def test_every_array_is_linear_in_the_prompt():
    sizes = [held(traced(Case((n,), 2, 4, n, 0, 128)).jaxpr) for n in (4096, 8192, 16384)]
    assert sizes[2] - sizes[1] <= 2.01 * (sizes[1] - sizes[0])


@pytest.mark.sampled(1)
@needs_libtpu
@pytest.mark.thorough
@pytest.mark.parametrize("n", [16384, 32768])
def test_temporary_memory_is_linear_in_the_prompt(n):
    """On a chip, where what is small may stay in its vector memory and is not counted."""
    program = compiled("v5e:1x1", Case((n,), 8, 4, n, 0, 128, needs=frozenset({MASS, ABOVE})))
    most = 4 * 8 * n * (4 + 4 + 4)
    assert program.memory_analysis().temp_size_in_bytes <= most, "log-sum-exp, counts, positions, weights: float32"
