"""Connections: their deadlines, their number, and clients that close their side, of a server without a model."""

import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc  # noqa: F401, pytest imports it when a thread has failed, which it cannot where no file can be opened
import types

import pytest

from tests.conftest import ROOT

uvicorn = pytest.importorskip("uvicorn", reason="the server needs kvjax[serve]")
pytest.importorskip("starlette", reason="the server needs kvjax[serve]")
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402
from starlette.responses import PlainTextResponse, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from kvjax.serve import listening, shutdown  # noqa: E402
from kvjax.serve.connection import Deadlines  # noqa: E402
from kvjax.serve.connections import SPARE_FILES, Connections  # noqa: E402
from kvjax.serve.event_stream import while_connected  # noqa: E402
from kvjax.serve.responses import disconnected  # noqa: E402

WAIT = 60
#: A connection is checked once a second, and its deadline begins at the first check that finds it.
QUICK = Deadlines(head=0.5, idle=30, body=0.5, rate=1000, rest=0.5, write=0.5)
LATE = 5  # seconds after which such a deadline is certainly over


class App:
    """Pages that count what becomes of their requests."""

    def __init__(self):
        self.answer, self.left, self.answered = threading.Event(), 0, 0

    async def echo(self, request):
        return PlainTextResponse(await request.body())

    async def early(self, request):
        return PlainTextResponse("early")

    async def wait(self, request):
        """Answers when `answer` is set; sees that its client has left."""
        import asyncio

        async def waited():
            while not self.answer.is_set():
                await asyncio.sleep(0.01)

        self.answered += 1
        try:
            await while_connected(request.receive, waited())
        except Exception:
            self.left += 1
            raise
        return PlainTextResponse("waited")

    async def endless(self, request):
        return StreamingResponse(itertools.repeat(b"x" * 65536))

    def routes(self):
        pages = (self.echo, self.early, self.wait, self.endless)
        return [Route(f"/{page.__name__}", page, methods=["GET", "POST"]) for page in pages]


