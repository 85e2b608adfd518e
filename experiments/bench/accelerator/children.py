"""Child processes that end when their time is up, and when their parent does.

This file is run as a script too, between parent and child; it imports nothing beyond the standard library.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux's prctl, which outlives exec
POLL_SECONDS = 0.05  # between two looks at children
GRACE = 3  # seconds from a polite signal to one that cannot be ignored: an accelerator is given back


def run(command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str], folder: Path) -> int | None:
    """Runs a command in a process group of its own, and waits for it.

    Args:
      command: the program and its arguments.
      seconds: after which the whole group is ended.
      log: a file that gets what the command writes.
      environment: all of the child's variables.
      folder: the child's working directory.

    Returns:
      Its exit status, negative for a signal; None if its time was up.
    """
    ((status, _),) = run_all([(command, log)], seconds, environment, folder)
    return status


def run_all(
    commands: Sequence[tuple[Sequence[str], Path]], seconds: float, environment: Mapping[str, str], folder: Path
) -> list[tuple[int | None, float]]:
    """Runs several commands with their logs at the same time; see `run`.

    Returns:
      The exit status and the seconds of each.
    """
    began = time.monotonic()
    children: list[subprocess.Popen[bytes]] = []
    ended: dict[int, tuple[int | None, float]] = {}
    try:
        for command, log in commands:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as output:
                children.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(os.getpid()), *command],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        cwd=folder,
                        env=dict(environment),
                        start_new_session=True,
                    )
                )
        while len(ended) < len(children) and time.monotonic() - began < seconds:
            time.sleep(POLL_SECONDS)
            for number, child in enumerate(children):
                if number not in ended and child.poll() is not None:
                    ended[number] = child.returncode, time.monotonic() - began
                    _end(child)  # what it left in its group
    finally:
        for number, child in enumerate(children):
            if number not in ended:
                _end(child)
    return [ended.get(number, (None, time.monotonic() - began)) for number in range(len(children))]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child, and whatever it has left behind in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)


def _become(parent: int, command: list[str]) -> None:
    """Becomes the command, which the kernel kills when the parent ends, however it ends (on Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has exited")
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
