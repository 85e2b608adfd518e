"""Storages: how slots hold keys and values. A new one is a factory in its family's file and one line of `STORAGES`."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvjax.errors import StorageError
from kvjax.storage.base import Codec, Exact, Storage, round_trip, slots
from kvjax.storage.dense import dense
from kvjax.storage.fp8 import Fp8, fp8
from kvjax.storage.integer import Integer, int2, int4, int8, integer
from kvjax.storage.packing import pack, unpack

#: Every named storage: the command line, sweeps and conformance tests take the list from here.
STORAGES: dict[str, Callable[..., Storage]] = {
    "dense": dense,
    "int8": int8,
    "int4": int4,
    "int2": int2,
    "integer": integer,
    "fp8": fp8,
}


def by_name(name: str, **arguments) -> Storage:
    """The storage `name` of `STORAGES`, built with `arguments`.

    Raises:
      StorageError: an unknown name, an argument it does not take, or values that cannot work.
    """
    return _factory(name)(**arguments)


def accepts(name: str) -> frozenset[str]:
    """The argument names that storage `name` takes."""
    return frozenset(inspect.signature(_factory(name)).parameters)


def _factory(name: str) -> Callable[..., Storage]:
    if name not in STORAGES:
        raise StorageError(f"unknown storage {name!r}; known storages: {', '.join(sorted(STORAGES))}.")
    return STORAGES[name]


if TYPE_CHECKING:
    from kvjax.cache.replay import breakdown, nbytes, read, replay


def __getattr__(name: str) -> Any:
    """`replay`, `read`, `nbytes` and `breakdown`, which run the cache that is built on this package."""
    if name in ("breakdown", "nbytes", "read", "replay"):
        from kvjax.cache import replay as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "STORAGES", "Codec", "Exact", "Fp8", "Integer", "Storage", "accepts", "breakdown", "by_name", "dense", "fp8",
    "int2", "int4", "int8", "integer", "nbytes", "pack", "read", "replay", "round_trip", "slots", "unpack",
]  # fmt: skip
