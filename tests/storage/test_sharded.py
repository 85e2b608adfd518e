"""A storage on a mesh holds what it holds on one device, where its rows and heads are.

Eight simulated devices exist only if XLA is told before jax starts, so one subprocess (`python -m
tests.storage.sharded`) runs every storage; `tests/parallel/test_sharding.py` has whole models.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, XLA_FLAGS
from tests.storage import every

#: Storages of single slots without anything that vectors share are those of int8.
NAMES = [
    name
    for name, held in every.HELD.items()
    if held.sides or held.layout != every.storage.slots or held.shortened or name == "turboquant"
]


@pytest.fixture(scope="module")
def results(request) -> dict[str, dict]:
    """The findings of each storage that a test of this run asks for."""
    here = [item for item in request.session.items if item.path.name == "test_sharded.py"]
    asked = {item.callspec.params["name"] for item in here if "results" in item.fixturenames}
    flags = XLA_FLAGS + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.storage.sharded", *(name for name in NAMES if name in asked)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_device(results, name):
    found = results[name]
    assert found["positions_equal"] and found["codes_equal"], found
    assert found["output_error"] < 1e-5 and found["cache_error"] < 1e-5, found
    assert found["spread"] == found["expected"]
    # Each row and head is by itself; whether any row has a token, or something to encode, is one bit.
    assert all(size == 1 for size in found["collectives"].values()), found["collectives"]
