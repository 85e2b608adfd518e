"""Where kernels for GPUs run in tests: interpreted on this machine, or on a GPU."""

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["interpreted", ON_GPU])
def machine(request):
    """Runs kernels on a GPU, or on this machine as a simulated one that raises at a race; the float32 error allowed."""
    gpu = jax.default_backend() == "gpu"
    if request.param == "gpu":
        if not gpu or jax.local_devices()[0].compute_capability != "9.0":
            pytest.skip("needs a Hopper GPU, and JAX_PLATFORMS=cuda")
        yield 1e-5  # its exponential is approximate
        return
    if gpu:
        pytest.skip("the GPU runs the same cases")
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("needs a jax with an interpreter of GPU kernels, 0.11 or newer")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield 2e-6
