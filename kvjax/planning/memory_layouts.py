"""The bytes that caches of growing texts take: reserved, in pages, in pages of virtual memory, and in fixed slots."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvjax.arguments import check_type
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.planning.served_model import Budget, ServedModel

PAGE = 16  # tokens of a page, as in vLLM
GRANULE = 2 << 20  # bytes that a GPU's virtual memory is mapped by


class RowBytes(NamedTuple):
    """The bytes of a row of some tokens.

    Attributes:
      reserved: for the longest text from the beginning.
      pages: in pages of 16 tokens (PagedAttention, arXiv:2309.06180).
      vattention: in granules of virtual memory, for the keys and for the values of each layer (vAttention,
        arXiv:2405.04437).
      vattention_sliced: the same, with all layers in one tensor.
      slots: in as many slots as the budget of each layer has, and one for the newest token, whatever the text's length.
    """

    reserved: int
    pages: int
    vattention: int
    vattention_sliced: int
    slots: int


def row_bytes(model: ServedModel, tokens: int, *, longest: int, budget: Budget, granule: int = GRANULE) -> RowBytes:
    """Returns the bytes of a row.

    Args:
      model: the model.
      tokens: of the row.
      longest: the most tokens that a row can have.
      budget: the slots of each layer, or one number for each; a layer without one has `longest` slots.
      granule: bytes that virtual memory is mapped by, 64 KiB to 2 MiB.

    Raises:
      InputError: a number below 1, slots in host memory, or see `ServedModel.runs`.
    """
    check_type("model", model, ServedModel, "a ServedModel, such as ServedModel.of(model.config)")
    for name, value in (("tokens", tokens), ("longest", longest), ("granule", granule)):
        check_count(name, value)
    model.check_on_device("layouts")
    slot, runs = model.token_bytes, model.runs(budget)
    return RowBytes(
        reserved=slot * longest,
        pages=slot * PAGE * math.ceil(tokens / PAGE),
        vattention=sum(2 * each.layers * granule * math.ceil(tokens * each.slot_bytes / 2 / granule) for each in runs),
        vattention_sliced=granule * math.ceil(slot * tokens / granule),
        slots=sum(each.total * (longest if each.budget is None else each.budget + 1) for each in runs),
    )


class TracedRow(NamedTuple):
    """A request of a trace.

    Attributes:
      arrival: the step from which it may run.
      prompt: tokens of its prompt.
      output: tokens that it generates, one a step.
    """

    arrival: int
    prompt: int
    output: int


@dataclasses.dataclass(frozen=True)
class LayoutUse:
    """The use of memory by a trace under one layout.

    Attributes:
      peak: the most bytes that rows take in a step.
      waste: the share of the bytes of rows that hold nothing, over all steps. In slots, the bytes of tokens that were
        evicted are none of them.
      most_rows: the most rows that run in a step.
      steps: the number of steps until all have ended.
    """

    peak: int
    waste: float
    most_rows: int
    steps: int


def simulate_layouts(
    model: ServedModel,
    trace: Sequence[TracedRow],
    *,
    memory: int,
    longest: int,
    budget: Budget,
    granule: int = GRANULE,
) -> Mapping[str, LayoutUse]:
    """Runs a trace under each layout: rows start in order of arrival, while what they will ever take fits.

    A row is never interrupted, so that room for all of its tokens is needed when it starts.

    Args:
      model: the model.
      trace: the requests.
      memory: bytes for caches.
      longest: see `row_bytes`.
      budget: see `row_bytes`.
      granule: see `row_bytes`.

    Raises:
      InputError: a request that does not fit alone, or is longer than `longest`.
    """
    for each in trace:
        if not all(isinstance(number, int) and number >= least for number, least in zip(each, (0, 1, 1), strict=True)):
            raise InputError(f"a request must have whole numbers of steps and tokens, from 0, 1 and 1 on; got {each}.")
    if not trace:
        raise InputError("the trace has no requests.")
    found = {}
    for name in RowBytes._fields:

        def size(tokens: int, name: str = name) -> int:
            own = row_bytes(model, tokens, longest=longest, budget=budget, granule=granule)
            return int(getattr(own, name))

        for each in trace:
            tokens = each.prompt + each.output
            if tokens > longest or size(tokens) > memory:
                raise InputError(f"a request of {tokens:,} tokens does not fit, as {name}, in {memory:,} bytes.")
        runs = model.runs(budget if name == "slots" else None)
        waiting = sorted(trace, key=lambda each: each.arrival)
        running: list[tuple[TracedRow, int]] = []  # and the step in which each started
        step = peak = most = allocated = used = 0
        while waiting or running:
            running = [(row, start) for row, start in running if step < start + row.output]
            if not running and waiting:
                step = max(step, waiting[0].arrival)  # until then, nothing happens
            promised = sum(size(row.prompt + row.output) for row, _ in running)
            while waiting and waiting[0].arrival <= step:
                more = size(waiting[0].prompt + waiting[0].output)
                if promised + more > memory:
                    break
                promised += more
                running.append((waiting.pop(0), step))
            lengths = [row.prompt + step - start + 1 for row, start in running]
            own = sum(map(size, lengths))
            allocated += own
            used += sum(
                each.total * min(length, longest if each.budget is None else each.budget + 1)
                for length in lengths for each in runs
            )  # fmt: skip
            peak, most = max(peak, own), max(most, len(running))
            step += 1
        found[name] = LayoutUse(peak, 1 - used / allocated if allocated else 0.0, most, step - 1)
    return found
