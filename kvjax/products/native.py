"""Makes kvjax's own products available as XLA custom calls: libraries that were built before, or that it builds.

There is a library for each source, loaded when one of its calls is first needed. The best one is built for this machine
(`kvjax.products.build`) and kept. Until there is one, that of the wheel is used, if kvjax was installed from a wheel
that brings it. Otherwise programs are traced without it while it is built, which takes seconds and happens once on a
machine, so that the first token comes soon; several are built side by side. Commands that measure, and servers, call
`await_native` first.
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
    "LIBRARIES",
    "SLOTS",
    "SOURCES",
    "TARGET",
    "Library",
    "await_native",
    "begin",
    "load",
    "register",
]

BUILDING = "it is being built, which happens once on a machine"
SOURCES = tuple(library.path for library in LIBRARIES)
WIDER = "avx512f"  # instructions of this machine for which a library of its own is faster than a wheel's
_OF_TARGET = {target: library for library in LIBRARIES for target, _ in library.symbols}

log = logging.getLogger(__name__)


class _Process:
    """The state of this process: library -> why it is not available, or None, when that is known."""

    lock = threading.Lock()
    started: dict[Library, "Future[str | None]"] = {}  # noqa: RUF012
    waits = False


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
    brought = _prebuilt(library) if found is None else None
    ready = found or brought
    if ready is not None:
        _register(library, ready)
        if brought is not None and reason is None and WIDER in host.instructions():
            # For the next process: in this one, programs may have been traced with the wheel's.
            ThreadPoolExecutor(1).submit(build.library, recipe)
        return _known(None)
    if reason is not None:
        return _known(reason)
    log.info("building %s: once on this machine, some seconds", library.source)
    # Python waits for the thread when the process ends, so that the next one finds the library.
    return ThreadPoolExecutor(1).submit(register, library, FLAGS)


def _prebuilt(library: Library) -> ctypes.CDLL | None:
    """Returns the library that kvjax's wheel brings, or None if there is none or this processor cannot run it."""
    if not library.prebuilt.exists() or not host.instructions() >= PREBUILT_INSTRUCTIONS:
        return None
    try:
        return ctypes.CDLL(str(library.prebuilt))
    except OSError as error:  # for example of a system with an older C++ library
        log.info("%s cannot be loaded: %s", library.prebuilt.name, error)
        return None


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
