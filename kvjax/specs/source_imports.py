"""Finds what a Python file imports from its own folder or from the working folder."""

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Stamp = tuple[str, int, int]  # a file's path, its time of change and its size


class _Import(NamedTuple):
    """An import of a file.

    Attributes:
      level: the number of dots that the name begins with.
      names: the parts of the name.
      late: whether it is inside of a function, so that it happens when this is called.
    """

    level: int
    names: tuple[str, ...]
    late: bool


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
        if (stamp := stamp_of(each)) is not None:
            waiting += _imported(each, (path.parent, Path()), stamp)
    return tuple(found.values())


def late_imports(files: Sequence[Path]) -> frozenset[str]:
    """The first parts of the names that files import inside of functions."""
    every = (each for file in files if (stamp := stamp_of(file)) is not None for each in _imports(str(file), stamp))
    return frozenset(each.names[0] for each in every if each.late and each.names)


def stamp_of(path: Path) -> Stamp | None:
    """Returns a stamp of a file, which changes with it; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path.resolve()), status.st_mtime_ns, status.st_size


def _imported(path: Path, folders: Sequence[Path], stamp: Stamp) -> Iterator[Path]:
    """The files below some folders that a file imports; `stamp` is its own."""
    for level, names, _ in _imports(str(path), stamp):
        # `from .name import ...` begins in the file's own folder, `from ..name` in the one above.
        yield from _files_of(path.parents[level - 1 : level] if level else folders, names)


@functools.lru_cache(maxsize=1024)
def _imports(path: str, stamp: Stamp) -> tuple[_Import, ...]:
    """Returns what a file imports; nothing if it is not Python, which is an error where it is loaded."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    late = {id(inside) for function in functions for inside in ast.walk(function)}
    found: list[_Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [_Import(0, tuple(alias.name.split(".")), id(node) in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = node.module.split(".") if node.module else []
            found += [_Import(node.level, (*names, alias.name), id(node) in late) for alias in node.names]
    return tuple(dict.fromkeys(found))


def _files_of(folders: Sequence[Path], names: Sequence[str]) -> Iterator[Path]:
    """The modules and packages of a dotted name, whose last part may be something inside of a module."""
    if names[0] in ("kvjax", "experiments"):  # the working folder may be that of their sources
        return
    for folder in folders:
        for count in range(1, len(names) + 1):
            place = folder.joinpath(*names[:count])
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
