"""Answers as streams of events, and work that ends when its client disconnects."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvjax.serve.answers import Answer, error_event
from kvjax.serve.engine import StreamChunk
from kvjax.serve.responses import api_error_of, response_of

Pieces = asyncio.Queue[tuple[int, StreamChunk | Exception]]


class EventStream(Response):
    """Events as they come. `ending` is closed at the end, and when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, pieces: Pieces, ending: contextlib.ExitStack):
        super().__init__()
        self._answer, self._pieces, self._ending = answer, pieces, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ending, contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A refused request is answered with an error status, so the status is not sent before the first piece.
        index, piece = await self._pieces.get()
        if isinstance(piece, Exception):
            await response_of(api_error_of(piece))(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes) -> None:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await write(self._answer.begin())
        left = len(self._answer.choices)
        while True:
            if isinstance(piece, Exception):
                await write(error_event(api_error_of(piece).body))
                break
            await write(self._answer.part(index, piece))
            left -= piece.result is not None
            if not left:
                await write(self._answer.end())
                break
            index, piece = await self._pieces.get()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, None]) -> None:
    """Waits for work; cancels it if the client disconnects.

    Raises:
      ClientDisconnect: the client has disconnected.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
