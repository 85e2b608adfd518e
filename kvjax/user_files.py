"""A user's own Python files of policies, storages, selections or tasks: what they import, and loading them."""

import ast
import contextlib
import functools
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from kvjax.errors import ConfigError

Stamp = tuple[str, int, int]  # a file's path, its time of change and its size

_loaded: dict[str, tuple[tuple[Stamp, ...], ModuleType]] = {}
_seen: dict[str, Stamp] = {}  # of every file that was loaded last, or imported by such a file
_pins = 0


def sources(path: Path) -> tuple[Path, ...]:
    """A file, and what it imports from its own folder or from the working folder, and what those files import.

    Installed packages are not among them, nor are those in folders that a file adds to `sys.path` itself.
    """
    found: dict[Path, Path] = {}
    waiting = [path]
    while waiting:
        each = waiting.pop()
        if (real := each.resolve()) in found:
            continue
        found[real] = each
        if (stamp := _stamp(each)) is not None:
            waiting += _imported(each, (path.parent, Path()), stamp)
    return tuple(found.values())


def load(path: str | Path) -> ModuleType:
    """Loads a file as a module. A file is loaded again once it, or what it imports (`sources`), has changed.

    Raises:
      ConfigError: the file, or one that it imports, is no Python or raises an error, with the line.
    """
    path = Path(path).resolve()
    if _pins and str(path) in _loaded:
        return _loaded[str(path)][1]
    files = sources(path)
    stamps = tuple(stamp for each in files if (stamp := _stamp(each)) is not None)
    if str(path) in _loaded and _loaded[str(path)][0] == stamps:
        return _loaded[str(path)][1]
    _loaded.pop(str(path), None)  # also if the new contents cannot be loaded
    # What it imports may have been loaded, for this file or for another one, before it changed.
    if any(_seen.get(stamp[0], stamp) != stamp for stamp in stamps):
        _forget({str(each.resolve()) for each in files[1:]})
    _seen.update((stamp[0], stamp) for stamp in stamps)
    for each in files:
        # Python takes its bytecode for that of a file of the same length that was changed within the same second.
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(str(each))).unlink(missing_ok=True)
    # A name that no other file has: dataclasses whose annotations are text look for their module in sys.modules.
    spec = importlib.util.spec_from_file_location(f"{path.stem} of {path}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}{_line(error)}.") from error
    _loaded[str(path)] = stamps, module
    return module


def _line(error: Exception) -> str:
    """Where an error was raised, if its text does not say so."""
    if isinstance(error, SyntaxError):
        return ""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f" ({frame.filename}, line {frame.lineno})"


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Within the block, files that have been loaded stay as they were, whether they change or not."""
    global _pins
    _pins += 1
    try:
        yield
    finally:
        _pins -= 1


def _stamp(path: Path) -> Stamp | None:
    """What is another once a file has changed; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path.resolve()), status.st_mtime_ns, status.st_size


def _forget(files: set[str]) -> None:
    """Makes the next import of these files read them."""
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        if where is not None and files and str(Path(where).resolve()) in files:
            del sys.modules[name]
    importlib.invalidate_caches()


def _imported(path: Path, folders: Sequence[Path], stamp: Stamp) -> Iterator[Path]:
    """The files below some folders that a file imports; `stamp` is its own."""
    for level, names in _names(str(path), stamp):
        # `from .name import ...` begins in the file's own folder, `from ..name` in the one above.
        yield from _files_of(path.parents[level - 1 : level] if level else folders, names)


@functools.lru_cache(maxsize=1024)
def _names(path: str, stamp: Stamp) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """What a file imports: the number of dots that a name begins with, and its parts."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):  # is said where it is loaded
        return ()
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = node.module.split(".") if node.module else []
            found += [(node.level, (*names, alias.name)) for alias in node.names]
    return tuple(dict.fromkeys(found))


def _files_of(folders: Sequence[Path], names: Sequence[str]) -> Iterator[Path]:
    """The modules and packages of a dotted name, whose last part may be something inside of a module."""
    if names[0] in ("kvjax", "experiments"):  # the working folder may be that of their sources
        return
    for folder in folders:
        for count in range(1, len(names) + 1):
            place = folder.joinpath(*names[:count])
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
