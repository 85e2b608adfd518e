"""Makes kvjax's own products, which `kvjax.products.build` builds, available as XLA custom calls.

There is a library for each source, built when one of its calls is first needed; several are built side by side. While
one is built, which takes seconds and happens once on a machine, programs are traced without it, so that the first token
comes soon. Commands that measure, and servers, call `await_native` first.
"""

import ctypes
import dataclasses
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from kvjax.products import build

TARGET, SLOTS = "kvjax_product", "kvjax_slots"  # see native.cc
ATTEND = "kvjax_attend"  # see attend.cc
CODED_VECTORS, CODED_WEIGHTS = "kvjax_coded_vectors", "kvjax_coded_weights"  # see codes.cc
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "slots.h"))
# Whether a product and a sum are rounded as one is said by the code: see Fma in vectors.h.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
BUILDING = "it is being built, which happens once on a machine"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of custom calls.

    Attributes:
      source: the name of its C++ file in this folder.
      symbols: (name of a custom call, its function in C++) of each.
    """

    source: str
    symbols: tuple[tuple[str, str], ...]

    def recipe(self, flags: tuple[str, ...]) -> build.Recipe:
        """Returns how the library is built with flags of the compiler."""
        return build.Recipe((Path(__file__).with_name(self.source),), HEADERS, flags)


LIBRARIES = (
    Library("native.cc", ((TARGET, "KvjaxProduct"), (SLOTS, "KvjaxSlots"))),
    Library("attend.cc", ((ATTEND, "KvjaxAttend"),)),
    Library("codes.cc", ((CODED_VECTORS, "KvjaxCodedVectors"), (CODED_WEIGHTS, "KvjaxCodedWeights"))),
)
SOURCES = tuple(path for library in LIBRARIES for path in library.recipe(FLAGS).sources)
_OF_TARGET = {target: library for library in LIBRARIES for target, _ in library.symbols}


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
            recipe = library.recipe(FLAGS)
            try:
                found = build.kept(recipe)
            except build.BuildError as error:
                _Process.started[library] = _known(str(error))
            else:
                if found is not None:
                    _register(library, found)
                    _Process.started[library] = _known(None)
                else:
                    log.info("building %s: once on this machine, some seconds", library.source)
                    # Python waits for the thread when the process ends, so that the next one finds the library.
                    _Process.started[library] = ThreadPoolExecutor(1).submit(register, library, FLAGS)
        return _Process.started[library]


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
        found = build.library(library.recipe(flags))
    except build.BuildError as error:
        return str(error)
    _register(library, found, suffix)
    return None


def _register(library: Library, found: ctypes.CDLL, suffix: str = "") -> None:
    for target, symbol in library.symbols:
        jax.ffi.register_ffi_target(target + suffix, jax.ffi.pycapsule(getattr(found, symbol)), platform="cpu")
