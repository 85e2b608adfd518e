"""Policies as text: a name, a call, a combination, or a factory in a file of your own.

h2o
h2o_decay(gamma=0.9, recent=16)
with_heavy_hitters(strided(stride=4, local=8), fraction=0.25)
after_prefill(snapkv(window=16), then=roco)
h2o(merge=d2o(beta=0.5))
mine.py:loudest(alpha=2)
"""

import ast
import difflib
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import ConfigError, PolicyError
from kvjax.policies import COMBINATORS, HEAD_PLANS, MERGES, POLICIES, Policy

_FILE = re.compile(r"([^\s(),=]+\.py):(\w+)")  # FILE.py:factory
Factory = Callable[..., Policy]


@functools.lru_cache(maxsize=None, typed=True)  # a budget of 1 slot is not 1.0 of the prompt
def build(text: str, **defaults: Any) -> Policy:
    """The policy that a text describes; its name is the text.

    Args:
      defaults: arguments for every policy in it that takes them and is not given them there. The same ones make the
        very same policy, so that nothing is compiled twice.

    Raises:
      ConfigError: a text that is none of the above, or an unknown name.
      PolicyError: arguments that a policy does not take, or values that cannot work.
    """
    node, files = _parsed(text)
    return _policy(node, files, defaults, text)._replace(name=text)


@functools.cache
def accepts(text: str) -> frozenset[str]:
    """Arguments that some policy of a text takes, its combinators aside.

    Raises:
      ConfigError: as `build`.
    """
    node, files = _parsed(text)
    return frozenset().union(*(_parameters(factory) for factory in _leaves(node, files, text)))


def _parsed(text: str) -> tuple[ast.expr, dict[str, tuple[str, str]]]:
    files: dict[str, tuple[str, str]] = {}

    def placeholder(match: re.Match[str]) -> str:
        name = f"__file{len(files)}"
        files[name] = (match[1], match[2])
        return name

    try:
        return ast.parse(_FILE.sub(placeholder, text.strip()), mode="eval").body, files
    except SyntaxError:
        raise ConfigError(
            f"policy {text!r} is not a policy's name, a call such as h2o_decay(gamma=0.9), or FILE.py:factory."
        ) from None


def _policy(node: ast.expr, files: dict[str, tuple[str, str]], defaults: dict[str, Any], text: str) -> Policy:
    factory, call = _factory(node, files, text)
    if isinstance(factory, Policy):
        return factory
    positional: list[Any] = []
    given: dict[str, Any] = {}
    for argument in call.args if call else ():
        positional.append(_value(argument, files, defaults, text))
    for keyword in call.keywords if call else ():
        if keyword.arg is None:
            raise ConfigError(f"policy {text!r}: ** has no meaning here.")
        given[keyword.arg] = _value(keyword.value, files, defaults, text)
    if factory not in COMBINATORS.values():
        taken = _parameters(factory) - set(list(inspect.signature(factory).parameters)[: len(positional)])
        given = {name: value for name, value in defaults.items() if name in taken} | given
    try:
        made = factory(*positional, **given)
    except TypeError as error:
        raise PolicyError(f"policy {text!r}: {error}.") from None
    if not isinstance(made, Policy):
        raise PolicyError(f"policy {text!r}: its factory returned {made!r}, not a policy; see kvjax.policies.evict.")
    return made


def _value(node: ast.expr, files: dict[str, tuple[str, str]], defaults: dict[str, Any], text: str) -> Any:
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Name) and called.id in MERGES:
        assert isinstance(node, ast.Call)
        return MERGES[called.id](
            *(_value(each, files, defaults, text) for each in node.args),
            **{k.arg: _value(k.value, files, defaults, text) for k in node.keywords if k.arg},
        )
    if isinstance(node, ast.Name) and node.id in MERGES:
        return MERGES[node.id]()
    if isinstance(node, ast.Name) and node.id in ("true", "false"):  # as flags are written
        return node.id == "true"
    if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and (node.id in POLICIES or node.id in files)):
        return _policy(node, files, defaults, text)
    if isinstance(node, ast.Name):  # pooling=max
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(f"policy {text!r}: {ast.unparse(node)} is no number, name or policy.") from None


def _factory(node: ast.expr, files: dict[str, tuple[str, str]], text: str) -> tuple[Factory | Policy, ast.Call | None]:
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name):
        raise ConfigError(f"policy {text!r}: {ast.unparse(name)} is not the name of a policy.")
    if name.id in files:
        return _from_file(*files[name.id]), call
    known: dict[str, Factory] = POLICIES | COMBINATORS | HEAD_PLANS
    if name.id not in known:
        close = difflib.get_close_matches(name.id, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown policy {name.id!r}; {hint}known policies: {', '.join(sorted(POLICIES))}; "
            f"combinators: {', '.join(sorted(COMBINATORS | HEAD_PLANS))}; or FILE.py:factory."
        )
    return known[name.id], call


def _leaves(node: ast.expr, files: dict[str, tuple[str, str]], text: str) -> Iterator[Factory]:
    factory, call = _factory(node, files, text)
    if factory in COMBINATORS.values() or factory is HEAD_PLANS["split_heads"]:
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)] if call else ():
            if isinstance(argument, ast.Call | ast.Name):
                yield from _leaves(argument, files, text)
    elif not isinstance(factory, Policy):
        yield factory


def _parameters(factory: Factory) -> frozenset[str]:
    return frozenset(inspect.signature(factory).parameters)


@functools.cache
def _from_file(path: str, name: str) -> Factory | Policy:
    if not Path(path).is_file():
        raise ConfigError(f"policy {path}:{name}: there is no file {path}.")
    module = _module(str(Path(path).resolve()))
    found = getattr(module, name, None)
    if not (callable(found) or isinstance(found, Policy)):
        raise ConfigError(f"policy {path}:{name}: the file has no factory and no policy of that name.")
    return found


@functools.cache
def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
