"""The decode kernel for GPUs: interpreted, races detected, or run by a GPU, against float64; and lowered for CUDA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.decode import pallas_gpu, plan_gpu
from kvjax.statistics import ABOVE, LAST, MASS, MASS_SQ, decayed, recent_above
from tests.kernels.conftest import ON_GPU

pytestmark = pytest.mark.newest  # whose interpreter takes kernels for GPUs

EVERY = (MASS, MASS_SQ, ABOVE, LAST, decayed(0.9), recent_above(20))


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and whether its slots go to several programs."""

    batch: int
    kv_heads: int
    group: int
    size: int
    dim: int
    dtype: type = jnp.bfloat16
    window: int | None = None
    exempt: bool = False
    log_weight: bool = False
    group_reduce: str = "mean"
    split: bool = False

    def __str__(self):
        return "-".join(str(getattr(x, "__name__", x)) for x in dataclasses.astuple(self)[:6]) + "-split" * self.split

    def shapes(self):
        """Query, key, value, and what is known of them but the window, as shapes."""
        pairs = (self.batch, self.kv_heads)
        slots = functools.partial(jax.ShapeDtypeStruct, (*pairs, self.size))
        cache = jax.ShapeDtypeStruct((*pairs, self.size, self.dim), self.dtype)
        known = {
            "query_position": jax.ShapeDtypeStruct((self.batch, 1), jnp.int32),
            "key_position": slots(jnp.int32),
            "exempt": slots(jnp.bool) if self.exempt else None,
            "log_weight": slots(jnp.float32) if self.log_weight else None,
        }
        return (jax.ShapeDtypeStruct((*pairs, self.group, 1, self.dim), self.dtype), cache, cache), known

    def arrays(self):
        """The same with values; two thirds of the slots live, and a row that has ended."""
        rng = np.random.default_rng(self.size)
        shapes, _ = self.shapes()
        query, key, value = (jnp.asarray(rng.normal(size=x.shape), self.dtype) for x in shapes)
        position = np.argsort(rng.random((self.batch, self.kv_heads, 2 * self.size)))[..., : self.size]
        position[rng.random(position.shape) < 0.3] = -1
        at = np.full((self.batch, 1), 2 * self.size)
        at[1:2] = -1
        known = {
            "query_position": jnp.asarray(at, jnp.int32),
            "key_position": jnp.asarray(position, jnp.int32),
            "window": self.window,
            "exempt": jnp.asarray(rng.random(position.shape) < 0.2) if self.exempt else None,
            "log_weight": jnp.asarray(3 * rng.random(position.shape), jnp.float32) if self.log_weight else None,
        }
        return (query, key, value), known

    def options(self):
        age = jnp.where(jnp.arange(self.batch)[:, None] == 1, -1, 0)
        weights = tuple(s.query_weights(age, age) for s in EVERY)
        return {
            "statistics": EVERY, "weights": weights, "scale": self.dim**-0.5, "group_reduce": self.group_reduce,
        }  # fmt: skip


CASES = [
    Case(2, 2, 4, 136, 64),
    Case(1, 1, 8, 328, 128, group_reduce="max", split=True),
    Case(2, 1, 1, 37, 80, jnp.float32, window=40),
    Case(1, 1, 3, 150, 96, window=100, exempt=True),
    Case(1, 1, 71, 200, 64, log_weight=True, split=True),
    Case(1, 1, 2, 100, 256, jnp.float32, log_weight=True, group_reduce="max"),
    Case(1, 2, 7, 80, 256),
    Case(1, 1, 2, 300, 64, jnp.float32, split=True),
]
HARDWARE = [
    Case(8, 8, 4, 2048, 128),
    Case(1, 8, 8, 8192, 128, group_reduce="max"),
    Case(2, 32, 1, 413, 64),
    Case(1, 1, 71, 4096, 64),
    Case(4, 8, 8, 2048, 128, jnp.float32),
    Case(2, 4, 4, 1040, 256, window=512, exempt=True, log_weight=True),
]


