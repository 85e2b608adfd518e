"""How the HTTP server stops after a signal (SIGINT, SIGTERM), and ends its requests.

Requests have `GRACE_SECONDS` to end; the others are answered with an error, and the process ends after `END_SECONDS`.
"""

import asyncio
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from types import FrameType

import uvicorn

from kvjax.serve.connections import Connections
from kvjax.serve.engine import Engine

GRACE_SECONDS = 3  # that requests have to end when the server is stopped
LAST_SECONDS = 1  # that it then takes, at the most, to answer the others with an error
END_SECONDS = 4.5  # after which the process ends, whatever it is doing
FORCED = 1  # the exit status of such an end


class StoppableServer(uvicorn.Server):
    """A server whose requests get an error if they do not end in time after it is stopped."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, connections: Connections):
        """Takes the settings.

        Args:
          config: with a longer `timeout_graceful_shutdown` than `grace`.
          engine: of the application.
          grace: seconds that requests have to end when the server is stopped.
          connections: those that are open.
        """
        super().__init__(config)
        self._engine, self._grace, self._connections = engine, grace, connections
        # Its `put` may interrupt itself, as nothing else may that a signal calls.
        self.interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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


def end_process_after_signal(server: StoppableServer) -> None:
    """Starts a thread that ends the process some seconds after a signal, since threads may compute for minutes."""
    threading.Thread(target=_end_process, args=(server.interrupts,), name="kvjax-end", daemon=True).start()


def _end_process(interrupts: "queue.SimpleQueue[int]") -> None:
    """Ends the process some seconds after it was interrupted, if it has not ended."""
    interrupts.get()
    time.sleep(END_SECONDS)
    _end_now()


def _end_now() -> None:
    """Ends the process and those that it has started, whatever they are doing."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(FORCED)
