"""Connections of clients: how many there may be, and how long one may take to send a request and to read the answer."""

import collections
import logging
import os
import resource
import time
from typing import Any

from kvjax.serve.connection import Connection, Deadlines
from kvjax.serve.protocol import BUSY, ApiError

MOST = 1024  # connections at the same time
SPARE_FILES = 16  # open files that connections leave to everything else, such as to the cache of compiled programs
RESERVED = 8  # connections that requests to the model leave to /health and to errors
FRESH_SECONDS = 1.0  # in which a new connection keeps its place, if others have waited longer
NOTICE_SECONDS = 10.0  # between two lines of the log about the same thing
FILES = "/dev/fd"  # lists the open files of the process

log = logging.getLogger("uvicorn.error")


class Connections:
    """The open connections.

    Their number is limited by `most` and by the process's limit of open files, which may be changed while the server
    runs. A connection beyond it takes the place of one that has not sent a whole request: of the address that has most
    of these, the one that has waited longest.

    Attributes:
      open: all of them.
      deadlines: how long each may take.
    """

    def __init__(self, most: int = MOST, deadlines: Deadlines = Deadlines()):
        """Begins without connections.

        Args:
          most: the number of connections at the most.
          deadlines: how long each may take.
        """
        self.open: set[Connection] = set()
        self.deadlines = deadlines
        self._most, self._others = most, 0
        self._noticed: dict[str, float] = {}
        self._silenced: collections.Counter[str] = collections.Counter()
        self.count_files()

    def __str__(self) -> str:
        """What they may do, as the log has it."""
        limits, files = self.deadlines, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"at most {self.limit} connections at the same time (limit of open files: {files}), each with "
            f"{limits.head:g} s for its headers and {limits.body:g} s for a body, and a second more for every "
            f"{limits.rate:,} bytes"
        )

    def make(self, **arguments: Any) -> Connection:
        """Makes the protocol of a new connection; uvicorn calls it."""
        return Connection(self, **arguments)

    @property
    def limit(self) -> int:
        """The number of connections that there may be at the moment."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            return self._most
        return max(1, min(self._most, files - self._others - SPARE_FILES))

    @property
    def crowded(self) -> bool:
        """Whether so many requests are in progress that no further one may begin."""
        most = max(1, self.limit - RESERVED)
        return len(self.open) >= most and sum(each.phase in ("body", "answer") for each in self.open) > most

    def add(self, connection: Connection) -> None:
        """Takes a new connection, for which another may be closed."""
        self.open.add(connection)
        if len(self.open) > self.limit and not self.make_room(besides=connection):
            connection.refuse(ApiError(503, "the server has no room for another connection.", code=BUSY), asked=True)
            connection.end()

    def discard(self, connection: Connection) -> None:
        """Forgets a connection that has been lost."""
        self.open.discard(connection)

    def make_room(self, besides: Connection | None = None) -> bool:
        """Closes a connection that has not sent a whole request; returns whether there was one.

        Args:
          besides: one that is not closed.
        """
        now = time.monotonic()
        found = [each for each in self.open if each is not besides and not each.ended and each.waits(now)]
        # Those that were opened a moment ago may have sent a request that has not been read.
        found = [each for each in found if now - each.since > FRESH_SECONDS] or found
        if not found:
            return False
        count = collections.Counter(each.address for each in found)
        worst = max(found, key=lambda each: (count[each.address], now - each.since))
        self.notice("full", f"{len(self.open)} connections are open, and at most {self.limit} may be: closed one of "
                    f"{worst.address}, which had not sent a whole request")  # fmt: skip
        worst.refuse(ApiError(503, "the server needed the place of this connection.", code=BUSY))
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
                each.refuse(ApiError(503, "the server is being stopped."))

    def notice(self, kind: str, text: str) -> None:
        """Writes a line to the log, unless there was one of its kind a moment ago."""
        now = time.monotonic()
        if now - self._noticed.get(kind, -NOTICE_SECONDS) < NOTICE_SECONDS:
            self._silenced[kind] += 1
            return
        more = self._silenced.pop(kind, 0)
        self._noticed[kind] = now
        log.warning("%s%s", text, f" ({more} more like this before)" if more else "")
