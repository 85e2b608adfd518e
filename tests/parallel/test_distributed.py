"""Four processes of one device each give what one process gives, and share the work of loading.

Two pairs of processes divide the rows, and the two of a pair the model. `tests.parallel.distributed_checks` runs once
in each of them; the tests here read what it found.
"""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.model import Model
from kvjax.models.parameters import random_parameters
from tests.conftest import ROOT, XLA_FLAGS
from tests.parallel import distributed_checks

COUNT, MESH = 4, "data:2,model:2"
LOADED_SHARE, CROSSED_SHARE = 1.1, 0.01  # of a process's own shards' bytes, and of the model's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint and a text."""
    folder = tmp_path_factory.mktemp("processes")
    params = jax.jit(lambda key: random_parameters(distributed_checks.CONFIG, key))(jax.random.key(0))
    kvjax.save(Model(distributed_checks.CONFIG, params), folder / "model")
    (folder / "text").write_bytes(np.random.default_rng(0).integers(0, 256, 256, dtype=np.uint8).tobytes())
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """The findings of this process."""
    return distributed_checks.everything(folder, "")[1]


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("localhost", 0))
        return each.getsockname()[1]


@pytest.fixture(scope="module")
def several(folder):
    """The number of processes, and what they find."""
    count = COUNT
    command = [sys.executable, "-m", "tests.parallel.distributed_checks", str(folder), MESH,
               f"--coordinator_address=localhost:{free_port()}", f"--num_processes={count}"]  # fmt: skip
    environment = os.environ | {"XLA_FLAGS": XLA_FLAGS, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [*command, f"--process_id={number}"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, "\n".join(each[-3000:] for each in said)
    found = json.loads((folder / f"found-{count}.json").read_text())
    with np.load(folder / f"found-{count}.npz") as arrays:
        return count, found, dict(arrays)


@pytest.mark.sampled(0)
def test_equal_to_one_process(several, alone):
    _, _, found = several
    assert found.keys() == alone.keys()
    for name, expected in alone.items():
        exact = expected.dtype.kind == "i" or name.startswith(("loaded", "restored"))
        np.testing.assert_allclose(found[name], expected, atol=0 if exact else 1e-5, rtol=0, err_msg=name)
    # The step has changed something.
    assert any(np.abs(found[name] - found[name.replace("trained", "loaded")]).max() > 1e-4 for name in found
               if name.startswith("trained"))  # fmt: skip


@pytest.mark.sampled(0)
def test_each_process_reads_its_own_shards(several):
    count, found, _ = several
    for about in found["about"]:
        assert about["own"] < 0.51 * about["model"]
        assert about["read"] < LOADED_SHARE * about["own"], about
        assert about["received"] < CROSSED_SHARE * about["model"], about
        # What crosses would be seen.
        assert about["gathered"] > about["model"] - about["own"] and about["restored"]
    assert all(about["wide"] for about in found["about"])  # numbers of 64 bits
    assert [about["silent"] for about in found["about"]] == [0] + [1] * (count - 1)


@pytest.mark.sampled(0)
def test_an_experiment_ends_with_one_folder(several, alone, folder):
    count, _, _ = several
    (one,), (other,) = ([*(folder / f"runs-{number}").iterdir()] for number in (1, count))
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    expected, found = (json.loads((each / "metrics.jsonl").read_text().split("\n")[0]) for each in (one, other))
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert json.loads((other / "environment.json").read_text())["processes"] == count


@pytest.mark.sampled(0)
def test_a_saved_folder_is_that_of_one_process(several, folder):
    count, _, _ = several
    saved, expected = folder / f"saved-{count}", folder / "model"
    assert sorted(path.name for path in saved.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in expected.iterdir():
        assert (saved / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.sampled(0)
def test_errors_are_of_all(several):
    count, found, _ = several
    *alone, of_file, without_mesh, of_another = found["errors"]
    needed = ("serving with a Runner", "kvjax.calibrate", "kvjax.analysis", "contexts.load")
    for error, what in zip(alone, needed, strict=True):
        assert error.startswith(f"{what} needs a model in one process, and this one is divided over {count} processes;")
    assert "text is a file" in of_file
    assert f"{count} processes share a model on a mesh; give a mesh of all {count} devices" in without_mesh
    assert of_another == f"reading failed in process 1 of {count}, whose message says why."
