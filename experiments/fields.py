"""Configs are dataclasses: the kinds of their fields, overrides by dotted path, and configs found by name.

``--config=h2o_tiny`` finds configs/h2o_tiny.py, which is beside this package in a clone and in it where a wheel is
installed; ``--config.policy.budget=0.1`` overrides one field, checked by the kind that its annotation names.
"""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from kvjax.arguments import closest, did_you_mean
from kvjax.errors import ConfigError
from kvjax.typing import IMPLEMENTATIONS, Implementation, JsonObject

_PACKAGE = Path(__file__).resolve().parent
# A wheel has the configs in this package (backend/kvjax_build.py): "configs" may be anything else beside it.
FOLDER = next(filter(Path.is_dir, (_PACKAGE / "configs", _PACKAGE.parent / "configs")), _PACKAGE / "configs")

# The kinds of fields: what a value is in Python, and how an error describes what the command line accepts.
Count = Annotated[int, "a whole number of at least 1"]
OptionalCount = Annotated[int | None, "a whole number of at least 0, or none"]
Whole = Annotated[int, "a whole number of at least 0"]
Budget = Annotated[int | float, "slots as a whole number (256), or a fraction of the prompt as a decimal (0.2)"]
Text = Annotated[str, "text"]
OptionalText = Annotated[str | None, "text, or none"]
Counts = Annotated[tuple[int, ...], "whole numbers of at least 1, separated by commas"]
Numbers = Annotated[tuple[float, ...], "numbers of at least 0, separated by commas"]
Number = Annotated[float, "a number of at least 0"]
Names = Annotated[tuple[str, ...], "names separated by commas, or none"]
Kernels = Annotated[Implementation, f"one of {', '.join(IMPLEMENTATIONS)}"]


def split(text: str) -> list[str]:
    """Parts between the commas that stand outside of parentheses: h2o, roco(protect=4, guard=2)."""
    parts, depth, begin = [], 0, 0
    for found in re.finditer(r"[(\[)\],]", text):
        depth += (found[0] in "([") - (found[0] in ")]")
        if found[0] == "," and depth == 0:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]


def _is_none(text: str) -> bool:
    return text.strip().lower() in ("none", "")


def _whole(text: str, minimum: int) -> int:
    if not re.fullmatch(r"[+-]?\d+", text.strip()) or int(text) < minimum:
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _implementation(text: str) -> str:
    if text not in IMPLEMENTATIONS:
        raise ValueError(text)
    return text


def _budget(text: str) -> int | float:
    """``256`` is slots and ``256.0`` is not: the decimal point says which. Ranges are the policy's to judge."""
    if re.fullmatch(r"[+-]?\d+", text.strip()):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


#: How each kind reads the text of a command line; raises ValueError when it cannot.
Config: TypeAlias = Any  # a frozen dataclass of settings, or its class
Kind: TypeAlias = Any  # the annotated type of a field
KINDS: dict[Any, Callable[[str], Any]] = {
    Count: lambda text: _whole(text, 1),
    OptionalCount: lambda text: None if _is_none(text) else _whole(text, 0),
    Whole: lambda text: _whole(text, 0),
    Budget: _budget,
    Number: _number,
    Counts: lambda text: tuple(_whole(part, 1) for part in text.split(",")),
    Numbers: lambda text: tuple(_number(part) for part in text.split(",")),
    Text: str,
    Kernels: _implementation,
    # Empty text is not the same as none: an empty prompt is refused, not replaced.
    OptionalText: lambda text: None if text.strip().lower() == "none" else text,
    Names: lambda text: () if _is_none(text) else tuple(name.strip() for name in split(text) if name.strip()),
}


def read(kind: Kind, text: str) -> object:
    """The value that `text` means for a field of this kind.

    Raises:
      ConfigError: with what the kind accepts.
    """
    try:
        return KINDS[kind](text)
    except ValueError:
        raise ConfigError(f"{text!r} is not valid here; give {kind.__metadata__[0]}.") from None


