"""Runs the HTTP server until a signal (SIGINT, SIGTERM) stops it, and then ends its requests.

Requests have `GRACE_SECONDS` to end; the others are answered with an error, and the process ends after `END_SECONDS`.
"""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from kvjax.serve.connection import Connection
from kvjax.serve.connections import Connections
from kvjax.serve.engine import Engine

GRACE_SECONDS = 3  # that requests have to end when the server is stopped
LAST_SECONDS = 1  # that it then takes, at the most, to answer the others with an error
END_SECONDS = 4.5  # after which the process ends, whatever it is doing
FORCED = 1  # the exit status of such an end
ACCEPT_SECONDS = 0.1  # after which accepting is tried again
CHECK_TICKS = 10  # of uvicorn, a tenth of a second each, between two checks of the deadlines


class Server(uvicorn.Server):
    """A server that accepts connections while there is room for them.

    When it is stopped, requests that do not end in time get an error.
    """

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
          connections: how many there may be; None for the default.
        """
        super().__init__(config)
        self._engine, self._grace, self._connections = engine, grace, connections or Connections()
        self._accepting: list[asyncio.Task[None]] = []
        # Its `put` may interrupt itself, as nothing else may that a signal calls.
        self.interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # asyncio's server accepts whatever comes, and repeats itself a thousand times when no file is left to open.
        await super().startup(sockets=[])
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets or []]

    async def on_tick(self, counter: int) -> bool:
        if counter % CHECK_TICKS == 0:
            self._connections.check()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        timer = asyncio.get_running_loop().call_later(self._grace, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            # Interrupted again: end at once. Python's own end would crash under a thread that computes.
            _end_now()
        self.interrupts.put(sig)
        super().handle_exit(sig, frame)

    def _end_requests(self) -> None:
        self._engine.stop(wait=False)
        self._connections.close_unfinished()

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections for ever."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            await self._connections.room()
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file is left to open, or a client has disconnected
                self._connections.notice("accept", f"a connection cannot be accepted: {error.strerror}")
                self._connections.make_room()
                await asyncio.sleep(ACCEPT_SECONDS)
                continue
            try:
                await loop.connect_accepted_socket(self._protocol, accepted)
            except OSError:
                accepted.close()

    def _protocol(self) -> Connection:
        return Connection(
            self._connections, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def run(app: Starlette, engine: Engine, listener: socket.socket, connections: Connections | None = None) -> None:
    """Runs the server.

    Args:
      app: from `kvjax.serve.app.make_app`.
      engine: of the application.
      listener: bound to the address.
      connections: how many there may be; None for the default.
    """
    connections = connections or Connections()
    config = uvicorn.Config(
        app, loop="asyncio", ws="none", log_level="info", server_header=False,
        proxy_headers=False,  # anybody can send them
        timeout_keep_alive=connections.deadlines.idle, timeout_graceful_shutdown=GRACE_SECONDS + LAST_SECONDS,
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
    _end_now()


def _end_now() -> None:
    """Ends the process and those that it has started, whatever they are doing."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(FORCED)
