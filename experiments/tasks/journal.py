"""Answers as they come: a file of lines that a run which was ended at any point goes on from."""

import hashlib
import json
import threading
import warnings
from pathlib import Path

from experiments.lines import numbered
from experiments.tasks.base import Answer

FOLDER = ".answers"  # under a config's output folder
DIGITS = 16  # hex digits of a key


class Journal:
    """Answers by what they depend on and by the number of their question.

    A line is written whole by one call, so that several processes may share a file; a last line that a process did not
    finish is left out. What a line is about is part of its key: other code, files or settings have other keys.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads a file.

        Args:
          path: a file, which need not be there; None = answers are kept in this process alone.
        """
        self.path = path
        self._lock = threading.Lock()  # caches may be measured side by side
        self._known: dict[str, dict[int, Answer]] = {}
        if path is None or not path.is_file():
            return
        for _, line in numbered(path.read_bytes().decode(errors="replace")):
            try:
                entry = json.loads(line)
                self._known.setdefault(entry["key"], {})[entry["number"]] = entry["answer"]
            except (ValueError, KeyError, TypeError):
                continue

    def known(self, key: str) -> dict[int, Answer]:
        """The answers of a key, by the number of their question."""
        return self._known.setdefault(key, {})

    def add(self, key: str, number: int, answer: Answer) -> None:
        """Keeps an answer: in this process alone, and with a warning, if the file cannot be written."""
        # As it is read again.
        text = json.dumps({"key": key, "number": number, "answer": answer})
        self.known(key)[number] = json.loads(text)["answer"]
        if self.path is None:
            return
        with self._lock:
            if self.path is None:
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab") as file:
                    # After a line that was not finished.
                    file.write(b"" if self._ends_a_line() else b"\n")
                    file.write(text.encode() + b"\n")
            except OSError as error:
                warnings.warn(
                    f"answers are not saved, since {self.path} cannot be written: {error.strerror}.",
                    stacklevel=2,
                )
                self.path = None

    def remove(self) -> None:
        """Removes the file, when its answers are part of results."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _ends_a_line(self) -> bool:
        assert self.path is not None
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            return file.read(1) in (b"", b"\n")


def key_of(*parts: str) -> str:
    """A key of what answers depend on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGITS]
