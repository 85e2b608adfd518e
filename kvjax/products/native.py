"""Makes kvjax's own products available as XLA custom calls: libraries that were built before, or that it builds.

There is a library for each source, loaded when one of its calls is first needed. The best one is built for this machine
(`kvjax.products.build`) and kept. Until there is one, that of the wheel is used, if kvjax was installed from a wheel
that brings it; it is built for AVX2, and stays if the machine has no wider vectors. Otherwise programs are traced
without it while it is built, which takes seconds and happens once on a machine, so that the first token comes soon;
several are built side by side. Commands that measure, and servers, call `await_native` first.
"""

import ctypes
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from kvjax import host
from kvjax.products import build
from kvjax.products.libraries import (
    ATTEND,
    CODED_VECTORS,
    CODED_WEIGHTS,
    FLAGS,
    HEADERS,
    INDEXED_CODED_VECTORS,
    INDEXED_CODED_WEIGHTS,
    INDEXED_PRODUCT,
    LIBRARIES,
    PREBUILT_INSTRUCTIONS,
    SLOTS,
    TARGET,
    Library,
)

__all__ = [
    "ATTEND",
    "BUILDING",
    "CODED_VECTORS",
    "CODED_WEIGHTS",
    "FLAGS",
    "HEADERS",
    "INDEXED_CODED_VECTORS",
    "INDEXED_CODED_WEIGHTS",
    "INDEXED_PRODUCT",
    "LIBRARIES",
    "SLOTS",
    "SOURCES",
    "TARGET",
    "Library",
    "await_native",
    "begin",
    "load",
    "register",
    "uses_prebuilt",
]

BUILDING = "it is being built, which happens once on a machine"
SOURCES = tuple(library.path for library in LIBRARIES)
WIDE_VECTORS = "avx512f"  # instructions that libraries of wheels do not use
_OF_TARGET = {target: library for library in LIBRARIES for target, _ in library.symbols}

log = logging.getLogger(__name__)


class _Process:
    """The state of this process: library -> why it is not available, or None, when that is known."""

    lock = threading.Lock()
    started: dict[Library, "Future[str | None]"] = {}  # noqa: RUF012
    waits = False
    prebuilt = False


def load(target: str = TARGET) -> str | None:
    """Makes a custom call available to programs for CPUs, once in a process.

    Args:
      target: the name of the custom call.

    Returns:
      None, or why it is not available; see `await_native`.
    """
    started = _start(_OF_TARGET[target])
    if not (started.done() or _Process.waits):
        return BUILDING
    return started.result()


def begin() -> None:
    """Starts to build the libraries that every model needs, side by side, and does not wait for them."""
    for target in (TARGET, ATTEND):
        _start(_OF_TARGET[target])


def await_native() -> None:
    """Makes this process wait for a library that is being built, so that its programs do not depend on timing."""
    _Process.waits = True


def _start(library: Library) -> "Future[str | None]":
    with _Process.lock:
        if library not in _Process.started:
            _Process.started[library] = _started(library)
        return _Process.started[library]


def _started(library: Library) -> "Future[str | None]":
    """Registers a library that is there, or starts to build it."""
    recipe, reason = recipe_of(library, FLAGS), None
    try:
        found = build.kept(recipe)
    except build.BuildError as error:
        found, reason = None, str(error)
    if found is not None:
        _register(library, found)
        return _known(None)
    wider = reason is None and WIDE_VECTORS in host.instructions()
    # A process that measures waits for the library that later ones use.
    if not (wider and _Process.waits) and _register_prebuilt(library):
        if wider:
            # For the next process: in this one, programs may have been traced with the wheel's.
            ThreadPoolExecutor(1).submit(build.library, recipe)
        return _known(None)
    if reason is not None:
        return _known(reason)
    log.info("building %s, once per machine; this takes some seconds", library.source)
    # Python waits for the thread when the process ends, so that the next one finds the library.
    return ThreadPoolExecutor(1).submit(_built, library)


def _built(library: Library) -> str | None:
    """Builds and registers a library, or registers that of the wheel if the compiler fails; see `register`."""
    reason = register(library, FLAGS)
    return None if reason is not None and _register_prebuilt(library) else reason


def _register_prebuilt(library: Library) -> bool:
    """Registers the library that kvjax's wheel brings; returns whether there is one that runs here."""
    if not library.prebuilt.exists() or not host.instructions() >= PREBUILT_INSTRUCTIONS:
        return False
    try:
        _register(library, ctypes.CDLL(str(library.prebuilt)))
    # OSError: a system with an older C++ library. Others: a jax that is older than the one it was built with.
    except Exception as error:
        log.info("%s cannot be used: %s", library.prebuilt.name, error)
        return False
    _Process.prebuilt = True
    return True


def uses_prebuilt() -> bool:
    """Returns whether this process uses a library that kvjax's wheel brought, whose speed may be another."""
    return _Process.prebuilt


def recipe_of(library: Library, flags: tuple[str, ...]) -> build.Recipe:
    """Returns how a library is built with flags of the compiler."""
    return build.Recipe((library.path,), HEADERS, flags)


def _known(reason: str | None) -> "Future[str | None]":
    future: Future[str | None] = Future()
    future.set_result(reason)
    return future


def register(library: Library, flags: tuple[str, ...], suffix: str = "") -> str | None:
    """Builds a library with some flags, and registers its functions; see `load`.

    Args:
      library: one of `LIBRARIES`.
      flags: of the compiler.
      suffix: of the names of the custom calls.
    """
    try:
        found = build.library(recipe_of(library, flags))
    except build.BuildError as error:
        return str(error)
    _register(library, found, suffix)
    return None


def _register(library: Library, found: ctypes.CDLL, suffix: str = "") -> None:
    for target, symbol in library.symbols:
        jax.ffi.register_ffi_target(target + suffix, jax.ffi.pycapsule(getattr(found, symbol)), platform="cpu")
