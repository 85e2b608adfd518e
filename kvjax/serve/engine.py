"""A thread that runs a `Runner`, so that requests can be submitted and cancelled at any time from others."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

from kvjax.contexts.prefix_store import PrefixStore
from kvjax.errors import InputError
from kvjax.serve.clients import Client, FairQueue
from kvjax.serve.counts import Counts, Load
from kvjax.serve.documents import DocumentCaches
from kvjax.serve.request import Progress, Request, Result
from kvjax.serve.runner import Runner
from kvjax.serve.text_stream import TextStream, TokenText

SHARED = Client()  # who sends requests of which nothing is known
SHARED_SECONDS = 10.0  # after several clients had requests, for which one that comes again finds few before it
JOIN_SECONDS = 30.0  # that a chunk may take when the thread is to end


class Busy(Exception):
    """As many requests wait as may."""


class Stopped(Exception):
    """The thread has ended, or an error has ended it."""


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """The part of an answer that is new since the last one.

    Attributes:
      text: new text; empty without a tokenizer.
      tokens: new token ids.
      logprobs: their log-probabilities.
      result: the whole result, if this is the last piece; otherwise None.
      token_texts: what tokens have of the text, of the next ones all of whose characters are there; None without a
        tokenizer.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    result: Result | None
    token_texts: list[TokenText] | None


#: Takes the pieces of a request, or the error that refused it; called by the engine's thread, and must not wait.
Deliver = Callable[[StreamChunk | Exception], None]

