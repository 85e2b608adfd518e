"""Policies, storages, selections and quantised weights as text.

What is built is named by its text. A factory in a file is called in it by the name that its policy has, as in
``evict(name="loudest")``, or else by FILE.py:factory.

A name, a call, a combination, or a factory in a file of your own:

h2o
h2o_decay(gamma=0.9, recent=16)
with_heavy_hitters(strided(stride=4, local=8), fraction=0.25)
after_prefill(snapkv(window=16), then=roco)
h2o(merge=d2o(beta=0.5))
int8(residual=32)
quest(page=16, budget=512)
int4(group=128)
mine.py:loudest(alpha=2)
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from kvjax.arguments import closest, did_you_mean
from kvjax.errors import ConfigError, KvjaxError, PolicyError, SelectionError, StorageError
from kvjax.models.quantize import WEIGHTS, WeightCodes
from kvjax.policies import COMBINATORS, GATES, HEAD_PLANS, MERGES, POLICIES, Gate, Merge, Policy
from kvjax.selection import SELECTIONS, Selection
from kvjax.specs import user_files
from kvjax.specs.expressions import SHOWN, parse, short
from kvjax.specs.user_files import raised_at
from kvjax.storage import STORAGES, Storage
from kvjax.typing import JsonObject

Axis = Literal["policy", "merge", "gate", "storage", "selection", "weights"]
Factory = Callable[..., Any]

_WORD = re.compile(r"[^\s(),=]+")
_NAME = re.compile(r"\w+")
_PLACEHOLDER = "__file"  # stands for FILE.py:factory, with its number
_COMBINING = COMBINATORS | {name: HEAD_PLANS[name] for name in ("split_heads", "split_layers")}
#: Names that policies of kvjax begin with: ``h2o``, ``adakv[snapkv]``, ``h2o+heavy``.
_LIBRARY = re.compile(rf"({'|'.join([*POLICIES, *HEAD_PLANS, *COMBINATORS, 'evict', 'compress'])})\b")
_OBJECTS = (Policy, Merge, Storage, Selection)  # what a file may hold instead of a factory


class Registry(NamedTuple):
    """The names that a text of one axis may have.

    Attributes:
      kind: the class of what is built.
      factories: by name.
      combinators: functions by name that take policies, or some heads or layers; listed separately in errors.
      inside: the axes that an argument may be of.
      example: of a call.
      error: raised for arguments that a factory of a user's own does not take.
    """

    kind: type
    factories: Mapping[str, Factory]
    combinators: Mapping[str, Factory]
    inside: tuple[Axis, ...]
    example: str
    error: type[KvjaxError]

    @property
    def names(self) -> dict[str, Factory]:
        """Factories and combinators."""
        return {**self.factories, **self.combinators}


REGISTRIES: dict[Axis, Registry] = {
    "policy": Registry(
        Policy, POLICIES, HEAD_PLANS | COMBINATORS, ("policy", "merge", "gate"), "h2o_decay(gamma=0.9)", PolicyError
    ),
    "merge": Registry(Merge, MERGES, {}, (), "d2o(beta=0.5)", PolicyError),
    "gate": Registry(Gate, GATES, {}, (), "mlp(width=64)", PolicyError),
    "storage": Registry(Storage, STORAGES, {}, ("storage",), "int8(residual=32)", StorageError),
    "selection": Registry(
        Selection, SELECTIONS, {}, ("selection",), "quest(page=16, budget=512)", SelectionError
    ),
    "weights": Registry(WeightCodes, WEIGHTS, {}, (), "int4(group=128)", ConfigError),
}  # fmt: skip


def build(axis: Axis, text: str, **defaults: Any) -> Any:
    """The policy, storage or selection that a text describes; for its name see this module.

    Args:
      axis: what is built.
      text: see this module.
      defaults: arguments of every policy in the text that takes them and is not given them there. Equal arguments give
        the very same object, so that functions in a user's file are equal too and nothing is compiled twice, until
        the file, or one that it imports (`kvjax.specs.user_files`), changes.

    Raises:
      ConfigError: a text that is none of the above, or an unknown name.
      PolicyError, StorageError, SelectionError: arguments that a factory does not take, or values that cannot work; or
        a factory that raises anything.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a {axis} must be a string here; got {text!r}.")
    return _build(axis, text, _modules(text), **defaults)


@functools.lru_cache(maxsize=None, typed=True)  # a budget of 1 slot is not 1.0 of the prompt
def _build(axis: Axis, text: str, modules: tuple[ModuleType, ...], **defaults: Any) -> Any:
    """See `build`; the modules are those of a user's own that the text names."""
    reader = _Reader.of(axis, text, defaults)
    made, registry = reader.made(reader.node), REGISTRIES[axis]
    if not isinstance(made, registry.kind):
        see = f"{registry.kind.__module__}.{registry.kind.__name__}"
        raise registry.error(f"{axis} {short(text)}: its factory returned {made!r}, not a {axis}; see {see}.")
    return named(made, reader.shown())


