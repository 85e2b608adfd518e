"""A peer in a process of its own: its threads disturb no other side, and it may have an interpreter of its own.

Threads of OpenMP wait in a loop after their work; in one process they would take a core from the side that comes next.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.peers import PEERS, PLATFORM, Work, child_environment
from kvjax.errors import ConfigError
from kvjax.typing import Foreign

STDERR = 2


class PeerProcess:
    """A peer of `PEERS` in a child process, with the same methods.

    Use it as a context manager: the process ends with it.
    """

    def __init__(self, name: str, folder: str | Path, python: str | None = None):
        """Starts the process.

        Args:
          name: a key of `PEERS`.
          folder: a Hugging Face folder.
          python: the interpreter, of an environment that has the peer and what kvjax needs; None = this one.

        Raises:
          ConfigError: the interpreter does not start, or the peer is not installed in it.
        """
        self.name = name
        ours, theirs = Pipe()
        environment = child_environment() | {PLATFORM: jax.default_backend()}
        # Not buffered: what was printed before a crash says why.
        command = [python or sys.executable, "-u", "-m", __name__, name, str(folder), str(theirs.fileno())]
        try:
            # What a library prints would be taken for a part of a table.
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
            )
        except OSError as error:
            raise ConfigError(f"--python={name}={python} does not start: {error}.") from None
        theirs.close()
        self.connection = ours
        try:
            self._ask("ready")
        except ConfigError:
            self.__exit__()
            raise

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] -> [B, T - 1] log-probability of each token after the first."""
        return np.asarray(self._ask("logprobs", tokens))

    def logprobs_under(self, *arguments: Any) -> np.ndarray:
        """See `experiments.peers.kvpress`."""
        return np.asarray(self._ask("logprobs_under", *arguments))

    def answers(self, *arguments: Any) -> list[list[int]]:
        """See `experiments.peers.kvpress`."""
        found: list[list[int]] = self._ask("answers", *arguments)
        return found

    def decode(self, work: Work) -> dict[str, tuple[Iterator[float], int]]:
        """Sides, with the slots that a step attends to."""
        slots: Mapping[str, int] = self._ask("decode", work)
        return {kind: (self._rounds("decode", kind), count) for kind, count in slots.items()}

    def prefill(self, prompt: np.ndarray) -> dict[str, Iterator[float]]:
        """Sides, each of which takes a prompt [B, T] in one call."""
        return {kind: self._rounds("prefill", kind) for kind in self._ask("prefill", prompt)}

    def _rounds(self, work: str, kind: str) -> Iterator[float]:
        while True:
            yield self._ask("next", work, kind)

    def _ask(self, *request: Any) -> Foreign:
        try:
            if request != ("ready",):  # the child says so without being asked
                self.connection.send(request)
            failed, answer = self.connection.recv()
        except (EOFError, OSError):
            raise ConfigError(
                f"{self.name} exited with status {self.process.wait()}; its output above says why."
            ) from None
        if failed:
            raise ConfigError(answer)
        return answer


def serve(name: str, folder: str, connection: Connection) -> None:
    """Answers a parent's requests until it closes its end."""
    # By the work too: decoding and prompts have sides of the same names.
    sides: dict[tuple[str, str], Iterator[float]] = {}
    peer: Any = None

    def answer(method: str, *arguments: Any) -> Foreign:
        nonlocal peer
        if method == "ready":
            peer = PEERS[name].load(folder)
            return None
        if method == "next":
            work, kind = arguments
            return next(sides[work, kind])
        made = getattr(peer, method)(*arguments)
        if method == "decode":
            sides.update({(method, kind): side for kind, (side, _) in made.items()})
            return {kind: slots for kind, (_, slots) in made.items()}
        if method == "prefill":
            sides.update({(method, kind): side for kind, side in made.items()})
            return list(made)
        return made

    request: tuple[Any, ...] = ("ready",)
    while True:
        try:
            connection.send((False, answer(*request)))
        except ConfigError as error:
            connection.send((True, str(error)))
        except Exception as error:  # a peer that fails is a line for the user, whatever its fault was
            connection.send((True, f"{name} failed: {type(error).__name__}: {error}"))
        try:
            request = connection.recv()
        except EOFError:
            return


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Connection(int(sys.argv[3])))
