"""The prefill kernel for GPUs: interpreted, races detected, or run by a GPU, against float64; and lowered for CUDA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention
from kvjax.kernels.prefill import grid_gpu, pallas_gpu, positions
from kvjax.statistics import ABOVE, LAST, MASS, recent_above
from tests.kernels import test_prefill_tpu as twin
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_prefill_tpu import EVERY, assert_golden

pytestmark = pytest.mark.newest  # whose interpreter takes kernels for GPUs

WIDE = recent_above(130)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: real queries of each row, older slots before them (without any the block is causal), and options."""

    real: tuple[int, ...]
    kv_heads: int
    group: int
    n: int
    before: int
    dim: int
    dtype: type = jnp.bfloat16
    window: int | str | None = None
    exempt: bool = False
    log_weight: bool = False
    group_reduce: str = "mean"
    statistics: tuple = EVERY

    def __str__(self):
        return "-".join(str(getattr(x, "__name__", x)) for x in dataclasses.astuple(self)[:7])

    @property
    def causal(self):
        return self.before == 0

    def inputs(self):
        heads = self.kv_heads * self.group
        return twin.arrays(heads, self.kv_heads, self.n, self.before, self.dim, self.real, self.causal, self.dtype)

    def masks(self, slots):
        """Window, exempt and log_weight, of those there are."""
        rng = np.random.default_rng(1)
        window = self.window
        if window == "each":
            window = jnp.asarray(40 + 7 * np.arange(len(self.real)), jnp.int32)
        return {
            "window": window,
            "exempt": jnp.asarray(rng.random(slots) < 0.2) if self.exempt else None,
            "log_weight": jnp.asarray(rng.random(slots) * 3, jnp.float32) if self.log_weight else None,
        }

    def weights(self, query_position):
        age = jnp.where(query_position >= 0, jnp.max(query_position, axis=1, keepdims=True) - query_position, -1)
        return tuple(statistic.query_weights(age, age) for statistic in self.statistics)

    def program(self, inputs, weights, masks):
        """The kernel and its arrays. A new one each time: what was traced for another machine is not used again."""
        query, key, value, query_position, key_position = inputs
        arrays = {
            "query": query, "key": key, "value": value, "query_position": query_position, "key_position": key_position,
            "weights": weights,
        }  # fmt: skip
        arrays |= {name: mask for name, mask in masks.items() if hasattr(mask, "shape")}
        run = functools.partial(
            pallas_gpu.attend, statistics=self.statistics, scale=self.dim**-0.5, group_reduce=self.group_reduce,
            causal=self.causal, **{name: mask for name, mask in masks.items() if name not in arrays},
        )  # fmt: skip
        return jax.jit(lambda arrays: run(**arrays)), arrays

    def attend(self, inputs, masks):
        """What the kernel finds, and the weights it was given."""
        weights = self.weights(inputs[3])
        run, arrays = self.program(inputs, weights, masks)
        return *run(arrays), weights

    def check(self, error):
        inputs = self.inputs()
        masks = self.masks(inputs[4].shape)
        got = self.attend(inputs, masks)
        atol = error if self.dtype == np.float32 else 0.02
        assert_golden(got, inputs, self.statistics, self.group_reduce, atol=atol, **masks)
        seen = np.asarray(inputs[3]) >= 0
        assert not np.any(np.moveaxis(np.asarray(got[0], np.float32), 3, 1)[~seen]), "who is not there gets zeros"

    def lowered(self):
        size = self.before + self.n
        inputs = twin.shapes(len(self.real), self.kv_heads, self.group, self.n, size, self.dim, self.dtype)
        run, arrays = self.program(
            inputs, jax.eval_shape(self.weights, inputs[3]), self.masks((len(self.real), self.kv_heads, size))
        )
        return run.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()


