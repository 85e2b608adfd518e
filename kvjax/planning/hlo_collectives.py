"""The collectives of a compiled program: what devices send to each other."""

import functools
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVE = re.compile(
    r"= (?P<shape>[^=]*?) (?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*?^\}", re.MULTILINE | re.DOTALL)
LOOP = re.compile(r" while\(.*?condition=%?(?P<condition>[\w.\-]+), body=%?(?P<body>[\w.\-]+)")
CALLED = re.compile(
    r"(?:body|calls|to_apply|called_computations|branch_computations)=\{?(?P<names>%[^}\s]*(?:, %[^}\s]*)*)"
)
#: The condition of a loop over a number of iterations that the program knows, from 0.
BOUND = re.compile(r"= s32\[\]\S* constant\((?P<count>\d+)\)(?=.*ROOT [^\n]* compare\([^\n]*direction=LT)", re.DOTALL)
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

    Those of a loop over layers within the step count once for each layer.

    Args:
      text: the optimised HLO of the program.
    """
    bodies = {match["name"]: match[0] for match in COMPUTATION.finditer(text)}
    count, moved = 0, 0
    for name, times in _times(bodies).items():
        for match in COLLECTIVE.finditer(bodies[name]):
            sizes = [
                BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
                for kind, dims in ARRAY.findall(match["shape"])
            ]
            # An asynchronous one returns its operand too; the result is the larger.
            sent = max(sizes, default=0) * (2 if match["kind"] == "all-reduce" else 1)
            count, moved = count + times, moved + times * sent
    return Collectives(count, moved)


def _times(bodies: dict[str, str]) -> dict[str, int]:
    """Returns how often each computation runs in a step: the product of the iterations of the loops around it."""
    callers: dict[str, list[tuple[str, int]]] = {name: [] for name in bodies}
    for caller, body in bodies.items():
        trips = {match["body"]: _iterations(bodies.get(match["condition"], "")) for match in LOOP.finditer(body)}
        for match in CALLED.finditer(body):
            for name in re.findall(r"[\w.\-]+", match["names"]):
                if name in callers:
                    callers[name].append((caller, trips.get(name, 1)))

    @functools.cache
    def times(name: str) -> int:
        return max((times(caller) * trips for caller, trips in callers[name]), default=1)

    return {name: times(name) for name in bodies}


def _iterations(condition: str) -> int:
    """Returns the iterations of a loop; 1 if they depend on data, as those of the loop over steps."""
    bound = BOUND.search(condition)
    return int(bound["count"]) if bound else 1