def named(made: object, name: str) -> Any:
    """Returns what was built under another name, which is not part of what two of a kind are compared by."""
    made = copy.copy(made)
    object.__setattr__(made, "name", name)
    return made


def accepts(axis: Axis, text: str) -> frozenset[str]:
    """Arguments that some policy of a text takes, its combinators aside; or those of a storage or a selection.

    Raises:
      ConfigError: as `build`.
    """
    return _accepts(axis, text, _modules(text))


@functools.cache
def _accepts(axis: Axis, text: str, modules: tuple[ModuleType, ...]) -> frozenset[str]:
    """See `accepts`; the modules are those of a user's own that the text names."""
    reader = _Reader.of(axis, text, {})
    return frozenset().union(*(_parameters(factory) for factory in reader.leaves(reader.node)))


def files(text: str) -> tuple[str, ...]:
    """The files of a user's own that a text names; see `kvjax.specs.source_imports` for what those import."""
    return tuple(each.file for each in _own(text))


class _Own(NamedTuple):
    """FILE.py:factory in a text, from `start` to before `end`."""

    start: int
    end: int
    file: str
    factory: str


def _own(text: str) -> Iterator[_Own]:
    """Finds every FILE.py:factory, in linear time: a file may have any name without spaces, brackets, commas and =."""
    for word in _WORD.finditer(text):
        at = word.end()
        # The last one of a word, so that a folder may have such a name too.
        while (at := text.rfind(".py:", word.start() + 1, at)) >= 0:
            if name := _NAME.match(text, at + len(".py:"), word.end()):
                yield _Own(word.start(), name.end(), text[word.start() : at + len(".py")], name[0])
                break


def _replaced(text: str, names: Sequence[str]) -> str:
    """Returns a text with names in place of every FILE.py:factory."""
    parts, end = [], 0
    for own, name in zip(_own(text), names, strict=True):
        parts += [text[end : own.start], name]
        end = own.end
    return "".join([*parts, text[end:]])


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _modules(text: str) -> tuple[ModuleType, ...]:
    """Those of the files that a text names, as far as there are such files."""
    return tuple(user_files.load(file) for file in files(text) if _is_file(file))


