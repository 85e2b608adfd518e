"""The largest batch that fits on a mesh with a cache, prefill included, and what its tokens cost.

Weights and cache are counted from the shapes of the whole model. Scratch memory and collectives are known to a compiler
alone, and grow by the same amount with every layer: programs of three and of four layers are compiled and extrapolated.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.cache.spec import CacheSpec
from kvjax.devices import topology_devices
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.plan import Plan, plan
from kvjax.policies.base import Policy

DEPTHS = (3, 4)  # layers of the programs that are compiled
#: The search ends when the smallest batch known not to fit exceeds the answer by at most this share.
PRECISION = 0.02
ROUNDS = 12  # of the search, each of which compiles four programs
MOST = 1 << 16  # rows
SECONDS_PER_HOUR, MILLION = 3600, 1e6
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


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The result of `capacity`. Bytes are those of one device.

    Attributes:
      policy: name of the policy, with storage and selection.
      target: the machine or the topology.
      mesh: axis name -> size.
      batch: rows; 0 if not even one for each part of the data axis fits.
      binds: ``prefill`` or ``decode``, which needs more memory.
      memory: bytes of the device.
      weights: bytes of the parameters.
      cache: bytes of the cache of this batch.
      decode: bytes that decoding needs in all.
      prefill: bytes that the prompts need in all.
      host: bytes in host memory.
      collectives: of a decode step.
      step_seconds: of a decode step, the largest of the roofline and of the collectives' time, as if both overlapped;
        None if the speed of the device is unknown.
      limit: what that is: ``memory``, ``compute``, ``host link`` or ``collectives``.
      tokens_per_second: of the whole mesh; None as above.
      dollars_per_million: of new tokens, while decoding; None without a price.
      compile_seconds: wall time of compiling the programs of this batch; several batches are tried.
    """

    policy: str
    target: str
    mesh: dict[str, int]
    batch: int
    binds: str
    memory: int
    weights: int
    cache: int
    decode: int
    prefill: int
    host: int
    collectives: Collectives
    step_seconds: float | None
    limit: str | None
    tokens_per_second: float | None
    dollars_per_million: float | None
    compile_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns all attributes as JSON values."""
        return dataclasses.asdict(self) | {"collectives": self.collectives._asdict()}


class Need(NamedTuple):
    """What a batch needs.

    Attributes:
      decode: bytes, to decode.
      prefill: bytes, to run the prompts.
      collectives: of a decode step.
      whole: the plan of the whole model, without what only a compiler knows.
      seconds: wall time of compilation.
    """

    decode: int
    prefill: int
    collectives: Collectives
    whole: Plan
    seconds: float

    @property
    def most(self) -> int:
        return max(self.decode, self.prefill)


def capacity(
    config: DecoderConfig,
    policy: Policy | CacheSpec,
    *,
    prompt_length: int,
    new_tokens: int,
    mesh_axes: str = "",
    topology: str | None = None,
    price: float | None = None,
    **options: Any,
) -> Capacity:
    """Finds the largest batch that fits, to within 2 %.

    Args:
      config: the decoder.
      policy: which slots the cache keeps, or a `CacheSpec`.
      prompt_length: the number of tokens of each row's prompt.
      new_tokens: the number of new tokens of each row.
      mesh_axes: see `kvjax.plan.plan`. If empty, the mesh on which the largest batch moves the fewest bytes per step.
      topology: see `kvjax.plan.plan`.
      price: US dollars for an hour of a chip, of your own offer; None to leave costs out.
      options: further arguments of `kvjax.plan.plan`, such as `dtype`, `weights` and `prefill_block`.

    Raises:
      KvjaxError: as `kvjax.plan.plan`; for a device whose memory is unknown.
    """
    run = Run(config, functools.partial(
        plan, policy=policy, prompt_length=prompt_length, new_tokens=new_tokens, topology=topology, **options
    ))  # fmt: skip
    unit, axes = 1, mesh_axes
    for _ in range(2):  # the best mesh depends on the batch, and the batch on the mesh
        one = run.shapes(unit, axes)
        if one.device.memory is None:
            raise ConfigError(f"the memory of {one.device.kind} is unknown; name a topology.")
        memory, unit = one.device.memory, one.mesh.get("data", 1)
        some = run.shapes(unit, axes)
        largest = min(int((memory - some.weights) // max(some.cache, 1)), MOST // unit)
        if mesh_axes or largest < 1:
            break
        mesh = run.shapes(largest * unit, "").mesh
        axes = ",".join(f"{name}:{size}" for name, size in mesh.items())
    found, fits = _largest(lambda rows: run.need(rows, axes), unit, largest, memory)
    return _result(found, fits * unit, topology, price)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose batch is open.

    Attributes:
      config: the decoder.
      plan: `kvjax.plan.plan` with everything but the decoder, the batch and the mesh.
    """

    config: DecoderConfig
    plan: Callable[..., Plan]

    def shapes(self, batch: int, axes: str) -> Plan:
        """Plans without compiling."""
        return self.plan(self.config, batch=batch, mesh_axes=axes, compiles=False)

    def need(self, batch: int, axes: str) -> Need:
        """Counts what a batch needs, from programs of few layers."""
        layers = self.config.num_layers
        depths = DEPTHS if layers > max(DEPTHS) else (layers,)
        whole = self.shapes(batch, axes)
        few = [
            self.plan(shallow_config(self.config, depth), batch=batch, mesh_axes=axes, prefill=True) for depth in depths
        ]
        seconds = sum(each.compile_seconds for each in few)
        if any(each.problem for each in few):
            beyond = 2 * int(whole.device.memory or 0)  # the compiler does not say how much it would take
            return Need(beyond, beyond, Collectives(0, 0), whole, seconds)
        held = whole.weights + whole.cache
        totals = [[each.total - each.weights - each.cache for each in few]]
        totals.append([(each.prefill_total or 0) - each.weights - each.cache for each in few])
        decode, prefill = (held + max(0, round(_line(each, depths, layers))) for each in totals)
        counted = [collectives(each.compiled.as_text() or "") for each in few if each.compiled]
        own = (_line(each, depths, layers) for each in zip(*counted, strict=True))
        return Need(decode, prefill, Collectives(*own), whole, seconds)


