"""Simulates a server whose requests change priority and are moved to the host and back (FastSwitch, arXiv:2411.18424).

A seeded trace of requests runs on the closed forms of `kvjax.planning.serving_costs`. All seconds are planned; those of
moving a row are measured by ``python -m experiments.bench swap``.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.arguments import check_type, choice_argument, number_argument
from kvjax.devices import Device, known_numbers
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.planning.memory_layouts import PAGE
from kvjax.planning.served_model import BudgetOfPrompt, LayerRun, ServedModel

PERCENTILES = (50, 95, 99, 99.9)
PRIORITIES = ("random", "markov")


class Turn(NamedTuple):
    """A message of a user, which follows the user's earlier ones.

    Attributes:
      user: whose it is.
      turn: its number; a turn begins when the one before has ended.
      arrival: seconds from the beginning.
      prompt: tokens of the message.
      output: tokens of the answer, at least 1.
    """

    user: int
    turn: int
    arrival: float
    prompt: int
    output: int


@dataclasses.dataclass(frozen=True)
class Preemptions:
    """The outcome of a simulation.

    Attributes:
      ttft: percentile -> seconds from when a turn may begin to its first token.
      tbt: percentile -> seconds between two tokens of a turn.
      tokens_per_second: of all answers.
      jain: Jain's index of fairness of the users' tokens per second of waiting and running, 1 = all alike.
      moved: bytes between device and host, in both directions.
      swaps: rows moved, in either direction.
      seconds: from the first arrival to the last token.
    """

    ttft: Mapping[float, float]
    tbt: Mapping[float, float]
    tokens_per_second: float
    jain: float
    moved: int
    swaps: int
    seconds: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the nearest-rank percentile: the least value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent * len(ordered) / 100 - 1e-9), 1) - 1]


def jain_index(values: Sequence[float]) -> float:
    """Returns Jain's index of fairness, (Σx)² / (n·Σx²): 1 where all are alike, 1/n where one has all."""
    x = np.asarray(values, np.float64)
    return float(x.sum() ** 2 / (len(x) * np.square(x).sum()))


@dataclasses.dataclass
class _Row:
    """A turn that is present.

    Attributes:
      turn: the request.
      number: its place in the trace.
      began: seconds when it could begin.
      held: tokens whose keys and values there are, those of the user's earlier turns included.
      end: tokens of which the prompt consists, with earlier turns.
      runs: the layers by the budgets of the user's text.
      made: tokens of the answer so far.
      resident: whether they are on the device.
      on_host: the tokens that the host has.
      priority: the larger, the sooner.
      last: seconds of the last token.
    """

    turn: Turn
    number: int
    began: float
    held: int
    end: int
    runs: tuple[LayerRun, ...]
    made: int = 0
    resident: bool = False
    on_host: int = 0
    priority: float = 0.0
    last: float = 0.0


