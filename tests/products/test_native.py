"""Libraries of custom calls are built in parallel, on first use, in the background unless the process waits."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import products
from kvjax.products import choice, native

SECONDS = 10.0  # after which a compiler that waits for another one gives up


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Returns a function that sets the compiler, a shell script; no library is built or known at first."""
    native.load()  # in the folder that all tests share
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native._Process, "started", {})
    monkeypatch.setattr(native._Process, "waits", False)
    monkeypatch.setattr(choice._Process, "setting", "auto")
    monkeypatch.setattr(choice._Process, "used", {})

    def use(text: str) -> None:
        path = tmp_path / "cxx"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    yield use
    for started in native._Process.started.values():
        started.result()


FAILS = "echo 'x.cc:1: error: not today' >&2; exit 1"


def test_programs_are_traced_without_a_library_that_is_being_built(compiler, tmp_path):
    compiler(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; {FAILS}")
    x, kernel = jax.ShapeDtypeStruct((8, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    start = time.perf_counter()
    assert native.load() == native.BUILDING
    assert choice.form_for(x, kernel, False) == "dot"
    cache = jnp.ones((1, 1, 512, 16), jnp.float32)
    np.testing.assert_allclose(
        products.product(jnp.ones((1, 1, 2, 16)), cache, transposed=True, used=jnp.full((1, 1), 9)), 16.0
    )
    assert time.perf_counter() - start < SECONDS and not choice._Process.used, "nothing is timed without it"
    (tmp_path / "go").touch()
    native.await_native()
    assert native.load().endswith("cannot compile native.cc: x.cc:1: error: not today")


def test_a_process_that_measures_waits(compiler):
    compiler(f"sleep 0.3; {FAILS}")
    native.await_native()
    assert "not today" in native.load(native.SLOTS) and "not today" in native.load(native.CODED_VECTORS)


def test_two_are_built_side_by_side_and_codes_when_they_are_needed(compiler, tmp_path):
    """Each run of this compiler waits until there is another one."""
    compiler(
        f"touch {tmp_path}/run.$$; for i in $(seq 200); do set -- {tmp_path}/run.*; "
        f"[ $# -gt 1 ] && {{ echo 'error: both ran' >&2; exit 1; }}; sleep 0.05; done; echo 'error: alone' >&2; exit 1"
    )
    native.begin()
    assert {library.source for library in native._Process.started} == {"native.cc", "attend.cc"}
    native.await_native()
    assert "both ran" in native.load(native.TARGET) and "both ran" in native.load(native.ATTEND)


def test_a_failure_that_is_remembered_is_known_at_once(compiler):
    compiler(FAILS)
    native.await_native()
    native.load()
    native._Process.started.clear()
    native._Process.waits = False
    assert "remembered for a day" in native.load()
