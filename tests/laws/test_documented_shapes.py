"""The shapes that docstrings give are those of the arrays that functions get.

Shapes are written once, in docstrings, where readers see them beside the meaning of an argument; annotations would say
them again and need another package. Here every function of kvjax whose docstring gives shapes is replaced by one that
compares them with its arguments while products of the registries are traced.
"""

import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import kvjax
from kvjax.cache import CacheSpec
from tests import examples
from tests.laws import test_products as products

pytestmark = pytest.mark.thorough

#: An argument, or an attribute of a tuple, whose description begins with a shape: its name and its first sentence.
DESCRIBED = re.compile(r"^\s+(\w+): (\[.*?)(?:\. |\.?$|; (?!if))", re.MULTILINE)
SHAPE = re.compile(r"\[([^\[\]]+)\]")
NAME = re.compile(r"[A-Za-z]\w*'?")
#: Functions of fewer checked calls than this would mean that the law looks at nothing.
ENOUGH = 100


Shapes = tuple[tuple[str, ...], ...]  # alternatives


def documented(thing: Callable[..., Any], section: str) -> dict[str, Shapes]:
    """Name -> the shapes that an argument of a function, or an attribute of a tuple, may have.

    Args:
      thing: a function or a class.
      section: of its docstring, "Args" or "Attributes".
    """
    _, _, text = (inspect.getdoc(thing) or "").partition(f"{section}:\n")
    text = re.split(r"\n(?:Returns|Raises):\n", text)[0]
    return {
        name: tuple(tuple(each.strip() for each in dims.split(",")) for dims in SHAPE.findall(said))
        for name, said in DESCRIBED.findall(text)
    }


def fits(shapes: Shapes, shape: tuple[int, ...], bound: dict[str, int]) -> bool:
    """Whether a shape is one of those that are documented; binds names of dimensions that are new."""
    for dims in shapes:
        known = dict(bound)
        if not mismatch(dims, shape, known):
            bound.update(known)
            return True
    return not shapes


def mismatch(dims: tuple[str, ...], shape: tuple[int, ...], bound: dict[str, int]) -> bool:
    """Whether a shape is not the documented one; binds names of dimensions that are new.

    Args:
      dims: as documented: a number, a name, an expression (of any size), or ``...`` and ``*name`` (of any number).
      shape: of an array.
      bound: name -> size, of the same call.
    """
    for place, each in enumerate(dims):
        if each == "..." or each.startswith("*"):
            rest = dims[place + 1 :]
            if any(other == "..." or other.startswith("*") for other in rest):
                return False
            count = len(shape) - len(rest)
            return count < place or mismatch(rest, shape[count:], bound)
        if place >= len(shape):
            return True
        size = shape[place]
        if each.isdigit():
            wrong = size != int(each)
        elif NAME.fullmatch(each):
            wrong = bound.setdefault(each, size) != size
        else:
            wrong = False
        if wrong:
            return True
    return len(shape) != len(dims)


def modules() -> Iterator[types.ModuleType]:
    """Every module of kvjax that is imported here; kernels of other platforms may not be."""
    for found in pkgutil.walk_packages(kvjax.__path__, "kvjax."):
        if not re.search(r"_gpu|hopper|__main__|\.serve|\.lm_eval", found.name):
            yield importlib.import_module(found.name)


