"""Simulates servers that hold slots of each other's requests (Infinite-LLM, arXiv:2401.02669).

Each instance has the weights and its own requests. Slots that do not fit beside those of earlier requests lie on other
instances, which attend to them (DistAttention). A seeded trace runs on closed forms: all seconds are planned.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.arguments import check_type, number_argument
from kvjax.devices import Device, known_numbers
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.planning.attention_traffic import part_bytes
from kvjax.planning.preemption import PERCENTILES, percentile
from kvjax.planning.served_model import BudgetOfPrompt, LayerRun, ServedModel, evicting_layers

Placement = tuple[tuple[int, int], ...]  # instances, and the number of slots on each


class Request(NamedTuple):
    """A request of a trace.

    Attributes:
      arrival: seconds from the beginning.
      prompt: tokens of the prompt.
      output: tokens of the answer, at least 1.
    """

    arrival: float
    prompt: int
    output: int


class Snapshot(NamedTuple):
    """The slots of all running requests at one time.

    Attributes:
      seconds: from the beginning.
      held: number of a request -> where its keys and values lie.
      promised: number of a request -> where all that it will ever hold lies.
    """

    seconds: float
    held: Mapping[int, Placement]
    promised: Mapping[int, Placement]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolUse:
    """The outcome of a simulation.

    Attributes:
      ttft: percentile -> seconds from an arrival to the first token.
      request_seconds: percentile -> seconds from an arrival to the last token.
      tokens_per_second: of the answers of all requests that ended.
      finished: requests that ended.
      refused: requests that do not fit even where nothing else runs.
      most_rows: the most requests that run at once, on all instances together.
      peak: the most bytes of keys and values that each instance holds.
      use: the share of the bytes for caches that each instance holds, mean over time.
      for_others: the most bytes that each instance holds for requests of others.
      slots_moved: bytes of keys and values that go to other instances.
      parts_moved: bytes of queries, and of outputs with their maxima and sums, of attention in parts.
      seconds: from the first arrival to the last token.
    """

    ttft: Mapping[float, float]
    request_seconds: Mapping[float, float]
    tokens_per_second: float
    finished: int
    refused: int
    most_rows: int
    peak: tuple[int, ...]
    use: tuple[float, ...]
    for_others: tuple[int, ...]
    slots_moved: int
    parts_moved: int
    seconds: float


def place(slots: int, free: Sequence[int], home: int, *, pooled: bool = True) -> Placement | None:
    """Chooses the instances on which the slots of a request lie.

    Home takes as many as fit. The rest go to the other instances by their free slots, the most first (equal: the lowest
    number first), each of which takes as many as fit.

    Args:
      slots: of the request, at least 1.
      free: the free slots of each instance.
      home: the instance whose request it is.
      pooled: whether other instances lend slots.

    Returns:
      Instances and the number of slots of each, home first if it has any; None if the slots do not fit.
    """
    found: list[tuple[int, int]] = []
    others = sorted((each for each in range(len(free)) if each != home), key=lambda each: (-free[each], each))
    for instance in (home, *others) if pooled else (home,):
        if own := min(slots, free[instance]):
            found.append((instance, own))
            slots -= own
    return None if slots else tuple(found)


@dataclasses.dataclass
class _Row:
    """A request that runs.

    Attributes:
      number: its place in the trace.
      request: the request.
      home: the instance that computes it.
      promised: where all that it will ever hold lies.
      runs: the layers by the budgets of its prompt.
      held: slots so far, which fill `promised` in its order.
      made: tokens of the answer so far.
    """

    number: int
    request: Request
    home: int
    promised: Placement
    runs: tuple[LayerRun, ...]
    held: int = 0
    made: int = 0

    def placement(self) -> Placement:
        """Returns where the slots so far lie."""
        found, rest = [], self.held
        for instance, most in self.promised:
            if rest:
                found.append((instance, min(rest, most)))
                rest -= found[-1][1]
        return tuple(found)

    def remote_placement(self) -> Placement:
        """Returns where those of them lie that are not at home."""
        return tuple((instance, own) for instance, own in self.placement() if instance != self.home)


@dataclasses.dataclass
class _Load:
    """Slots on each instance.

    Attributes:
      held: of all requests.
      decoding: of those that decode.
      for_others: of requests of other instances.
    """

    held: list[int]
    decoding: list[int]
    for_others: list[int]

    @classmethod
    def of(cls, rows: Sequence[Sequence[_Row]]) -> "_Load":
        held, decoding, for_others = ([0] * len(rows) for _ in range(3))
        for row in (row for own in rows for row in own):
            for instance, slots in row.placement():
                held[instance] += slots
                decoding[instance] += slots if row.made else 0
                for_others[instance] += slots if instance != row.home else 0
        return cls(held, decoding, for_others)


class _Step(NamedTuple):
    """A step of an instance.

    Attributes:
      seconds: that it takes.
      slots_moved: bytes of keys and values that go to other instances.
      parts_moved: bytes of queries and outputs between instances.
    """

    seconds: float
    slots_moved: int
    parts_moved: int


def simulate_pool(
    model: ServedModel,
    device: Device,
    trace: Sequence[Request],
    *,
    instances: int,
    pooled: bool = True,
    budget: BudgetOfPrompt = None,
    observe: Callable[[Snapshot], None] | None = None,
) -> PoolUse:
    """Simulates instances of a server under a trace.

    Requests go to instances in turn, by arrival. Each instance takes its own in their order, as soon as all that one
    will ever hold fits (`place`), and never interrupts them. A request's slots fill their places in order; none moves
    later. A step of an instance reads the prompts of the requests that it has just taken, and computes a token of each
    other one. It takes the longest of its FLOPs, of the bytes that it reads (weights, and all slots that it holds, of
    others too), and of the parts that other instances attend to for it; and then the bytes that it exchanges with
    these, over its own links, without latency. Attention in parts takes the bytes of
    `kvjax.planning.attention_traffic.part_bytes`; keys and values of tokens whose place is on another instance go there
    besides. Under a budget, whose slots are replaced anywhere, those of each token do: an upper bound.

    Args:
      model: the model, which each instance has.
      device: of each instance, with its memory and the speeds of its memory, of its products and of its links to
        others.
      trace: the requests.
      instances: the number of instances.
      pooled: whether they hold slots of each other's requests.
      budget: slots of each layer, with one for the newest token besides; or one number for each, whose bytes are then
        counted as slots of all layers, rounded up. None = a full cache. Or a function that returns them for the number
        of tokens of a prompt.
      observe: called after each event, for checks and plots; None = not.

    Raises:
      InputError: an argument that is not valid, a device whose numbers are not known or without room for a slot.
    """
    check_type("model", model, ServedModel, "a ServedModel, such as ServedModel.of(model.config)")
    check_count("instances", instances)
    model.check_on_device("a pool")
    memory, *_ = known_numbers(device, "memory", "bandwidth", "flops", "interconnect")
    _check(trace)
    slot = model.token_bytes
    capacity = int((memory - model.weight_bytes) // slot)
    if capacity < 1:
        raise InputError(f"the weights, {model.weight_bytes:,} bytes, leave no room for slots in {device.kind}.")

    runs = [model.runs_of(budget, request.prompt) for request in trace]

    def most(number: int, request: Request) -> int:
        # The last token of an answer is chosen, and not fed.
        tokens = request.prompt + request.output - 1
        held = sum(each.total * (tokens if each.budget is None else each.budget + 1) for each in runs[number])
        return -(-held // slot)

    arriving = sorted(enumerate(trace), key=lambda each: (each[1].arrival, each[0]))
    queues: list[list[tuple[int, Request]]] = [[] for _ in range(instances)]
    rows: list[list[_Row]] = [[] for _ in range(instances)]
    ends = [math.inf] * instances  # of the steps that run
    free = [capacity] * instances
    peak, for_others, area = [0] * instances, [0] * instances, [0.0] * instances
    ttft: list[float] = []
    ended: list[float] = []
    load = _Load.of(rows)
    arrived = tokens = refused = most_rows = slots_moved = parts_moved = 0
    clock = first = arriving[0][1].arrival
    while True:
        now = min(*ends, arriving[arrived][1].arrival if arrived < len(arriving) else math.inf)
        if now == math.inf:
            break
        area = [sum_ + own * (now - clock) for sum_, own in zip(area, load.held, strict=True)]
        clock = now
        while arrived < len(arriving) and arriving[arrived][1].arrival <= now:
            number, request = arriving[arrived]
            home = arrived % instances
            arrived += 1
            if place(most(number, request), [capacity] * instances, home, pooled=pooled) is None:
                refused += 1
            else:
                queues[home].append((number, request))
        for home in (each for each in range(instances) if ends[each] == now):
            ends[home] = math.inf
            for row in rows[home]:
                row.made += 1
                if row.made == 1:
                    ttft.append(now - row.request.arrival)
                if row.made == row.request.output:
                    ended.append(now - row.request.arrival)
                    tokens += row.request.output
                    for instance, own in row.promised:
                        free[instance] += own
            rows[home] = [row for row in rows[home] if row.made < row.request.output]
        idle = [each for each in range(instances) if ends[each] == math.inf]
        for home in idle:
            while queues[home]:
                number, request = queues[home][0]
                promised = place(most(number, request), free, home, pooled=pooled)
                if promised is None:
                    break
                queues[home].pop(0)
                for instance, own in promised:
                    free[instance] -= own
                rows[home].append(_Row(number, request, home, promised, runs[number]))
            for row in rows[home]:
                tokens_held = row.request.prompt + row.made
                row.held = -(-sum(each.total * each.held(tokens_held) for each in row.runs) // slot)
        load = _Load.of(rows)
        for home in idle:
            if rows[home]:
                step = _step(model, device, rows[home], load)
                ends[home] = now + step.seconds
                slots_moved, parts_moved = slots_moved + step.slots_moved, parts_moved + step.parts_moved
        most_rows = max(most_rows, sum(map(len, rows)))
        peak = [max(pair) for pair in zip(peak, load.held, strict=True)]
        for_others = [max(pair) for pair in zip(for_others, load.for_others, strict=True)]
        if observe is not None:
            running = [row for own in rows for row in own]
            observe(Snapshot(
                now, {row.number: row.placement() for row in running}, {row.number: row.promised for row in running}
            ))  # fmt: skip
    seconds = clock - first
    return PoolUse(
        ttft={each: percentile(ttft, each) for each in PERCENTILES} if ttft else {},
        request_seconds={each: percentile(ended, each) for each in PERCENTILES} if ended else {},
        tokens_per_second=tokens / seconds if seconds else 0.0, finished=len(ended), refused=refused,
        most_rows=most_rows, peak=tuple(slot * each for each in peak),
        use=tuple(each / (capacity * seconds) if seconds else 0.0 for each in area),
        for_others=tuple(slot * each for each in for_others), slots_moved=slots_moved, parts_moved=parts_moved,
        seconds=seconds,
    )  # fmt: skip


def _step(model: ServedModel, device: Device, rows: Sequence[_Row], load: _Load) -> _Step:
    """Returns the costs of a step of an instance.

    Args:
      model: the model.
      device: of each instance.
      rows: the instance's requests. They hold the slots that the step writes already.
      load: of all instances.
    """
    assert device.flops and device.bandwidth and device.interconnect
    home, slot = rows[0].home, model.token_bytes
    parts = part_bytes(model.heads, model.kv_heads, model.dim, model.width)
    pair = 4 * model.layers * model.heads * model.dim  # FLOPs of the products of a query with a slot
    flops, slots_moved, parts_moved = float(pair * load.decoding[home]), 0, 0
    remote: dict[int, int] = {}  # instance -> slots of rows that decode here
    for row in rows:
        away = row.remote_placement()
        if not row.made:
            flops += model.prefill_flops(row.request.prompt, statistics_layers=evicting_layers(row.runs))
            slots_moved += slot * sum(own for _, own in away)
            continue
        flops += 2 * model.active
        tokens = row.request.prompt + row.made
        evicting = [each for each in row.runs if each.budget is not None and tokens > each.budget]
        for instance, own in away:
            remote[instance] = remote.get(instance, 0) + own
            parts_moved += model.layers * (parts.out + parts.back) + evicting_layers(evicting) * parts.victim
        # The newest slot is the last one, unless it replaces another one.
        if away:
            slots_moved += slot if row.placement()[-1][0] != home else sum(each.total for each in evicting)
    computing = max(flops / device.flops, (model.weight_bytes + slot * load.held[home]) / device.bandwidth)
    others = max(
        (max(pair * own / device.flops, slot * own / device.bandwidth) for own in remote.values()), default=0.0
    )
    return _Step(max(computing, others) + (slots_moved + parts_moved) / device.interconnect, slots_moved, parts_moved)


def _check(trace: Sequence[Request]) -> None:
    """Raises an `InputError` for a trace that is not valid."""
    if not trace:
        raise InputError("the trace has no requests.")
    for each in trace:
        check_type("each request of a trace", each, Request, "a kvjax.planning.memory_pool.Request")
        whole = all(isinstance(size, int | np.integer) and size >= 1 for size in (each.prompt, each.output))
        if not whole or not math.isfinite(each.arrival) or each.arrival < 0:
            raise InputError(
                "a request must arrive after a number of seconds, and have whole numbers of at least one token of "
                f"prompt and output; got {each}."
            )


def random_requests(
    number: int, *, rate: float, prompt: int, output: int, long: int, long_share: float, seed: int = 0
) -> list[Request]:
    """Returns a trace: Poisson arrivals, and geometric lengths, of which those of some prompts have a larger mean.

    Args:
      number: of requests.
      rate: requests that arrive in a second.
      prompt: tokens of a prompt, on average.
      output: tokens of an answer, on average.
      long: tokens of a long prompt, on average.
      long_share: the chance that a prompt is long.
      seed: of the draws.

    Raises:
      InputError: an argument out of range.
    """
    for name, value in (("number", number), ("prompt", prompt), ("output", output), ("long", long)):
        check_count(name, value)
    number_argument("rate", rate, minimum=1e-9, maximum=1e9, error=InputError)
    number_argument("long_share", long_share, minimum=0, maximum=1, error=InputError)
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, number))
    means = np.where(rng.random(number) < long_share, long, prompt)
    prompts, outputs = rng.geometric(1 / means), rng.geometric(1 / output, number)
    return [Request(float(arrivals[each]), int(prompts[each]), int(outputs[each])) for each in range(number)]