def names(cls: type) -> list[str]:
    """Every config of the project that is of a class."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem[0] != "_" and isinstance(_read(path), cls))


def by_name(name: str, cls: type) -> Config:
    """The config of configs/`name`.py, or of a Python file given by its path.

    Raises:
      ConfigError: there is none, or its file has no `get_config` that returns one of this class.
    """
    path = Path(name) if name.endswith(".py") else FOLDER / f"{name}.py"
    try:
        known = path.is_file() and not (path.parent == FOLDER and path.stem[0] == "_")
    except (OSError, ValueError):  # a name that no file can have
        known = False
    if not known:
        hint = did_you_mean(name, names(cls))
        raise ConfigError(
            f"unknown config {name!r}; {hint}known configs: {', '.join(names(cls))}, or a path to a .py file."
        )
    config = _read(path)
    if not isinstance(config, cls):
        raise ConfigError(
            f"{path.name} must define get_config() that returns a {cls.__name__}; known configs of that kind: "
            f"{', '.join(names(cls))}."
        )
    return config


def _read(path: Path) -> Config:
    """Returns the result of the file's `get_config`, or None if it has none."""
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module.get_config() if hasattr(module, "get_config") else None


def _argument_hint(walked: list[str], part: str) -> str | None:
    """Returns where an argument of policies is written that is no field of a config; None if no policy has it."""
    if walked[-1:] != ["policy"]:
        return None
    from kvjax.policies import POLICIES, accepts  # imports jax, which an error may

    takes = [name for name in POLICIES if part in accepts(name)]
    if not takes:
        return None
    return f"; {part} is an argument of some policies, to be given in the name: policy.name='{takes[0]}({part}=...)'."


def kind_of(path: str, cls: type) -> Kind:
    """The kind of the field at a dotted path such as ``policy.budget``.

    Raises:
      ConfigError: no such field, or a group of fields; with the valid ones.
    """
    here: Any = cls
    walked: list[str] = []
    for part in path.split("."):
        fields = (
            {field.name: field.type for field in dataclasses.fields(here)} if dataclasses.is_dataclass(here) else {}
        )
        if part not in fields:
            where = f"{'.'.join(walked)} has" if walked else "a config has"
            valid = ", ".join(fields) if fields else "no fields of its own"
            close = closest(path, leaves(cls))
            hint = _argument_hint(walked, part) or (f"; did you mean {close!r}?" if close else ".")
            raise ConfigError(f"unknown field {path!r}: {where} {valid}{hint}")
        here = fields[part]
        walked.append(part)
    if dataclasses.is_dataclass(here):
        inner = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(here))
        raise ConfigError(f"{path!r} is a group of fields; set one of {inner}.")
    return here


def leaves(cls: Config, prefix: str = "") -> list[str]:
    """Every dotted path that can be overridden."""
    found = []
    for field in dataclasses.fields(cls):
        inner = dataclasses.is_dataclass(field.type)
        found += leaves(field.type, f"{prefix}{field.name}.") if inner else [prefix + field.name]
    return found


def meanings(cls: Config, prefix: str = "") -> dict[str, str]:
    """Returns the text of every leaf that the docstrings of the dataclasses describe, by dotted path."""
    described = _attributes(cls)
    found: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            found |= meanings(field.type, f"{prefix}{field.name}.")
        elif field.name in described:
            found[prefix + field.name] = described[field.name]
    return found


def groups(cls: Config, prefix: str = "") -> dict[str, str]:
    """Returns the text of every group of fields that a docstring describes, by dotted path."""
    described, found = _attributes(cls), {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            found[prefix + field.name] = described.get(field.name, "")
            found |= groups(field.type, f"{prefix}{field.name}.")
    return found


def _attributes(cls: type) -> dict[str, str]:
    """Returns the entries of the section "Attributes" of a docstring; continuation lines are indented."""
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section), re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def value_of(config: object, path: str) -> Any:
    """Returns the value of the field at a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


def override(config: object, path: str, value: object) -> Config:
    """A copy of `config` with one field set (`value` as text, or already of the field's type)."""
    kind = kind_of(path, type(config))
    config = copy.deepcopy(config)
    *groups, field = path.split(".")
    holder: Any = config
    for group in groups:
        holder = getattr(holder, group)
    setattr(holder, field, read(kind, value) if isinstance(value, str) else value)
    return config


def to_dict(config: Config) -> JsonObject:
    """As JSON would hold it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: Config, fields: JsonObject) -> Config:
    """The config that `to_dict` was given; fields that it did not have then are as they are by default."""
    values = {}
    for field in dataclasses.fields(cls):
        if field.name not in fields:
            continue
        value = fields[field.name]
        if dataclasses.is_dataclass(field.type):
            value = from_dict(field.type, value)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