def reference(case, arrays, known):
    """Output, and m and how many slots are seen, in float64 from the definition."""
    query, key, value = (np.asarray(x, np.float64) for x in arrays)
    at, position = np.asarray(known["query_position"])[:, None], np.asarray(known["key_position"])
    seen = (position >= 0) & (position <= at)
    if case.window is not None:
        near = position > at - case.window
        seen &= near | np.asarray(known["exempt"]) if case.exempt else near
    logits = np.einsum("bkgnd,bksd->bkgs", query, key) * case.dim**-0.5
    if case.log_weight:
        logits = logits + np.asarray(known["log_weight"], np.float64)[:, :, None]
    logits = np.where(seen[:, :, None], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weight = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    probability = weight / np.maximum(weight.sum(axis=-1, keepdims=True), 1e-300)
    output = np.einsum("bkgs,bksd->bkgd", probability, value)[:, :, :, None]
    m = probability.mean(axis=2) if case.group_reduce == "mean" else probability.max(axis=2)
    return output, m, seen


def columns(m, seen):
    """What one query of weight 1 adds to each of `EVERY`."""
    count = np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    above = (seen & (m >= 1 / count)).astype(np.float64)
    # 20 queries make two words; this one is the newest.
    recent = np.stack([above, np.zeros_like(above)], axis=-1)
    return {"mass": m, "mass_sq": m**2, "above": above, "last": m, "decayed(0.9)": 0.1 * m, "above[20]": recent}


# Rows of a product that nobody reads hold what was in the memory, here NaN.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_float64(machine, monkeypatch, case):
    monkeypatch.setattr(plan_gpu, "SPAN", 2)
    monkeypatch.setattr(plan_gpu, "PROGRAMS", 264 if case.split else 1)
    check(case, machine)


@pytest.mark.parametrize("machine", [ON_GPU], indirect=True)
@pytest.mark.parametrize("case", HARDWARE, ids=str)
def test_attention_of_many_slots_is_that_of_float64(machine, case):
    check(case, machine)


def check(case, error):
    arrays, known = case.arrays()
    # Not under jit: a trace that was made without the interpreter would be used again.
    got, found = pallas_gpu.attend(*arrays, **known, **case.options())
    output, m, seen = reference(case, arrays, known)
    assert got.dtype == case.dtype
    coarse = case.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), output, atol=0.01 if coarse else error)
    for name, column in columns(m, seen).items():
        column = np.where(np.arange(case.batch).reshape(-1, *[1] * (column.ndim - 1)) == 1, 0.0, column)
        assert found[name].dtype == jnp.float32
        np.testing.assert_allclose(found[name], column, atol=error, err_msg=name)


@pytest.mark.parametrize(
    ("case", "told"),
    [*((case, True) for case in [*CASES, *HARDWARE]), (CASES[0], False), (HARDWARE[1], False)],
    ids=str,
)
def test_it_lowers_for_cuda(case, told):
    shapes, known = case.shapes()
    options = case.options() | ({} if told else {"statistics": (), "weights": ()})
    run = jax.jit(functools.partial(pallas_gpu.attend, **options, window=case.window))
    text = run.trace(*shapes, **known).lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r"custom_call @(mosaic_gpu\w*)", text)
    assert len(kernels) == 1
    if case.size >= pallas_gpu.TILE:
        caches = re.compile(
            rf"tensor<({case.batch}x{case.kv_heads}|{case.batch * case.kv_heads})x{case.size}x{case.dim}x"
        )
        touching = [line for line in text.splitlines() if caches.search(line) and "func.func" not in line]
        assert all("stablehlo.reshape" in line or "@mosaic_gpu" in line for line in touching), (
            "read by the kernel alone"
        )


def test_programs_share_the_slots():
    plan = functools.partial(plan_gpu.Plan, dtype=jnp.bfloat16, told=True, group_reduce="mean", scale=1.0)
    many = plan(4, 128, 2048).cut(1024)
    assert (many.spans, many.span) == (1, 32)
    assert many.stages > 1
    few = plan(4, 128, 8192).cut(8)
    assert few.spans * 8 > plan_gpu.PROGRAMS // 2
    wide = plan(71, 64, 4096).cut(1024)
    assert wide.spans > 1, "logits of 71 heads do not fit"


def test_what_cannot_run_says_so():
    case = Case(1, 1, 2, 64, 64)
    (query, key, value), known = case.arrays()
    with pytest.raises(ValueError, match="one query a head; got 2"):
        pallas_gpu.attend(jnp.concatenate([query] * 2, axis=3), key, value, **known, **case.options())
    with pytest.raises(ValueError, match="a multiple of 16; got 32"):
        pallas_gpu.attend(*(x[..., :32] for x in (query, key, value)), **known, **case.options())
    with pytest.raises(ValueError, match="exceed the shared memory"):
        plan_gpu.Plan(71, 256, 64, jnp.float32, True, "mean", 1.0).cut(1)
