"""The report of a plan: the memory that a run needs, its maximum speed, and a table of both."""

import dataclasses

import jax
from tabulate import tabulate

from kvjax.devices import Device
from kvjax.planning.hlo_collectives import Collectives
from kvjax.planning.roofline import Roofline
from kvjax.planning.speculation import SpeculationPlan
from kvjax.typing import JsonObject
from kvjax.units import si, size


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. Bytes are those of the device that needs the most.

    Attributes:
      target: the machine or the topology.
      device: one of its devices.
      mesh: axis name -> size.
      mesh_chosen: whether `plan` has chosen the mesh.
      policy: name of the policy, with storage and selection.
      batch: the number of rows.
      prompt_length: the number of tokens of each row's prompt.
      new_tokens: the number of new tokens of each row.
      dtype: of parameters and cache.
      codes: name of what weights are quantised to, or empty.
      parameters: the total number of elements of the parameters.
      slots: for each group of heads of each layer, the number of slots per head that is allocated for decoding.
      explain: what runs in each layer, and why no faster kernel does; see `CacheLayout.explain`.
      by_layer: whether prompts call a program of a layer for each of them.
      weights: bytes of the parameters on the device, from shapes.
      weights_even: bytes of the parameters on a device if they were divided evenly over those that share a row.
      cache: bytes of the KVState on the device, from shapes.
      cache_even: bytes of the KVState on a device if it were divided evenly, without padding.
      rows: the number of rows of arrays; those after the batch's are padding.
      host: bytes of parameters, keys and values in host memory, from shapes.
      temporaries: bytes of scratch memory of the decode program; None if it did not compile for lack of memory.
      other: bytes of the program itself, of tokens and of the padding of layouts; None as above.
      total: bytes of all of these; a lower bound if `temporaries` is None.
      prefill_temporaries: bytes of scratch memory of the prefill program; None if it was not requested or did not
        compile for lack of memory.
      prefill_total: bytes that the prefill program needs in all; None as above.
      fits: whether decoding, and prefill if requested, fit into the memory of the device; None if unknown.
      problem: the message of the compiler if the memory does not suffice, otherwise empty.
      prompt_flops: FLOPs of the products of attention over the prompts, of the whole mesh, as XLA computes it.
      full_prompt_flops: the same with a full cache.
      flops_per_token: FLOPs of the whole mesh per new token of one row.
      bytes_per_token: bytes that the whole mesh moves per new token of one row.
      collectives: of a decode step; None if it did not compile.
      step: the roofline of a decode step under the policy.
      full: the roofline of a decode step with a full cache.
      compile_seconds: the wall time of compilation.
      compiled: the decode program, or None if it did not compile.
      drafts: of an exact full cache on one device of known speed, from which length on drafts pay; otherwise None.
    """

    target: str
    device: Device
    mesh: dict[str, int]
    mesh_chosen: bool
    policy: str
    batch: int
    prompt_length: int
    new_tokens: int
    dtype: str
    codes: str
    parameters: int
    slots: tuple[int, ...]
    explain: str
    by_layer: bool
    weights: int
    weights_even: int
    cache: int
    cache_even: int
    rows: int
    host: int
    temporaries: int | None
    other: int | None
    total: int
    prefill_temporaries: int | None
    prefill_total: int | None
    fits: bool | None
    problem: str
    prompt_flops: int
    full_prompt_flops: int
    flops_per_token: float
    bytes_per_token: float
    collectives: Collectives | None
    step: Roofline
    full: Roofline
    compile_seconds: float
    compiled: jax.stages.Compiled | None = dataclasses.field(default=None, repr=False, compare=False)
    drafts: SpeculationPlan | None = None

    def as_dict(self) -> JsonObject:
        """Returns all attributes except the program, as JSON values."""
        values = dataclasses.asdict(dataclasses.replace(self, compiled=None))
        del values["compiled"]
        asked = self.collectives and self.collectives._asdict()
        return values | {"slots": list(self.slots), "collectives": asked}

    @property
    def held(self) -> str:
        """The dtype of the parameters, and what weights are quantised to."""
        return f"{self.dtype}, weights {self.codes}" if self.codes else self.dtype

    @property
    def _padding(self) -> str:
        """Says how many rows are padding; nothing if none is."""
        return "" if self.rows == self.batch else f" ({self.rows - self.batch} of {self.rows} rows are padding)"

    @property
    def _asked(self) -> str:
        """Formats the collectives of a step, and how long their bytes take."""
        if self.collectives is None:
            return "-"
        number, moved = self.collectives
        return f"{number:.0f}, {_in_time(moved, self.device.interconnect)}"

    def _linked(self, step: Roofline) -> str:
        """Formats the bytes that a step moves from the host, and how long they take."""
        return _in_time(step.link_moved, self.device.link) if step.link_moved else size(0)

    @staticmethod
    def _experts(step: Roofline) -> str:
        """Formats how many experts of a layer are read."""
        return f"{step.experts_read:.3g} of {step.experts}"

    def table(self) -> str:
        """Returns a table of the memory that the run needs and has, and of its maximum speed."""
        least, full, step = "" if self.temporaries is not None else "at least ", self.full, self.step
        full_total = self.weights + full.cache
        rows = [
            ("weights", size(self.weights), size(self.weights)),
            ("weights, times the even split", _times(self.weights, self.weights_even), "-"),
            ("cache, statistics included", size(self.cache), size(full.cache)),
            ("cache, times the even split", f"{_times(self.cache, self.cache_even)}{self._padding}", "-"),
            ("temporaries", size(self.temporaries), "-"),
            ("program, tokens, padding", size(self.other), "-"),
            ("total to decode", least + size(self.total), f"at least {size(full_total)}"),
            ("total to prefill", size(self.prefill_total), "-"),
            ("in host memory", size(self.host), size(full.host)),
            ("memory", size(self.device.memory), size(self.device.memory)),
            (
                "fits",
                _yes(self.fits, "" if self.compiled else "before temporaries"),
                _yes(fits_in(full_total, self.device.memory), "before temporaries"),
            ),
            (
                "moved per step",
                size(step.weights_moved + step.cache_moved),
                size(full.weights_moved + full.cache_moved),
            ),
            ("over the host link per step", self._linked(step), self._linked(full)),
            ("collectives per step", self._asked, "-"),
            ("experts of a layer read per step", self._experts(step), self._experts(full)),
            ("computed per step", si(step.flops, "FLOP"), si(full.flops, "FLOP")),
            ("roofline", _speed(step), _speed(full)),
        ]
        left_out = {"total to prefill"} if self.prefill_total is None else set()
        left_out |= set() if self.collectives and self.collectives.number else {"collectives per step"}
        left_out |= set() if step.experts else {"experts of a layer read per step"}
        if max(self.mesh.values()) == 1:
            left_out |= {"weights, times the even split", "cache, times the even split"}
        left_out |= set() if self.host or full.host else {"in host memory", "over the host link per step"}
        rows = [row for row in rows if row[0] not in left_out]
        axes = ",".join(f"{axis}:{count}" for axis, count in self.mesh.items())
        low, high = min(self.slots), max(self.slots)
        kept = f"{low}" if low == high else f"{low} to {high}"
        first = (
            f"{self.parameters / 1e9:.3g}B parameters in {self.held}; batch {self.batch}, {self.prompt_length} prompt "
            f"+ {self.new_tokens} new tokens; {kept} slots a head under {self.policy}."
        )
        chosen = " (chosen here: fewest bytes moved)" if self.mesh_chosen else ""
        second = f"{self.target}, mesh {axes}{chosen}; bytes and FLOPs of one device:"
        columns = 2 if self.policy == "full" else 3
        headers, alignment = ("", self.policy, "full cache")[:columns], ("left", "right", "right")[:columns]
        body = tabulate([row[:columns] for row in rows], headers=headers, colalign=alignment, disable_numparse=True)
        link = f", {si(self.device.link, 'B/s')} from the host" if self.host and self.device.link else ""
        last = (
            f"A token needs {si(self.flops_per_token, 'FLOP')} and {size(self.bytes_per_token)} moved. "
            f"Compiled in {self.compile_seconds:.1f} s.\nOne device: {si(self.device.bandwidth, 'B/s')}, "
            f"{si(self.device.flops, 'FLOP/s')}{link} ({self.device.source}). The roofline counts no collectives."
        )
        if self.prompt_flops < self.full_prompt_flops:
            share = 100 * self.prompt_flops / self.full_prompt_flops
            last += (
                f"\nAttention over the prompts computes {si(self.prompt_flops, 'FLOP')}, {share:.0f} % of the "
                f"{si(self.full_prompt_flops, 'FLOP')} of prompts that are read whole."
            )
        words = [str(self.drafts)] if self.drafts is not None else []
        words += [f"The compiler reports: {self.problem}"] if self.problem else []
        return "\n".join((first, second, body, last, self.explain, *words))


def fits_in(needed: float, memory: float | None) -> bool | None:
    """Returns whether `needed` bytes fit into a memory, or None if its size is unknown."""
    return None if memory is None else bool(needed <= memory)


def _in_time(moved: float, speed: float | None) -> str:
    """Formats bytes, and how long they take where the speed is known."""
    return f"{size(moved)}, {1e3 * moved / speed:.3g} ms" if speed else size(moved)


def _times(held: int, even: int) -> str:
    """Formats a share of the even split."""
    return f"{held / max(even, 1):.3f}"


def _yes(answer: bool | None, condition: str = "") -> str:
    """Formats an answer; `condition` qualifies a yes."""
    if answer is None:
        return "unknown"
    return "no" if not answer else f"yes, {condition}" if condition else "yes"


def _speed(step: Roofline) -> str:
    """Formats the maximum speed and its limit."""
    return "-" if step.tokens_per_second is None else f"{step.tokens_per_second:,.3g} tokens/s ({step.limit})"
