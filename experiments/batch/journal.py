"""Results on disk: in the order of requests, each once, however often the program is killed.

A result is written to the output when all before it are; until then a file beside it, the journal, has it. Both files
are only appended to, a line at a time, so that a kill leaves at most a part of a line, which is cut off.
"""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from experiments import results
from experiments.lines import divided
from kvjax.errors import ConfigError, KvjaxError
from kvjax.typing import Json, JsonObject

SYNC_SECONDS = 1.0  # at least, between two calls that make the disk write
SUFFIX = ".journal"
FILES = "contents of files"  # in what results depend on: a digest of each, by name


class Journal:
    """The results of a run.

    Use it as a context manager: at its end everything is on the disk. Of a run that is refused before it has a result,
    the files are removed, and folders that were made for them.

    Attributes:
      written: the number of results that are in the output.
      failed: how many of them are errors.
      notes: what `note` has written, by name.
    """

    def __init__(self, output: Path, about: JsonObject):
        """Opens the files, and reads what an earlier call has written.

        Args:
          output: the file of results.
          about: what the results depend on.

        Raises:
          ConfigError: the file cannot be written, is in use, or is of other requests or another config.
        """
        self._path, self._output_path = output.with_name(output.name + SUFFIX), output
        existed = self._path.exists()
        if output.exists() and not existed:
            raise ConfigError(f"--output={str(output)!r} exists, but not from an unfinished run; give another file.")
        self._folders = results.missing(output.parent)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            self._journal = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._output = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"--output={str(output)!r} cannot be written: {error.strerror}.") from None
        self._held: dict[int, str] = {}
        self.written = self.failed = 0
        self.notes: dict[str, Any] = {}
        self._synced = time.monotonic()
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(f"--output={str(output)!r} is being written by another process.") from None
        try:
            self._recover(about)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        refused = kind is not None and issubclass(kind, KvjaxError)
        if refused and not (self.written or self._held or self.notes):
            with contextlib.suppress(OSError):
                self._output_path.unlink()
                self._path.unlink()
            results.remove_empty(self._folders)
        self.close()

    def __contains__(self, index: int) -> bool:
        """Whether the result of a request is there."""
        return index < self.written or index in self._held

    def put(self, index: int, result: JsonObject) -> None:
        """Writes the result of a request.

        Args:
          index: the number of requests before it.
          result: as JSON.
        """
        line = _line(result)
        if index != self.written:
            _append(self._journal, _line({"index": index, "result": result}))
            self._held[index] = line
            return
        self._write(line)
        while (line := self._held.pop(self.written, "")) != "":
            self._write(line)

    def note(self, name: str, value: object) -> None:
        """Writes something that the next call must know."""
        self.notes[name] = value
        _append(self._journal, _line({"note": name, "value": value}))

    def sync(self, *, often: bool = False) -> None:
        """Makes the disk write; with `often`, only if some time has passed."""
        if often and time.monotonic() < self._synced + SYNC_SECONDS:
            return
        os.fsync(self._journal)
        os.fsync(self._output)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Closes the files, which ends the lock."""
        os.close(self._output)
        os.close(self._journal)

    def shorten(self) -> None:
        """Leaves of the journal what says that the output is whole."""
        results.write(self._path, divided(self._path.read_bytes())[0] + b"\n")

    def _write(self, line: str) -> None:
        _append(self._output, line)
        self.written += 1
        self.failed += "error" in json.loads(line)

    def _recover(self, about: JsonObject) -> None:
        """Reads both files, and cuts off what is not whole."""
        for line in _whole_lines(self._output):
            self.written += 1
            self.failed += "error" in json.loads(line)
        first, *others = _whole_lines(self._journal) or [""]
        if not first:
            if self.written:
                raise ConfigError(f"{self._path} is damaged; give another --output.")
            _append(self._journal, _line(about))
            return
        if (before := json.loads(first)) != json.loads(_line(about)):
            if not (self.written or others):
                # A run that was refused before it had a result.
                os.ftruncate(self._journal, 0)
                _append(self._journal, _line(about))
                return
            names = sorted(name for name in before.keys() | about.keys() if before.get(name) != _plain(about.get(name)))
            changed = _changed(before.get(FILES), about.get(FILES)) if FILES in names else ""
            raise ConfigError(
                f"--output={str(self._output_path)!r} belongs to a run with different {', '.join(names)}{changed}; "
                "give another file, or the same settings."
            )
        for line in others:
            entry = json.loads(line)
            if "note" in entry:
                self.notes[entry["note"]] = entry["value"]
            elif entry["index"] >= self.written:
                self._held[entry["index"]] = _line(entry["result"])
        # A kill between two results that were due.
        while (line := self._held.pop(self.written, "")) != "":
            self._write(line)


def _changed(before: object, after: object) -> str:
    """The files whose contents differ, in brackets."""
    one, other = (each if isinstance(each, dict) else {} for each in (before, after))
    return f" ({', '.join(sorted({name for name, _ in one.items() ^ other.items()}))})"


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _plain(value: object) -> Json:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))


def _append(file: int, line: str) -> None:
    data = line.encode()
    while data:
        data = data[os.write(file, data) :]


def _whole_lines(file: int) -> list[str]:
    """The lines of a file that end in a newline; what follows them is cut off."""
    size = os.fstat(file).st_size
    content = b""
    while len(content) < size:
        content += os.pread(file, size - len(content), len(content))
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < size:
        os.ftruncate(file, len(whole))
    return divided(whole.decode())
