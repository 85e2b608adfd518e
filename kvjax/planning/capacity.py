"""Finds the largest batch that fits on a mesh with a cache, prefill included, and the cost of its tokens.

See `kvjax.planning.memory_estimate` for how bytes are counted. Bytes beyond the weights are nearly in proportion to the
rows, so that the search needs two batches, often one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.planning import Plan, plan
from kvjax.planning.hlo_collectives import Collectives
from kvjax.planning.memory_estimate import DEPTHS, Need, Run, without_merges
from kvjax.planning.topologies import find_target
from kvjax.policies.base import Policy
from kvjax.typing import JsonObject

#: The search ends when no batch that is larger by more than this share can fit.
PRECISION = 0.02
#: Of the largest batch whose weights and cache fit: where the search begins if nothing is known of its scratch memory.
FIRST = 0.4
ROUNDS = 12  # of the search
MIN_SLOPE = 0.5  # of the mean need of a row: the smallest slope that the search believes
MAX_ROWS = 1 << 16  # rows
#: The first program of all layers is of a batch that is larger by this share than what few layers say.
ABOVE = 0.04
#: A program that needs more than the memory by at most this share says how many rows would fit.
NEAR = 0.05
SECONDS_PER_HOUR, MILLION = 3600, 1e6


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The result of `capacity`. Bytes are those of one device.

    Attributes:
      policy: name of the policy, with storage and selection.
      target: the machine or the topology.
      mesh: axis name -> size.
      batch: rows; 0 if not even one for each part of the data axis fits.
      binds: ``prefill`` or ``decode``, which needs more memory; ``shapes`` if nothing was compiled, because no compiler
        for the devices is here. The batch is then an upper bound: no scratch memory was counted.
      memory: bytes of the device.
      weights: bytes of the parameters.
      cache: bytes of the cache of this batch.
      decode: bytes that decoding needs in all.
      prefill: bytes that the prompts need in all.
      host: bytes in host memory.
      moved: bytes that a decode step reads and writes in the device's memory.
      link: bytes that a decode step moves from host memory.
      experts: of each layer; 0 for a dense MLP.
      experts_read: of these, how many a decode step reads on average.
      collectives: of a decode step; None if nothing was compiled.
      merging: those that a policy's merges add; None for a policy without, or if nothing was compiled.
      seconds: the least time of a decode step by ``memory``, ``compute``, ``host link`` and ``collectives``, as known.
      step_seconds: the largest of these, as if they overlapped; None if the speed of the device is unknown.
      limit: which of them that is.
      tokens_per_second: of the whole mesh; None as above.
      dollars_per_million: of new tokens, while decoding; None without a price.
      verified: whether the prefill of all layers was compiled for this batch, and fits.
      programs: the number of programs that were compiled.
      compile_seconds: wall time of compiling them.
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
    moved: int
    link: int
    experts: int
    experts_read: float
    collectives: Collectives | None
    merging: Collectives | None
    seconds: dict[str, float]
    step_seconds: float | None
    limit: str | None
    tokens_per_second: float | None
    dollars_per_million: float | None
    verified: bool
    programs: int
    compile_seconds: float

    @property
    def scratch_per_row(self) -> float:
        """Bytes beyond weights and cache, of the phase that needs more memory, for each row."""
        return (max(self.decode, self.prefill) - self.weights - self.cache) / max(self.batch, 1)

    def as_dict(self) -> JsonObject:
        """Returns all attributes as JSON values."""
        asked = {name: each and each._asdict() for name, each in self._asked.items()}
        return dataclasses.asdict(self) | asked

    @property
    def _asked(self) -> dict[str, Collectives | None]:
        return {"collectives": self.collectives, "merging": self.merging}


def capacity(
    config: DecoderConfig,
    policy: Policy | CacheSpec,
    *,
    prompt_length: int,
    new_tokens: int,
    mesh_axes: str = "",
    topology: str | None = None,
    price: float | None = None,
    like: Capacity | None = None,
    verify: bool = False,
    **options: Any,
) -> Capacity:
    """Finds the largest batch that fits, to within 2 %.

    Args:
      config: the decoder.
      policy: which slots the cache keeps, or a `CacheSpec`.
      prompt_length: the number of tokens of each row's prompt.
      new_tokens: the number of new tokens of each row.
      mesh_axes: see `kvjax.planning.plan`. If empty, the mesh on which the largest batch moves the fewest bytes per
        step.
      topology: see `kvjax.planning.plan`.
      price: US dollars for an hour of a chip, of your own offer; None to leave costs out.
      like: the result for another cache of the same run, whose scratch memory says where the search begins.
      verify: whether to compile all layers for the batch that was found too, which takes minutes; else it is between
        those of programs that were refused, of which the compiler of TPUs says how much they need.
      options: further arguments of `kvjax.planning.plan`, such as `dtype`, `weights` and `prefill_block`.

    Raises:
      KvjaxError: as `kvjax.planning.plan`; for a device whose memory is unknown.
    """
    spec = as_spec(policy, options.pop("storage", None), options.pop("selection", None))
    planned = functools.partial(
        plan, policy=spec, prompt_length=prompt_length, new_tokens=new_tokens, topology=topology, **options
    )
    shapes = functools.partial(planned, config, compiles=False)
    one, units = _mesh(shapes, mesh_axes)
    axes, memory = _axes(one), float(one.device.memory or 0)
    if find_target(topology).devices is None:
        return _result(
            shapes(batch=max(units, 1) * one.rows, mesh_axes=axes), None, units * one.rows, None, topology, price
        )
    run = Run(config, planned, axes, one)
    first = int(FIRST * units)
    if like is not None:
        first = int((memory - one.weights) // (one.cache + like.scratch_per_row * one.rows))
    refined = None
    if units and find_target(topology).platform == "tpu" and config.num_layers > max(DEPTHS):
        refined = _refined(run, min(max(first, 1), units), memory, verify)
    if refined is None:
        refined = (*_largest(run.need, one.rows, units, memory, one.weights, first), False)
    found, fits, verified = refined
    rows = fits * one.rows
    merging = None
    if without_merges(spec.policy) != spec.policy:
        plain = dataclasses.replace(spec, policy=without_merges(spec.policy))
        other = run.collectives(found.rows, policy=plain)
        merging = Collectives(*(own - less for own, less in zip(found.collectives, other, strict=True)))
    result = _result(shapes(batch=found.rows, mesh_axes=axes), found, rows, merging, topology, price)
    return dataclasses.replace(result, verified=verified)


def _mesh(shapes: Callable[..., Plan], mesh_axes: str) -> tuple[Plan, int]:
    """Chooses the mesh.

    Args:
      shapes: plans a batch on a mesh from shapes alone.
      mesh_axes: see `capacity`.

    Returns:
      The plan of one row on the mesh, and how many times as many rows as its arrays have fit without scratch memory.
    """
    one = shapes(batch=1, mesh_axes=mesh_axes)
    if one.device.memory is None:
        raise ConfigError(f"the memory of {one.device.kind} is unknown; name a topology.")
    units = _units(one)
    for _ in range(2):  # the best mesh depends on the batch, and the batch on the mesh
        if mesh_axes or units < 1 or math.prod(one.mesh.values()) == 1:
            break
        best = shapes(batch=units * one.rows, mesh_axes="")
        if best.mesh == one.mesh:
            break
        one = shapes(batch=1, mesh_axes=_axes(best))
        units = _units(one)
    return one, max(0, units)


def _units(one: Plan) -> int:
    """Returns how many times the rows of a plan's arrays fit, without scratch memory."""
    return min(int(((one.device.memory or 0) - one.weights) // max(one.cache, 1)), MAX_ROWS // one.rows)


def _axes(plan: Plan) -> str:
    return ",".join(f"{name}:{size}" for name, size in plan.mesh.items())


def _largest(
    need: Callable[[int, Need | None], Need], unit: int, max_units: int, memory: float, weights: int, first: int
) -> tuple[Need, int]:
    """Searches for the largest number of units of rows that fits.

    Args:
      need: rows, and what another batch needs if that is known -> what they need.
      unit: rows are multiples of it.
      max_units: the number of units beyond which weights and cache alone do not fit.
      memory: bytes of a device.
      weights: bytes that do not depend on the rows.
      first: the number of units to begin with.

    Returns:
      What that number needs, or one unit if nothing fits, and the number.
    """
    if max_units < 1:
        return need(unit, None), 0
    low, high, guess = 0, max_units + 1, min(max(first, 1), max_units)
    best, found = None, None
    before, then = 0, float(weights)  # the last number of units, and what it needs
    for _ in range(ROUNDS):
        found = need(guess * unit, found)
        slope = max((found.peak - then) / (guess - before), (found.peak - weights) / guess * MIN_SLOPE)
        exact = guess + (memory - found.peak) / max(slope, 1e-9)
        before, then = guess, found.peak
        if found.peak <= memory:
            low, best = guess, found
        else:
            high = guess
        if high - low <= max(1, int(PRECISION * high)) or (low == guess and int(exact) <= guess * (1 + PRECISION)):
            break
        # From above, less shrinks than is in proportion to the rows.
        aim = int(exact) if low == guess else int(exact * (1 - PRECISION / 4))
        guess = aim if low < aim < high else (low + high) // 2
    return (best, low) if best else (found if found and found.rows == unit else need(unit, found), 0)


def _refined(run: Run, first: int, memory: float, verify: bool) -> tuple[Need, int, bool] | None:
    """Searches from a batch of which few layers say how many rows may fit, by prefill programs of all layers.

    Args:
      run: the run.
      first: the number of units of rows of the programs of few layers.
      memory: bytes of a device.
      verify: see `capacity`.

    Returns:
      What the largest batch needs, its units of rows, and whether all layers were compiled for it; None if the compiler
      does not say how much memory a program needs that it refuses.
    """
    unit, weights = run.one.rows, run.one.weights
    found = run.need(first * unit)
    # Decoding grows evenly with the layers, so that few tell how many rows it has room for.
    room = int(first * (memory - weights) / max(found.held + found.decode - weights, 1))
    start = max(1, min(room, int(first * (memory - weights) / max(found.peak - weights, 1))))
    low, high, guess = 0, max(room, 1) + 1, min(start + max(1, round(start * ABOVE)), max(room, 1))
    before, then, programs = 0, float(weights), found.programs
    needs: dict[int, float] = {}  # units -> bytes of those that fit

    def answer(units: int, used: float) -> tuple[Need, int, bool]:
        rows = max(units, 1) * unit
        held = run.held(rows)
        return found.scaled(rows)._replace(held=held, prefill=used - held, programs=programs), units, units in needs

    for _ in range(ROUNDS):
        used = run.whole(guess * unit)
        if used is None:
            return None
        programs += 1
        slope = max((used - then) / (guess - before), (used - weights) / guess * MIN_SLOPE)
        exact = guess + (memory - used) / slope
        before, then = guess, used
        if used <= memory:
            low, needs[guess] = guess, used
        else:
            high = guess
            if used <= memory * (1 + NEAR) and not verify and int(exact) > low:
                return answer(int(exact), used + slope * (int(exact) - guess))
        if high - low <= max(1, int(PRECISION * high)) or (low == guess and exact <= guess * (1 + PRECISION)):
            break
        # What is slightly too large is refused within seconds.
        aim = int(exact) if verify else math.ceil(exact * (1 + PRECISION))
        guess = aim if low < aim < high else (low + high) // 2
    return answer(low, needs.get(low, then))


def _result(
    whole: Plan, found: Need | None, rows: int, merging: Collectives | None, topology: str | None, price: float | None
) -> Capacity:
    """Puts a result together.

    Args:
      whole: the plan of the batch, or of the fewest rows, from shapes alone.
      found: what it needs; None if nothing was compiled.
      rows: of the largest batch; 0 if nothing fits.
      merging: see `Capacity`.
      topology: see `capacity`.
      price: see `capacity`.
    """
    device, seconds = whole.device, whole.step.seconds(whole.device)
    if found and device.interconnect and found.collectives.moved:
        seconds["collectives"] = found.collectives.moved / device.interconnect
    limit = max(seconds, key=seconds.__getitem__) if "memory" in seconds else None
    step = seconds[limit] if limit else None
    tokens = rows / step if step and rows else None
    hourly = None if price is None else price * _chips(whole, topology)
    held = whole.weights + whole.cache
    decode, prefill = (round(held + each) for each in ((found.decode, found.prefill) if found else (0, 0)))
    return Capacity(
        policy=whole.policy, target=whole.target, mesh=whole.mesh, batch=rows,
        binds="shapes" if found is None else "prefill" if prefill > decode else "decode",
        memory=int(device.memory or 0), weights=whole.weights, cache=whole.cache, decode=decode, prefill=prefill,
        host=whole.host, moved=whole.step.weights_moved + whole.step.cache_moved, link=whole.step.link_moved,
        experts=whole.step.experts, experts_read=whole.step.experts_read,
        collectives=found and found.collectives, merging=merging, seconds=seconds, step_seconds=step, limit=limit,
        tokens_per_second=tokens,
        verified=False,
        dollars_per_million=hourly / SECONDS_PER_HOUR / tokens * MILLION if hourly is not None and tokens else None,
        programs=found.programs if found else 0, compile_seconds=found.seconds if found else 0.0,
    )  # fmt: skip


def _chips(whole: Plan, topology: str | None) -> float:
    """Returns the number of chips of the mesh; one machine has one price."""
    if topology is None:
        return 1.0
    target = find_target(topology)
    return target.chips * math.prod(whole.mesh.values()) / target.size
