"""A run on a mesh equals the run on one device, and really is spread over the mesh.

Eight simulated CPU devices exist only if XLA is told before jax starts, so one subprocess (`python -m
tests.parallel.sharding_checks`) runs every check and prints a line of JSON each; the tests here read them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kvjax.errors import ConfigError
from kvjax.parallel import sharding
from tests.conftest import XLA_FLAGS
from tests.parallel.sharding_checks import CASES, MODELS, ROWS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def results(request) -> dict[str, dict]:
    """The findings of each case that a test of this run asks for."""
    here = [item for item in request.session.items if item.path.name == "test_sharding.py"]
    asked = {item.callspec.params["name"] for item in here if "results" in item.fixturenames}
    flags = XLA_FLAGS + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.sharding_checks", *(name for name in CASES if name in asked)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_a_mesh(results, name):
    """All that is to be seen of a case, in one test: a sample of cases then runs few of them."""
    result, case = results[name], CASES[name]
    assert_equals_one_device(result, case)
    assert_is_spread(result)
    assert_moves_no_cache(result, case)
    if case.rows < ROWS:
        assert_copies_are_spread(result["copies"])
    if case.refilled:
        assert result["served_equal"] and result["served"] == case.rows, result


def assert_equals_one_device(result, case):
    assert result["tokens_equal"], result
    assert result["slots_equal"], result
    coded = not case.storage.exact
    # A number halfway between two codes may be rounded to either; the next tokens then attend to another number.
    assert result["logprob_error"] < (5e-3 if coded else 1e-5), result
    # The condition of a fit multiplies the rounding of its values and weights.
    rounding = 1e-3 if case.policy == "matched" else 1e-4
    assert result["cache_error"] < rounding + 1.01 * result["code_step"], result


def assert_is_spread(result):
    assert result["state_shards"] == result["expected_state_shards"]
    assert result["parameter_shards"] == result["expected_parameter_shards"]


def assert_copies_are_spread(found):
    """Three copies on eight devices are three rows of eight, the others of which hold nothing."""
    assert found["error"] < 1e-5, found
    assert found["rows"] == [3, 3] and found["shards"][0] == 1, found
    alone, spread = found["lengths"]
    assert spread == [*alone, *[0] * 5], found


def assert_moves_no_cache(result, case):
    """Collectives of the compiled step carry hidden states and logits, never slots; the state is updated in place.

    They do not grow with the slots, by comparison with the step of a cache that has about four times as many. Where
    the query heads of a KV head are on several devices, their statistics and ranks are added up: one number per slot,
    but nothing of D features.
    """
    # Where slots are divided, fewer numbers are held than move; none of these is of a slot.
    assert case.parts > 1 or result["largest_collective"] < result["cache_shard_elements"], result["collectives"]
    assert result["aliased"] >= result["state_bytes"], result
    most = 0 if result["heads_divided"] else result["numbers_per_slot"]
    assert max(result["growing_collectives"].values(), default=0) <= most, result


def test_every_kind_of_attention_is_covered():
    """Query heads for each KV head: one, some and all."""
    groups = {config.num_heads // config.num_kv_heads for config in MODELS.values()}
    assert groups == {1, 2, 8}


class Axes(NamedTuple):
    """As much of a mesh as `spec` looks at."""

    shape: dict[str, int]


MESH = Axes({"data": 2, "model": 4})


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        (("attention", "query", "kernel"), (64, 128), (None, "model")),
        # Of one KV head of 64 features, each device has a part.
        (("attention", "key", "kernel"), (64, 64), (None, "model")),
        (("attention", "query", "bias"), (95,), (None,)),
        (("attention", "out", "kernel"), (128, 64), ("model", None)),
        (("mlp", "up", "kernel"), (64, 128), (None, "model")),
        (("mlp", "down", "kernel"), (128, 64), ("model", None)),
        (("mlp", "down", "kernel"), (5, 128, 64), (None, "model", None)),
        (("mlp", "down", "kernel", "scale"), (5, 8, 64), (None, "model", None)),
        (("mlp", "up", "kernel", "codes"), (5, 8, 4, 128), (None, None, None, "model")),
        (("mlp", "down", "bias"), (64,), (None,)),
        # A vocabulary that four devices do not divide is divided along its features.
        (("embed", "tokens"), (50257, 64), (None, "model")),
        (("embed", "tokens"), (50257, 63), (None, None)),
        (("mlp", "up", "kernel"), (5, 64, 63), (None, None, None)),
        (("embed", "tokens"), (50272, 64), ("model", None)),
        (("attention_norm", "scale"), (64,), (None,)),
    ],
)
def test_parameter_spec(path, shape, expected):
    assert tuple(sharding.parameter_spec(("layer_0", *path), shape, MESH)) == expected


@pytest.mark.parametrize("axes", ["model:x", "model:0", "rows:2", "model", "data:1,model:4096"])
def test_bad_meshes_are_refused(axes):
    with pytest.raises(ConfigError):
        sharding.make_mesh(axes)
