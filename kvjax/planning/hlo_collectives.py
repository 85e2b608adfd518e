"""The collectives of a compiled program: what devices send to each other."""

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVE = re.compile(
    r"= (?P<shape>[^=]*?) (?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([\d,]*)\]")


class Collectives(NamedTuple):
    """The collectives of a decode step.

    Attributes:
      number: how many there are.
      moved: bytes that a device sends: those of the result, twice for an all-reduce.
    """

    number: float
    moved: float


def collectives(text: str) -> Collectives:
    """Counts the collectives of a compiled decode loop, whose body is one step.

    Args:
      text: the optimised HLO of the program.
    """
    count, moved = 0, 0
    for match in COLLECTIVE.finditer(text):
        sizes = [
            BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
            for kind, dims in ARRAY.findall(match["shape"])
        ]
        # An asynchronous one returns its operand too; the result is the larger.
        count, moved = count + 1, moved + max(sizes, default=0) * (2 if match["kind"] == "all-reduce" else 1)
    return Collectives(count, moved)
