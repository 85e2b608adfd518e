"""Writes results to disk whole or not at all: under a temporary name in the same folder, then renamed."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.sweeps import claims
from kvjax import host
from kvjax.errors import ConfigError

OWNER = ".owner"  # of an unfinished folder: the process that writes it
UNFINISHED = ".unfinished-"  # begins the names of folders and files that are not whole yet
PROBE = 1 << 18  # bytes that a folder must take before any work begins


@contextlib.contextmanager
def folder(parent: str | Path, name: str) -> Iterator[tuple[Path, Path]]:
    """A folder that appears under `parent` only when the block ends without an error.

    It is claimed before the block begins: of several processes that ask for one name, each has a folder of its own.

    Yields:
      Where to write (hidden, and named as unfinished), and where it will be. A name that is taken gets a number.

    Raises:
      ConfigError: `parent` cannot be written.
    """
    parent = Path(parent)
    make_folder(parent)
    _remove_abandoned(parent)
    unfinished, target = _claim(parent, name)
    owner = unfinished / OWNER
    try:
        with contextlib.suppress(OSError):  # it only says whose folder this is
            owner.write_text(json.dumps(dataclasses.asdict(claims.this_worker())))
        yield unfinished, target
        owner.unlink(missing_ok=True)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove_abandoned(parent: Path) -> None:
    """Removes unfinished folders of processes of this machine that were killed."""
    here = claims.this_worker()
    for owner in parent.glob(f"{UNFINISHED}*/{OWNER}"):
        about = read_json(owner)
        if isinstance(about, dict) and about.get("machine") == here.machine:
            with contextlib.suppress(TypeError):  # of another version
                if not claims.lives(claims.Worker(**about)):
                    shutil.rmtree(owner.parent, ignore_errors=True)


def _claim(parent: Path, name: str) -> tuple[Path, Path]:
    """Makes the unfinished folder that nobody else has, and returns it and the folder that it will be."""
    for number in itertools.count(1):
        target = parent / (name if number == 1 else f"{name}-{number}")
        unfinished = parent / f"{UNFINISHED}{target.name}"
        try:
            unfinished.mkdir()
        except FileExistsError:
            continue
        # Only who has made the unfinished folder makes this target: it cannot appear from here on.
        if not target.exists():
            return unfinished, target
        unfinished.rmdir()
    raise AssertionError


def elsewhere(name: str, error: OSError) -> Path | None:
    """Where results go that their own folder does not take, for example because a disk is full.

    Args:
      name: of the folder that is made.
      error: what went wrong, which is said with the new place.

    Returns:
      An empty folder under the user's cache folder or the system's temporary one; None if neither can be written.
    """
    for parent in (host.user_cache() / "results", Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, ConfigError):
            make_folder(parent)
            unfinished, target = _claim(parent, name)
            unfinished.rename(target)
            print(f"error: results cannot be written: {error}. They go to {target}/ instead.", file=sys.stderr)
            return target
    return None


def missing(folder: Path) -> list[Path]:
    """Returns the folders that would be made for a folder, the innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, the innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for each in folders:
            each.rmdir()


def make_folder(path: Path, flag: str = "output") -> None:
    """Makes sure, before the work begins, of a folder that is written, which a flag or field names.

    Raises:
      ConfigError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(bytes(PROBE))
    except OSError as error:
        raise ConfigError(f"{flag}={str(path)!r} cannot be written: {error.strerror}.") from None


def make_file(path: str | Path, flag: str = "output") -> Path:
    """Makes sure, before the work begins, of the folder of a file that is written.

    Raises:
      ConfigError: it cannot be made or written, or the file is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"--{flag}={str(path)!r} is a folder; give a file.")
    make_folder(path.parent, flag)
    return path


def write(path: Path, content: str | bytes) -> None:
    """Writes a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix=f"{UNFINISHED}{path.name}-", dir=path.parent)
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


def to_json(value: object) -> str:
    """Readable JSON that ends in a newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is none or it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
