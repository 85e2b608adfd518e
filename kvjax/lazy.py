"""Names of a package that are imported when they are first used (PEP 562), so that importing the package takes no time.

A package lists its names in `attach`, and once more under ``TYPE_CHECKING``, where type checkers and editors look.
"""

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.arguments import plain_signature

#: Held while a name is imported. Without it, two threads that use their first names at once import parts of jax and
#: flax in different orders, and each finds modules that the other has not finished.
_importing = threading.RLock()
#: Seconds that a thread waits for it. One that waits within an import statement holds the lock of a module, for which
#: the other may wait in turn.
_PATIENCE = 20.0


def attach(package: str, names: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
      package: its ``__name__``.
      names: module -> the public names that are imported from it. Modules of the package are found without.
    """
    modules = {name: module for module, listed in names.items() for name in listed}

    def load(name: str) -> Any:
        """Imports a public name, or a module of the package."""
        if name.startswith("__"):  # that Python and other programs look for in every module
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        acquired = _importing.acquire(timeout=_PATIENCE)
        try:
            if name in modules:
                value = getattr(importlib.import_module(modules[name]), name)
                if inspect.isfunction(value):
                    plain_signature(value)
            else:
                value = _module(package, name)
        finally:
            if acquired:
                _importing.release()
        setattr(sys.modules[package], name, value)  # the next time it is found without this function
        return value

    def listed() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*own, *modules, *own.get("__all__", ())})

    return load, listed


def _module(package: str, name: str) -> Any:
    """Imports a module of a package.

    Raises:
      AttributeError: there is no such module.
    """
    module = f"{package}.{name}"
    if not name.startswith("_"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
