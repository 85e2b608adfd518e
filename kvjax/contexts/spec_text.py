"""Reads a `CacheSpec` back from its `repr`, without running anything but constructors of kvjax's dataclasses."""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from kvjax.cache.spec import CacheSpec
from kvjax.specs import expressions

PACKAGES = ("kvjax.policies", "kvjax.storage", "kvjax.selection", "kvjax.numerics.statistics")


def read(text: str) -> CacheSpec:
    """Returns the spec whose `repr` is a text.

    Raises:
      ValueError: the text is not one of a spec, or the spec is made of something else than dataclasses of kvjax.
    """
    made = _value(expressions.parse(text))
    if not isinstance(made, CacheSpec) or repr(made) != text:
        raise ValueError("is not the text of a spec")
    return made


@functools.cache
def _classes() -> dict[str, Any]:
    """Returns the dataclasses of policies, storages and selections by name; None where two have the same name."""
    found: dict[str, Any] = {"CacheSpec": CacheSpec}
    for package in PACKAGES:
        module = importlib.import_module(package)
        inner = pkgutil.iter_modules(getattr(module, "__path__", []))
        modules = [module, *(importlib.import_module(f"{package}.{each.name}") for each in inner)]
        for each in modules:
            for name, value in vars(each).items():
                if inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__module__ == each.__name__:
                    found[name] = value if found.get(name, value) is value else None
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case ast.Set(elts=items):
            return set(map(_value, items))
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Call(func=ast.Name(id=name), args=given, keywords=keywords):
            function: Callable[..., Any] | None = frozenset if name == "frozenset" else _classes().get(name)
            if function is None or any(each.arg is None for each in keywords):
                raise ValueError(f"names {name}, which is not a dataclass of kvjax")
            return function(*map(_value, given), **{str(each.arg): _value(each.value) for each in keywords})
    raise ValueError("contains something else than dataclasses and constants")
