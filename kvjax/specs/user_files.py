"""A user's own Python files of policies, storages, selections or tasks, with the files that they import."""

import contextlib
import hashlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kvjax.errors import ConfigError
from kvjax.specs.source_imports import Stamp, late_imports, sources, stamp_of

ATTEMPTS = 3  # to load a file that changes meanwhile
LIBRARIES = ("kvjax", "jax", "jaxlib", "numpy")  # whose lines say nothing about a user's error


class _Loaded(NamedTuple):
    """A file that was loaded.

    Attributes:
      stamps: of the file and of what it imports.
      module: what it became.
      digests: of the contents of these files, by their resolved paths, when they were loaded.
      late: first parts of the names that they import inside of functions.
    """

    stamps: tuple[Stamp, ...]
    module: ModuleType
    digests: dict[Path, str]
    late: frozenset[str]


_loaded: dict[str, _Loaded] = {}
_seen: dict[str, Stamp] = {}  # of every file that was loaded last, or imported by such a file
_lock = threading.RLock()
_pins = 0  # blocks of `pinned` that have not ended
_pinned: set[str] | None = None  # files that stay as they were loaded; None = outside of `pinned`


def load(path: str | Path) -> ModuleType:
    """Loads a file as a module. A file is loaded again once it, or what it imports (`sources`), has changed.

    Its folder is searched first for what it imports, and stays on the path. Files that it imports inside of functions
    are imported with it.

    Raises:
      ConfigError: the file, or one that it imports, is no Python or raises an error, with the line; or a file beside it
        cannot be imported because of its name.
    """
    return _load(path).module


def digests(path: str | Path) -> dict[Path, str]:
    """The contents of a file and of what it imports (`sources`), as hexadecimal digests.

    Within `pinned`, and for a file that can be loaded, they are of what was loaded.
    """
    given = Path(path)
    if _pinned is not None:
        with contextlib.suppress(ConfigError):  # is said where it is used
            found, real = _load(given).digests, given.resolve()
            return {_relative_to_given(given, each, real): digest for each, digest in found.items()}
    return {
        _relative_to_given(given, each, given.resolve()): digest for each, digest in _digests(sources(given)).items()
    }


def _relative_to_given(given: Path, each: Path, real: Path) -> Path:
    """The path of a file as a user would write it who wrote `given` for the file that imports it."""
    return given.parent / each.relative_to(real.parent) if each.is_relative_to(real.parent) else each


def _load(path: str | Path) -> _Loaded:
    """See `load`."""
    path = Path(path).resolve()
    with _lock:
        if _pinned is not None and str(path) in _pinned:
            return _loaded[str(path)]
        for _ in range(ATTEMPTS):
            files = sources(path)
            stamps = _stamps(files)
            if str(path) in _loaded and _loaded[str(path)].stamps == stamps:
                break
            _loaded.pop(str(path), None)  # also if the new contents cannot be loaded
            late = late_imports(files)
            _check_names(path, files, late)
            # It may change while it is loaded.
            _loaded[str(path)] = _Loaded(stamps, _execute(path, files, stamps), _digests(files), late)
        else:
            if _loaded[str(path)].stamps != _stamps(sources(path)):
                raise ConfigError(f"{path}, or a file that it imports, changes each time it is loaded.")
        if _pinned is not None:
            _pinned.add(str(path))
        return _loaded[str(path)]


def _check_names(path: Path, files: Sequence[Path], late: frozenset[str]) -> None:
    """Refuses modules of one name that are two files, if one is imported inside of a function, where either may come.

    Raises:
      ConfigError: there is one.
    """
    own = _by_name(path, {each.resolve() for each in files})
    for other, loaded in _loaded.items():
        theirs = _by_name(Path(other), set(loaded.digests))
        for name in sorted((own.keys() & theirs.keys()) & (late | loaded.late)):
            if other != str(path) and own[name] != theirs[name]:
                raise ConfigError(
                    f"{path} and {other} import two modules named {name}, one inside a function: move that import "
                    "to the beginning of its file, or rename one module."
                )


def _by_name(path: Path, files: set[Path]) -> dict[str, frozenset[Path]]:
    """The files below a file's folder, by the name of their module or of their package."""
    found: dict[str, set[Path]] = {}
    for each in files - {path}:
        if each.is_relative_to(path.parent):
            found.setdefault(each.relative_to(path.parent).parts[0].removesuffix(".py"), set()).add(each)
    return {name: frozenset(own) for name, own in found.items()}


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
    own = {each.resolve() for each in files}
    names = _by_name(path, own)
    with contextlib.suppress(ValueError):
        sys.path.remove(str(path.parent))
    sys.path.insert(0, str(path.parent))
    _forget({Path(each) for each in _seen} - own, set(names))
    _check_found(path, names)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}{raised_at(error)}.") from error
    for each in sorted(file for found in names.values() for file in found):
        parts = each.relative_to(path.parent).with_suffix("").parts
        with contextlib.suppress(Exception):  # is raised where the file imports it
            importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return module


def _check_found(path: Path, names: dict[str, frozenset[Path]]) -> None:
    """Refuses files beside a file that have the names of modules that are there already.

    Raises:
      ConfigError: there is one.
    """
    for name, own in names.items():
        module = sys.modules.get(name)
        first = {path.parent / f"{name}.py", path.parent / name / "__init__.py"} & own
        if module is not None and first:
            where = getattr(module, "__file__", None)
            if where is None or Path(where).resolve() not in own:
                raise ConfigError(
                    f"{path} imports {first.pop()}, but {name} is the name of another module here: {where or module}. "
                    "Give the file another name."
                )


def raised_at(error: Exception) -> str:
    """Returns the user's line that raised an error, in brackets; nothing if there is none or its text says so."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES
    ]
    return f" ({frames[-1][0]}, line {frames[-1][1]})" if frames else ""


def described_error(error: Exception) -> str:
    """Returns the type of an error, the first line of its text and where it was raised, without a full stop."""
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{f': {first}' if first else ''}{raised_at(error)}"


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Within the block, files stay as they are when they are first loaded there, whether they change or not.

    Blocks that overlap, one in another or in several threads, are one.
    """
    global _pinned, _pins
    with _lock:
        _pins, _pinned = _pins + 1, set() if _pinned is None else _pinned
    try:
        yield
    finally:
        with _lock:
            # Blocks of several threads may end in any order.
            _pins -= 1
            _pinned = _pinned if _pins else None


def _stamps(files: Sequence[Path]) -> tuple[Stamp, ...]:
    return tuple(stamp for each in files if (stamp := stamp_of(each)) is not None)


def _digests(files: Sequence[Path]) -> dict[Path, str]:
    return {each.resolve(): hashlib.sha256(each.read_bytes()).hexdigest() for each in files if each.is_file()}


def _forget(files: set[Path], packages: set[str] | None = None) -> None:
    """Makes the next import of these files read them; of the modules in these packages, if any are given."""
    for name, module in list(sys.modules.items()):
        if packages is None or name.partition(".")[0] in packages:
            where = getattr(module, "__file__", None)
            if where is not None and files and Path(where).resolve() in files:
                del sys.modules[name]
    importlib.invalidate_caches()