def axis_of(text: str, among: Sequence[Axis]) -> Axis:
    """Returns the axis that a text is of, by the name that it begins with.

    Args:
      text: see this module.
      among: the axes to choose from; a factory in a file is of the first whose object it makes.

    Raises:
      ConfigError: it is of none of them.
    """
    name = re.match(r"\w*", text)
    assert name is not None
    for axis in among:
        if name[0] in REGISTRIES[axis].names:
            return axis
    for axis in among if files(text) else ():
        with contextlib.suppress(KvjaxError):
            build(axis, text)
            return axis
    known = {each for axis in among for each in REGISTRIES[axis].names}
    close = closest(name[0], known)
    hint = f"; did you mean {close!r}?" if close else f"; there are {', '.join(sorted(known))}."
    raise ConfigError(f"{short(text)} is not a {' or a '.join(among)}{hint}")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Evaluates one text.

    Attributes:
      axis: of the whole text.
      text: as it was given.
      node: the text, parsed.
      files: the name that stands for FILE.py:factory in `node` -> file and factory.
      defaults: see `build`.
      names: the same -> the name that a policy of the file has, as they are built.
    """

    axis: Axis
    text: str
    node: ast.expr
    files: dict[str, tuple[str, str]]
    defaults: dict[str, Any]
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, axis: Axis, text: str, defaults: JsonObject) -> "_Reader":
        own = list(_own(text))
        files = {f"{_PLACEHOLDER}{number}": (each.file, each.factory) for number, each in enumerate(own)}
        plain = _replaced(text, list(files))
        try:
            if plain.count(_PLACEHOLDER) > len(own):
                raise ValueError(f"has the name {_PLACEHOLDER}")
            return cls(axis, text, parse(plain.strip()), files, defaults)
        except ValueError as error:
            raise ConfigError(
                f"{axis} {short(text)} is not a {axis}'s name, a call such as {REGISTRIES[axis].example}, or "
                f"FILE.py:factory: it {error}."
            ) from None

    def made(self, node: ast.expr) -> Any:
        """Builds the object that a name or a call describes."""
        built = self.built(node)
        name = node.func if isinstance(node, ast.Call) else node
        own = getattr(built, "name", None) if isinstance(built, Policy) else None
        # A policy of kvjax that a factory passes on, or one without a name, is distinguished from others by its file.
        if own and isinstance(name, ast.Name) and name.id in self.files and not _LIBRARY.match(own):
            self.names[name.id] = own
        return built

    def shown(self) -> str:
        """The text, with the names of policies in place of their files."""
        own = enumerate(_own(self.text))
        names = [self.names.get(f"{_PLACEHOLDER}{number}", self.text[each.start : each.end]) for number, each in own]
        return _replaced(self.text, names)

    def built(self, node: ast.expr) -> Any:
        """See `made`."""
        factory, call = self.factory(node)
        if isinstance(factory, _OBJECTS):
            if call:
                raise ConfigError(f"{self.axis} {short(self.text)}: {_source(call.func)} takes no arguments.")
            return factory
        positional = [self.argument(each) for each in call.args] if call else []
        given: dict[str, Any] = {}
        for keyword in call.keywords if call else ():
            if keyword.arg is None:
                raise ConfigError(f"{self.axis} {short(self.text)}: ** is not supported here.")
            given[keyword.arg] = self.argument(keyword.value)
        if factory not in _COMBINING.values():
            taken = _parameters(factory)[len(positional) :]
            given = {name: value for name, value in self.defaults.items() if name in taken} | given
        try:
            return factory(*positional, **given)
        except KvjaxError:
            raise
        except TypeError as error:
            raise REGISTRIES[self.axis].error(f"{self.axis} {short(self.text)}: {error}.") from error
        except (
            Exception
        ) as error:  # of a user's own factory, or of an argument of a kind that a factory is not made for
            raise REGISTRIES[self.axis].error(
                f"{self.axis} {short(self.text)}: its factory raised {type(error).__name__}: {error}{raised_at(error)}."
            ) from error

    def argument(self, node: ast.expr) -> Any:
        """An argument: a policy, merge, storage or selection where those may stand, a literal, or a word."""
        if isinstance(node, ast.Name) and node.id not in self._inside and node.id not in self.files:
            # Flags are written true and false; other words are text, as in pooling=max.
            return {"true": True, "false": False}.get(node.id, node.id)
        if isinstance(node, ast.Call | ast.Name):
            return self.made(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{self.axis} {short(self.text)}: {_source(node)} is not a number, a name or a {self.axis}."
            ) from None

    def factory(self, node: ast.expr) -> tuple[Any, ast.Call | None]:
        """The factory that a node names, or an object of a user's file; and the node, if it is a call."""
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call else node
        if not isinstance(name, ast.Name):
            raise ConfigError(f"{self.axis} {short(self.text)}: {_source(name)} is not the name of a {self.axis}.")
        if name.id in self.files:
            return _from_file(self.axis, *self.files[name.id]), call
        # The whole text is of the axis itself; what stands in it may be of others too.
        known = REGISTRIES[self.axis].names if node is self.node else self._inside
        if name.id not in known:
            raise ConfigError(_unknown(self.axis, name.id, known))
        return known[name.id], call

    def leaves(self, node: ast.expr) -> Iterator[Factory]:
        """The factories of a text, those in combinators instead of these."""
        factory, call = self.factory(node)
        if factory in _COMBINING.values():
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)] if call else ():
                if isinstance(argument, ast.Call | ast.Name):
                    yield from self.leaves(argument)
        elif not isinstance(factory, _OBJECTS):
            yield factory

    @functools.cached_property
    def _inside(self) -> dict[str, Factory]:
        found: dict[str, Factory] = {}
        for axis in REGISTRIES[self.axis].inside:
            found |= REGISTRIES[axis].names
        return found


def _unknown(axis: Axis, name: str, known: Mapping[str, Any]) -> str:
    """Returns the error message for an unknown name."""
    registry = REGISTRIES[axis]
    hint = did_you_mean(name, known)
    plural = {"policy": "policies", "weights": "weights"}.get(axis, f"{axis}s")
    lists = [f"known {plural}: {', '.join(sorted(registry.factories))}"]
    if registry.combinators:
        lists.append(f"combinators: {', '.join(sorted(registry.combinators))}")
    others = (each for each in registry.inside if each != axis and REGISTRIES[each].factories.keys() <= known.keys())
    lists += [f"{each}s: {', '.join(sorted(REGISTRIES[each].factories))}" for each in others]
    return f"unknown {axis} {short(name)}; {hint}{'; '.join(lists)}; or FILE.py:factory."


def _source(node: ast.expr) -> str:
    return _brief(ast.unparse(node))


def _brief(text: str) -> str:
    """Returns a text for a message, without quotes unless it is long."""
    return text if len(text) <= SHOWN else short(text)


def _parameters(factory: Factory) -> list[str]:
    """The names of a factory's parameters, in their order."""
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # something that is built in, which does not say
        return []


def _from_file(axis: Axis, path: str, name: str) -> Any:
    """A factory, or an object that needs no arguments, of a user's file."""
    if not _is_file(path):
        raise ConfigError(f"{axis} {_brief(f'{path}:{name}')}: there is no file {_brief(path)}.")
    module = user_files.load(path)
    found = getattr(module, name, None)
    if not (callable(found) or isinstance(found, _OBJECTS)):
        own = [
            each
            for each, value in vars(module).items()
            if each[0] != "_" and callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        known = f"; it defines {', '.join(sorted(own))}." if own else "."
        raise ConfigError(
            f"{axis} {_brief(f'{path}:{name}')}: the file has no factory and no {axis} of that name{known}"
        )
    return found
