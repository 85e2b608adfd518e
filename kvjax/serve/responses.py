"""Errors as responses, and what surrounds the routes: whatever goes wrong, a client gets an error of the API."""

import asyncio
import json
import logging
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvjax.errors import KvjaxError, NonFiniteError
from kvjax.serve.address import is_called
from kvjax.serve.api_errors import JSON_TYPE, ApiError, refused
from kvjax.serve.bodies import CLOSE
from kvjax.serve.engine import Stopped
from kvjax.typing import Json

log = logging.getLogger("uvicorn.error")

VERSIONS = ("1.0", "1.1")  # of HTTP
IDENTITY = "identity"  # the encoding of a body that is sent as it is


class Edge:
    """Around the routes: calls by another name are refused, and every error is the API's."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def sent(message: Json) -> None:
            nonlocal begun
            begun = True
            await send(message)

        error = self._refuses(scope)
        if error is not None:
            await response_of(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            if not begun:
                await response_of(ApiError(503, "the server was stopped."))(scope, receive, send)
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if begun:
                raise  # the connection is closed in the middle of the answer
            await response_of(ApiError(500, "the server has made an error, which its log has."))(scope, receive, send)

    def _refuses(self, scope: Scope) -> ApiError | None:
        """Returns why a request is not answered, whatever it asks for; None if it may be."""
        headers = dict(scope["headers"])
        if scope["http_version"] not in VERSIONS:
            return ApiError(505, f"HTTP {scope['http_version']} is not supported; use 1.1.", headers=CLOSE)
        if headers.keys() >= {b"content-length", b"transfer-encoding"}:
            # A proxy that reads the other one sees another request in the body.
            return ApiError(400, "a request has Content-Length or Transfer-Encoding, not both.", headers=CLOSE)
        host = headers.get(b"host", b"").decode("latin-1")
        return None if is_called(host, self._hosts) else ApiError(400, f"{host!r} is not a host name of this server.")


def check_type(request: Request) -> None:
    """Refuses a body that is not JSON as it is; a web page can send other types without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(415, f"the body must be of type {JSON_TYPE}.")
    if (encoding := request.headers.get("content-encoding", IDENTITY).strip().lower()) != IDENTITY:
        raise ApiError(415, f"a body with Content-Encoding {encoding!r} is not supported; send it unencoded.")


def api_error_of(error: Exception) -> ApiError:
    """Returns the response to an error of the engine."""
    if isinstance(error, NonFiniteError):
        return ApiError(500, str(error), code="not_finite")
    if isinstance(error, ApiError):
        return error
    if isinstance(error, KvjaxError):
        return refused(error)
    return ApiError(503 if isinstance(error, Stopped) else 500, str(error))


def response_of(error: ApiError) -> Response:
    """Returns an error as a response."""
    return Response(json.dumps(error.body), error.status, error.headers)


async def api_error(_: Request, error: Exception) -> Response:
    """Returns the response to an `ApiError`."""
    assert isinstance(error, ApiError)
    return response_of(error)


async def disconnected(_: Request, error: Exception) -> Response:
    """Returns a response that no client reads, for the log."""
    return Response(status_code=499)


async def http_error(request: Request, error: Exception) -> Response:
    """Returns the response to an error of the routes."""
    assert isinstance(error, HTTPException)
    known = {404: f"there is no page {request.url.path}.", 405: f"{request.method} is not for {request.url.path}."}
    return response_of(ApiError(error.status_code, known.get(error.status_code, error.detail), headers=error.headers))
