"""The memory and collectives of a batch: from the shapes of the whole model, and from programs of few layers.

Weights and cache are counted from shapes. Scratch memory and collectives are known to a compiler alone, and grow by the
same amount with every layer: programs of three and of four layers are compiled and extrapolated. Where prompts are run
by one program, the order in which the compiler runs the evictions of all layers is known from a program of all layers
alone. That of TPUs says within seconds how much memory a program would take that is too large. Where they call a
program of a layer for each of them, that is as large whatever their number.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvjax.models.config import DecoderConfig
from kvjax.planning import Plan
from kvjax.planning.hlo_collectives import Collectives
from kvjax.policies.base import Policy

DEPTHS = (3, 4)  # layers of the programs that are compiled
PHASES = ("decode", "prefill")
#: A phase that needs less than this share of what the other one needs is not compiled again for another batch.
CLOSE = 0.9
#: What the compiler of TPUs says of a program that is too large, arguments and results included.
USED = re.compile(r"(?:Used |HLO temporaries \()([\d.]+)([KMG])\)? (?:of|exceeds)")
UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}
P = TypeVar("P", bound=Policy)


class Need(NamedTuple):
    """The memory and the collectives of a batch.

    Attributes:
      rows: the batch.
      held: bytes of weights and cache.
      decode: bytes beyond these, to decode.
      prefill: bytes beyond these, to run the prompts.
      collectives: of a decode step.
      programs: the number of programs that were compiled for it, and for the batches before it.
      seconds: wall time of compiling them.
      refused: whether the compiler refused one of them, so that the bytes are not known.
    """

    rows: int
    held: float
    decode: float
    prefill: float
    collectives: Collectives
    programs: int
    seconds: float
    refused: bool = False

    @property
    def peak(self) -> float:
        """Bytes that the larger of both phases needs in all."""
        return self.held + max(self.decode, self.prefill)

    def scaled(self, rows: int) -> "Need":
        """Returns what another batch would need, if all but the weights were in proportion to the rows."""
        share, (number, moved) = rows / self.rows, self.collectives
        return self._replace(
            rows=rows, decode=self.decode * share, prefill=self.prefill * share,
            collectives=Collectives(number, moved * share),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose batch is open.

    Attributes:
      config: the decoder.
      plan: `kvjax.planning.plan` with everything but the decoder, the batch and the mesh.
      axes: of the mesh.
      one: the plan, from shapes alone, of one row; its arrays have as many as divide evenly over the mesh.
    """

    config: DecoderConfig
    plan: Callable[..., Plan]
    axes: str
    one: Plan

    def held(self, rows: int) -> float:
        """Returns the bytes of weights and cache."""
        return self.one.weights + self.one.cache * rows / self.one.rows

    def need(self, rows: int, before: Need | None = None) -> Need:
        """Counts what a batch needs.

        Args:
          rows: the batch.
          before: what another batch needs. Of its phases, only the one that needs more is compiled again, unless both
            need about as much.
        """
        known = before and before.scaled(rows)
        peak = max(known.decode, known.prefill) + self.held(rows) if known else 0.0
        phases = [
            phase for phase in PHASES if not known or getattr(known, phase) + self.held(rows) >= CLOSE * peak
        ]  # fmt: skip
        depths = self._depths
        few = [self._few(depth, rows, **{phase: phase in phases for phase in PHASES}) for depth in depths]
        programs = (known.programs if known else 0) + len(depths) * len(phases)
        seconds = (known.seconds if known else 0.0) + sum(each.compile_seconds for each in few)
        scratch = {phase: getattr(known, phase) if known else 0.0 for phase in PHASES}
        for phase in phases:
            scratch[phase] = self._beyond(phase, few)
        asked = known.collectives if known else Collectives(0, 0)
        if "decode" in phases:
            asked = self._collectives(few)
        refused = any(each.problem for each in few)
        return Need(rows, self.held(rows), scratch["decode"], scratch["prefill"], asked, programs, seconds, refused)

    def collectives(self, rows: int, **options: Any) -> Collectives:
        """Returns the collectives of a decode step with other arguments of `kvjax.planning.plan`."""
        return self._collectives(
            [self._few(depth, rows, decode=True, prefill=False, **options) for depth in self._depths]
        )

    def whole(self, rows: int) -> float | None:
        """Returns the bytes of the prefill program of all layers; None if the compiler does not say how many.

        One program of all layers that fits is compiled to its end, which takes minutes; one that does not is refused
        within seconds.
        """
        made = self.plan(self.config, batch=rows, mesh_axes=self.axes, decode=False, prefill=True)
        if made.problem:
            used = USED.search(made.problem)
            return float(used[1]) * UNITS[used[2]] if used else None
        return float(made.prefill_total or 0)

    @property
    def _depths(self) -> tuple[int, ...]:
        """The number of layers of each program."""
        layers = self.config.num_layers
        return DEPTHS if layers > max(DEPTHS) else (layers,)

    def _few(self, depth: int, rows: int, **options: Any) -> Plan:
        config, by_layer = shallow_config(self.config, depth), self.one.by_layer
        return self.plan(config, batch=rows, mesh_axes=self.axes, by_layer=by_layer, **options)

    def _beyond(self, phase: str, few: Sequence[Plan]) -> float:
        """Returns the bytes of a program of the whole model beyond weights and cache."""
        if any(each.problem for each in few):
            # The compiler does not say how much it would take.
            return 2 * float(self.one.device.memory or 0)
        totals = [(each.total if phase == "decode" else each.prefill_total or 0) for each in few]
        beyond = [total - each.weights - each.cache for total, each in zip(totals, few, strict=True)]
        # The compiler orders operations anew for each depth, so that a deeper program may need less.
        return max(0.0, self._line(beyond), *beyond)

    def _collectives(self, few: Sequence[Plan]) -> Collectives:
        counted = [each.collectives for each in few if each.collectives]
        if len(counted) < len(few):
            return Collectives(0, 0)
        return Collectives(*(self._line(each) for each in zip(*counted, strict=True)))

    def _line(self, values: Sequence[float]) -> float:
        """Extrapolates from the values of the programs of few layers to all layers."""
        depths, (first, *rest) = self._depths, values
        if not rest:
            return float(first)
        slope = (rest[-1] - first) / (depths[-1] - depths[0])
        return float(rest[-1] + (self.config.num_layers - depths[-1]) * slope)


def shallow_config(config: DecoderConfig, depth: int) -> DecoderConfig:
    """Returns a decoder of the same widths with the first layers alone."""
    return dataclasses.replace(config, num_layers=depth, windows=config.windows[:depth], ropes=config.ropes[:depth])


def without_merges(policy: P) -> P:
    """Returns a policy that drops what it, or a policy that it is made of, would merge."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(policy):  # type: ignore[arg-type]
        value = getattr(policy, field.name)
        if isinstance(value, Policy):
            changed[field.name] = without_merges(value)
        elif field.name == "merge" and value is not None:
            changed[field.name] = None
    return dataclasses.replace(policy, **changed)  # type: ignore[type-var]
