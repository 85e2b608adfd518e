"""The HTTP server: OpenAI's completions, chat completions and conversations, the models, and how the server is.

It is made of Starlette, which is ASGI with routes and little else and has no dependency but anyio, and run by uvicorn.
Both are pure Python.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvjax.checkpoint import sandbox
from kvjax.contexts.prefix_store import PrefixStore
from kvjax.errors import KvjaxError
from kvjax.serve.admission import FULL, PATIENCE_SECONDS, Admission
from kvjax.serve.answers import Answer
from kvjax.serve.api_errors import BUSY, ApiError, no_conversation, refused
from kvjax.serve.api_keys import bearer_token, is_among
from kvjax.serve.bodies import Bodies
from kvjax.serve.chat_prompts import chat_prompt, conversation_id
from kvjax.serve.clients import Client, client_of
from kvjax.serve.connections import Connections
from kvjax.serve.conversations import Conversation, ConversationBusy, Conversations, NoConversation
from kvjax.serve.document_fields import ChatTokens
from kvjax.serve.documents import DocumentCaches
from kvjax.serve.engine import Busy, Engine, Stopped, StreamChunk, Ticket
from kvjax.serve.event_stream import EventStream, Pieces, while_connected
from kvjax.serve.protocol import Call, ServerInfo, check_model, parse, read
from kvjax.serve.responses import Edge, api_error, api_error_of, check_type, disconnected, http_error
from kvjax.typing import JsonObject

log = logging.getLogger("uvicorn.error")

LOOK_SECONDS = 0.25  # between looks whether a client still waits for its chat template


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
        middleware=[Middleware(Edge, hosts=hosts)],
        exception_handlers={HTTPException: http_error, ApiError: api_error, ClientDisconnect: disconnected},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


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
            "documents": self._document_counts(request),
            "conversations": self._conversation_counts(request),
        }
        return JSONResponse(about, 200 if error is None else 503)

    def _prefix_cache(self, request: Request) -> JsonObject | None:
        """The counts of the states of prompts; None if none are kept."""
        store = self._engine.prefix_store
        return None if store is None else self._store_counts(request, store, "states")

    def _document_counts(self, request: Request) -> JsonObject | None:
        """The counts of the caches of documents; None if none are kept."""
        caches = self._engine.documents
        return self._store_counts(request, caches, "caches") if caches.max_bytes else None

    def _store_counts(self, request: Request, store: PrefixStore | DocumentCaches, states: str) -> JsonObject:
        """The bound of a store and, if the client sees them, its counts; `states` names the number of its entries."""
        about: JsonObject = {"max_bytes": store.max_bytes}
        if not self._sees_counts(request):
            return about
        counts = store.counts(self._namespace(request))
        return about | {
            "bytes": counts.nbytes, states: counts.states, "hits": counts.hits, "misses": counts.misses,
            "found_tokens": counts.saved_tokens,
        }  # fmt: skip

    def _conversation_counts(self, request: Request) -> JsonObject | None:
        """The number of conversations; None if the server holds none."""
        if not self._conversations.max_bytes:
            return None
        about: JsonObject = {"max_bytes": self._conversations.max_bytes}
        if not self._sees_counts(request):
            return about
        number, nbytes = self._conversations.counts(self._namespace(request))
        return about | {"bytes": nbytes, "conversations": number}

    def _sees_counts(self, request: Request) -> bool:
        """Whether a client sees the counts of its key, or without keys those of all.

        Without a valid key, it does not learn how much others' prompts find.
        """
        return not self._keys or self._namespace(request) is not None

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
        check_type(request)
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
        check_type(request)
        # Before its body is read.
        if self._admission.full(client):
            raise ApiError(429, f"the server is busy: {FULL}.", code=BUSY)
        namespace = self._namespace(request)
        with contextlib.ExitStack() as ending:
            async with self._bodies.receive(request, client.outer) as content:
                try:
                    body = parse(content)
                    conversation = chat = None
                    if kind == "chat":
                        conversation = self._take_conversation(body, namespace, ending)
                        chat = await self._chat_prompt(body, conversation, request)
                    call = await asyncio.to_thread(read, kind, body, self._served, chat, conversation)
                except RecursionError:
                    raise ApiError(400, "the values of the body are nested too deeply.") from None
            call = dataclasses.replace(
                call, requests=[dataclasses.replace(each, namespace=namespace) for each in call.requests]
            )
            answer, pieces = Answer(call, self._served), Pieces()
            tickets: list[Ticket] = []
            ending.callback(self._cancel, tickets)
            await while_connected(request.receive, self._submit(call, pieces, client, tickets, conversation))
            if call.stream:
                return EventStream(answer, pieces, ending.pop_all())
            await while_connected(request.receive, self._collect(answer, pieces))
            return JSONResponse(answer.whole())

    def _cancel(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._engine.cancel(ticket)

    def _take_conversation(
        self, body: JsonObject, namespace: bytes | None, ending: contextlib.ExitStack
    ) -> Conversation | None:
        """Returns the conversation that a body continues, which is released at the end; None for none."""
        name = conversation_id(body)
        if name is None:
            return None
        try:
            conversation = self._conversations.take(name, namespace)
        except NoConversation:
            raise no_conversation(name) from None
        except ConversationBusy:
            raise ApiError(409, "a message of this conversation is being answered; send the next one afterwards.",
                           param="conversation", code="conversation_locked") from None  # fmt: skip
        ending.callback(self._conversations.release, conversation)
        return conversation

    async def _chat_prompt(self, body: JsonObject, conversation: Conversation | None, request: Request) -> ChatTokens:
        """Returns the prompt of a chat. Clients that wait for a slow template hold no thread of others."""
        if self._rendering >= self._engine.max_requests:
            raise ApiError(429, "the server is busy: too many conversations are waiting.", code=BUSY)
        self._rendering += 1
        before = None if conversation is None else conversation.context
        made = asyncio.get_running_loop().run_in_executor(self._renders, chat_prompt, body, self._served, before)
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
        self, call: Call, pieces: Pieces, client: Client, tickets: list[Ticket], conversation: Conversation | None
    ) -> None:
        """Waits for places, and adds the tickets. The conversation goes on before its answer is sent."""
        loop = asyncio.get_running_loop()

        def deliver_to(index: int) -> Callable[[StreamChunk | Exception], None]:
            def deliver(piece: StreamChunk | Exception) -> None:
                if conversation is not None and isinstance(piece, StreamChunk):
                    piece = self._keep_context(conversation, piece)
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

    def _keep_context(self, conversation: Conversation, piece: StreamChunk) -> StreamChunk | Exception:
        """Keeps the context that an answer has left, and returns what is sent; an error is of this request alone."""
        if piece.result is None or piece.result.context is None:
            return piece
        try:
            kept = self._conversations.put(conversation, piece.result.context)
        except Exception:  # such as too little host memory
            log.exception("conversation %s could not be kept", conversation.id)
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
                raise api_error_of(piece)
            answer.choices[index].add(piece)
            left -= piece.result is not None


def _about_conversation(made: Conversation) -> JsonObject:
    return {"id": made.id, "object": "conversation", "created_at": made.created, "tokens": made.tokens}
