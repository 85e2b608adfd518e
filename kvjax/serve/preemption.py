"""Preemption: requests of a higher priority take the rows of others, whose states wait in host memory.

The order is that of FastSwitch (arXiv:2411.18424): priority, higher first, then arrival. A request never takes the row
of one of its own priority, so that each preemption needs a request that is more urgent than one that runs.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.errors import InputError, shown
from kvjax.serve.intake import Job
from kvjax.serve.swap import row_bytes, swap_out
from kvjax.typing import PyTree

SWAP_BYTES = 4 * 10**9  # of host memory, unless the caller gives another number


@dataclasses.dataclass(frozen=True, eq=False)
class Swapped:
    """A request whose row was taken.

    Attributes:
      job: the request.
      held: its row, in host memory.
      nbytes: bytes of the row.
    """

    job: Job
    held: PyTree
    nbytes: int


class SwapSpace:
    """Requests whose rows were taken, within a number of bytes of host memory.

    Attributes:
      nbytes: bytes that are taken at the moment.
      preemptions: times that a request has lost its row.
      moved_bytes: bytes that have been moved to host memory.
    """

    def __init__(self, max_bytes: int):
        """Begins without requests.

        Args:
          max_bytes: the number of bytes; 0 = no request loses its row.

        Raises:
          InputError: it is not a whole number of at least 0.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int | np.integer) or max_bytes < 0:
            raise InputError(f"swap_bytes must be a whole number of bytes of at least 0; got {shown(max_bytes)}.")
        self.nbytes = self.preemptions = self.moved_bytes = 0
        self._max_bytes = int(max_bytes)
        self._swapped: list[Swapped] = []

    def __len__(self) -> int:
        """The number of requests."""
        return len(self._swapped)

    def room(self, rows: PyTree | None) -> int:
        """The number of rows of a batch that there is room for; of None, which is not yet allocated, there are none."""
        return 0 if rows is None else (self._max_bytes - self.nbytes) // row_bytes(rows)

    def put(self, job: Job, rows: PyTree, row: int) -> None:
        """Copies a request's row to host memory; the row is then free."""
        nbytes = row_bytes(rows)
        self._swapped.append(Swapped(job, swap_out(rows, row), nbytes))
        self.nbytes += nbytes
        self.preemptions += 1
        self.moved_bytes += nbytes

    @property
    def first(self) -> Job | None:
        """The request that gets a row next."""
        return min((each.job for each in self._swapped), key=order, default=None)

    def take(self) -> Swapped:
        """Takes the request that gets a row next, of which there must be one."""
        found = min(self._swapped, key=lambda each: order(each.job))
        self.drop(found.job)
        return found

    def drop(self, job: Job) -> None:
        """Forgets a request, if it is here."""
        self._swapped = [each for each in self._swapped if each.job is not job]
        self.nbytes = sum(each.nbytes for each in self._swapped)


def order(job: Job) -> tuple[int, int]:
    """The key by which requests are sorted: the first one is served first."""
    return -job.request.priority, job.id


def preempted_row(jobs: Sequence[Job | None], waiting: Job) -> int | None:
    """Returns the row that a waiting request takes: that of the last of the less urgent requests; None if none is.

    Args:
      jobs: of each row.
      waiting: the request.
    """
    running = [(order(job), row) for row, job in enumerate(jobs) if job is not None and yields_to(job, waiting)]
    return max(running, default=(None, None))[1]


def yields_to(job: Job, waiting: Job | None) -> bool:
    """Whether a running request gives its row to a waiting one."""
    return waiting is not None and job.request.priority < waiting.request.priority
