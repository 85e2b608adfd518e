"""Runs of a sweep that several workers share: each is run by one of them, and its result is there for all."""

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import results
from experiments.sweeps.claims import HEARTBEAT, Claims, Life, Worker
from kvjax.errors import ConfigError

Result = dict[str, Any]
MISSING = "missing"  # the status of what has no result yet
POLL = HEARTBEAT / 2  # seconds between two looks at the claims of others


@dataclasses.dataclass(frozen=True)
class Shard:
    """Every `count`-th run, from the `number`-th on, which is at least 1."""

    number: int
    count: int

    def has(self, index: int) -> bool:
        """Whether the run of this index, from 0, is in the shard."""
        return index % self.count == self.number - 1


def parse_shard(text: str) -> Shard:
    """Parses ``2/8``, the second of eight.

    Raises:
      ConfigError: it is not of that form, or there is no such shard.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard={text} is not of the form I/N with I from 1 to N, as in --shard=2/8.")
    return Shard(int(found[1]), int(found[2]))


class Folder:
    """The results in a folder to which other workers write too.

    What was there when the object was made, and was asked to be run again, counts as missing; what has been written
    since counts, whoever has written it, and whether or not the run failed.
    """

    def __init__(self, path: Path, names: Sequence[str], *, rerun: bool) -> None:
        """Notes which results are there.

        Args:
          path: the folder.
          names: of the files.
          rerun: whether all are to be run again; else those that are damaged or failed.
        """
        self._before, self._rerun = path, rerun
        self._stamps = {name: _stamp(path / name) for name in names}
        self._own: dict[str, Result] = {}
        self.path = path  # where the next result goes

    def result(self, name: str, *, old: bool = False) -> Result | None:
        """A result that need not be computed; None if there is none. `old`: also one that was to be run again."""
        if name in self._own:
            return self._own[name]
        path = self._before / name
        stamp, found = _stamp(path), results.read_json(path)
        if not isinstance(found, dict):
            return None
        counts = old or stamp != self._stamps[name] or (not self._rerun and found.get("status") == "ok")
        return found if counts else None

    def put(self, name: str, result: Result) -> Result:
        """Writes a result, if need be to another folder.

        Returns:
          The result; if another worker, who believed this one dead, has been faster, that one's.
        """
        if (other := self.result(name)) is not None:
            return other
        self._own[name] = result
        self.path = write(self.path, name, results.to_json(result))
        return result


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """Writes a file, if need be to another folder; returns the folder."""
    try:
        results.write(folder / name, content)
        return folder
    except OSError as error:
        other = results.elsewhere(folder.name, error)
        if other is None:
            print(f"error: {name} cannot be written: {error}.", file=sys.stderr)
            return folder
        results.write(other / name, content)
        return other


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns a stamp of a file, which changes when it is written; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


class Sharing:
    """Divides runs between this worker and others."""

    def __init__(self, folder: Folder, *, shard: Shard | None, wait: bool) -> None:
        """Notes how runs are shared.

        Args:
          folder: the results.
          shard: what this worker runs; None = what it can claim.
          wait: whether to stay until others have done what they have claimed.
        """
        self.folder, self._shard, self._wait = folder, shard, wait
        self._claims = Claims(folder.path)

    def attempt(self, index: int, name: str, run: Callable[[], Result]) -> Result | None:
        """Runs what has no result and belongs to this worker.

        Args:
          index: of the run, for shards.
          name: of its file.
          run: computes the result.

        Returns:
          The result, or None if it is left to another worker.
        """
        if (found := self.folder.result(name)) is not None:
            return found
        if self._shard is not None:
            return self.folder.put(name, run()) if self._shard.has(index) else None
        claim = self._claims.take(Path(name).stem)
        if claim is None:
            return None
        with claim:
            # It may have come between the look at the folder and the claim.
            found = self.folder.result(name)
            return self.folder.put(name, run()) if found is None else found

    def leaves(self, names: Sequence[str]) -> bool:
        """Whether what has no result is all left to other workers; waits where it is not known yet whether they live.

        Args:
          names: of the files.
        """
        if self._shard is not None:
            return True
        reported: list[str] = []
        while True:
            missing = [name for name in names if self.folder.result(name) is None]
            holders = [self._claims.holder(Path(name).stem) for name in missing]
            if any(life is Life.DEAD for life, _ in holders):
                return False
            if not missing or not (self._wait or any(life is Life.UNKNOWN for life, _ in holders)):
                return bool(missing)
            reported = _report_waiting([worker for _, worker in holders], self._claims.timeout, reported)
            time.sleep(POLL)

    def by_others(self, name: str) -> Result | None:
        """The result of what was left to other workers, if it is there."""
        return self.folder.result(name, old=self._shard is not None)


def _report_waiting(holders: Sequence[Worker | None], timeout: float, reported: list[str]) -> list[str]:
    """Says, once, who is waited for; returns what was said."""
    said = [str(worker or "a worker that has not said who it is") for worker in holders]
    for each in dict.fromkeys(said):
        if each not in reported:
            print(f"waiting for {each}, or for {timeout:.0f} s without a sign of life", file=sys.stderr, flush=True)
    return [*reported, *said]
