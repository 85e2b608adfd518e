"""The decode kernel for GPUs: interpreted, races detected, or run by a GPU, against float64; and lowered for CUDA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from kvjax import attention
from kvjax.errors import ConfigError
from kvjax.kernels.decode import launch_gpu, pallas_gpu
from tests.kernels.cases import DECODE, Case, DecodeCases
from tests.kernels.codes import CODED_GPU
from tests.kernels.conftest import ON_GPU

pytestmark = pytest.mark.newest  # whose interpreter takes kernels for GPUs

HARDWARE = [
    Case((1, 0) * 4, 8, 4, 1, 2047, 128),
    Case((1,), 8, 8, 1, 8191, 128, group_reduce="max"),
    Case((1, 1), 32, 1, 1, 412, 64),
    Case((1,), 1, 71, 1, 4095, 64),
    Case((1,) * 4, 8, 8, 1, 2047, 128, jnp.float32),
    Case((1, 0), 4, 4, 1, 1039, 256, window=512, exempt=True, log_weight=True),
]


# Rows of a product that are not read hold what was in the memory, here NaN.
@pytest.mark.filterwarnings("ignore:invalid value encountered in (matmul|add)")
class TestDecode(DecodeCases):
    implementation = "pallas_gpu"

    def small_tiles(self, monkeypatch, case):
        monkeypatch.setattr(launch_gpu, "SPAN", 2)
        monkeypatch.setattr(launch_gpu, "PROGRAMS", 264 if case.split else 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("machine", [ON_GPU], indirect=True)
@pytest.mark.parametrize("case", HARDWARE, ids=str)
def test_many_slots_are_those_of_float64(machine, case):
    case.check("pallas_gpu", machine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "reports"),
    [*((case, True) for case in [*DECODE, *HARDWARE]), (DECODE[0], False), (HARDWARE[1], False)],
    ids=str,
)
def test_it_lowers_for_cuda(case, reports):
    text = (case if reports else dataclasses.replace(case, needs=frozenset())).lowered_for_cuda()
    kernels = re.findall(r"custom_call @(mosaic_gpu\w*)", text)
    assert len(kernels) == 1
    size, pairs = case.before + case.n, len(case.real) * case.kv_heads
    if size >= pallas_gpu.TILE:
        caches = re.compile(rf"tensor<({len(case.real)}x{case.kv_heads}|{pairs})x{size}x{case.dim}x")
        touching = [line for line in text.splitlines() if caches.search(line) and "func.func" not in line]
        assert all("stablehlo.reshape" in line or "@mosaic_gpu" in line for line in touching), (
            "read by the kernel alone"
        )


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:invalid value encountered in (matmul|add)")
@pytest.mark.parametrize("case", CODED_GPU, ids=str)
def test_of_codes_it_is_that_of_what_they_decode_to(machine, monkeypatch, case):
    monkeypatch.setattr(launch_gpu, "SPAN", 2)
    monkeypatch.setattr(launch_gpu, "PROGRAMS", 264 if case.case.split else 1)
    case.check("pallas_gpu", machine, rounded=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CODED_GPU, ids=str)
def test_of_codes_it_lowers_for_cuda(case):
    run = jax.jit(lambda parts: attention.attend_parts(parts, "pallas_gpu"))
    text = run.trace(case.shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @(mosaic_gpu\w*)", text)) == 1
    size = case.case.before + case.case.n - case.exact
    if size < pallas_gpu.TILE:
        return
    codes = re.compile(rf"tensor<(\d+x)+{size}x\d+xui8>")
    touching = [line for line in text.splitlines() if codes.search(line) and "func.func" not in line]
    assert all("stablehlo.reshape" in line or "@mosaic_gpu" in line for line in touching), "read by the kernel alone"
    scales = re.compile(rf"stablehlo.transpose.*tensor<(\d+x)+{size}x\d+x(bf16|f32)>")
    assert not scales.search(text), "scales and zeros are read in the order in which they lie"


def test_programs_share_the_slots():
    launch = functools.partial(launch_gpu.Launch, dtype=jnp.bfloat16, reports=True)
    many = launch(4, 128, 2048).cut(1024)
    assert (many.spans, many.span) == (1, 32)
    assert many.stages > 1
    few = launch(4, 128, 8192).cut(8)
    assert few.spans * 8 > launch_gpu.PROGRAMS // 2
    wide = launch(71, 64, 4096).cut(1024)
    assert wide.spans > 1, "logits of 71 heads do not fit"


def test_what_cannot_run_says_so():
    def run(case):
        attention.attend_and_reduce(case.problem(*case.arrays()), "pallas_gpu")

    two = Case((2,), 1, 2, 2, 62, 64)
    with pytest.raises(ConfigError, match="decode/pallas_gpu: it takes one query per head, not 2"):
        pallas_gpu.attend_and_reduce(two.problem(*two.arrays()))
    with pytest.raises(ConfigError, match="head sizes of 64 to 256, a multiple of 16, not 32"):
        run(Case((1,), 1, 2, 1, 63, 32))
    with pytest.raises(ConfigError, match="71 heads of 256 in float32 exceed the shared memory"):
        run(Case((1,), 1, 71, 1, 63, 256, jnp.float32))
