"""Which form is used where, what is kept of timings, and what is said where there is no compiler."""

import functools
import json
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import host, products
from kvjax.errors import ConfigError
from kvjax.products import build, choice, native, scenes
from kvjax.products.forms import FORMS


@pytest.fixture(autouse=True)
def own_machine(monkeypatch, tmp_path):
    """A cache folder and decisions of this test's own."""
    native.load()  # in the folder that all tests share
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice._Process, "setting", "auto")
    monkeypatch.setattr(choice._Process, "given", {})
    monkeypatch.setattr(choice._Process, "used", {})
    choice.chosen.cache_clear()
    yield
    choice.chosen.cache_clear()


@pytest.fixture
def timings(monkeypatch):
    """Timings are made up; the fixture is the list of those that were asked for."""
    asked = []

    def measure(dtype, batched, transposed, rows):
        asked.append((dtype, batched, transposed, rows))
        return {"dot": 10e9, "split": 10.4e9, "native": 10e9 + rows * 1e9}, rows != 64

    monkeypatch.setattr(choice, "_measure", measure)
    monkeypatch.setitem(FORMS, "native", FORMS["native"]._replace(refuses=lambda kernel, transposed: None))
    return asked


def form(rows, inputs=1024, outputs=1024, transposed=False, dtype=jnp.float32):
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    return choice.form_for(jax.ShapeDtypeStruct((rows, inputs), dtype), jax.ShapeDtypeStruct(shape, dtype), transposed)


def test_the_fastest_form_is_used_if_it_is_faster_by_more_than_noise():
    eight = functools.partial(choice.Entry.of, "float32 batch of [in, out], 8 rows")
    assert eight({"dot": 10.0, "split": 10.2, "native": 10.25}).form == "dot"
    assert eight({"dot": 10.0, "split": 11.0, "native": 11.3}).form == "split"
    assert eight({"dot": 10.0, "split": 11.0, "native": 11.4}).form == "native"
    one = functools.partial(choice.Entry.of, "float32 [in, out], 1 rows")
    assert one({"dot": 10.2, "split": 10.0, "native": 10.25}).form == "split", "the form without a timing"
    assert one({"dot": 10.4, "split": 10.0, "native": 10.6}).form == "dot"
    assert one({"dot": 10.0}).form == "dot"


def test_timings_are_taken_once_and_kept(timings):
    assert [form(rows) for rows in (5, 8, 7)] == ["native"] * 3
    assert form(9, 1024, 2048, transposed=True) == "native" and form(1, dtype=jnp.bfloat16) == "native"
    keys = jax.ShapeDtypeStruct((8, 12, 512, 64), jnp.float32)
    assert choice.form_for(jax.ShapeDtypeStruct((8, 12, 2, 64), jnp.float32), keys, True) == "native"
    assert timings == [
        ("float32", False, False, 8), ("float32", False, True, 16), ("bfloat16", False, False, 1),
        ("float32", True, True, 2),
    ]  # fmt: skip
    choice.chosen.cache_clear()  # as another process
    assert form(8) == "native" and len(timings) == 4
    (path,) = (host.user_cache() / "products").iterdir()
    assert json.loads(path.read_text())["float32 [in, out], 8 rows"]["native"] == 18e9
    assert "float32 batch of [out, in], 2 rows: native (dot 10.0, split 10.4, native 12.0 GB/s)" in products.explain()
    assert "float32 [out, in], 16 rows: native (dot 10.0, split 10.4, native 26.0 GB/s)" in products.explain()
    path.write_text("{")  # cut off
    choice.chosen.cache_clear()
    assert form(8) == "native" and len(timings) == 5


def test_disturbed_timings_are_not_kept(timings):
    assert form(64) == "native" == form(60) and len(timings) == 1
    choice.chosen.cache_clear()  # as another process
    assert form(64) == "native" and len(timings) == 2


def test_another_process_may_choose_as_this_one_did(timings):
    assert form(64) == "native"
    used = products.timings()
    assert used == {"float32 [in, out], 64 rows": {"dot": 10e9, "split": 10.4e9, "native": 74e9}}
    products.use_timings({"float32 [in, out], 64 rows": {"dot": 10e9, "split": 30e9, "native": 10e9}})
    assert form(64) == "split" and len(timings) == 1
    # What it has not is timed.
    assert form(8) == "native" and len(timings) == 2 and set(products.timings()) == {*used, "float32 [in, out], 8 rows"}


