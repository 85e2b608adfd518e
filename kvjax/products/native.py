"""Builds kvjax's own products with the machine's C++ compiler, once, and registers them as XLA custom calls.

jaxlib brings the headers. The library is kept in the user cache, by source, processor, compiler and version of jaxlib.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from kvjax import host

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
NAMES = ", ".join(source.name for source in SOURCES)
# Whether a product and a sum are rounded as one is said by the code: see Fma in vectors.h.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # after which a compiler is given up


@functools.cache
def load() -> str | None:
    """Makes the custom calls of `SYMBOLS` available to programs for CPUs.

    Returns:
      None, or why it is not available.
    """
    compiler = _compiler()
    if compiler is None:
        return f"there is no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH, and $CXX is not set"
    try:
        library = ctypes.CDLL(str(_built(compiler, FLAGS)))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return f"{compiler} cannot compile {NAMES}: {next((x for x in lines if 'error' in x), lines[-1])}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{NAMES} were not built: {error}"
    for target, symbol in SYMBOLS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return None


def _compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """Returns the compiled library."""
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    about = (*texts, " ".join(flags), compiler, host.processor(), importlib.metadata.version("jaxlib"))
    name = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    folder = host.user_cache() / "native"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is run
        # Processes that build it at the same time must not see half of it.
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            output = Path(unfinished) / library.name
            command = [*compiler.split(), *flags, f"-I{jax.ffi.include_dir()}", *map(str, SOURCES), "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
            output.replace(library)
    return library
