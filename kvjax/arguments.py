"""Checks of arguments, and tables of factories by name; policies, storages and selections are built with them."""

import contextlib
import functools
import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from kvjax.errors import KvjaxError, PolicyError, shown

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
LARGEST = (1 << 31) - 1  # whole number of an argument that gives no other limit: numbers of slots are int32


def count_argument(
    name: str, value: Any, *, minimum: int = 0, maximum: int | None = None, error: type[KvjaxError] = PolicyError
) -> int:
    """Returns a whole number as an int.

    Raises:
      error: `value` is not a whole number from `minimum` to `maximum` (None = `LARGEST`). The message says `name`.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    most = LARGEST if maximum is None else maximum
    if not whole or not minimum <= value <= most:
        plain = maximum is None and not (whole and value > most)
        valid = f"of at least {minimum}" if plain else f"from {minimum} to {most}"
        raise error(f"{name} must be a whole number {valid}; got {shown(value)}.")
    return int(value)


def number_argument(
    name: str, value: Any, *, minimum: float, maximum: float, error: type[KvjaxError] = PolicyError
) -> float:
    """Returns a number as a float.

    Raises:
      error: `value` is not a number from `minimum` to `maximum`. The message says `name`.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not minimum <= value <= maximum:  # NaN fails this too
        raise error(f"{name} must be a number from {minimum:g} to {maximum:g}; got {shown(value)}.")
    return float(value)


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
                raise error(f"{function.__name__}(): {wrong}; it accepts {accepted}.") from None
            return function(*args, **kwargs)

        return call

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
            raise self.error(f"unknown {self.noun} {name!r}; known {self.plural}: {', '.join(sorted(self))}.")
        return self[name]
