"""The prefill kernel for GPUs: interpreted, races detected, or run by a GPU, against float64; and lowered for CUDA."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention
from kvjax.errors import ConfigError
from kvjax.kernels.prefill import grid_gpu, pallas_gpu, positions
from tests.kernels.cases import EVERY, PREFILL, WIDE, Case, PrefillCases
from tests.kernels.conftest import ON_GPU

pytestmark = pytest.mark.newest  # whose interpreter takes kernels for GPUs

HARDWARE = [
    Case((2048, 1500), 8, 4, 2048, 0, 128),
    Case((3000,), 8, 1, 3000, 0, 64, window=500, needs=WIDE),
    Case((64, 30), 4, 8, 64, 1984, 128, window=300, exempt=True, log_weight=True),
    Case((1000,), 2, 4, 1024, 0, 256, jnp.float32, group_reduce="max"),
    Case((512,), 1, 71, 512, 0, 64, jnp.float16),
]


class TestPrefill(PrefillCases):
    implementation = "pallas_gpu"

    def small_tiles(self, monkeypatch, case):
        monkeypatch.setattr(pallas_gpu, "WORDS", 12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("machine", [ON_GPU], indirect=True)
@pytest.mark.parametrize("case", HARDWARE, ids=str)
def test_many_slots_are_those_of_float64(machine, case):
    case.check("pallas_gpu", machine)


def test_a_slot_too_many_is_noticed(machine, monkeypatch):
    """A mutation: every query sees one slot of the future."""
    whole = positions.lines

    def early(*arguments):
        query, slots = whole(*arguments)
        return query, slots.at[:, 0].add(-1)

    monkeypatch.setattr(positions, "lines", early)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        Case((24,), 1, 1, 24, 0, 64, needs=frozenset()).check("pallas_gpu", machine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "reports"),
    [*((case, True) for case in [*PREFILL, *HARDWARE]), (PREFILL[0], False), (HARDWARE[0], False)],
    ids=str,
)
def test_it_lowers_for_cuda(case, reports):
    text = (case if reports else dataclasses.replace(case, needs=frozenset())).lowered_for_cuda()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1 + reports
    size = case.before + case.n
    if size % 8 == 0 and size >= 64 and case.group > 1 and case.dtype != jnp.float32:
        pairs = len(case.real) * case.kv_heads
        caches = re.compile(rf"tensor<({len(case.real)}x{case.kv_heads}|{pairs}|{pairs}x1)x{size}x{case.dim}x")
        touching = [line for line in text.splitlines() if caches.search(line) and "func.func" not in line]
        assert len(touching) > 1
        moving = ("stablehlo.reshape", "stablehlo.broadcast_in_dim", "@mosaic_gpu")
        assert all(any(each in line for each in moving) for line in touching), "read by the kernels alone"


def tiling(group=4, n=104, size=104, dim=64, dtype=jnp.bfloat16, windowed=False, causal=True):
    return grid_gpu.Tiling(group, n, size, dim, dtype, windowed, False, causal)


def visits(tiling, n, window=None, real=None):
    """Tiles that both passes visit, of one row with so many real queries."""
    index = np.arange(tiling.size)
    line = np.where(index < (n if real is None else real), index.astype(np.float32), np.inf)
    queries = np.pad(
        np.where(np.isinf(line), -np.inf, line), (0, max(tiling.n - tiling.size, 0)), constant_values=-np.inf
    )
    rows = np.pad(np.tile(queries[: tiling.n], tiling.group), (0, tiling.rows), constant_values=-np.inf)[: tiling.rows]
    slots = jnp.asarray(line, jnp.float32)[None, None]
    first = grid_gpu.slots_of_rows(tiling, jnp.asarray(rows, jnp.float32)[None], slots, window)
    tiled = pallas_gpu._tiled(slots, 64, tiling.places)
    second = grid_gpu.queries_of_slots(tiling, jnp.asarray(queries[None, : tiling.n] > -np.inf), tiled, window)
    return np.asarray(first[0]), np.asarray(second[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [None, 1, 90])
@pytest.mark.parametrize(("group", "n", "real"), [(1, 136, 136), (3, 200, 150), (4, 1032, 1032), (2, 64, 0)])
def test_a_tile_is_visited_where_something_is_seen(group, n, real, window):
    what = tiling(group, n, n, windowed=window is not None)
    first, second = visits(what, n, window, real)
    i, j = np.arange(n)[:, None], np.arange(n)
    seen = (j <= i) & (i - j < (window or np.inf)) & (i < real)

    def ends(holds, tile):
        found = np.flatnonzero(holds)
        return (found[0] // tile, found[-1] // tile) if len(found) else None

    row = np.arange(what.rows) % n
    for tile, (low, high) in enumerate(first):
        own = np.arange(tile * 64, tile * 64 + 64)
        own = row[own[own < group * n]]
        span = ends(seen[own].any(axis=0), what.slots)
        assert (low, high) == span if span else low > high
    for tile, (low, high) in enumerate(second):
        span = ends(seen[:, tile * 64 : tile * 64 + 64].any(axis=1), what.queries)
        assert (low, high) == span if span else low > high


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", [1, 7, 71])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_statistics_cost_at_most_sixty_percent(group, dim, dtype):
    """FLOPs of products and weighted sums, in whole tiles, of all of POLICIES.md's statistics."""
    words = sum(max(statistic.words, default=1) for statistic in EVERY if statistic.needs_attention)
    for n in (16, 100, 1100):
        size = n if n % 8 == 0 and n >= 64 else -(-n // 64) * 64
        for window in (None, 600):
            what = tiling(group, -(-n // 8) * 8, size, dim, dtype, window is not None)
            first, second = (np.maximum(x[:, 1] - x[:, 0] + 1, 0).sum() for x in visits(what, n, window))
            products = 64 * what.slots * first * 4 * dim, 64 * what.queries * second * 2 * dim * group
            assert products[1] + 64 * what.queries * second * 2 * words <= 0.6 * products[0]


def test_warpgroups_share_what_passes():
    assert tiling(4, 2048, 2048, 128).first() == (2, 4)
    assert tiling(4, 2048, 2048, 256).first() == (2, 4)
    assert tiling(4, 2048, 2048, 256, jnp.float32).first() == (1, 3)
    assert tiling(4, 2048, 2048, 128).second(14) == (2, 4)
    assert tiling(1, 64, 64, 128).first()[0] == 1, "one tile of rows needs no second"


def test_what_cannot_run_says_so():
    case = Case((24,), 1, 1, 24, 0, 32)
    with pytest.raises(ConfigError, match=r"prefill/pallas_gpu: it takes head sizes of 64 to 256, .* not 32"):
        attention.attend_and_reduce(case.problem(*case.arrays()), "pallas_gpu")
    with pytest.raises(ValueError, match="at most 256 lines of queries; 300 heads"):
        tiling(300).second(310)
    with pytest.raises(ValueError, match=r"240 heads of 256 in .*float32.* exceed the shared memory"):
        tiling(240, 64, 64, 256, jnp.float32).second(250)
