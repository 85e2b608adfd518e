"""Files that kvjax keeps for later processes in the user's cache folder. It does not trust them: any may be damaged.

A file appears whole or not at all. It is read only if this user alone can have written it, because what is kept is run.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
LOCK_SECONDS = 180.0  # after which a process goes on without the lock of one that hangs
POLL_SECONDS = 0.05  # between two tries to get a lock


class _NotPrivateError(Exception):
    """A folder in which another user can write."""


def user_cache() -> Path:
    """Returns the folder for kvjax's files, in the user's cache as the XDG base directory specification says.

    A user without a home folder has one in the folder for temporary files.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # a relative path is to be ignored
        return Path(named) / "kvjax"
    with contextlib.suppress(RuntimeError):  # there is none
        home = Path.home()
        # An empty $HOME is read as the root folder.
        if home.is_absolute() and os.environ.get("HOME", "unset"):
            return home / ".cache" / "kvjax"
    return _temporary()


def private_folder(*names: str) -> Path | None:
    """Returns a folder that this user alone can write, or None if there can be none.

    It is in `user_cache`. Where that belongs to another user, as under ``sudo``, or cannot be written, it is in the
    folder for temporary files.

    Args:
      names: of the folder and of the ones that it is in, the outermost first.
    """
    for folder in dict.fromkeys((user_cache(), _temporary())):
        try:
            for path in (folder, *(folder.joinpath(*names[: i + 1]) for i in range(len(names)))):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make_private(path)
            if os.access(path, os.W_OK | os.X_OK):
                return path
        except _NotPrivateError as error:
            warnings.warn(f"{error}: kvjax does not use this cache folder.", stacklevel=3)
        except OSError:
            pass
    return None


def read(path: Path) -> bytes | None:
    """Returns the content of a file, or None if there is none that only this user can have written."""
    try:
        # Neither a link nor a pipe, which would keep this process waiting.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(number, "rb") as file:
            about = os.fstat(number)
            if not stat.S_ISREG(about.st_mode) or not _is_mine(about) or about.st_mode & OTHERS_WRITE:
                return None
            return file.read()
    except OSError:
        return None


def write(path: Path, content: bytes) -> None:
    """Writes a file, in place of whatever has its name. Other processes see all of it or none, also after a crash.

    Raises:
      OSError: it cannot be written.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not on Windows
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def locked(path: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Lets one thread of one process at a time run the block.

    The lock of a process that has ended is free. Where a folder cannot have locks, the block runs without: what it
    writes is still whole.

    Args:
      path: the file that is locked.
      seconds: after which the block runs although another holds the lock.
    """
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + seconds
        while fcntl is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            except OSError:
                break
        yield
    finally:
        os.close(number)


def _temporary() -> Path:
    """Returns the folder of this user's files among the temporary ones; who has made it is checked when it is used."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"kvjax-{user}"


def _is_mine(about: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()


def _make_private(folder: Path) -> None:
    """Withdraws from others the right to write into a folder.

    Raises:
      _NotPrivateError: the folder is another user's.
    """
    about = folder.stat()
    if not _is_mine(about):
        raise _NotPrivateError(f"{folder} belongs to another user")
    if hasattr(os, "getuid") and about.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(about.st_mode) & ~OTHERS_WRITE)