CASES = [
    Case((40, 23), 1, 8, 40, 0, 64),
    Case((150,), 1, 3, 150, 0, 128, window=60, group_reduce="max", statistics=(*EVERY, WIDE)),
    Case((136,), 1, 1, 136, 0, 80, np.float32),
    Case((21, 9, 0), 1, 3, 21, 180, 96, np.float32, "each", True, True, "max"),
    Case((10,), 2, 2, 16, 184, 256, window=50, log_weight=True),
    Case((70,), 1, 2, 70, 0, 256, np.float32, window=20, exempt=True, statistics=(LAST, MASS)),
]
HARDWARE = [
    Case((2048, 1500), 8, 4, 2048, 0, 128),
    Case((3000,), 8, 1, 3000, 0, 64, window=500, statistics=(*EVERY, WIDE)),
    Case((64, 30), 4, 8, 64, 1984, 128, window="each", exempt=True, log_weight=True),
    Case((1000,), 2, 4, 1024, 0, 256, np.float32, group_reduce="max"),
    Case((512,), 1, 71, 512, 0, 64, jnp.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_float64(machine, monkeypatch, case):
    monkeypatch.setattr(pallas_gpu, "WORDS", 12)
    case.check(machine)


@pytest.mark.parametrize("machine", [ON_GPU], indirect=True)
@pytest.mark.parametrize("case", HARDWARE, ids=str)
def test_attention_of_many_slots_is_that_of_float64(machine, case):
    case.check(machine)


def test_the_public_op_is_that_of_xla(machine):
    query, key, value, query_position, key_position = Case((24,), 2, 2, 24, 40, 64, np.float32).inputs()

    def run(implementation):
        return attention.attend(
            query.reshape(1, 4, 24, 64), key, value, query_position=query_position, key_position=key_position,
            needs=frozenset({MASS, ABOVE}), implementation=implementation,
        )  # fmt: skip

    (got, found), (expected, columns) = (jax.jit(lambda name=name: run(name))() for name in ("pallas_gpu", "xla"))
    np.testing.assert_allclose(got, expected, atol=machine)
    for name in ("mass", "above"):
        np.testing.assert_allclose(found[name], columns[name], atol=machine)


def test_what_ties_with_the_uniform_share_is_above_it(machine):
    case = Case((24,), 1, 1, 24, 0, 64, np.float32, statistics=(ABOVE,))
    query, key, *rest = case.inputs()
    _, columns, _ = case.attend((query, jnp.broadcast_to(key[:, :, :1], key.shape), *rest), case.masks(()))
    np.testing.assert_array_equal(columns["above"], np.arange(24, 0, -1)[None, None])


def test_a_slot_too_many_is_noticed(machine, monkeypatch):
    """A mutation: every query sees one slot of the future."""
    whole = positions.lines

    def early(*arguments):
        query, slots = whole(*arguments)
        return query, slots.at[:, 0].add(-1)

    monkeypatch.setattr(positions, "lines", early)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        Case((24,), 1, 1, 24, 0, 64, statistics=()).check(machine)


@pytest.mark.parametrize(
    ("case", "told"),
    [*((case, True) for case in [*CASES, *HARDWARE]), (CASES[0], False), (HARDWARE[0], False)],
    ids=str,
)
def test_it_lowers_for_cuda(case, told):
    text = (case if told else dataclasses.replace(case, statistics=())).lowered()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1 + told
    size = case.before + case.n
    if size % 8 == 0 and size >= 64 and case.group > 1 and case.dtype != np.float32:
        pairs = len(case.real) * case.kv_heads
        caches = re.compile(rf"tensor<({len(case.real)}x{case.kv_heads}|{pairs}|{pairs}x1)x{size}x{case.dim}x")
        touching = [line for line in text.splitlines() if caches.search(line) and "func.func" not in line]
        assert len(touching) > 1
        moving = ("stablehlo.reshape", "stablehlo.broadcast_in_dim", "@mosaic_gpu")
        assert all(any(each in line for each in moving) for line in touching), "read by the kernels alone"


def plan(group=4, n=104, size=104, dim=64, dtype=jnp.bfloat16, windowed=False, causal=True):
    return grid_gpu.Plan(group, n, size, dim, dtype, windowed, False, causal, 1.0, "mean")


def visits(plan, n, window=None, real=None):
    """Tiles that both passes visit, of one row with so many real queries."""
    index = np.arange(plan.size)
    line = np.where(index < (n if real is None else real), index.astype(np.float32), np.inf)
    queries = np.pad(np.where(np.isinf(line), -np.inf, line), (0, max(plan.n - plan.size, 0)), constant_values=-np.inf)
    rows = np.pad(np.tile(queries[: plan.n], plan.group), (0, plan.rows), constant_values=-np.inf)[: plan.rows]
    slots = jnp.asarray(line, jnp.float32)[None, None]
    first = grid_gpu.slots_of_rows(plan, jnp.asarray(rows, jnp.float32)[None], slots, window)
    tiled = pallas_gpu._tiled(slots, 64, plan.places)
    second = grid_gpu.queries_of_slots(plan, jnp.asarray(queries[None, : plan.n] > -np.inf), tiled, window)
    return np.asarray(first[0]), np.asarray(second[0])


@pytest.mark.parametrize("window", [None, 1, 90])
@pytest.mark.parametrize(("group", "n", "real"), [(1, 136, 136), (3, 200, 150), (4, 1032, 1032), (2, 64, 0)])
def test_a_tile_is_visited_where_something_is_seen(group, n, real, window):
    what = plan(group, n, n, windowed=window is not None)
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


@pytest.mark.parametrize("group", [1, 7, 71])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_statistics_cost_at_most_sixty_percent(group, dim, dtype):
    """FLOPs of products and weighted sums, in whole tiles, of all of POLICIES.md's statistics."""
    words = sum(max(statistic.words, default=1) for statistic in EVERY)
    for n in (16, 100, 1100):
        size = n if n % 8 == 0 and n >= 64 else -(-n // 64) * 64
        for window in (None, 600):
            what = plan(group, -(-n // 8) * 8, size, dim, dtype, window is not None)
            first, second = (np.maximum(x[:, 1] - x[:, 0] + 1, 0).sum() for x in visits(what, n, window))
            products = 64 * what.slots * first * 4 * dim, 64 * what.queries * second * 2 * dim * group
            assert products[1] + 64 * what.queries * second * 2 * words <= 0.6 * products[0]


def test_warpgroups_share_what_passes():
    assert plan(4, 2048, 2048, 128).first() == (2, 4)
    assert plan(4, 2048, 2048, 256).first() == (2, 4)
    assert plan(4, 2048, 2048, 256, jnp.float32).first() == (1, 3)
    assert plan(4, 2048, 2048, 128).second(14) == (2, 4)
    assert plan(1, 64, 64, 128).first()[0] == 1, "one tile of rows needs no second"


def test_what_cannot_run_says_so():
    case = Case((24,), 1, 1, 24, 0, 32)
    with pytest.raises(ValueError, match="a multiple of 16; got 32"):
        case.attend(case.inputs(), case.masks(()))
    with pytest.raises(ValueError, match="at most 256 lines of queries; 300 heads"):
        plan(300).second(310)
    with pytest.raises(ValueError, match=r"240 heads of 256 in .*float32.* exceed the shared memory"):
        plan(240, 64, 64, 256, jnp.float32).second(250)
