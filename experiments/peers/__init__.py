"""What kvjax is measured against, each at its best setting: all cores, inference mode, nothing recomputed.

A peer is imported when it is first asked for; each names what to install.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


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


PEERS: dict[str, Peer] = {
    "transformers": Peer(("opt", "llama"), _transformers),
    "kvpress": Peer(("llama",), _kvpress),
    "llama.cpp": Peer(("llama",), _llama_cpp),
}


def versions() -> dict[str, str | None]:
    """The versions of the packages that the peers need; None = not installed."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in ("torch", "transformers", "kvpress", "llama_cpp_python")}
