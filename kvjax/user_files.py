"""A user's own Python files of policies, storages, selections or tasks: what they import, and loading them."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kvjax.errors import ConfigError

Stamp = tuple[str, int, int]  # a file's path, its time of change and its size


class _Loaded(NamedTuple):
    """A file that was loaded.

    Attributes:
      stamps: of the file and of what it imports.
      module: what it became.
      digests: of the contents of these files, when they were loaded.
    """

    stamps: tuple[Stamp, ...]
    module: ModuleType
    digests: dict[Path, str]


_loaded: dict[str, _Loaded] = {}
_seen: dict[str, Stamp] = {}  # of every file that was loaded last, or imported by such a file
_pinned: set[str] | None = None  # files that stay as they were loaded; None = outside of `pinned`


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

    As with a script, its folder is searched first for what it imports, and stays on the path.

    Raises:
      ConfigError: the file, or one that it imports, is no Python or raises an error, with the line.
    """
    return _load(path).module


def digests(path: str | Path) -> dict[Path, str]:
    """The contents of a file and of what it imports (`sources`), as hexadecimal digests.

    Within `pinned`, and for a file that can be loaded, they are of what was loaded.
    """
    if _pinned is not None:
        with contextlib.suppress(ConfigError):  # is said where it is used
            return _load(path).digests
    return _digests(sources(Path(path)))


def _load(path: str | Path) -> _Loaded:
    """See `load`."""
    given, path = Path(path), Path(path).resolve()
    if _pinned is not None and str(path) in _pinned:
        return _loaded[str(path)]
    files = sources(given)
    stamps = _stamps(files)
    if str(path) not in _loaded or _loaded[str(path)].stamps != stamps:
        _loaded.pop(str(path), None)  # also if the new contents cannot be loaded
        while True:
            found = _Loaded(stamps, _execute(path, files, stamps), _digests(files))
            files = sources(given)
            stamps = _stamps(files)
            if stamps == found.stamps:  # else it was changed in between
                break
        _loaded[str(path)] = found
    if _pinned is not None:
        _pinned.add(str(path))
    return _loaded[str(path)]


def _execute(path: Path, files: Sequence[Path], stamps: Sequence[Stamp]) -> ModuleType:
    """A new module of a file."""
    # What it imports may have been loaded, for this file or for another one, before it changed.
    if any(_seen.get(stamp[0], stamp) != stamp for stamp in stamps):
        _forget({each.resolve() for each in files[1:]})
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
    _search_first(path.parent, files[1:])
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}{_line(error)}.") from error
    return module


def _search_first(folder: Path, files: Sequence[Path]) -> None:
    """Puts a folder first on the path, and forgets modules that have the names of its files but are others."""
    with contextlib.suppress(ValueError):
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    own = {each.resolve() for each in files}
    names = {each.relative_to(folder).parts[0].removesuffix(".py") for each in own if each.is_relative_to(folder)}
    others = {Path(each) for each in _seen} - own
    _forget(others, names)


def _line(error: Exception) -> str:
    """Where an error was raised, if its text does not say so."""
    if isinstance(error, SyntaxError):
        return ""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f" ({frame.filename}, line {frame.lineno})"


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Within the block, files stay as they are when they are first loaded there, whether they change or not."""
    global _pinned
    outer, _pinned = _pinned, set() if _pinned is None else _pinned
    try:
        yield
    finally:
        _pinned = outer


def _stamps(files: Sequence[Path]) -> tuple[Stamp, ...]:
    return tuple(stamp for each in files if (stamp := _stamp(each)) is not None)


def _digests(files: Sequence[Path]) -> dict[Path, str]:
    return {each: hashlib.sha256(each.read_bytes()).hexdigest() for each in files if each.is_file()}


def _stamp(path: Path) -> Stamp | None:
    """What is another once a file has changed; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path.resolve()), status.st_mtime_ns, status.st_size


def _forget(files: set[Path], packages: set[str] | None = None) -> None:
    """Makes the next import of these files read them; of the modules in these packages, if any are given."""
    for name, module in list(sys.modules.items()):
        if packages is None or name.partition(".")[0] in packages:
            where = getattr(module, "__file__", None)
            if where is not None and files and Path(where).resolve() in files:
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
