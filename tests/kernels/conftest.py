"""Where kernels run in tests: interpreted on this machine, or on a GPU."""

import importlib.util

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'kvjax[tpu]'"
)

ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["interpreted", ON_GPU])
def machine(request):
    """Runs kernels on a GPU, or on this machine as a simulated one that raises at a race; the float32 error allowed."""
    gpu = jax.default_backend() == "gpu"
    if request.param == "gpu":
        if not gpu or jax.local_devices()[0].compute_capability != "9.0":
            pytest.skip("needs a Hopper GPU, and JAX_PLATFORMS=cuda")
        # By default, XLA multiplies float32 in tf32 on GPUs.
        with jax.default_matmul_precision("highest"):
            yield 1e-5  # its exponential is approximate
        return
    if gpu:
        pytest.skip("the GPU runs the same cases")
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("needs a jax with an interpreter of GPU kernels, 0.11 or newer")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield 2e-6


@pytest.fixture
def interpreted(capfd):
    """Runs TPU kernels on this machine, as a simulated TPU that looks for races between memories and prints them.

    On a TPU (JAX_PLATFORMS=tpu) they run as they are, and what they are compared with multiplies float32 in full.
    """
    if jax.default_backend() == "tpu":
        with jax.default_matmul_precision("highest"):
            yield
        return
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
        jax.effects_barrier()
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err
