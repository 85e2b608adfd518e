"""Tells functions of a user's own apart between processes, where a policy's text has no more than their names."""

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import kvjax
from kvjax.specs import user_files

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
KVJAX = Path(kvjax.__path__[0])


def described(value: object) -> str:
    """Returns the text of a value without addresses, with a digest if it holds functions that are not of kvjax.

    The digest covers their code, their defaults, what they enclose, and the contents of their files with what these
    import (`kvjax.specs.source_imports`).

    Args:
      value: made of dataclasses, containers and functions.
    """
    functions = [each for each in _functions(value, set()) if KVJAX not in _file(each).parents]
    text = _ADDRESS.sub("", repr(value))
    if not functions:
        return text
    digest = hashlib.sha256("\n".join(map(_described, functions)).encode()).hexdigest()
    return f"{text} {digest}"


def _functions(value: object, seen: set[int]) -> Iterator[FunctionType]:
    """The functions in a value, and those that they enclose."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Any = ()
    if isinstance(value, FunctionType):
        yield value
        inside = [*_enclosed(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, tuple | list | frozenset | set):
        inside = value
    for each in inside:
        yield from _functions(each, seen)


def _described(function: FunctionType) -> str:
    values = [*_enclosed(function), function.__defaults__, function.__kwdefaults__]
    file = _file(function)
    files = sorted(user_files.digests(file).values()) if file.is_file() else []
    return _ADDRESS.sub("", repr([function.__qualname__, _code(function.__code__), values, files]))


def _code(code: CodeType) -> list[object]:
    """Returns the code of a function: its instructions, names and constants."""
    constants = [_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return [code.co_code, code.co_names, constants]


def _enclosed(function: FunctionType) -> list[object]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not set yet
            found.append(None)
    return found


def _file(function: FunctionType) -> Path:
    return Path(inspect.getfile(function))