def shallow_config(config: DecoderConfig, depth: int) -> DecoderConfig:
    """Returns a decoder of the same widths with the first layers alone."""
    return dataclasses.replace(config, num_layers=depth, windows=config.windows[:depth], ropes=config.ropes[:depth])


def collectives(text: str) -> Collectives:
    """Counts the collectives of a compiled decode loop, whose body is one step."""
    count, moved = 0, 0
    for match in COLLECTIVE.finditer(text):
        sizes = [
            BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
            for kind, dims in ARRAY.findall(match["shape"])
        ]
        # An asynchronous one returns its operand too; the result is the larger.
        count, moved = count + 1, moved + max(sizes, default=0) * (2 if match["kind"] == "all-reduce" else 1)
    return Collectives(count, moved)


def _line(values: Any, depths: tuple[int, ...], layers: int) -> float:
    """Extrapolates from the values at `depths` to a number of layers."""
    first, *rest = values
    if not rest:
        return float(first)
    slope = (rest[-1] - first) / (depths[-1] - depths[0])
    return float(rest[-1] + (layers - depths[-1]) * slope)


def _largest(need: Callable[[int], Need], unit: int, largest: int, memory: float) -> tuple[Need, int]:
    """Searches for the largest number of units of rows that fits.

    Args:
      need: rows -> what they need.
      unit: rows are multiples of it.
      largest: the number of units beyond which weights and cache alone do not fit.
      memory: bytes of a device.
    """
    if largest < 1:
        return need(unit), 0
    low, high = 0, largest + 1
    best, guess = None, largest
    seen: list[tuple[int, int]] = []  # units, and bytes that they need
    for _ in range(ROUNDS):
        found = need(guess * unit)
        seen = [*seen, (guess, found.most)][-2:]
        if found.most <= memory:
            low, best = guess, found
        else:
            high = guess
        margin = max(1, int(PRECISION * high))
        if high - low <= margin:
            break
        # Bytes grow about linearly with the rows: from the last two, or from the weights alone.
        (first, least), (second, most) = seen if len(seen) == 2 else [(0, found.whole.weights), *seen]
        exact = first + (memory - least) * (second - first) / (most - least) if most != least else 0.0
        # Between the two, and where the line meets the memory, on the side that is still open.
        guess = int(exact) if int(exact) > low else low + margin
        guess = guess if low < guess < high else (low + high) // 2
    return (best, low) if best else (need(unit), 0)


def _result(found: Need, rows: int, topology: str | None, price: float | None) -> Capacity:
    whole, device = found.whole, found.whole.device
    speed, limit, step = whole.step.tokens_per_second, whole.step.limit, None
    if speed:
        times = {str(limit): whole.batch / speed}
        if device.interconnect:
            times["collectives"] = found.collectives.moved / device.interconnect
        limit = max(times, key=times.__getitem__)
        step = times[limit]
    tokens = rows / step if step and rows else None
    cost = _hourly(whole, topology, price)
    return Capacity(
        policy=whole.policy, target=whole.target, mesh=whole.mesh, batch=rows,
        binds="prefill" if found.prefill > found.decode else "decode", memory=int(device.memory or 0),
        weights=whole.weights, cache=whole.cache, decode=found.decode, prefill=found.prefill, host=whole.host,
        collectives=found.collectives, step_seconds=step, limit=limit, tokens_per_second=tokens,
        dollars_per_million=cost / SECONDS_PER_HOUR / tokens * MILLION if cost and tokens else None,
        compile_seconds=found.seconds,
    )  # fmt: skip


def _hourly(whole: Plan, topology: str | None, price: float | None) -> float | None:
    """Returns the price of an hour of all chips of a mesh."""
    if topology is None or price is None:
        return price
    devices = topology_devices(topology)
    chips = len({tuple(getattr(each, "coords", (index,))) for index, each in enumerate(devices)})
    return price * chips * math.prod(whole.mesh.values()) / len(devices)
