"""Commands where something is not there: they say so at once, say what to do, and leave nothing behind."""

import os
import subprocess
import sys
import time

import pytest

from experiments import peers
from experiments.bench import __main__ as command
from experiments.bench import contestants
from experiments.programs import bench
from kvjax.errors import ConfigError

#: Makes this process's imports fail as if packages were not installed.
BLOCKED = """
import importlib.machinery as machinery, os
find = machinery.PathFinder.find_spec
blocked = os.environ["BLOCKED"].split(",")
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.split(".")[0] in blocked else find(name, path, target)
)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a module in a process without some packages; the result, and how long it took."""

    def run_without(packages, module, *arguments):
        (tmp_path / "sitecustomize.py").write_text(BLOCKED)
        environment = os.environ | {"BLOCKED": packages, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run_without


def test_help_of_lm_eval(run):
    done = run("lm_eval", "kvjax.lm_eval", "--help")
    assert done.returncode == 0 and "pip install 'kvjax[lm-eval]'" in done.stdout and not done.stderr
    done = run("lm_eval", "kvjax.lm_eval", "--tasks", "x")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "kvjax[lm-eval]" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_the_server(run):
    done = run("starlette,uvicorn,jinja2", "kvjax.serve", "--help")
    assert done.returncode == 0 and "--port" in done.stdout


def test_experiments_without_their_extra(run):
    done = run("ml_collections,matplotlib", "experiments.run", "--help")
    message = "experiments need matplotlib, ml_collections: pip install 'kvjax[experiments]'"
    assert done.returncode == 1 and done.stderr == f"error: {message}\n"


@pytest.mark.sampled(0)
@pytest.mark.parametrize("texts", [[], ["--config.texts={folder}/absent"], ["--config.texts={folder}/short.txt"]])
def test_training_without_texts(run, texts, tmp_path):
    (tmp_path / "short.txt").write_text("Two words.")
    output = tmp_path / "results" / "run"
    texts = [each.format(folder=tmp_path) for each in texts]
    done = run("nothing", "experiments.train", "--config=train_nano", f"--config.output={output}", *texts)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert not output.exists()


#: Tasks that have one peer.
ALONE = {"memory": "transformers", "first_use": "transformers", "gguf": "llama.cpp", "answers": "kvpress"}


@pytest.mark.parametrize(
    ("task", "name"),
    [(task, name) for task in bench.AGAINST for name in peers.PEERS if ALONE.get(task, name) == name],
)
def test_peers_are_looked_for_before_anything_is_measured(task, name, monkeypatch):
    monkeypatch.setattr(peers, "_is_found", lambda module: False)
    monkeypatch.setattr(contestants, "reading", lambda: pytest.fail("something was measured"))
    with pytest.raises(ConfigError, match=rf"benchmarks against {name} need .*; install kvjax\[bench"):
        command.main(["bench", task, f"--against={name}"])


def test_peers_of_other_interpreters(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"made": peers.Peer(("opt",), lambda folder: None, ("json", "no_such_module"))})
    with pytest.raises(ConfigError, match=r"need no_such_module; install kvjax\[bench\] in the environment of"):
        peers.check_installed(["made"], {"made": sys.executable})
    with pytest.raises(ConfigError, match="does not start"):
        peers.check_installed(["made"], {"made": "/bin/false"})
    with pytest.raises(ConfigError, match=r"need no_such_module; install kvjax\[bench\], or"):
        peers.check_installed(["made"], {})
    peers.check_installed([], {})
    begun = time.monotonic()
    monkeypatch.setattr(peers, "PEERS", {"made": peers.Peer(("opt",), lambda folder: None, ("json",))})
    peers.check_installed(["made"], {"made": sys.executable})
    assert time.monotonic() - begun < 10
