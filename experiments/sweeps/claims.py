"""Claims: which of several workers, on one machine or on many that share a folder, runs what.

A claim on NAME is the folder .claim-NAME-1, which only one worker can make. It holds one file that says who made it,
and that is written again every `HEARTBEAT` seconds. A worker that takes over the claim of a dead one makes
.claim-NAME-2, and so on: no claim of another worker is removed before its work is done, so that two that take over the
same claim cannot both have it. On the same machine a worker is dead when its process is. On another machine, whose
clock and processes are not known, it is dead when its file has stayed as it is for `TIMEOUT` seconds of one's own
clock.
"""

import contextlib
import dataclasses
import enum
import errno
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".claim-"
HEARTBEAT = 10.0  # seconds between two signs of life
TIMEOUT = 180.0  # seconds without one after which a worker on another machine is dead
DIGITS = 12  # of the number of a heartbeat, so that every one has as many bytes


class Life(enum.Enum):
    """Whether the owner of a claim lives. ``UNKNOWN``: it has not been watched for long enough."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Worker:
    """A process.

    Attributes:
      host: the name of its machine, for people.
      machine: the machine since it was started, and the process's namespace of process ids.
      pid: its process id there.
      started: when it was started; another process of the same id has another.
    """

    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_worker() -> Worker:
    """Returns this process."""
    host, boot, namespace = socket.gethostname(), "", ""
    with contextlib.suppress(OSError):  # not on Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    _, started = _status(os.getpid()) or ("", "")
    return Worker(host, f"{host} {boot} {namespace}", os.getpid(), started)


def _status(pid: int) -> tuple[str, str] | None:
    """The state of a process of this machine and when it was started, as Linux says; None where that is not known."""
    try:
        # After the name, which may contain anything: the state, and 19 entries later the time of the start.
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return after[0], after[19]
    except (OSError, IndexError):
        return None


def lives(worker: Worker) -> bool:
    """Whether a process of this machine lives."""
    if (status := _status(worker.pid)) is not None:
        return status[0] not in "ZX" and status[1] == worker.started
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # a process of another user
    return True


class Claim:
    """A claim that this process has. While it is a context, others see that it lives."""

    def __init__(self, path: Path | None, owner: Worker) -> None:
        """Writes the first heartbeat into the folder of a claim; None = the claim is not shared."""
        self._path, self._ended, self._beats = path, threading.Event(), 0
        if path is not None:
            self._file = path / uuid.uuid4().hex
            self._about = json.dumps(dataclasses.asdict(owner))
            self._beat("x")
            self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> "Claim":
        if self._path is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._path is not None:
            self._thread.join()
            self.remove()

    def remove(self) -> None:
        """Gives the claim up, and removes those that it was taken over from; nothing if it was taken over itself."""
        if self._path is None or not self._file.exists():
            return
        name, number = _parts(self._path)
        # The newest last: until then none but this process may claim the name.
        for older in range(1, number + 1):
            shutil.rmtree(_folder(self._path.parent, name, older), ignore_errors=True)

    def _live(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # a claim that was taken over, and removed; or a full disk
                self._beat("r+")

    def _beat(self, mode: str) -> None:
        self._beats += 1
        with self._file.open(mode) as file:
            file.write(f"{self._beats:0{DIGITS}d} {self._about}\n")


class Claims:
    """The claims in a folder, as this process sees them."""

    def __init__(self, folder: Path, timeout: float = TIMEOUT) -> None:
        """`timeout`: seconds, see `TIMEOUT`."""
        self._folder, self.timeout = folder, timeout
        self._worker = this_worker()
        self._seen: dict[Path, tuple[bytes | None, float, bool]] = {}  # contents, since when, whether they changed

    def take(self, name: str) -> Claim | None:
        """Claims a name.

        Returns:
          The claim, or None if another worker has it or may have it.
        """
        found = dict(self._claims(name))
        if any(self._life(path) is not Life.DEAD for path in found.values()):
            return None
        path = _folder(self._folder, name, max(found, default=0) + 1)
        try:
            path.mkdir()
            claim = Claim(path, self._worker)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOENT):
                return None
            # A folder that takes nothing any more stops no work, whose result may go elsewhere.
            shutil.rmtree(path, ignore_errors=True)
            return Claim(None, self._worker)
        # Another one may have found other claims, and made a folder of another number.
        others = {number: other for number, other in self._claims(name) if other != path}
        if any(number > _parts(path)[1] or self._life(other) is not Life.DEAD for number, other in others.items()):
            shutil.rmtree(path, ignore_errors=True)
            return None
        return claim

    def holder(self, name: str) -> tuple[Life, Worker | None]:
        """Returns the state of the claim on a name, and its worker if that is known. Without a claim it is ``DEAD``."""
        lives = [(self._life(path), path) for _, path in self._claims(name)]
        for wanted in (Life.ALIVE, Life.UNKNOWN):
            for life, path in lives:
                if life is wanted:
                    return life, _owner(_contents(path))
        return Life.DEAD, None

    def _claims(self, name: str) -> Iterator[tuple[int, Path]]:
        """The number and the folder of every claim on a name."""
        for path in self._folder.glob(f"{PREFIX}{name}-*"):
            of, number = _parts(path)
            if of == name:
                yield number, path

    def _life(self, path: Path) -> Life:
        """Whether the owner of a claim lives."""
        contents, now = _contents(path), time.monotonic()
        owner = _owner(contents)
        if owner is not None and owner.machine == self._worker.machine:
            return Life.ALIVE if lives(owner) else Life.DEAD
        # Also where there is no file yet: its owner may be about to write it, or have died before.
        before, since, changed = self._seen.get(path, (contents, now, False))
        if contents != before:
            since, changed = now, True
        self._seen[path] = contents, since, changed
        if now - since >= self.timeout:
            return Life.DEAD
        return Life.ALIVE if changed else Life.UNKNOWN


def _folder(parent: Path, name: str, number: int) -> Path:
    return parent / f"{PREFIX}{name}-{number}"


def _parts(path: Path) -> tuple[str, int]:
    """The name and the number of a claim's folder; of another folder an empty name."""
    found = re.fullmatch(re.escape(PREFIX) + r"(.*)-(\d+)", path.name)
    return (found[1], int(found[2])) if found else ("", 0)


def _contents(path: Path) -> bytes | None:
    """Returns the text that the owner of a claim has written last."""
    try:
        return next(path.iterdir()).read_bytes()
    except (OSError, StopIteration):
        return None


def _owner(contents: bytes | None) -> Worker | None:
    """Who has written that; None if it is not whole."""
    try:
        return Worker(**json.loads((contents or b"").partition(b" ")[2]))
    except (ValueError, TypeError):
        return None