def simulate_preemption(
    model: ServedModel,
    device: Device,
    trace: Sequence[Turn],
    *,
    budget: BudgetOfPrompt = None,
    prompt_tokens: int = 512,
    copy_seconds: float = 0.0,
    frequency: float = 0.02,
    priorities: str = "random",
    stay: float = 0.5,
    overlap: bool = False,
    keep_host: bool = False,
    seed: int = 0,
) -> Preemptions:
    """Simulates a server under a trace.

    In each iteration, the turns that are present are taken by priority, then arrival, while they fit in memory; others
    are moved to the host, as is the text of a user until the next message. Then at most `prompt_tokens` of prompts are
    read, in that order, and each turn whose prompt has been read gets a token. Slots in host memory (`ServedModel`)
    stay there: a step reads them over the link, while the device reads and computes.

    Args:
      model: the model.
      device: with its memory, and the speeds of its memory, of its host link and of its products.
      trace: the turns.
      budget: slots of each layer, or one number for each; None = a full cache in pages of 16 tokens, of all layers or
        of one. Or a function that returns them for a number of tokens, which is called with those of the first message
        of each user, as the budgets of `kvjax.contexts` are those of the first prompt.
      prompt_tokens: the most tokens of prompts of an iteration.
      copy_seconds: that each copy takes besides its bytes: of each page, or of the slots of a layer, keys and values.
      frequency: redraws of the priorities in an iteration: 0.02 = every 50 iterations.
      priorities: ``random``, or ``markov``: a priority stays with the probability `stay`.
      stay: see `priorities`.
      overlap: whether rows are moved while others are computed.
      keep_host: whether a copy stays on the host, so that only what was written since goes out again.
      seed: of the priorities.

    Raises:
      InputError: an argument that is not valid, a device whose speeds are not known, or a turn that does not fit alone.
    """
    check_type("model", model, ServedModel, "a ServedModel, such as ServedModel.of(model.config)")
    choice_argument("priorities", priorities, PRIORITIES, error=InputError)
    check_count("prompt_tokens", prompt_tokens)
    number_argument("frequency", frequency, minimum=1e-6, maximum=1, error=InputError)
    number_argument("stay", stay, minimum=0, maximum=1, error=InputError)
    memory, bandwidth, link, compute = known_numbers(device, "memory", "bandwidth", "link", "flops")
    if not trace:
        raise InputError("the trace has no turns.")
    number_argument("copy_seconds", copy_seconds, minimum=0, maximum=1e3, error=InputError)
    room = memory - model.weight_bytes
    rng = np.random.default_rng(seed)

    def size(row: _Row, tokens: int) -> int:
        """Returns the bytes on the device of a row of `tokens` tokens."""
        pages = PAGE * math.ceil(tokens / PAGE)
        return sum(each.on_device * (pages if each.budget is None else each.budget + 1) for each in row.runs)

    def move(row: _Row, most: int) -> tuple[int, int]:
        """Returns the bytes and the copies of at most `most` slots of each layer of a row that are on the device."""
        slots = [(each, min(each.held(row.held), most)) for each in row.runs if each.on_device]
        copies = sum(
            2 * each.layers * (math.ceil(own / PAGE) if each.budget is None else min(own, 1)) for each, own in slots
        )
        return sum(each.on_device * own for each, own in slots), copies

    def outgoing(row: _Row) -> tuple[int, int]:
        """Returns the bytes and copies that go out with a row: all, or what the host does not have."""
        return move(row, row.held - row.on_host if keep_host else row.held)

    def swapped(row: _Row) -> int:
        """Returns 1 for a row that has slots on the device, which move; 0 for another."""
        return int(any(each.on_device for each in row.runs))

    waiting = _by_user(trace)
    runs = {user: model.runs_of(budget, turns[0][1].prompt) for user, turns in waiting.items()}
    pending = (0, 0, 0)  # bytes, copies and rows that leave with the next step
    texts = dict.fromkeys(waiting, 0)
    stored = dict.fromkeys(waiting, 0)  # tokens of each user's text that the host has
    present: list[_Row] = []
    free = dict.fromkeys(waiting, 0.0)  # seconds when a user's last turn ended
    served, waited = dict.fromkeys(waiting, 0), dict.fromkeys(waiting, 0.0)
    ttft: list[float] = []
    tbt: list[float] = []
    moved = swaps = iteration = drawn = 0
    clock = first = min(each.arrival for each in trace)
    while True:
        for user, turns in waiting.items():
            if turns and not any(row.turn.user == user for row in present):
                number, turn = turns[0]
                begins = max(turn.arrival, free[user])
                if begins <= clock:
                    turns.pop(0)
                    # The last token of an answer is chosen and not fed, until another message follows.
                    text = texts[user]
                    present.append(_Row(
                        turn, number, begins, text, text + turn.prompt + (text > 0), runs[user],
                        on_host=stored[user], priority=float(rng.random()),
                    ))  # fmt: skip
        if not present:
            later = [max(turns[0][1].arrival, free[user]) for user, turns in waiting.items() if turns]
            if not later:
                break
            clock = min(later)
            continue
        if int(iteration * frequency + 1e-9) > drawn:
            drawn = int(iteration * frequency + 1e-9)
            for row in present:
                if priorities == "random" or rng.random() >= stay:
                    row.priority = float(rng.random())
        order = sorted(present, key=lambda row: (-row.priority, row.turn.arrival, row.number))
        chosen: list[tuple[_Row, int]] = []
        used, left = 0, prompt_tokens
        for row in order:
            more = min(row.end - row.held, left) if row.made == 0 and row.held < row.end else 1
            own = size(row, row.held + more)
            if used + own > room:
                if not chosen:
                    raise InputError(f"a turn of user {row.turn.user} does not fit in the device's memory.")
                break
            chosen.append((row, more))
            used += own
            left -= more if row.held < row.end else 0
        ids = {id(row) for row, _ in chosen}
        # Rows whose turn has ended leave first, then those that must wait.
        swap_bytes, swap_copies, swaps = pending[0], pending[1], swaps + pending[2]
        pending = (0, 0, 0)
        for row in present:
            if row.resident and id(row) not in ids:
                out, parts = outgoing(row)
                swap_bytes, swap_copies, swaps = swap_bytes + out, swap_copies + parts, swaps + swapped(row)
                row.resident, row.on_host = False, row.held
            elif not row.resident and id(row) in ids:
                back, parts = move(row, row.held)
                if back:
                    swap_bytes, swap_copies, swaps = swap_bytes + back, swap_copies + parts, swaps + 1
                row.resident = True
        moved += swap_bytes
        swap = swap_bytes / link + swap_copies * copy_seconds
        flops, read, linked = 0.0, float(model.weight_bytes), 0.0
        for row, more in chosen:
            if not more:
                continue
            flops += 2 * model.active * more
            for each in row.runs:
                # Pairs of a query and a key, twice: of the tokens with what is held, and with each other.
                pairs = 2 * more * each.held(row.held) + more**2
                # With statistics, half as much again of a prompt.
                passes = 2 if each.budget is None or row.held >= row.end else 3
                flops += passes * each.layers * model.heads * model.dim * pairs
                read += each.total * each.held(row.held + more)
                linked += each.on_host * each.held(row.held + more)
        computing, reading = max(flops / compute, read / bandwidth), linked / link
        clock += max(computing, reading + swap) if overlap else max(computing, reading) + swap
        for row, more in chosen:
            row.held += more
            if row.held < row.end:
                continue
            (ttft.append(clock - row.began) if row.made == 0 else tbt.append(clock - row.last))
            row.made, row.last = row.made + 1, clock
            served[row.turn.user] += 1
            if row.made == row.turn.output:
                user = row.turn.user
                texts[user], free[user] = row.held, clock
                # A user who is silent has no slots: the text goes to the host, if another message follows.
                if waiting[user]:
                    out, parts = outgoing(row)
                    pending = (pending[0] + out, pending[1] + parts, pending[2] + swapped(row))
                    stored[user] = row.held
                waited[user] += clock - row.began
                present.remove(row)
        iteration += 1
    made = sum(each.output for each in trace)
    return Preemptions(
        {each: percentile(ttft, each) for each in PERCENTILES},
        {each: percentile(tbt, each) for each in PERCENTILES} if tbt else {},
        made / (clock - first), jain_index([served[user] / waited[user] for user in waiting]), moved, swaps,
        clock - first,
    )  # fmt: skip


