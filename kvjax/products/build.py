"""Builds a C++ library once for all processes of this user, and loads it only if it is whole.

One lock for threads and processes: of two that need the same library, one builds it and the other waits.

A library that was cut short kills the process that loads it, so that no error can be caught. The name of a built one
therefore has the digest and the size of its content, which are compared before it is loaded; whatever is odd is built
again. A build that fails is remembered for a day, because every process would try it again.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax

from kvjax import host, kept_files

COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # after which a compiler is given up
DAY = 24 * 3600.0  # seconds for which a failure is remembered
MAX_REASON = 500  # characters of what a compiler says


class BuildError(Exception):
    """A library that cannot be built or loaded."""


class Recipe(NamedTuple):
    """The files and options from which a library is built.

    Attributes:
      sources: C++ files.
      headers: what they include, in addition to what jaxlib brings.
      flags: of the compiler.
    """

    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]

    @property
    def names(self) -> str:
        """The names of the sources, for messages."""
        return ", ".join(source.name for source in self.sources)


def kept(recipe: Recipe) -> ctypes.CDLL | None:
    """Returns a library that was built before, or None.

    Args:
      recipe: of the library.

    Raises:
      BuildError: there is no compiler, or it failed during the last day.
    """
    compiler = _compiler()
    folder, key = _place(recipe, compiler)
    found = _load(folder, key)
    if found is None and (reason := _remembered(folder / f"{key}.failed")) is not None:
        raise BuildError(f"{reason} (remembered for a day in {folder / f'{key}.failed'}; delete it to try again)")
    return found


def library(recipe: Recipe) -> ctypes.CDLL:
    """Returns a library, which is built unless it is kept.

    Args:
      recipe: of the library.

    Raises:
      BuildError: there is no compiler, or it fails, or the library cannot be loaded.
    """
    if (found := kept(recipe)) is not None:
        return found
    compiler = _compiler()
    folder, key = _place(recipe, compiler)
    with kept_files.locked(folder / f"{key}.lock", seconds=1.5 * SECONDS):
        # Another thread or process may have built it meanwhile.
        if (found := kept(recipe)) is not None:
            return found
        failure = folder / f"{key}.failed"
        command = [*compiler.split(), *recipe.flags, f"-I{jax.ffi.include_dir()}", *map(str, recipe.sources)]
        try:
            content = _compiled(command, folder)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
            first = next((line for line in lines if "error" in line), lines[-1])
            reason = f"{compiler} cannot compile {recipe.names}: {first}"[:MAX_REASON]
            _remember(failure, reason)
            raise BuildError(reason) from None
        except subprocess.TimeoutExpired:
            reason = f"{recipe.names} was not built: {compiler} takes more than {SECONDS} s"
            _remember(failure, reason)
            raise BuildError(reason) from None
        except OSError as error:
            raise BuildError(f"{recipe.names} was not built: {error}") from None
        for odd in folder.glob(f"{key}-*"):
            if odd.is_file() or odd.is_symlink():
                odd.unlink(missing_ok=True)
        path = folder / f"{key}-{_digest(content)}-{len(content)}.so"
        try:
            kept_files.write(path, content)
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{recipe.names} was built, but cannot be loaded: {error}") from None


def _compiler() -> str:
    """Returns the command of the compiler.

    Raises:
      BuildError: there is none.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(
            f"there is no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH, and $CXX is not set"
        )
    return compiler


def _place(recipe: Recipe, compiler: str) -> tuple[Path, str]:
    """Returns the folder where a library is kept, and the beginning of its name there."""
    texts = [path.read_text() for path in (*recipe.sources, *recipe.headers)]
    about = (*texts, " ".join(recipe.flags), compiler, *_identity(compiler), host.processor(),
             importlib.metadata.version("jaxlib"))  # fmt: skip
    folder = kept_files.private_folder("native") or Path(_unkept().name)
    return folder, hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


def _identity(compiler: str) -> tuple[str, ...]:
    """Returns an identifier of a compiler, which another one of the same name does not have."""
    found = shutil.which(compiler.split()[0]) if compiler.split() else None
    if found is None:
        return ()
    about = Path(found).stat()
    return (os.path.realpath(found), str(about.st_size), str(about.st_mtime_ns))


def _load(folder: Path, key: str) -> ctypes.CDLL | None:
    """Loads a library that is kept and whole, or returns None."""
    for path in folder.glob(f"{key}-*.so"):
        content = kept_files.read(path)
        if content and path.name == f"{key}-{_digest(content)}-{len(content)}.so":
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # for example of a system that was changed since
                continue
    return None


def _compiled(command: list[str], folder: Path) -> bytes:
    """Returns the library that a command compiles.

    Raises:
      CalledProcessError: the compiler fails.
      TimeoutExpired: it takes too long.
      OSError: it cannot be run, or its output not be written.
    """
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        output = Path(unfinished) / "library.so"
        # Its messages in English, of which a line is looked for.
        subprocess.run([*command, "-o", str(output)], check=True, capture_output=True, text=True, errors="replace",
                       timeout=SECONDS, env=os.environ | {"LC_ALL": "C"})  # fmt: skip
        return output.read_bytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _remembered(path: Path) -> str | None:
    """Returns the reason of a failure of the last day, or None."""
    try:
        found = json.loads(kept_files.read(path) or b"")
        reason, at = found["reason"], float(found["time"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    recent = math.isfinite(at) and 0 <= time.time() - at < DAY
    return reason if recent and isinstance(reason, str) else None


def _remember(path: Path, reason: str) -> None:
    with contextlib.suppress(OSError):  # the next process tries again
        kept_files.write(path, json.dumps({"reason": reason, "time": time.time()}).encode())


@functools.cache
def _unkept() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder of this process alone, which is removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="kvjax-")
