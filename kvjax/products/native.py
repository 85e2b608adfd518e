"""Makes kvjax's own products, which `kvjax.products.build` builds, available as XLA custom calls."""

import threading
from pathlib import Path

import jax

from kvjax.products import build

TARGET, SLOTS = "kvjax_product", "kvjax_slots"  # see native.cc
ATTEND = "kvjax_attend"  # see attend.cc
CODED_VECTORS, CODED_WEIGHTS = "kvjax_coded_vectors", "kvjax_coded_weights"  # see codes.cc
SYMBOLS = {
    TARGET: "KvjaxProduct",
    SLOTS: "KvjaxSlots",
    ATTEND: "KvjaxAttend",
    CODED_VECTORS: "KvjaxCodedVectors",
    CODED_WEIGHTS: "KvjaxCodedWeights",
}
SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.cc", "attend.cc", "codes.cc"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "slots.h"))
# Whether a product and a sum are rounded as one is said by the code: see Fma in vectors.h.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")


class _Process:
    """The state of this process: `reason` is that of `load`, once `tried`."""

    lock = threading.Lock()
    tried = False
    reason: str | None = None


def load() -> str | None:
    """Makes the custom calls of `SYMBOLS` available to programs for CPUs, once in a process.

    Returns:
      None, or why they are not available.
    """
    with _Process.lock:
        if not _Process.tried:
            _Process.reason, _Process.tried = register(FLAGS), True
        return _Process.reason


def register(flags: tuple[str, ...], suffix: str = "") -> str | None:
    """Builds the library with some flags, and registers its functions; see `load`.

    Args:
      flags: of the compiler.
      suffix: of the names of the custom calls.
    """
    try:
        library = build.library(SOURCES, HEADERS, flags)
    except build.BuildError as error:
        return str(error)
    for target, symbol in SYMBOLS.items():
        jax.ffi.register_ffi_target(target + suffix, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return None
