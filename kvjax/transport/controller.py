"""CacheGen's controller: at which level each chunk is sent, so that the first token comes in time."""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.arguments import number_argument, plain_signature
from kvjax.errors import InputError, shown

TEXT = "text"


class Transfer(NamedTuple):
    """A context that was sent in chunks.

    Attributes:
      levels: of each chunk, the level of its codes, or ``text`` where its tokens were sent and computed again.
      ttft: seconds until all chunks are there.
      in_time: whether these are no more than the objective.
    """

    levels: tuple[int | str, ...]
    ttft: float
    in_time: bool


class _Link:
    """A link whose rate is constant between some moments.

    Attributes:
      begins: seconds, ascending, the first 0.
      rates: bytes/s from each of these on.
    """

    def __init__(self, trace: Sequence[tuple[float, float]]) -> None:
        self.begins = [float(each[0]) for each in trace]
        self.rates = [float(each[1]) for each in trace]

    def end(self, start: float, size: float) -> float:
        """Returns when bytes that are sent from `start` on have arrived."""
        place = bisect.bisect_right(self.begins, start) - 1
        for number in itertools.count(place):
            until = self.begins[number + 1] if number + 1 < len(self.begins) else float("inf")
            able = (until - start) * self.rates[number] if self.rates[number] else 0.0
            if size <= able:
                return start + (size / self.rates[number] if size else 0.0)
            size, start = size - able, until
        raise AssertionError


@plain_signature
def plan_transfer(
    sizes: Sequence[Sequence[int]],
    recompute: Sequence[float],
    *,
    slo: float,
    trace: Sequence[tuple[float, float]],
    throughput: float | None = None,
) -> Transfer:
    """Sends the chunks of a context, each as well as there is time for (CacheGen, arXiv:2310.07240, section 5).

    Before each chunk: if all that is left can be computed again from its text in the time that is left, the text is
    sent, which loses nothing. Otherwise the highest level is taken at which all that is left arrives in time, by the
    rate of the last chunk that was sent; if there is none, level 1.

    Args:
      sizes: of each chunk, its bytes at levels 1, 2 and so on, ascending; from `kvjax.transport.report`.
      recompute: of each chunk, the seconds to compute it from its text, whose bytes take no time.
      slo: seconds in which all must be there.
      trace: pairs of seconds and bytes/s: the rate of the link from then on; the first at 0 seconds.
      throughput: bytes/s that are assumed for the first chunk; None = those of the trace.

    Raises:
      InputError: a trace, sizes or seconds that are not valid.
    """
    number_argument("slo", slo, minimum=0, maximum=1e9, error=InputError)
    if not sizes or len(sizes) != len(recompute) or len({len(each) for each in sizes}) != 1 or not sizes[0]:
        raise InputError("give the bytes of each chunk at the same levels, and the seconds to compute it again.")
    numbers = [*itertools.chain(*sizes), *recompute]
    if not all(math.isfinite(each) and each >= 0 for each in numbers):
        raise InputError("bytes and seconds of chunks must be numbers of at least 0.")
    trace = [(float(each[0]), float(each[1])) for each in trace]
    begins = [each[0] for each in trace]
    valid = begins and begins[0] == 0 and all(one < two for one, two in itertools.pairwise(begins))
    if not valid or not all(0 <= each[1] < math.inf for each in trace) or not trace[-1][1] > 0:
        raise InputError(
            f"trace must be pairs of ascending seconds from 0 on and bytes/s, the last above 0; got {shown(trace)}."
        )
    link, now = _Link(trace), 0.0
    rate = float(trace[0][1] if throughput is None else throughput)
    levels: list[int | str] = []
    for number, own in enumerate(sizes):
        left = slo - now
        if sum(recompute[number:]) <= left:
            levels.append(TEXT)
            now += recompute[number]
            continue
        totals = [sum(each[level] for each in sizes[number:]) for level in range(len(own))]
        fitting = [level for level, total in enumerate(totals) if rate > 0 and total / rate <= left]
        level = max(fitting, default=0)
        levels.append(level + 1)
        end = link.end(now, own[level])
        rate, now = own[level] / (end - now) if end > now else rate, end
    return Transfer(tuple(levels), now, now <= slo)
