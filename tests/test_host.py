"""Compiled programs are kept for later processes, unless the user or the environment says otherwise."""

import os
import subprocess
import sys

import jax
import pytest

from kvjax import host
from kvjax.errors import ConfigError
from tests.conftest import ROOT

#: A process that has compiled something before it loads a model, as a notebook may.
PROGRAM = """
import jax, kvjax, sys
jax.jit(lambda x: x + 1)(1.0)
{before}
kvjax.load("kvjax-tiny")
jax.jit(lambda x: x * 3)(1.0)
"""


def kept(tmp_path, before="", **environment):
    """Returns the programs that a process keeps in its user's cache, and in the folder `other`."""
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], cwd=ROOT, check=True,
        env=inherited | {"XDG_CACHE_HOME": str(tmp_path)} | environment,
    )  # fmt: skip
    return [[path.name for path in (tmp_path / name).rglob("jit_*-cache")] for name in ("kvjax/xla", "other")]


def test_a_process_that_loads_a_model_keeps_its_programs(tmp_path):
    (mine, other) = kept(tmp_path)
    assert any("lambda" in name for name in mine) and not other


@pytest.mark.sampled(0)
@pytest.mark.parametrize("way", ["variable", "call", "jax's variable", "folder"])
def test_the_user_decides(way, tmp_path):
    other = str(tmp_path / "other")
    given = {
        "variable": {"KVJAX_COMPILATION_CACHE": "off"},
        "call": {"before": "kvjax.keep_programs(False)"},
        "jax's variable": {"JAX_COMPILATION_CACHE_DIR": other, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        "folder": {"before": f"kvjax.keep_programs({other!r})"},
    }[way]
    mine, named = kept(tmp_path, **given)
    assert not mine and bool(named) == (way in ("jax's variable", "folder"))


def test_a_variable_of_another_value(monkeypatch):
    monkeypatch.setenv(host.VARIABLE, "/tmp")
    with pytest.raises(ConfigError, match=r"KVJAX_COMPILATION_CACHE='/tmp' must be on or off; kvjax.keep_programs and"):
        host.keep_programs_by_default()


def test_a_folder_that_cannot_be_written(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").touch()
    assert not host.keep_programs(tmp_path / "file" / "within")
    assert jax.config.jax_compilation_cache_dir == before
