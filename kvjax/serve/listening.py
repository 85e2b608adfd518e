"""Runs the HTTP server until it is interrupted, and then ends its requests one way or the other."""

import asyncio
import contextlib
import socket

import uvicorn
from starlette.applications import Starlette

from kvjax.serve.engine import Engine

GRACE_SECONDS = 5  # that requests have to end when the server is stopped
LAST_SECONDS = 5  # that it then takes, at the most, to tell the others


class Server(uvicorn.Server):
    """A server that tells the clients of requests which do not end in time, instead of leaving them without a word."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float = GRACE_SECONDS):
        """Takes the settings.

        Args:
          config: with a longer `timeout_graceful_shutdown` than `grace`.
          engine: of the application.
          grace: seconds that requests have to end when the server is stopped.
        """
        super().__init__(config)
        self._engine, self._grace = engine, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace, lambda: self._engine.stop(wait=False))
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def run(app: Starlette, engine: Engine, listener: socket.socket) -> None:
    """Runs the server.

    Args:
      app: from `kvjax.serve.app.make_app`.
      engine: of the application.
      listener: bound to the address.
    """
    config = uvicorn.Config(
        app, timeout_graceful_shutdown=GRACE_SECONDS + LAST_SECONDS, log_level="info", server_header=False
    )  # fmt: skip
    host, port = listener.getsockname()[:2]
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # has ended the server, and is raised once more
        Server(config, engine).run(sockets=[listener])