def test_a_form_that_is_gone_is_not_used(timings, monkeypatch):
    assert form(8) == "native"
    monkeypatch.setitem(FORMS, "native", FORMS["native"]._replace(refuses=lambda kernel, transposed: "no compiler"))
    assert form(8) == "dot"


def test_where_the_form_is_fixed(timings):
    many, small = choice.MAX_ROWS + 1, {"inputs": 256, "outputs": 256}
    assert [form(many), form(8, **small), form(1, inputs=400, outputs=8)] == ["dot", "dot", "split"]
    assert form(8) == "native" and form(8, transposed=True) == "dot", "a table is larger"
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert form(8) == "native"
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert form(8) == "dot" and form(1) == "split"
    products.use("fixed")
    assert form(8) == "dot" and form(1) == "split" and form(1, transposed=True) == "dot"
    products.use("native")
    assert form(8) == form(2, **small) == "native" and form(many) == "dot"
    products.use("split")
    assert form(8) == "split" and form(8, transposed=True) == "dot"


def test_it_is_measured_while_a_program_is_traced(monkeypatch):
    for name, value in {"LAYERS": 1, "WIDTH": 512, "INNER": 512}.items():
        monkeypatch.setattr(scenes, name, value)
    monkeypatch.setattr(choice, "MIN_OF_MANY", 1 << 18)
    monkeypatch.setitem(FORMS, "native", FORMS["native"]._replace(refuses=lambda kernel, transposed: "not built here"))
    x, kernel = jnp.ones((2, 512)), jnp.ones((512, 512))
    program = jax.jit(products.product).lower(x, kernel)
    np.testing.assert_allclose(program.compile()(x, kernel), 512.0)
    entry = choice.chosen("float32", False, False, 2)
    assert set(entry.speeds) == {"dot", "split"} and min(entry.speeds.values()) > 0
    assert program.as_text().count("dot_general") < 4, "no timed program is in the trace"


@pytest.mark.parametrize("kind", [(False, False), (False, True), (True, False), (True, True)])
def test_forms_are_timed_in_programs_that_use_them(kind, monkeypatch):
    small = {"WIDTH": 8, "INNER": 16, "ROWS_OF_TABLE": 24, "HEADS": (3, 8, 4), "LAYERS": 2, "TABLES": 2, "CACHES": 2}
    for name, value in small.items():
        monkeypatch.setattr(scenes, name, value)
    x, kernels, program = scenes.scene("float32", *kind, 2)
    asked = []

    def run(x, kernel, transposed, dtype):
        asked.append(transposed)
        return FORMS["dot"].run(x, kernel, transposed, dtype)

    y = program(run, x, kernels)
    assert y.shape == x.shape and y.dtype == x.dtype and np.isfinite(y).all()
    # In attention the form under test multiplies only the keys or only the values; XLA multiplies the others.
    assert asked == [kind[1]] * (len(kernels) // 2 if kind[0] else len(kernels))


def test_others_work_is_noticed():
    busy = "import time; print(flush=True); end = time.time() + 5\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        other.stdout.readline()  # it has begun
        with host.measure_load() as others:
            time.sleep(0.3)
        other.kill()
    assert sys.platform != "linux" or others.share > 0.3 / host.cores()


def test_settings_are_checked(monkeypatch):
    with pytest.raises(ConfigError, match=r"unknown form of products 'fast'; give one of auto, fixed, dot, split, nat"):
        products.use("fast")
    monkeypatch.setattr(choice._Process, "setting", None)
    monkeypatch.setenv(choice.VARIABLE, "slow")
    with pytest.raises(ConfigError, match="'slow'"):
        choice.setting()


def load():
    """Returns the result of `native.load` in a process that has not called it, and where it fails."""
    return native.register(native.LIBRARIES[0], native.FLAGS)


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert load() == "there is no C++ compiler: none of c++, g++, clang++ is on the PATH, and $CXX is not set"
    monkeypatch.setattr(native, "load", lambda *target: load())
    with pytest.raises(ConfigError, match=r"the native form of products is not available: there is no C\+\+ compiler"):
        products.use("native")


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho native.cc:1: error: not today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert load().endswith("cannot compile native.cc: native.cc:1: error: not today")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert "native.cc was not built" in load()


def test_it_is_available_where_there_is_a_compiler():
    """Otherwise all tests of the native form would be skipped on a machine that could run them."""
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("there is no C++ compiler")
    reasons = [native.load(target) for library in native.LIBRARIES for target, _ in library.symbols]
    assert reasons and not any(reasons)
