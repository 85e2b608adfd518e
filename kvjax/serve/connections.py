"""Connections of clients: how many there may be, and how long one may take to send a request and to read the answer."""

import asyncio
import collections
import logging
import os
import resource
import time

from kvjax.serve.api_errors import BUSY, ApiError
from kvjax.serve.connection import Connection, Deadlines

MAX_CONNECTIONS = 1024  # connections at the same time
SPARE_FILES = 16  # open files that connections leave to everything else, such as to the cache of compiled programs
FRESH_SECONDS = 0.25  # in which a new connection keeps its place: its request may have come, and not be read
LOOK_SECONDS = 0.02  # between two looks whether there is room
NOTICE_SECONDS = 10.0  # between two lines of the log about the same thing
FILES = "/dev/fd"  # lists the open files of the process

log = logging.getLogger("uvicorn.error")


class Connections:
    """The open connections.

    Their number is limited by `max_connections` and by the process's limit of open files, which may be changed while
    the server runs. One more takes the place of one that waits for its client, which has sent no whole request or takes
    no answer: of the address that has most of these, the one that has waited longest.

    Attributes:
      open: all of them.
      deadlines: how long each may take.
    """

    def __init__(self, max_connections: int = MAX_CONNECTIONS, deadlines: Deadlines = Deadlines()):
        """Begins without connections.

        Args:
          max_connections: the number of connections at the most.
          deadlines: how long each may take.
        """
        self.open: set[Connection] = set()
        self.deadlines = deadlines
        self._max_connections, self._others = max_connections, 0
        self._noticed: dict[str, float] = {}
        self._silenced: collections.Counter[str] = collections.Counter()
        self.count_files()

    def __str__(self) -> str:
        """Returns the limits as text, for the log."""
        limits, files = self.deadlines, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"at most {self.limit} connections at the same time (limit of open files: {files}), each with "
            f"{limits.head:g} s for its headers and {limits.body:g} s for a body, plus one second per "
            f"{limits.rate:,} bytes"
        )

    @property
    def limit(self) -> int:
        """The number of connections that there may be at the moment."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            return self._max_connections
        return max(1, min(self._max_connections, files - self._others - SPARE_FILES))

    async def room(self) -> None:
        """Waits until one more connection may be opened. Until then clients wait to be accepted, as they came."""
        while len(self.open) >= self.limit:
            # Those that are closed are lost at the loop's next turn.
            await asyncio.sleep(0 if self.make_room() else LOOK_SECONDS)

    def make_room(self) -> bool:
        """Closes a connection that has waited for its client for a while; returns whether there was one."""
        now = time.monotonic()
        found = [each for each in self.open if each.waits(now) and now - each.phase_began > FRESH_SECONDS]
        if not found:
            return False
        count = collections.Counter(each.address for each in found)
        worst = max(found, key=lambda each: (count[each.address], now - each.phase_began))
        self.notice("full", f"{len(self.open)} connections are open, and at most {self.limit} may be: closed one of "
                    f"{worst.address}, which had sent no whole request or took no answer")  # fmt: skip
        worst.refuse(ApiError(503, "the server closed this connection to accept another one.", code=BUSY))
        worst.end()
        return True

    def check(self) -> None:
        """Closes connections whose time is over. It is called about once a second."""
        self.count_files()
        now = time.monotonic()
        for each in list(self.open):
            each.check(now)

    def count_files(self) -> None:
        """Counts the open files that are no connections."""
        try:
            self._others = max(0, len(os.listdir(FILES)) - 1 - len(self.open))
        except OSError:
            return  # no file is left to open the folder with: what was counted before is near enough

    def close_unfinished(self) -> None:
        """Refuses the requests of which the body has not come, because the server is being stopped."""
        for each in list(self.open):
            if each.phase == "body":
                each.refuse(ApiError(503, "the server is stopping."))

    def notice(self, kind: str, text: str) -> None:
        """Writes a line to the log, unless there was one of its kind a moment ago."""
        now = time.monotonic()
        if now - self._noticed.get(kind, -NOTICE_SECONDS) < NOTICE_SECONDS:
            self._silenced[kind] += 1
            return
        more = self._silenced.pop(kind, 0)
        self._noticed[kind] = now
        log.warning("%s%s", text, f" ({more} more like this before)" if more else "")
