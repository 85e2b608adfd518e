"""Bodies of requests: how large they may be, and how many bytes of all of them there may be at once."""

import collections
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from kvjax.serve.api_errors import BUSY, ApiError

MAX_BYTES = 16 << 20  # of a body
SMALL_BYTES = 64 << 10  # of each body, which the number of connections limits
ALL_BYTES = 32 << 20  # of all bodies, in addition to those
#: What comes of a body that is refused is then not even parsed.
CLOSE = {"connection": "close"}


class Bodies:
    """The bytes of the bodies that are being received and read.

    A body counts before it comes, by its Content-Length, and one in chunks as it comes. So that a client which sends
    large ones slowly leaves room to others, a client may hold half of the bytes, or one body.
    """

    def __init__(self, max_bytes: int = ALL_BYTES):
        """Begins without bodies.

        Args:
          max_bytes: bytes of all bodies, in addition to the first `SMALL_BYTES` of each.
        """
        self._max_bytes = max_bytes
        self._held: collections.Counter[str | bytes] = collections.Counter()

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, client: str | bytes) -> AsyncIterator[bytearray]:
        """Yields a body, whose bytes count until the block ends.

        Args:
          request: the request.
          client: who sends it.

        Raises:
          ApiError: it is too large, or there is no room for it at the moment.
        """
        content, counted = bytearray(), 0
        try:
            announced = int(request.headers.get("content-length", 0))
            self._check(announced)
            counted = self._count(client, 0, announced)
            async for part in request.stream():
                size = len(content) + len(part)
                self._check(size)
                counted = self._count(client, counted, size)
                content += part
            yield content
        finally:
            self._held[client] -= counted
            if not self._held[client]:
                del self._held[client]

    def _check(self, size: int) -> None:
        if size > MAX_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BYTES:,} bytes.", headers=CLOSE)

    def _count(self, client: str | bytes, counted: int, size: int) -> int:
        """Counts a body of `size` bytes of which `counted` were; returns how many are now."""
        more = max(0, size - SMALL_BYTES) - counted
        if more <= 0:
            return counted
        own, all_held = self._held[client], sum(self._held.values())
        if all_held + more > self._max_bytes or (own > counted and own + more > self._max_bytes // 2):
            raise ApiError(
                503, f"the server is busy: large bodies are being received, and there is no room for {size:,} bytes "
                "more at the moment.", code=BUSY, headers=CLOSE,
            )  # fmt: skip
        self._held[client] += more
        return counted + more
