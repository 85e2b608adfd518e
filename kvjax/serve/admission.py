"""Requests that find no place: they wait a moment in line, so that a client that asks again at once gains nothing."""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator

from kvjax.errors import KvjaxError
from kvjax.serve.clients import Client
from kvjax.serve.engine import Asked, Busy, Engine, Stopped, Ticket

PATIENCE_SECONDS = 5.0  # after which a request in line is refused
LOOK_SECONDS = 0.02  # between two looks whether there is a place
PLACES, LINE = 4, 8  # of the connections, a quarter are for requests with a place, an eighth for those in line
FULL = "no further request may wait"

Waiting = tuple[list[Asked], "asyncio.Future[list[Ticket]]"]


class Admission:
    """Submits requests to an engine, in the order in which a client sent them."""

    def __init__(self, engine: Engine, connections: Callable[[], int], patience: float = PATIENCE_SECONDS):
        """Begins without requests.

        Args:
          engine: runs requests.
          connections: the number of connections that there may be at the moment.
          patience: seconds after which a request in line is refused.
        """
        self._engine, self._connections, self._patience = engine, connections, patience
        self._lines: dict[Client, collections.deque[Waiting]] = {}

    def full(self, client: Client) -> bool:
        """Whether a client's request would be refused without waiting."""
        return self._no_line() and self._engine.full(client, places=self._places())

    async def submit(self, asked: list[Asked], client: Client) -> list[Ticket]:
        """Adds requests, as soon as there is a place for all of them.

        Args:
          asked: see `kvjax.serve.engine.Engine.submit`.
          client: who sends them.

        Raises:
          Busy: there was no place in time.
          InputError: they are more than there is ever room for.
          Stopped: the engine has ended.
        """
        if client not in self._lines:
            with contextlib.suppress(Busy):
                return self._engine.submit(asked, client, places=self._places())
        if self._no_line():
            raise Busy(FULL)
        with self._in_line(asked, client) as place:
            try:
                await asyncio.wait({place}, timeout=self._patience)
            except asyncio.CancelledError:
                # The client disconnected when its turn came.
                if place.done() and place.exception() is None:
                    for ticket in place.result():
                        self._engine.cancel(ticket)
                raise
        if not place.done():
            raise Busy(FULL)
        return place.result()

    @contextlib.contextmanager
    def _in_line(self, asked: list[Asked], client: Client) -> "Iterator[asyncio.Future[list[Ticket]]]":
        """A place in the line of a client, until the block ends."""
        loop = asyncio.get_running_loop()
        waiting: Waiting = (asked, loop.create_future())
        if not self._lines:
            loop.call_later(LOOK_SECONDS, self._look, loop)
        self._lines.setdefault(client, collections.deque()).append(waiting)
        try:
            yield waiting[1]
        finally:
            line = self._lines.get(client)
            if line is not None and waiting in line:
                line.remove(waiting)
                if not line:
                    del self._lines[client]

    def _places(self) -> int:
        return max(1, self._connections() // PLACES)

    def _no_line(self) -> bool:
        """Whether no further request may wait in line."""
        return sum(map(len, self._lines.values())) >= self._connections() // LINE

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submits the first of each line, while there are places."""
        ready = list(self._lines)
        while ready:
            ready = [client for client in ready if self._advance(client)]
        if self._lines:
            loop.call_later(LOOK_SECONDS, self._look, loop)

    def _advance(self, client: Client) -> bool:
        """Submits the first of a line; returns whether there may be a place for the next one."""
        asked, place = self._lines[client][0]
        try:
            place.set_result(self._engine.submit(asked, client, places=self._places()))
        except Busy:
            return False
        except (KvjaxError, Stopped) as error:
            place.set_exception(error)
        self._lines[client].popleft()
        if not self._lines[client]:
            del self._lines[client]
        return client in self._lines
