"""Writes results to disk whole or not at all: under a temporary name in the same folder, then renamed."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import ConfigError


@contextlib.contextmanager
def folder(parent: str | Path, name: str) -> Iterator[tuple[Path, Path]]:
    """A folder that appears under `parent` only when the block ends without an error.

    Yields:
      Where to write (hidden, and named as unfinished), and where it will be. A name that is taken gets a number.

    Raises:
      ConfigError: `parent` cannot be written.
    """
    try:
        parent = Path(parent)
        parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".unfinished-{name}-", dir=parent))
    except OSError as error:
        raise ConfigError(f"output={str(parent)!r} cannot be written: {error.strerror}.") from None
    try:
        unfinished.chmod(0o755)
        target, number = parent / name, 2
        while target.exists():
            target, number = parent / f"{name}-{number}", number + 1
        yield unfinished, target
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def make_folder(path: Path) -> None:
    """Makes sure, before the work begins, of a folder that is written bit by bit.

    Raises:
      ConfigError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"output={str(path)!r} cannot be written: {error.strerror}.") from None


def write(path: Path, content: str | bytes) -> None:
    """Writes a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix=f".unfinished-{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def to_json(value: Any) -> str:
    """Readable JSON that ends in a newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is none or it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
