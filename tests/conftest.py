"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# With the TPU compiler installed, jax would look for a TPU; a machine with an accelerator may name it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

# An accidental float64 or int32 -> float32 promotion is an error here.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Hundreds of tiny programs: compiling them is most of the time. Tests that read programs ask for the real thing.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)

ROOT = Path(__file__).resolve().parent.parent


def find_shared() -> Path | None:
    """The shared data folder: $KVJAX_SHARED, or `shared` in or beside the project's root."""
    named = os.environ.get("KVJAX_SHARED")
    candidates = [Path(named)] if named else [ROOT / "shared", ROOT.parent / "shared"]
    return next((path for path in candidates if (path / "data").is_dir()), None)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs hold memory maps, of which a process may have 65,530; without any the compiler crashes."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The shared data folder; a test that asks for it is skipped where there is none."""
    folder = find_shared()
    if folder is None:
        pytest.skip("no shared data folder: set KVJAX_SHARED to the folder that holds data/")
    return folder
