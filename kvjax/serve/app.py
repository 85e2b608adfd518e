"""The HTTP server: OpenAI's completions and chat completions, the list of models, and a page that says how it is.

It is made of Starlette, which is ASGI with routes and little else and has no dependency but anyio, and run by uvicorn.
Both are pure Python.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvjax.checkpoint import sandbox
from kvjax.errors import KvjaxError, NonFiniteError
from kvjax.serve.address import is_called
from kvjax.serve.admission import FULL, PATIENCE_SECONDS, Admission
from kvjax.serve.answers import Answer, error_event
from kvjax.serve.api_keys import bearer_token, is_among
from kvjax.serve.bodies import CLOSE, Bodies
from kvjax.serve.clients import Client, client_of
from kvjax.serve.connections import Connections
from kvjax.serve.conversations import Conversation, ConversationBusy, Conversations, NoConversation
from kvjax.serve.engine import Busy, Engine, Stopped, StreamChunk, Ticket
from kvjax.serve.protocol import (
    BUSY,
    JSON_TYPE,
    ApiError,
    Call,
    ServerInfo,
    check_model,
    conversation,
    conversation_id,
    no_conversation,
    parse,
    read,
    refused,
    turn,
)
from kvjax.typing import Json, JsonObject

log = logging.getLogger("uvicorn.error")

VERSIONS = ("1.0", "1.1")  # of HTTP
IDENTITY = "identity"  # the encoding of a body that is sent as it is
LOOK_SECONDS = 0.25  # between looks whether a client still waits for its chat template

Pieces = asyncio.Queue[tuple[int, StreamChunk | Exception]]


def make_app(
    engine: Engine,
    served: ServerInfo,
    *,
    api_keys: Sequence[bytes] = (),
    hosts: Sequence[str] = ("*",),
    connections: Connections | None = None,
    conversations: Conversations | None = None,
    patience: float = PATIENCE_SECONDS,
) -> Starlette:
    """Makes the application.

    Args:
      engine: runs requests; it is stopped when the application ends.
      served: what it runs them on.
      api_keys: of which clients must send one as a bearer token; none for no matter what.
      hosts: see `kvjax.serve.address.names`.
      connections: those of the server, if it counts them.
      conversations: those that the server holds; None if it holds none.
      patience: see `kvjax.serve.admission.Admission`.
    """
    connections = connections or Connections()
    admission = Admission(engine, lambda: connections.limit, patience)
    pages = _Pages(engine, served, api_keys, admission, conversations or Conversations(0))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        pages.stop_renders()
        await asyncio.to_thread(engine.stop)

    app = Starlette(
        routes=[
            Route("/health", pages.health, methods=["GET"]),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
            Route("/v1/completions", pages.completions, methods=["POST"]),
            Route("/v1/chat/completions", pages.chat, methods=["POST"]),
            Route("/v1/conversations", pages.begin_conversation, methods=["POST"]),
            Route("/v1/conversations/{name}", pages.conversation, methods=["GET", "DELETE"]),
        ],
        middleware=[Middleware(_Edge, hosts=hosts)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, ClientDisconnect: _disconnected},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class _Edge:
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
            await _response(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            if not begun:
                await _response(ApiError(503, "the server was stopped."))(scope, receive, send)
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if begun:
                raise  # the connection is closed in the middle of the answer
            await _response(ApiError(500, "the server has made an error, which its log has."))(scope, receive, send)

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


class _Pages:
    """The handlers of the routes."""

    def __init__(
        self,
        engine: Engine,
        served: ServerInfo,
        keys: Sequence[bytes],
        admission: Admission,
        conversations: Conversations,
    ):
        self._engine, self._served, self._keys, self._admission = engine, served, keys, admission
        self._conversations = conversations
        self._started, self._bodies = time.time(), Bodies()
        self._rendering = 0  # conversations whose text is made, or waits for that
        self._renders = ThreadPoolExecutor(sandbox.WORKERS, thread_name_prefix="kvjax-template")

    def stop_renders(self) -> None:
        """Ends the chat templates that are being rendered, so that the server's end waits for none."""
        self._renders.shutdown(wait=False, cancel_futures=True)
        sandbox.SHARED.stop()

    async def health(self, request: Request) -> Response:
        load, counts, error = self._engine.load, self._engine.counts, self._engine.error
        about = {
            "status": "ok" if error is None else "failed",
            "error": None if error is None else str(error),
            "rows": load.rows,
            "running": load.running,
            "waiting": load.waiting,
            "swapped": load.swapped,
            "swapped_bytes": load.swapped_bytes,
            "preemptions": counts.preemptions,
            "seconds": round(time.time() - self._started, 1),
            "requests": counts.requests,
            "not_finite": counts.not_finite,
            "new_tokens": counts.tokens,
            "prompt_tokens": counts.prompt_tokens,
            "useful_row_steps": counts.useful_row_steps,
            "row_steps": counts.row_steps,
            "rounds": counts.rounds,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "prefix_cache": self._prefix_cache(request),
            "conversations": self._conversation_counts(request),
        }
        return JSONResponse(about, 200 if error is None else 503)

    def _prefix_cache(self, request: Request) -> JsonObject | None:
        """The counts of the states of prompts: those of the caller's key, where the server has keys, and otherwise all.

        Without a valid key, a client does not learn how much others' prompts find.
        """
        store = self._engine.prefix_store
        if store is None:
            return None
        about: JsonObject = {"max_bytes": store.max_bytes}
        if (namespace := self._namespace(request)) is None and self._keys:
            return about
        counts = store.counts(namespace)
        return about | {
            "bytes": counts.nbytes, "states": counts.states, "hits": counts.hits, "misses": counts.misses,
            "found_tokens": counts.saved_tokens,
        }  # fmt: skip

    def _conversation_counts(self, request: Request) -> JsonObject | None:
        """The number of conversations: those of the caller, as in `_prefix_cache`; None if the server holds none."""
        if not self._conversations.max_bytes:
            return None
        about: JsonObject = {"max_bytes": self._conversations.max_bytes}
        if (namespace := self._namespace(request)) is None and self._keys:
            return about
        number, nbytes = self._conversations.counts(namespace)
        return about | {"bytes": nbytes, "conversations": number}

    def _namespace(self, request: Request) -> bytes | None:
        """Returns whose states a request shares: those of its API key. Without keys, all clients share theirs."""
        token = bearer_token(dict(request.headers.raw).get(b"authorization", b""))
        return token if self._keys and is_among(token, self._keys) else None

    async def models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def model(self, request: Request) -> Response:
        self._authorise(request)
        check_model(request.path_params["name"], self._served)
        return JSONResponse(self._about())

    async def begin_conversation(self, request: Request) -> Response:
        client = self._authorise(request)
        _check_type(request)
        async with self._bodies.receive(request, client.outer) as content:
            body = parse(content or b"{}")
        if unknown := sorted(name for name, value in body.items() if value not in ([], {}, None)):
            raise ApiError(400, f"{unknown[0]} is not supported; messages are sent to /v1/chat/completions.",
                           param=unknown[0], code="unsupported_parameter")  # fmt: skip
        if not self._conversations.max_bytes:
            raise ApiError(400, "this server holds no conversations; start it with --conversation-bytes=BYTES, and "
                           "without --speculate.", code="unsupported_value")  # fmt: skip
        made = self._conversations.begin(self._namespace(request))
        if made is None:
            raise ApiError(503, "the server is busy: there is no room for another conversation.", code=BUSY)
        return JSONResponse(_about_conversation(made))

    async def conversation(self, request: Request) -> Response:
        self._authorise(request)
        name, namespace = request.path_params["name"], self._namespace(request)
        try:
            if request.method == "DELETE":
                self._conversations.remove(name, namespace)
                return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})
            return JSONResponse(_about_conversation(self._conversations.find(name, namespace)))
        except NoConversation:
            raise no_conversation(name) from None

    async def completions(self, request: Request) -> Response:
        return await self._answer("completion", request)

    async def chat(self, request: Request) -> Response:
        return await self._answer("chat", request)

    def _about(self) -> JsonObject:
        return {"id": self._served.name, "object": "model", "created": int(self._started), "owned_by": "kvjax"}

    def _authorise(self, request: Request) -> Client:
        """Checks the API key; returns who sends the request."""
        token = bearer_token(dict(request.headers.raw).get(b"authorization", b""))
        if self._keys and not is_among(token, self._keys):
            raise ApiError(401, "the API key is missing or wrong.", code="invalid_api_key",
                           headers={"www-authenticate": "Bearer"})  # fmt: skip
        address = request.client.host if request.client is not None else ""
        return client_of(address, token, verified=bool(self._keys))

    async def _answer(self, kind: str, request: Request) -> Response:
        client = self._authorise(request)
        _check_type(request)
        # Before its body is read.
        if self._admission.full(client):
            raise ApiError(429, f"the server is busy: {FULL}.", code=BUSY)
        namespace = self._namespace(request)
        with contextlib.ExitStack() as ending:
            async with self._bodies.receive(request, client.outer) as content:
                try:
                    body = parse(content)
                    held = self._taken(body, namespace, ending) if kind == "chat" else None
                    said = await self._rendered(body, held, request) if kind == "chat" else None
                    call = await asyncio.to_thread(read, kind, body, self._served, said, held)
                except RecursionError:
                    raise ApiError(400, "the values of the body are nested too deeply.") from None
            call = dataclasses.replace(
                call, requests=[dataclasses.replace(each, namespace=namespace) for each in call.requests]
            )
            answer, pieces = Answer(call, self._served), Pieces()
            tickets: list[Ticket] = []
            ending.callback(self._cancel, tickets)
            await _while_connected(request.receive, self._submit(call, pieces, client, tickets, held))
            if call.stream:
                return _EventStream(answer, pieces, ending.pop_all())
            await _while_connected(request.receive, self._collect(answer, pieces))
            return JSONResponse(answer.whole())

    def _cancel(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._engine.cancel(ticket)

    def _taken(self, body: JsonObject, namespace: bytes | None, ending: contextlib.ExitStack) -> Conversation | None:
        """Returns the conversation that a body continues, which is released at the end; None for none."""
        name = conversation_id(body)
        if name is None:
            return None
        try:
            held = self._conversations.take(name, namespace)
        except NoConversation:
            raise no_conversation(name) from None
        except ConversationBusy:
            raise ApiError(409, "a message of this conversation is being answered; send the next one afterwards.",
                           param="conversation", code="conversation_locked") from None  # fmt: skip
        ending.callback(self._conversations.release, held)
        return held

    async def _rendered(self, body: JsonObject, held: Conversation | None, request: Request) -> str | list[int]:
        """Returns a chat's messages as text or, of the next turn of a conversation, as token ids.

        Clients that wait for a slow template hold no thread of others.
        """
        if self._rendering >= self._engine.max_requests:
            raise ApiError(429, "the server is busy: too many conversations are waiting.", code=BUSY)
        self._rendering += 1
        render: Callable[[], str | list[int]] = functools.partial(conversation, body, self._served)
        if held is not None and held.context is not None:
            render = functools.partial(turn, body, self._served, held.context)
        made = asyncio.get_running_loop().run_in_executor(self._renders, render)
        try:
            while not (await asyncio.wait({made}, timeout=LOOK_SECONDS))[0]:
                if self._engine.stopping:
                    raise ApiError(503, "the server is stopping.")
                if await request.is_disconnected():
                    raise ClientDisconnect
            return made.result()
        finally:
            self._rendering -= 1
            made.cancel()

    async def _submit(
        self, call: Call, pieces: Pieces, client: Client, tickets: list[Ticket], held: Conversation | None
    ) -> None:
        """Waits for places, and adds the tickets. The conversation goes on before its answer is sent."""
        loop = asyncio.get_running_loop()

        def deliver_to(index: int) -> Callable[[StreamChunk | Exception], None]:
            def deliver(piece: StreamChunk | Exception) -> None:
                if held is not None and isinstance(piece, StreamChunk):
                    piece = self._kept(held, piece)
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

            return deliver

        asked = [
            (request, text, deliver_to(index))
            for index, (request, text) in enumerate(zip(call.requests, call.texts, strict=True))
        ]
        try:
            tickets += await self._admission.submit(asked, client)
        except Busy as error:
            raise ApiError(429, f"the server is busy: {error}.", code=BUSY) from None
        except KvjaxError as error:
            raise refused(error) from None
        except Stopped as error:
            raise ApiError(503, str(error)) from None

    def _kept(self, held: Conversation, piece: StreamChunk) -> StreamChunk | Exception:
        """Keeps the context that an answer has left, and returns what is sent; an error is of this request alone."""
        if piece.result is None or piece.result.context is None:
            return piece
        try:
            kept = self._conversations.put(held, piece.result.context)
        except Exception:  # such as too little host memory
            log.exception("conversation %s could not be kept", held.id)
            kept = False
        if not kept:
            return ApiError(503, "there was no room to keep this conversation.", code="conversation_not_kept")
        # Pieces may wait long for their client.
        return dataclasses.replace(piece, result=dataclasses.replace(piece.result, context=None))

    async def _collect(self, answer: Answer, pieces: Pieces) -> None:
        """Waits for all choices."""
        left = len(answer.choices)
        while left:
            index, piece = await pieces.get()
            if isinstance(piece, Exception):
                raise _api_error_of(piece)
            answer.choices[index].add(piece)
            left -= piece.result is not None


class _EventStream(Response):
    """Events as they come. `ending` is closed at the end, and when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, pieces: Pieces, ending: contextlib.ExitStack):
        super().__init__()
        self._answer, self._pieces, self._ending = answer, pieces, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ending, contextlib.suppress(ClientDisconnect):
            await _while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request that is refused has a status of its own, so nothing is sent before the first piece.
        index, piece = await self._pieces.get()
        if isinstance(piece, Exception):
            await _response(_api_error_of(piece))(scope, receive, send)
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
                await write(error_event(_api_error_of(piece).body))
                break
            await write(self._answer.part(index, piece))
            left -= piece.result is not None
            if not left:
                await write(self._answer.end())
                break
            index, piece = await self._pieces.get()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_type(request: Request) -> None:
    """Refuses a body that is not JSON as it is; a web page can send other types without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(415, f"the body must be of type {JSON_TYPE}.")
    if (encoding := request.headers.get("content-encoding", IDENTITY).strip().lower()) != IDENTITY:
        raise ApiError(415, f"a body with Content-Encoding {encoding!r} is not supported; send it unencoded.")


def _about_conversation(made: Conversation) -> JsonObject:
    return {"id": made.id, "object": "conversation", "created_at": made.created, "tokens": made.tokens}


async def _while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, None]) -> None:
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


def _api_error_of(error: Exception) -> ApiError:
    """Returns the response to an error of the engine."""
    if isinstance(error, NonFiniteError):
        return ApiError(500, str(error), code="not_finite")
    if isinstance(error, ApiError):
        return error
    if isinstance(error, KvjaxError):
        return refused(error)
    return ApiError(503 if isinstance(error, Stopped) else 500, str(error))


def _response(error: ApiError) -> Response:
    return Response(json.dumps(error.body), error.status, error.headers)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error)


async def _disconnected(_: Request, error: Exception) -> Response:
    """Returns a response that no client reads, for the log."""
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"there is no page {request.url.path}.", 405: f"{request.method} is not for {request.url.path}."}
    return _response(ApiError(error.status_code, known.get(error.status_code, error.detail), headers=error.headers))
