"""Renders untrusted chat templates, with limits on time, memory and output that hold whatever a template does.

A template is a program: it can loop without end, double a string forty times, or compute ``9**(9**9)``, which is one
instruction that nothing inside Python interrupts. It therefore runs in a process that can be ended. Such a process
(`kvjax.checkpoint.template_worker`) imports Jinja alone, is started when the first template is rendered and kept for
the next ones, and a render takes some tenths of a millisecond more than in this process. It is a new program and not a
fork, which JAX's threads do not survive, and ends when this process does, even if this process is killed. Its limits
are timers and limits of the operating system, which Windows does not have.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from kvjax.checkpoint import template_worker
from kvjax.errors import ConfigError, InputError
from kvjax.typing import Json

PROCESSOR_SECONDS = 1.0  # of one template; ordinary ones take a thousandth
SECONDS = 10.0  # of one template, by the clock
MEMORY = 512 << 20  # bytes of address space of a process
CHARACTERS = 16 << 20  # of the text that a template makes
WORKERS = 2  # processes, each of which renders one template at a time
JINJA = (3, 1, 6)  # older releases have known ways out of Jinja's sandbox
MAX_REASON = 200  # characters of what JSON says is wrong


class ChatTemplateError(InputError):
    """A conversation that a chat template refuses, or a template that is not valid or exceeds a limit."""


class Sandbox:
    """Processes that render templates. Every method may be called from several threads."""

    def __init__(
        self,
        *,
        workers: int = WORKERS,
        processor_seconds: float = PROCESSOR_SECONDS,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        characters: int = CHARACTERS,
    ):
        """Sets the limits; processes are started when they are needed.

        Args:
          workers: the number of processes; more renders than that wait for each other.
          processor_seconds: processor time of one render.
          seconds: wall time of one render.
          memory: bytes of address space of a process.
          characters: of the text that a template makes.
        """
        self._limits, self._workers = (processor_seconds, seconds, memory, characters), workers
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def render(self, source: str, variables: Mapping[str, Json]) -> str:
        """Renders a template.

        Args:
          source: the template.
          variables: what it is given: data that JSON can hold.

        Raises:
          ChatTemplateError: the template raises an error, is not valid, or exceeds a limit.
          InputError: the variables are not what JSON can hold.
          ConfigError: Jinja is not installed, or too old.
        """
        _check_jinja()
        try:
            request = json.dumps({"source": source, "variables": variables}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"the messages and arguments of a conversation must be JSON values: {str(error)[:MAX_REASON]}."
            ) from None
        with self._one() as worker:
            kind, answer = worker.ask(request)
            # One that has ended, or is about to, is not kept.
            code = None if kind in (template_worker.TEXT, template_worker.ERROR) else worker.end()
        if kind == template_worker.TEXT:
            return answer.decode("utf-8", "surrogatepass")
        if kind:
            raise ChatTemplateError(f"the chat template refuses the conversation: {answer.decode()}.")
        raise ChatTemplateError(f"the chat template was not rendered: {self._ended_by(code)}.")

    def stop(self) -> None:
        """Ends the processes; renders that are running end with an error, and later ones start new processes."""
        with self._lock:
            idle, self._idle = self._idle, []
            for worker in self._all:
                worker.process.kill()
        for worker in idle:
            worker.end()

    @contextlib.contextmanager
    def _one(self) -> Iterator["_Worker"]:
        """Yields a process that no other thread has. It is kept unless it has ended, or its render was interrupted."""
        with self._free:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is not None and worker.process.poll() is not None:
                worker.close()
                worker = None
            worker = worker or self._started()
            try:
                yield worker
            except BaseException:
                worker.end()
                raise
            finally:
                with self._lock:
                    if worker.process.returncode is None:
                        self._idle.append(worker)
                    else:
                        self._all.discard(worker)

    def _started(self) -> "_Worker":
        worker = _Worker(self._limits)
        with self._lock:
            self._all = {worker, *(each for each in self._all if each.process.poll() is None)}
        return worker

    def _ended_by(self, code: int | None) -> str:
        """Says why a process has ended, by its exit code."""
        processor_seconds, seconds, memory, _ = self._limits
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {processor_seconds:g} s of processor time"
        if code == -getattr(signal, "SIGALRM", 0):
            return f"it takes more than {seconds:g} s"
        return f"its process, which has {memory >> 20} MiB of memory, ended with code {code}"

    def _forget(self) -> None:
        self._lock, self._free = threading.Lock(), threading.BoundedSemaphore(self._workers)
        self._idle, self._all = [], set()

    def _forked(self) -> None:
        """Leaves the processes to the parent, which alone may read their answers and whose end they wait for."""
        for worker in self._all:
            worker.process.returncode = 0  # it is no child of this process
            worker.close()
        self._forget()


class _Worker:
    """A process, and the pipes to and from it.

    Attributes:
      process: the process.
    """

    def __init__(self, limits: tuple[float, float, int, int]):
        command = [sys.executable or "python3", "-P", template_worker.__file__, *map(str, limits)]
        # Jinja is found where this process finds it.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
        try:
            # Without buffers, which a fork of this process would have too.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                env=environment, cwd=Path(template_worker.__file__).parent,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"no process for chat templates could be started: {error.strerror}.") from None

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Sends a request.

        Returns:
          The kind of the answer and the answer; two empty strings if the process has ended.
        """
        assert self.process.stdin is not None
        left = memoryview(len(request).to_bytes(template_worker.LENGTH_BYTES, "little") + request)
        try:
            while left:
                left = left[self.process.stdin.write(left) :]
        except BrokenPipeError:
            return b"", b""
        header = self._read(1 + template_worker.LENGTH_BYTES)
        size = int.from_bytes(header[1:], "little")
        answer = self._read(size)
        complete = len(header) == 1 + template_worker.LENGTH_BYTES and len(answer) == size
        return (header[:1], answer) if complete else (b"", b"")

    def end(self) -> int:
        """Ends the process and returns its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.close()
        return code

    def close(self) -> None:
        """Closes the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, size: int) -> bytes:
        """Reads `size` bytes, or fewer if the process has ended."""
        assert self.process.stdout is not None
        found = bytearray()
        while len(found) < size and (part := self.process.stdout.read(min(size - len(found), 1 << 20))):
            found += part
        return bytes(found)


@functools.cache
def _check_jinja() -> None:
    try:
        found = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        raise ConfigError("chat templates need Jinja: pip install 'kvjax[chat]'.") from None
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < JINJA:
        minimum = ".".join(map(str, JINJA))
        raise ConfigError(f"chat templates need Jinja {minimum} or newer, not {found}: pip install -U jinja2.")


SHARED = Sandbox()
