"""Checks of arguments, and tables of factories by name; policies, storages and selections are built with them."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import numbers
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from kvjax.errors import InputError, KvjaxError, PolicyError, shown

LONGEST_NAME = 100  # characters of a name that others are compared with

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

LARGEST = (1 << 31) - 1  # whole number of an argument that gives no other limit: numbers of slots are int32
#: Slots below which predictions mean little. The server, batches, tasks and lm_eval keep as many of short prompts, as
#: `Fraction.min_slots`. Elsewhere a fraction keeps max(1, ⌊f·n + 1e-9⌋) slots, as it is defined, and warns: another
#: default would change what policies of given arguments keep.
MIN_SLOTS = 32
_warned: set[Hashable] = set()  # what `warn_once` has warned of in this process


class Restorable:
    """A dataclass that refuses to be unpickled from fields of other names, which another version of kvjax saved.

    Raises:
      PolicyError: a field is missing; its default would otherwise stand for a number that was saved.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        missing = sorted({field.name for field in dataclasses.fields(self)} - set(state))  # type: ignore[arg-type]
        if missing:
            names = ", ".join(sorted(set(state)))
            raise PolicyError(
                f"a {type(self).__name__} saved by another version of kvjax has {names} and lacks "
                f"{', '.join(missing)}; create it again."
            )
        self.__dict__.update(state)


def count_argument(
    name: str, value: object, *, minimum: int = 0, maximum: int | None = None, error: type[KvjaxError] = PolicyError
) -> int:
    """Returns a whole number as an int.

    Raises:
      error: `value` is not a whole number from `minimum` to `maximum` (None = `LARGEST`). The message says `name`.
    """
    whole = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    largest = LARGEST if maximum is None else maximum
    if whole is None or not minimum <= whole <= largest:
        plain = maximum is None and not (whole is not None and whole > largest)
        valid = f"of at least {minimum}" if plain else f"from {minimum} to {largest}"
        raise error(f"{name} must be a whole number {valid}; got {shown(value)}.")
    return whole


def number_argument(
    name: str, value: object, *, minimum: float, maximum: float, error: type[KvjaxError] = PolicyError
) -> float:
    """Returns a number as a float.

    Raises:
      error: `value` is not a number from `minimum` to `maximum`. The message says `name`.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not minimum <= value <= maximum:  # type: ignore[operator]  # NaN fails this too
        raise error(f"{name} must be a number from {minimum:g} to {maximum:g}; got {shown(value)}.")
    return float(value)  # type: ignore[arg-type]


def choice_argument(name: str, value: T, valid: Sequence[T], *, error: type[KvjaxError] = PolicyError) -> T:
    """Returns a value that is one of a few.

    Raises:
      error: `value` is not among `valid`. The message says `name`.
    """
    if value not in valid:
        *others, last = map(repr, valid)
        choices = f"{', '.join(others)} or {last}" if others else last
        raise error(f"{name}={shown(value)} is not valid; use {choices}.")
    return value


def check_type(
    name: str, value: object, kind: type | tuple[type, ...], valid: str, *, error: type[KvjaxError] = InputError
) -> None:
    """Checks the type of an argument.

    Args:
      name: the name of the argument, for the message.
      value: its value.
      kind: its type, or several.
      valid: what it must be, for the message, such as "a model, from kvjax.load".
      error: what is raised.

    Raises:
      error: `value` is of another type. The message says `name` and `valid`.
    """
    if not isinstance(value, kind):
        raise error(f"{name} must be {valid}; got {shown(value)}.")


def check_path(name: str, value: object, *, error: type[KvjaxError] = InputError) -> None:
    """Checks that an argument is a path.

    Raises:
      error: it is not. The message says `name`.
    """
    check_type(name, value, (str, os.PathLike), "a path, as text or a pathlib.Path", error=error)


def check_hashable(what: str, value: object, *, error: type[KvjaxError] = PolicyError) -> None:
    """Checks that a value can be a static argument of a program.

    Raises:
      error: it cannot be hashed. The message begins with `what`.
    """
    try:
        hash(value)
    except Exception as raised:
        raise error(
            f"{what}: {type(value).__name__} is not hashable ({type(raised).__name__}: {raised}), but programs are "
            "looked up by it: make it a frozen dataclass whose fields are numbers, strings, functions or "
            "tuples."
        ) from None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the part of an error message that suggests the known name closest to `name`; empty if none is close."""
    close = closest(str(name), known)
    return f"did you mean {close!r}? " if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is closest to `name`, in small letters or not; None if none is close."""
    if len(name) > LONGEST_NAME:  # a comparison takes long
        return None
    plain = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.strip().lower(), list(plain), n=1)
    return plain[found[0]] if found else None


def outer_level() -> int:
    """Returns the `stacklevel` of `warnings.warn`, called by the caller, that is the first frame outside of kvjax."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level


def warn_once(text: str, about: Hashable | None = None) -> None:
    """Warns at the first caller outside of kvjax, once per process.

    Args:
      text: the warning.
      about: what it warns of; a second warning about an equal value is not shown. None = `text`.
    """
    about = text if about is None else about
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, stacklevel=outer_level())


def plain_signature(function: F) -> F:
    """Lets `help` show a function's arguments and defaults in one line; their types are in its docstring."""
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    plain = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    function.__signature__ = plain  # type: ignore[attr-defined]
    return function


@contextlib.contextmanager
def named(name: str, *, noun: str = "policy", error: type[PolicyError] = PolicyError) -> Iterator[None]:
    """Raises a `PolicyError` of its body as an `error` that begins with "<noun> <name>: "."""
    try:
        yield
    except PolicyError as raised:
        if str(raised).startswith(f"{noun} "):  # it says what it is about
            raise
        raise error(f"{noun} {name}: {raised}") from None


def checked_call(error: type[KvjaxError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator: a call with wrong arguments raises an `error` that lists the valid ones."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as wrong:
                accepted = ", ".join(signature.parameters) or "no arguments"
                unknown = (name for name in kwargs if name not in signature.parameters)
                hint = "".join(did_you_mean(name, signature.parameters) for name in unknown)
                raise error(f"{function.__name__}(): {wrong}; {hint}it accepts {accepted}.") from None
            return function(*args, **kwargs)

        return plain_signature(call)

    return decorate


class Registry(dict[str, Callable[..., T]]):
    """Factories by name.

    Attributes:
      noun: what the factories build, in the singular.
      plural: the same in the plural.
      error: raised for an unknown name.
    """

    def __init__(self, noun: str, plural: str, error: type[KvjaxError], factories: Mapping[str, Callable[..., T]]):
        super().__init__(factories)
        self.noun, self.plural, self.error = noun, plural, error

    def names(self) -> list[str]:
        """Returns the names that `by_name` takes."""
        return list(self)

    def by_name(self, name: str, **arguments: Any) -> T:
        """Calls the factory `name` with `arguments`.

        Raises:
          PolicyError, StorageError or SelectionError: an unknown name, an argument that the factory does not accept, or
            values that are not valid.
        """
        return self._factory(name)(**arguments)

    def accepts(self, name: str) -> frozenset[str]:
        """Returns the names of the arguments that the factory `name` accepts.

        Raises:
          PolicyError, StorageError or SelectionError: an unknown name.
        """
        return frozenset(inspect.signature(self._factory(name)).parameters)

    def _factory(self, name: str) -> Callable[..., T]:
        if name not in self:
            hint = did_you_mean(name, self)
            raise self.error(f"unknown {self.noun} {name!r}; {hint}known {self.plural}: {', '.join(sorted(self))}.")
        return self[name]
