"""Tasks as text, as configs name them.

copa
copa(shots=5)
xsum(article=768, new_tokens=64)
needle(lengths=(256, 512), depths=5, aware=true)
questions/multi_news.jsonl(aware=true)
mine.py:task(count=8)

Values are numbers, words, quoted text, or several of these in parentheses.
"""

import ast
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.tasks import multiple_choice, recall_turns, ruler, ruler_questions, scbench
from experiments.tasks.jsonl import JsonLines
from experiments.tasks.needles import FORMS, Needles
from experiments.tasks.published import SOURCES, Instructions, MultipleChoice, Reconstruction, Summaries
from experiments.tasks.recall_turns import RecallTurns
from experiments.tasks.ruler import Ruler
from experiments.tasks.ruler_questions import RulerQuestions
from experiments.tasks.scbench import SCBench
from experiments.tasks.spec import TaskSpec
from kvjax.arguments import did_you_mean
from kvjax.errors import ConfigError
from kvjax.specs import user_files
from kvjax.typing import Json, JsonObject

Factory = Callable[..., TaskSpec]
TASKS: Mapping[str, Factory] = {
    **{name: functools.partial(MultipleChoice, name) for name in multiple_choice.TASKS},
    **{name: functools.partial(Summaries, name) for name in SOURCES},
    "reconstruction": functools.partial(Reconstruction, "reconstruction"),
    "alpaca": functools.partial(Instructions, "alpaca"),
    **{name: functools.partial(Needles, name) for name in FORMS},
    **{f"ruler_{name}": functools.partial(Ruler, name) for name in ruler.TASKS},
    **{f"ruler_{name}": functools.partial(RulerQuestions, name) for name in ruler_questions.SOURCES},
    **{f"recall_{kind}": functools.partial(RecallTurns, kind) for kind in recall_turns.KINDS},
    **{name: functools.partial(SCBench, name) for name in scbench.TASKS},
}
_CALL = re.compile(r"\s*([^()]+?)\s*(\(.*\))?\s*", re.DOTALL)
_FILE = re.compile(r"(.+\.py):(\w+)")  # FILE.py:factory


def build(text: str) -> TaskSpec:
    """The task that a text names.

    Raises:
      ConfigError: an unknown task, a setting that it does not take, or values that cannot work.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        raise ConfigError(f"task {text!r} is not a name, or a name with settings such as copa(shots=5).")
    name, settings = match[1], _settings(text, match[2] or "()")
    factory = _factory(name)
    kinds = _kinds(factory)
    for key, value in settings.items():
        if key in kinds and not _is(value, kinds[key]):
            wanted = _worded(kinds[key])
            raise ConfigError(f"task {text!r}: {key}={value!r} should be {wanted}.")
    try:
        made = factory(**settings)
    except TypeError:
        known = ", ".join(kinds) or "none"
        raise ConfigError(
            f"task {text!r}: {name} does not take {_unknown(factory, settings)}; it takes {known}."
        ) from None
    if not isinstance(made, TaskSpec):
        raise ConfigError(f"task {text!r}: its factory returned {made!r}, not an experiments.tasks.spec.TaskSpec.")
    return made


def files(text: str) -> tuple[str, ...]:
    """The Python file of a user's own that a text names, if it names one."""
    match = _CALL.fullmatch(text)
    own = _FILE.fullmatch(match[1]) if match else None
    return () if own is None else (own[1],)


def _factory(name: str) -> Factory:
    if name in TASKS:
        return TASKS[name]
    if name.endswith((".jsonl", ".json")):
        return functools.partial(JsonLines, name)
    if own := _FILE.fullmatch(name):
        return _from_file(*own.groups())
    raise ConfigError(
        f"unknown task {name!r}; {did_you_mean(name, TASKS)}known tasks: {', '.join(TASKS)}; or FILE.jsonl, or "
        "FILE.py:factory."
    )


def _from_file(path: str, name: str) -> Factory:
    if not Path(path).is_file():
        raise ConfigError(f"task {path}:{name}: there is no file {path}.")
    found = getattr(user_files.load(path), name, None)
    if not callable(found):
        raise ConfigError(f"task {path}:{name}: the file has no factory of that name.")
    factory: Factory = found
    return factory


def _settings(text: str, call: str) -> JsonObject:
    try:
        node = ast.parse(f"f{call}", mode="eval").body
        assert isinstance(node, ast.Call) and not node.args
        return {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ConfigError(
            f"task {text!r}: settings are written as in copa(shots=5) or needle(depths=(0, 50))."
        ) from None


def _value(node: ast.expr) -> Json:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id, node.id)
    return ast.literal_eval(node)


def _kinds(factory: Factory) -> JsonObject:
    """The settings of a task, and the types of their values; empty if the factory is no dataclass."""
    inner = factory.func if isinstance(factory, functools.partial) else factory
    if not dataclasses.is_dataclass(inner):
        return {}
    try:
        hints = typing.get_type_hints(inner)
    except Exception:  # an annotation that names what is not there when the program runs
        hints = {}
    names = [field.name for field in dataclasses.fields(inner) if field.init]
    # The first one of a task of kvjax is its name.
    return {name: hints.get(name, Any) for name in (names[1:] if isinstance(factory, functools.partial) else names)}


def _is(value: object, kind: object) -> bool:
    """Whether a value is of a type that settings are written in; always, for a type that is none of these."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, each) for each in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return isinstance(value, tuple | list) and all(_is(each, arguments[0]) for each in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return kind not in (str, bool, types.NoneType) or isinstance(value, kind)


def _worded(kind: Any) -> str:
    """A type in words."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(_worded, arguments))
    if typing.get_origin(kind) is tuple:
        return f"several of {_worded(arguments[0])} in parentheses"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "none"}.get(
        kind, str(kind)
    )


def _unknown(factory: Factory, settings: Mapping[str, Json]) -> str:
    others = [f"{key}={value!r}" for key, value in settings.items() if key not in _kinds(factory)]
    return others[0] if others else f"these values: {settings}"