@contextlib.contextmanager
def serving(deadlines=Deadlines(), max_connections=100):
    """The port of a server, its pages, and its connections."""
    pages, connections = App(), Connections(max_connections, deadlines)
    app = Starlette(routes=pages.routes(), exception_handlers={ClientDisconnect: disconnected})
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    engine = types.SimpleNamespace(stop=lambda wait: None)
    server = listening.Server(config, engine, grace=0.1, connections=connections)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], pages, connections
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def connect(port, content=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    connection.sendall(content)
    return connection


def read(connection):
    """Returns the bytes that come until the connection ends."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def request(page, *headers, body=b"", method="POST"):
    return f"{method} /{page} HTTP/1.1\r\n".encode() + b"\r\n".join([b"Host: x", *headers, b"", body])


def error_of(answer):
    """The status and the message of an error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def wait_until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(port):
    return b" 200 " in read(connect(port, request("early", b"Connection: close", method="GET")))


SLOW = {
    # what is sent at once, what is sent every tenth of a second, the status
    "silent": (b"", b"", None),
    "headers": (b"GET /early HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n", 408),
    "body": (request("echo", b"Content-Length: 100000"), b"x", 408),
    "chunks": (request("echo", b"Transfer-Encoding: chunked"), b"1\r\nx\r\n", 408),
    "rest of a body": (request("early", b"Content-Length: 100000"), b"x", 200),
    "rest of the last body": (request("early", b"Content-Length: 100000", b"Connection: close"), b"x", 200),
}


def test_slow_clients_are_ended():
    """Whatever they are slow at; one that sends at the least rate is answered."""

    def drip(connection, part, ended):
        with contextlib.suppress(OSError):
            while part and not ended.wait(0.1):
                connection.sendall(part)

    with serving(QUICK) as (port, _, connections):
        begun, ended = time.monotonic(), threading.Event()
        held = {name: connect(port, content) for name, (content, _, _) in SLOW.items()}
        fast = connect(port, request("echo", b"Content-Length: 8000", b"Connection: close"))
        parts = [(held[name], part) for name, (_, part, _) in SLOW.items()] + [(fast, b"y" * 200)]
        threads = [threading.Thread(target=drip, args=(*each, ended)) for each in parts]
        for thread in threads:
            thread.start()
        for name, connection in held.items():
            answer, status = read(connection), SLOW[name][2]
            if status == 408:
                assert error_of(answer)[0] == 408, name
            else:
                assert not answer if status is None else answer.startswith(b"HTTP/1.1 200 OK"), name
        assert time.monotonic() - begun < LATE
        assert read(fast).endswith(b"\r\n\r\n" + b"y" * 8000)
        ended.set()
        for thread in threads:
            thread.join(WAIT)
        assert alive(port)
        # The client sees the end of a connection before the server has let go of it.
        wait_until(lambda: not connections.open)


def test_a_client_that_takes_nothing_of_its_answer_is_ended():
    with serving(QUICK) as (port, _, connections):
        held = [connect(port, request("endless", method="GET")) for _ in range(3)]
        begun = time.monotonic()
        while connections.open or time.monotonic() < begun + 0.5:
            assert time.monotonic() < begun + LATE, connections.open
            time.sleep(0.05)
        del held


def test_keep_alive_connections_last_as_long_as_requests_come():
    with serving(QUICK) as (port, _, _), connect(port) as connection:
        for _ in range(30):
            connection.sendall(request("early", method="GET"))
            assert b" 200 " in connection.recv(1 << 16)
            time.sleep(0.1)


def test_more_connections_than_there_may_be():
    """The oldest that have sent no request make room, and clients that send one are all answered."""
    with serving(max_connections=20) as (port, pages, connections):
        waiting = [connect(port, request("wait", b"Connection: close", method="GET")) for _ in range(10)]
        held = [connect(port, b"GET /ea" if number % 2 else b"") for number in range(90)]
        for _ in range(5):
            assert alive(port) and len(connections.open) <= 20
        closed = 0
        for connection in held:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                closed += not connection.recv(1) or 1
        assert closed >= 75
        pages.answer.set()
        assert all(b"waited" in read(connection) for connection in waiting)


def test_the_limit_of_open_files_is_followed():
    """Also when it becomes lower while the server runs, and when nothing can be opened any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as (port, _, connections):
        with contextlib.ExitStack() as held:
            files = len(os.listdir("/dev/fd"))
            # Both ends of every connection are files of this process; the server's limit is for its own alone.
            for _ in range(30):
                held.enter_context(connect(port))
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files + 30 + SPARE_FILES + 20, hard))
                time.sleep(1.2)
                assert connections.limit < 100 and alive(port)
                # A connection may be answered while others are closed for it.
                wait_until(lambda: len(connections.open) <= 21)
                with socket.socket() as client:
                    client.settimeout(WAIT)
                    client.connect(("127.0.0.1", port))
                    # No further file at all.
                    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                    client.sendall(request("early", b"Connection: close", method="GET"))
                    time.sleep(0.5)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    assert b" 200 " in read(client)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert alive(port)


def test_clients_that_close_their_side_are_answered():
    """Those that have left end their requests; both look alike until something is sent."""
    with serving() as (port, pages, _):
        stay = connect(port, request("wait", method="GET"))
        stay.shutdown(socket.SHUT_WR)
        both = connect(port, request("wait", method="GET") + request("echo", b"Content-Length: 3", body=b"abc"))
        both.shutdown(socket.SHUT_WR)
        for _ in range(5):
            connect(port, request("wait", method="GET")).close()
        begun = time.monotonic()
        while pages.left < 5:
            assert time.monotonic() < begun + LATE, pages.left
            time.sleep(0.05)
        time.sleep(0.5)
        assert (pages.left, pages.answered) == (5, 7)
        pages.answer.set()
        answer = read(stay)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\nwaited")
        answer = read(both)
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2 and b"waited" in answer and answer.endswith(b"\r\n\r\nabc")
        for part in (b"GET /early HTTP/1.1\r\nHo", request("echo", b"Content-Length: 9", body=b"abc")):
            connection = connect(port, part)
            connection.shutdown(socket.SHUT_WR)
            assert error_of(read(connection)) == (400, "the connection was closed before the request was complete.")


MALFORMED = [
    (b"\x00\xff\x80\r\n\r\n", 400),
    (b"GET /early\r\n\r\n", 400),
    (b"GET /early HTTP/1.1\r\n\r\n", 400),
    (b"GET /early HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n", 400),
    (b"GET /early HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n", 400),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    (request("early", b"X: " + b"y" * 100_000), 431),
    (request("early", *[b"X%d: y" % number for number in range(20_000)]), 431),
    (request("echo", b"Content-Length: -1"), 400),
    (request("echo", b"Content-Length: 3", b"Content-Length: 4"), 400),
    (request("echo", b"Transfer-Encoding: gzip"), 501),
    (request("echo", b"Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
]


def test_what_is_no_request_is_answered_with_an_error():
    with serving() as (port, _, _):
        for content, status in MALFORMED:
            found, message = error_of(read(connect(port, content)))
            assert found == status and message.startswith("this is not a valid HTTP request: "), content[:50]
            assert len(message) < 3000
        # A client that sends a whole large body, and only then reads that nobody wanted it.
        large = connect(port, request("early", b"Content-Length: 5000000", b"Connection: close", body=b"x" * 5_000_000))
        assert read(large).endswith(b"early")


HANGING = """
import contextlib, socket, time, types
import asyncio
from starlette.applications import Starlette
from kvjax.serve.listening import run

@contextlib.asynccontextmanager
async def lifespan(_):
    yield
    await asyncio.to_thread(time.sleep, 60)

with socket.create_server(("127.0.0.1", 0)) as listener:
    run(Starlette(lifespan=lifespan), types.SimpleNamespace(stop=lambda wait: None), listener)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_process_that_hangs_is_ended(signals):
    child = subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert "serving on" in child.stdout.readline()
        for line in child.stderr:
            if "startup complete" in line:
                break
        begun = time.monotonic()
        for each in signals:
            child.send_signal(each)
            time.sleep(0.3)  # two at once would be one
        assert child.wait(5) == shutdown.FORCED
        # The second interrupt ends it at once.
        assert len(signals) == 1 or time.monotonic() - begun < shutdown.END_SECONDS / 2
        assert "Traceback" not in child.communicate()[1]
    finally:
        child.kill()
        child.communicate()
