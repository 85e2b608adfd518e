"""Runs the HTTP server: accepts connections while there is room for them, until a signal stops it (`shutdown`)."""

import asyncio
import contextlib
import socket

import uvicorn
from starlette.applications import Starlette

from kvjax.serve import shutdown
from kvjax.serve.connection import Connection
from kvjax.serve.connections import Connections
from kvjax.serve.engine import Engine

ACCEPT_SECONDS = 0.1  # after which accepting is tried again
CHECK_TICKS = 10  # of uvicorn, a tenth of a second each, between two checks of the deadlines


class Server(shutdown.StoppableServer):
    """A server that accepts connections while there is room for them."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engine,
        grace: float = shutdown.GRACE_SECONDS,
        connections: Connections | None = None,
    ):
        """Takes the settings; see `kvjax.serve.shutdown.StoppableServer`. `connections`: None for the default."""
        super().__init__(config, engine, grace, connections or Connections())
        self._accepting: list[asyncio.Task[None]] = []

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
        await super().shutdown(sockets)

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
        timeout_keep_alive=connections.deadlines.idle,
        timeout_graceful_shutdown=shutdown.GRACE_SECONDS + shutdown.LAST_SECONDS,
    )  # fmt: skip
    server = Server(config, engine, connections=connections)
    shutdown.end_process_after_signal(server)
    host, port = listener.getsockname()[:2]
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}, {connections}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # has ended the server, and is raised once more
        server.run(sockets=[listener])
