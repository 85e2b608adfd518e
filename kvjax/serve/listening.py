"""Runs the HTTP server until it is interrupted, and then ends its requests one way or the other."""

import asyncio
import contextlib
import errno
import logging
import multiprocessing
import os
import queue
import socket
import threading
import time
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kvjax.serve.address import BACKLOG
from kvjax.serve.connections import Connections
from kvjax.serve.engine import Engine

GRACE_SECONDS = 3  # that requests have to end when the server is stopped
LAST_SECONDS = 1  # that it then takes, at the most, to tell the others
END_SECONDS = 4.5  # after which the process ends, whatever it is doing
FORCED = 1  # the exit status of such an end
ACCEPTED = 4  # connections that are accepted before those accepted earlier are looked at
CHECK_TICKS = 10  # of uvicorn, a tenth of a second each, between two checks of the deadlines
NO_FILE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("uvicorn.error")


class Server(uvicorn.Server):
    """A server that tells the clients of requests which do not end in time, instead of leaving them without a word."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engine,
        grace: float = GRACE_SECONDS,
        connections: Connections | None = None,
    ):
        """Takes the settings.

        Args:
          config: with a longer `timeout_graceful_shutdown` than `grace`.
          engine: of the application.
          grace: seconds that requests have to end when the server is stopped.
          connections: those of `config`, if it has any.
        """
        super().__init__(config)
        self._engine, self._grace, self._connections = engine, grace, connections
        # Its `put` may interrupt itself, as nothing else may that a signal calls.
        self.interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_error)
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # uvicorn's own setting is also the number that is accepted at once

    async def on_tick(self, counter: int) -> bool:
        if self._connections is not None and counter % CHECK_TICKS == 0:
            self._connections.check()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupts.put(sig)
        super().handle_exit(sig, frame)

    def _end_requests(self) -> None:
        self._engine.stop(wait=False)
        if self._connections is not None:
            self._connections.close_unfinished()

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Makes room if no connection can be accepted, which asyncio tries again a second later."""
        error = context.get("exception")
        if self._connections is None or not isinstance(error, OSError) or error.errno not in NO_FILE_LEFT:
            loop.default_exception_handler(context)
            return
        self._connections.notice("files", f"no connection can be accepted: {error.strerror}")
        for _ in range(ACCEPTED):
            self._connections.make_room()


def run(app: Starlette, engine: Engine, listener: socket.socket, connections: Connections | None = None) -> None:
    """Runs the server.

    Args:
      app: from `kvjax.serve.app.make_app`.
      engine: of the application.
      listener: bound to the address.
      connections: how many there may be; None for `kvjax.serve.connections.MOST`.
    """
    connections = connections or Connections()
    config = uvicorn.Config(
        app, http=connections.make, loop="asyncio", ws="none", log_level="info", server_header=False,  # type: ignore[arg-type]
        # Anybody can send the headers that they are read from.
        proxy_headers=False,
        backlog=ACCEPTED, timeout_keep_alive=connections.deadlines.idle,
        timeout_graceful_shutdown=GRACE_SECONDS + LAST_SECONDS,
    )  # fmt: skip
    server = Server(config, engine, connections=connections)
    threading.Thread(target=_end_process, args=(server.interrupts,), name="kvjax-end", daemon=True).start()
    host, port = listener.getsockname()[:2]
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}, {connections}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # has ended the server, and is raised once more
        server.run(sockets=[listener])


def _end_process(interrupts: "queue.SimpleQueue[int]") -> None:
    """Ends the process some seconds after it was interrupted, if it has not ended: threads may compute for minutes."""
    interrupts.get()
    time.sleep(END_SECONDS)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(FORCED)
