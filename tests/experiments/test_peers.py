"""Peers in processes of their own: what crosses, and what is said when one fails. The peer is made up."""

import sys
import textwrap

import numpy as np
import pytest

from experiments import peers
from experiments.peers import Work
from experiments.peers.process import PeerProcess
from kvjax.errors import ConfigError

PEER = """
    import itertools, os
    import experiments.peers as peers
    from kvjax.errors import ConfigError

    class Made:
        def __init__(self, folder):
            if folder == "missing":
                raise ConfigError("install it")
            self.folder = folder
            print("what a library prints")

        def logprobs(self, tokens):
            return -tokens[:, 1:].astype("float64")

        def decode(self, work):
            count = itertools.count(1)
            return {kind: ((float(n) for n in count), work.slots + i) for i, kind in enumerate(("one", "two"))}

        def prefill(self, prompt):
            if prompt.shape[1] == 2:
                os._exit(3)
            if prompt.shape[1] == 1:
                return {"one": itertools.count(100.0)}
            raise ValueError("too long")

    peers.PEERS["made"] = peers.Peer(("llama",), Made)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts the peer `made`, which the child's interpreter finds through sitecustomize."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(PEER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(peers.PEERS, "made", peers.Peer(("llama",), lambda folder: pytest.fail("loaded here")))
    return lambda folder="model": PeerProcess("made", folder, sys.executable)


def test_answers_cross_and_failures_are_named(started, capfd):
    work = Work(np.zeros((2, 3), int), 4, 5, ("h2o",), False)
    with started() as peer:
        np.testing.assert_array_equal(peer.logprobs(np.array([[7, 8, 9]])), [[-8.0, -9.0]])
        sides = peer.decode(work)
        assert {kind: slots for kind, (_, slots) in sides.items()} == {"one": 5, "two": 6}
        assert [next(sides["one"][0]), next(sides["two"][0]), next(sides["one"][0])] == [1.0, 2.0, 3.0]
        with pytest.raises(ConfigError, match="made failed: ValueError: too long"):
            peer.prefill(np.zeros((1, 3), int))
        assert next(sides["two"][0]) == 4.0, "it goes on after a failure"
        prompts = peer.prefill(np.zeros((1, 1), int))
        assert [next(prompts["one"]), next(sides["one"][0])] == [100.0, 5.0], "sides of one name, but of other work"
        with pytest.raises(ConfigError, match="made exited with status 3"):
            peer.prefill(np.zeros((1, 2), int))
    assert peer.process.returncode == 3
    captured = capfd.readouterr()
    assert "what a library prints" in captured.err and not captured.out
    with pytest.raises(ConfigError, match="install it"):
        started("missing")


def test_an_interpreter_that_does_not_start(tmp_path):
    with pytest.raises(ConfigError, match=r"--python=made=.* does not start"):
        PeerProcess("made", "model", str(tmp_path / "python"))


def test_versions_of_another_interpreter(monkeypatch, tmp_path):
    found = peers.versions({"vllm": sys.executable})
    assert found == peers.versions(), "the same packages are named once"
    with pytest.raises(ConfigError, match=r"--python=vllm=.* cannot import experiments.peers"):
        peers.versions({"vllm": str(tmp_path / "python")})