class Checked:
    """Replaces functions and methods of kvjax, and remembers what is wrong.

    Attributes:
      calls: name of a function -> the number of its calls.
      wrong: name of a function and an argument -> the first call that differs from the docstring.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.wrong: dict[str, str] = {}

    def check(self, name: str, shapes: Mapping[str, Shapes], given: Mapping[str, Any]) -> None:
        """Compares the arrays of a call with the documented shapes."""
        bound: dict[str, int] = {}
        self.calls[name] = self.calls.get(name, 0) + 1
        for argument, alternatives in shapes.items():
            shape = getattr(given.get(argument), "shape", None)
            if isinstance(shape, tuple) and not fits(alternatives, shape, bound):
                said = " or ".join(f"[{', '.join(dims)}]" for dims in alternatives)
                self.wrong.setdefault(f"{name}, {argument}", f"documented as {said}, got {list(shape)}, where {bound}")

    def function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """The function that replaces another one; None if its docstring gives no shapes."""
        signature, name = inspect.signature(function), f"{function.__module__}.{function.__qualname__}"
        shapes = {arg: dims for arg, dims in documented(function, "Args").items() if arg in signature.parameters}
        if not shapes or inspect.isgeneratorfunction(function):
            return None

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.check(name, shapes, signature.bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return run

    def tuple_of(self, cls: Any) -> Callable[..., Any] | None:
        """The constructor that replaces that of a named tuple; None if its docstring gives no shapes."""
        shapes = {name: dims for name, dims in documented(cls, "Attributes").items() if name in cls._fields}
        if not shapes:
            return None
        make, name = cls.__new__, f"{cls.__module__}.{cls.__qualname__}"

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made = make(cls, *args, **kwargs)
            self.check(name, shapes, made._asdict())
            return made

        return new

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces what has shapes, wherever it is imported."""
        every = list(modules())
        made: dict[int, Callable[..., Any]] = {}
        for module in every:
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                if inspect.isfunction(value) and (new := self.function(value)):
                    made[id(value)] = new
                elif inspect.isclass(value):
                    if hasattr(value, "_fields") and (new := self.tuple_of(value)):
                        monkeypatch.setattr(value, "__new__", new)
                    for name, method in list(vars(value).items()):
                        if inspect.isfunction(method) and (new := self.function(method)):
                            monkeypatch.setattr(value, name, new)
        for module in every:
            for name, value in list(vars(module).items()):
                if id(value) in made:
                    monkeypatch.setattr(module, name, made[id(value)])


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Functions of kvjax compare their arguments' shapes with their docstrings."""
    found = Checked()
    found.install(monkeypatch)
    return found


def specs() -> Iterator[CacheSpec]:
    """Every policy, storage and selection, and plans of heads and combinations, each with plain others."""
    dense, all_read, h2o = examples.held("dense"), examples.chosen("everything"), examples.policy("h2o")
    for policy in products.POLICY.values():
        yield CacheSpec(policy, dense, all_read)
    for storage in products.STORAGE.values():
        for policy in (examples.policy("full"), h2o):
            yield CacheSpec(policy, storage, all_read)
    for selection in products.SELECTION.values():
        yield CacheSpec(examples.policy("full"), dense, selection)
        yield CacheSpec(h2o, dense, selection)


@pytest.mark.sampled(0)
def test_shapes_are_as_documented(checked: Checked) -> None:
    """In prompts of one shot and in blocks, and in steps."""
    for number, spec in enumerate(specs()):
        try:
            products.trace(spec, (None, 8)[number % 2])
        except kvjax.KvjaxError:
            continue  # refused, as test_products checks
    assert not checked.wrong, "\n".join(f"{where}: {said}" for where, said in sorted(checked.wrong.items()))
    assert len(checked.calls) >= ENOUGH, f"{len(checked.calls)} functions were called: {sorted(checked.calls)}"


@pytest.mark.parametrize(
    ("dims", "shape", "wrong"),
    [
        (("B", "K", "S"), (2, 3, 4), False),
        (("B", "K"), (2, 3, 4), True),
        (("B", "B"), (2, 3), True),
        (("B", "1"), (2, 1), False),
        (("B", "1"), (2, 2), True),
        (("...", "D"), (2, 3, 4), False),
        (("D", "...", "D"), (4, 3, 4), False),
        (("D", "...", "D"), (4, 3, 5), True),
        (("B", "S + n"), (2, 9), False),
    ],
)
def test_a_mismatch_is_found(dims: tuple[str, ...], shape: tuple[int, ...], wrong: bool) -> None:
    assert mismatch(dims, shape, {}) == wrong