def _by_user(trace: Sequence[Turn]) -> dict[int, list[tuple[int, Turn]]]:
    """Returns the turns of each user in their order, with their places in the trace."""
    found: dict[int, list[tuple[int, Turn]]] = {}
    for each in trace:
        check_type("each turn of a trace", each, Turn, "a kvjax.planning.preemption.Turn")
    for number, each in sorted(enumerate(trace), key=lambda pair: (pair[1].user, pair[1].turn)):
        whole = all(isinstance(size, int | np.integer) and size >= 1 for size in (each.prompt, each.output))
        if not whole or not math.isfinite(each.arrival) or each.arrival < 0:
            raise InputError(
                f"turn {each.turn} of user {each.user} must arrive after a number of seconds, and have whole numbers "
                f"of at least one token of prompt and output; got {each}."
            )
        found.setdefault(each.user, []).append((number, each))
    return found


def random_trace(users: int, turns: int, *, rate: float, prompt: int, output: int, seed: int = 0) -> list[Turn]:
    """Returns a trace: Poisson arrivals of users, and geometric lengths of messages and answers.

    Args:
      users: the number of users.
      turns: of each.
      rate: users that arrive in a second.
      prompt: tokens of a message, on average.
      output: tokens of an answer, on average.
      seed: of the draws.

    Raises:
      InputError: an argument out of range.
    """
    for name, value in (("users", users), ("turns", turns), ("prompt", prompt), ("output", output)):
        check_count(name, value)
    number_argument("rate", rate, minimum=1e-9, maximum=1e9, error=InputError)
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, users))
    return [
        Turn(user, turn, float(arrivals[user]), int(rng.geometric(1 / prompt)), int(rng.geometric(1 / output)))
        for user in range(users) for turn in range(turns)
    ]  # fmt: skip
