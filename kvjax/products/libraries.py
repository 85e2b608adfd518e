"""The C++ libraries of kvjax's own products: their sources, symbols and flags, and how a wheel names those it brings.

It imports nothing but the standard library, since the backend that builds wheels reads it without what kvjax needs.
"""

import dataclasses
import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
TARGET, SLOTS = "kvjax_product", "kvjax_slots"  # see native.cc
ATTEND = "kvjax_attend"  # see attend.cc
# The same for one of several layers, whose index is an operand.
INDEXED_PRODUCT, INDEXED_SLOTS, INDEXED_ATTEND = "kvjax_indexed_product", "kvjax_indexed_slots", "kvjax_indexed_attend"
CODED_VECTORS, CODED_WEIGHTS = "kvjax_coded_vectors", "kvjax_coded_weights"  # see codes.cc and weights.cc
INDEXED_CODED_VECTORS, INDEXED_CODED_WEIGHTS = "kvjax_indexed_coded_vectors", "kvjax_indexed_coded_weights"


@dataclasses.dataclass(frozen=True)
class Indexed:
    """The form of a custom call for slices of stacks; it has the index of the slices as one more, last operand.

    Attributes:
      target: its name.
      stacks: the operands that are stacks.
      optional: the operands that may be stacks or slices.
    """

    target: str
    stacks: tuple[int, ...]
    optional: tuple[int, ...] = ()


INDEXED = {
    SLOTS: Indexed(INDEXED_SLOTS, (1,)),
    ATTEND: Indexed(INDEXED_ATTEND, (1, 2)),
    CODED_VECTORS: Indexed(INDEXED_CODED_VECTORS, (1,), optional=(2, 3)),
}
HEADERS = tuple(FOLDER / name for name in ("vectors.h", "caches.h", "slots.h", "levels.h"))
# Whether a product and a sum are rounded as one is said by the code: see Fma in vectors.h.
_SHARED_FLAGS = ("-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
FLAGS = ("-O3", "-march=native", *_SHARED_FLAGS)
#: Of a wheel's libraries, for every x86-64 processor with AVX2.
PREBUILT_FLAGS = ("-O3", "-march=x86-64-v3", *_SHARED_FLAGS)
#: Instructions of x86-64-v3, as Linux names them.
PREBUILT_INSTRUCTIONS = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
PREBUILT_FOLDER = FOLDER / "prebuilt"
DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of custom calls.

    Attributes:
      source: the name of its C++ file in this folder.
      symbols: (name of a custom call, its function in C++) of each.
    """

    source: str
    symbols: tuple[tuple[str, str], ...]

    @property
    def path(self) -> Path:
        """The C++ file."""
        return FOLDER / self.source

    @property
    def prebuilt(self) -> Path:
        """The library that a wheel brings, named by the sources from which it is built; it need not exist."""
        texts = (path.read_bytes() for path in (self.path, *HEADERS))
        digest = hashlib.sha256(b"\n".join(texts)).hexdigest()[:DIGITS]
        return PREBUILT_FOLDER / f"{self.path.stem}-{digest}.so"


LIBRARIES = (
    Library(
        "native.cc",
        (
            (TARGET, "KvjaxProduct"),
            (SLOTS, "KvjaxSlots"),
            (INDEXED_PRODUCT, "KvjaxIndexedProduct"),
            (INDEXED_SLOTS, "KvjaxIndexedSlots"),
        ),
    ),
    Library("attend.cc", ((ATTEND, "KvjaxAttend"), (INDEXED_ATTEND, "KvjaxIndexedAttend"))),
    Library(
        "codes.cc",
        (
            (CODED_VECTORS, "KvjaxCodedVectors"),
            (INDEXED_CODED_VECTORS, "KvjaxIndexedCodedVectors"),
        ),
    ),
    Library(
        "weights.cc",
        (
            (CODED_WEIGHTS, "KvjaxCodedWeights"),
            (INDEXED_CODED_WEIGHTS, "KvjaxIndexedCodedWeights"),
        ),
    ),
)