#: A request that is to be submitted, what makes its text, or None, and what takes its pieces.
Asked = tuple[Request, TextStream | None, Deliver]


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request that was submitted.

    Attributes:
      request: the request.
      deliver: see `Deliver`.
      text: makes its text; None for none.
      client: who has sent it.
      id: of the runner; None before the runner has it.
      open: whether something is still to be delivered.
    """

    request: Request
    deliver: Deliver
    text: TextStream | None = None
    client: Client = SHARED
    id: int | None = None
    open: bool = True


class Engine:
    """Runs a runner in a thread of its own.

    Requests wait here, and are taken from each client in turn. The runner has as many that wait as it looks at when it
    chooses prompts, the number of its rows, and a quarter of these where there are several clients. Those of a lower
    priority are not counted, so that none is in the way of a more urgent one.

    Attributes:
      error: what has ended the thread; None while all is well.
    """

    def __init__(self, runner: Runner, *, most_waiting: int):
        """Starts the thread.

        Args:
          runner: it must not be used by others any more.
          most_waiting: the number of requests beyond the runner's rows that are accepted, in addition to those of
            clients that hold less than their share; see `FairQueue.fits`.
        """
        self.error: Exception | None = None
        self._runner, self._max_requests = runner, runner.load.rows + most_waiting
        self._change = threading.Condition()
        self._queue: FairQueue[Ticket] = FairQueue(lambda ticket: ticket.request.priority)
        self._taken: collections.deque[Ticket] = collections.deque()  # from the queue, and not submitted
        self._cancelled: list[int] = []  # ids of the runner
        self._running: dict[int, Ticket] = {}
        self._stopping = False
        self._load, self._counts = runner.load, runner.counts
        self._thread = threading.Thread(target=self._run, name="kvjax-serve", daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """The load of the runner after its last chunk; requests that wait include those that it does not have yet."""
        with self._change:
            running = self._load.running
            return dataclasses.replace(self._load, running=running, waiting=max(0, self._queue.open - running))

    @property
    def counts(self) -> Counts:
        """The counts of the runner after its last chunk."""
        return self._counts

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The states of prompts; None if none are kept."""
        return self._runner.prefix_store

    @property
    def documents(self) -> DocumentCaches:
        """The caches of documents."""
        return self._runner.documents

    def submit(self, requests: list[Asked], client: Client = SHARED, *, places: int | None = None) -> list[Ticket]:
        """Adds requests, all of them or none.

        Args:
          requests: what is asked.
          client: who sends them.
          places: the number of requests that may run or wait, if that is less than otherwise.

        Raises:
          InputError: they are more than there is ever room for.
          Busy: there is no room for all of them at the moment.
          Stopped: the thread has ended.
        """
        tickets = [Ticket(request, deliver, text, client) for request, text, deliver in requests]
        with self._change:
            if self._stopping or self.error is not None:
                raise Stopped(f"the engine is not running: {self.error or 'it was stopped'}")
            if len(tickets) > self._max_requests:
                raise InputError(f"{len(tickets)} requests were sent at once, but the limit is {self._max_requests}.")
            if not self._queue.fits(client, len(tickets), max_requests := self._places(places)):
                raise Busy(f"{self._queue.open} requests are running or waiting, and the limit is {max_requests}.")
            for ticket in tickets:
                self._queue.add(client, ticket)
            self._change.notify()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, of which nothing is delivered any more. Its row is free after the current chunk."""
        with self._change:
            if not ticket.open:
                return
            ticket.open = False
            if self._queue.remove(ticket.client, ticket) or ticket.id is None:
                return  # it waits no more, or the thread has just taken it and sees that it is not open
            self._cancelled.append(ticket.id)
            self._change.notify()

    def full(self, client: Client = SHARED, *, places: int | None = None) -> bool:
        """Whether a client can add no request at the moment; see `submit`."""
        with self._change:
            return not self._queue.fits(client, 1, self._places(places))

    def _places(self, limit: int | None) -> int:
        return self._max_requests if limit is None else min(self._max_requests, limit)

    @property
    def max_requests(self) -> int:
        """The most requests that may run or wait."""
        return self._max_requests

    @property
    def stopping(self) -> bool:
        """Whether no request is taken any more."""
        return self._stopping

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread after its chunk; requests that have not ended end with `Stopped`.

        Args:
          wait: whether to return only when it has ended.
        """
        with self._change:
            self._stopping = True
            self._change.notify()
        if wait:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except Exception as error:  # whatever it is, clients must not wait for ever
            self.error = error
        ended = Stopped(f"the engine is not running: {self.error or 'it was stopped'}")
        with self._change:
            self._stopping = True
            waiting = self._queue.clear()
        for ticket in waiting:
            self._deliver_last(ticket, ended)
        for ticket in [*self._taken, *self._running.values()]:
            self._close(ticket, ended)
        self._running.clear()

    def _wait(self) -> bool:
        """Waits until there is something to do; returns whether the thread goes on."""
        with self._change:
            while not (self._stopping or self._cancelled or self._queue.waiting) and self._runner.idle:
                self._change.wait()
            return not self._stopping

    def _turn(self) -> None:
        """Takes requests, and runs one chunk."""
        load = self._runner.load
        with self._change:
            cancelled, self._cancelled = self._cancelled, []
            alone = time.monotonic() - self._queue.shared > SHARED_SECONDS
            places = load.rows + (load.rows if alone else max(1, load.rows // 4))
            while self._has_place(places) and (ticket := self._queue.take()) is not None:
                self._taken.append(ticket)
        for number in cancelled:
            self._runner.cancel(number)
        while self._taken:
            self._admit(self._taken[0])
            self._taken.popleft()
        progress = [] if self._runner.idle else self._runner.step()
        with self._change:
            self._load, self._counts = self._runner.load, dataclasses.replace(self._runner.counts)
        for each in progress:
            self._report(each)

    def _has_place(self, places: int) -> bool:
        """Whether the runner has fewer requests that the next one of the queue waits for."""
        least = self._queue.priority
        held = [*self._running.values(), *self._taken]
        return least is not None and sum(each.request.priority >= least for each in held) < places

    def _admit(self, ticket: Ticket) -> None:
        if not ticket.open:
            self._close(ticket, None)
            return
        try:
            number = self._runner.submit(ticket.request)
        except Exception as error:  # of one request, which ends alone
            self._close(ticket, error)
            return
        self._running[number] = ticket
        with self._change:
            ticket.id = number
            if not ticket.open:
                self._cancelled.append(number)

    def _report(self, progress: Progress) -> None:
        ticket = self._running[progress.id]
        text, token_texts = "", None
        if ticket.text is not None:
            if progress.result is not None:
                ticket.text.finish()
            text, token_texts = ticket.text.pop(), ticket.text.pop_tokens()
        tokens, logprobs = [int(x) for x in progress.tokens], [float(x) for x in progress.logprobs]
        piece = StreamChunk(text, tokens, logprobs, progress.result, token_texts)
        if progress.result is None:
            if ticket.open:
                ticket.deliver(piece)
            return
        del self._running[progress.id]
        if progress.result.error is None:
            self._close(ticket, piece)
            return
        if ticket.open and tokens:
            ticket.deliver(dataclasses.replace(piece, result=None))
        self._close(ticket, progress.result.error)

    def _close(self, ticket: Ticket, last: StreamChunk | Exception | None) -> None:
        """Delivers the last piece of a request that was taken, and makes room for another."""
        with self._change:
            self._queue.end(ticket.client)
        self._deliver_last(ticket, last)

    def _deliver_last(self, ticket: Ticket, last: StreamChunk | Exception | None) -> None:
        with self._change:
            wanted, ticket.open = ticket.open, False
        if wanted and last is not None:
            ticket.deliver(last)
